"""Class centroids: the optimum, for any batching, on awkward classes."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from igeood.errors import IgeoodWarning, InputError
from igeood.geometry import categorical
from igeood.geometry.centroids import centroids, kl_centroids, sgd_centroids, stream_centroids
from igeood.geometry.sphere import chord_distance, sphere
from igeood.geometry.weiszfeld import Points, sphere_sums


def objectives(logits, labels, centres, temperature=1.0):
    """Mean distance of each class's samples to its centroid, (C,)."""
    apart = chord_distance(sphere(logits, temperature), sphere(centres)[labels])
    sums = torch.zeros(len(centres), dtype=torch.float64).index_add_(0, labels, apart)
    return sums / torch.bincount(labels, minlength=len(centres))


def lbfgs_objective(logits, temperature, start):
    """Best mean distance of one class's samples that L-BFGS finds, in float64, over the centroid's logits."""
    points = sphere(logits, temperature)

    def value_and_gradient(z):
        z = torch.tensor(z, dtype=torch.float64, requires_grad=True)
        value = chord_distance(points, sphere(z)).mean()
        value.backward()
        return value.item(), z.grad.numpy()

    options = {"maxiter": 5000, "maxfun": 20000, "ftol": 1e-15, "gtol": 1e-12}
    starts = [start.clamp(min=-60).numpy(), categorical.log_softmax(logits, temperature).clamp(min=-60).mean(0).numpy()]
    return min(minimize(value_and_gradient, z, jac=True, method="L-BFGS-B", options=options).fun for z in starts)


@pytest.mark.parametrize(("n_classes", "margin"), [(2, 4.0), (3, 1.0), (10, 2.0), (10, 8.0), (10, 20.0), (30, 6.0)])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 20.0])
def test_objective_is_the_optimum_and_below_the_papers_recipe(make, n_classes, margin, temperature):
    data = make(n_classes, n=40 * n_classes, margin=margin)
    found = centroids(data.train, data.labels, n_classes, temperature)
    ours = objectives(data.train, data.labels, found, temperature)
    paper = objectives(
        data.train, data.labels, sgd_centroids(data.train, data.labels, n_classes, temperature), temperature
    )
    assert (ours <= paper * (1 + 1e-12)).all()
    for c in range(min(n_classes, 4)):
        best = lbfgs_objective(data.train[data.labels == c], temperature, found[c])
        assert ours[c].item() <= best * (1 + 1e-6)


def test_they_are_log_probabilities(classifier):
    found = centroids(classifier.train, classifier.labels, 10)
    assert found.shape == (10, 10)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.exp().sum(dim=1), torch.ones(10, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.equal(found.argmax(dim=1), torch.arange(10))


@pytest.mark.parametrize("batch", [1, 7, 64, 399])
def test_any_batch_size_and_sharding_gives_the_same(classifier, batch, monkeypatch):
    whole = centroids(classifier.train, classifier.labels, 10)
    shards = list(zip(classifier.train.split(batch), classifier.labels.split(batch), strict=True))
    assert torch.equal(stream_centroids(shards, 10), whole)
    monkeypatch.setattr("igeood.geometry.precision.CHUNK_ELEMENTS", 10 * batch)
    torch.testing.assert_close(centroids(classifier.train, classifier.labels, 10), whole, rtol=1e-9, atol=1e-9)


@given(cut=st.integers(1, 399), seed=st.integers(0, 5))
@settings(max_examples=20)
def test_law_sums_of_shards_add_up_to_the_whole(classifier, cut, seed):
    order = torch.randperm(400, generator=torch.Generator().manual_seed(seed))
    logits, labels = classifier.train[order], classifier.labels[order]
    centre = sphere(torch.eye(10) * 3)
    parts = sphere_sums([(logits[:cut], labels[:cut])], centre) + sphere_sums([(logits[cut:], labels[cut:])], centre)
    whole = sphere_sums([(logits, labels)], centre)
    for name in ("pull", "weight", "angle", "count", "coincident", "octaves"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-12, atol=1e-12)


def test_one_sample_in_a_class_is_its_centroid():
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    found = centroids(logits, torch.arange(4), 4)
    torch.testing.assert_close(found, categorical.log_softmax(logits), rtol=0, atol=1e-12)


def test_identical_samples_are_their_centroid():
    logits = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
    found = centroids(logits.repeat(50, 1), torch.arange(3).repeat(50), 3)
    torch.testing.assert_close(found, categorical.log_softmax(logits), rtol=0, atol=1e-10)


@pytest.mark.parametrize("share", [0.3, 0.4, 0.45, 0.5, 0.6, 0.9])
def test_part_of_a_class_at_a_vertex(share):
    """Samples with all mass on their class. With 60% of them the median is the vertex: the others cannot outpull it."""
    generator = torch.Generator().manual_seed(2)
    n_classes, n = 5, 500
    labels = torch.arange(n) % n_classes
    logits = torch.randn(n, n_classes, generator=generator) * 2
    logits[torch.arange(n), labels] += 2
    at_vertex = torch.arange(n) < share * n
    logits[at_vertex] = -torch.inf
    logits[at_vertex, labels[at_vertex]] = 0.0
    found = centroids(logits, labels, n_classes)
    sums = sphere_sums([(logits, labels)], torch.exp(0.5 * found))
    assert (sums.gap(torch.exp(0.5 * found)) <= 1e-6).all()
    if share >= 0.6:
        assert torch.equal(found.exp(), torch.eye(n_classes, dtype=torch.float64))


def test_half_of_a_class_identical_elsewhere():
    """A cluster of equal samples that is not the start: the iteration has to land on it."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(300, 3, generator=generator)
    logits[:160] = torch.tensor([1.0, 0.3, -0.5])
    labels = torch.zeros(300, dtype=torch.int64)
    labels[-2:] = torch.tensor([1, 2])
    found = centroids(logits, labels, 3)
    torch.testing.assert_close(found[0], categorical.log_softmax(logits[0]), rtol=0, atol=1e-10)


def test_the_gap_bounds_the_distance_to_the_optimum(classifier):
    """The certificate that stops the iteration holds at any point, not only at the end."""
    optimum = objectives(classifier.train, classifier.labels, centroids(classifier.train, classifier.labels, 10))
    for sharpness in (0.1, 1.0, 4.0, 8.0):
        centre = sphere(torch.eye(10) * sharpness)
        sums = sphere_sums([(classifier.train, classifier.labels)], centre)
        relative = (2 * sums.angle / sums.count - optimum) / (2 * sums.angle / sums.count)
        assert (relative <= sums.gap(centre) + 1e-9).all()


def test_a_neighbouring_start_gives_the_same(classifier):
    cold = centroids(classifier.train, classifier.labels, 10, 2.0)
    start = categorical.retemper(centroids(classifier.train, classifier.labels, 10, 1.5), 1.5, 2.0)
    warm = centroids(classifier.train, classifier.labels, 10, 2.0, start=start)
    torch.testing.assert_close(warm.exp(), cold.exp(), rtol=0, atol=1e-6)


def test_too_few_passes_is_a_warning_with_the_figure(classifier):
    with pytest.warns(IgeoodWarning, match=r"class \d is within .* after 2 passes"):
        centroids(classifier.train, classifier.labels, 10, max_passes=2, tolerance=1e-9)


def test_sgd_takes_the_papers_path(make):
    """100 steps of 0.1 from the identity, checked against a plain loop over the classes."""
    data = make(4, n=80, margin=2.0)
    centre = torch.eye(4, dtype=torch.float64)
    for _ in range(100):
        centre = centre.requires_grad_()
        loss = sum(categorical.distance(data.train[data.labels == c].double(), centre[c]).mean() for c in range(4))
        centre = (centre - 0.1 * torch.autograd.grad(loss, centre)[0]).detach()
    found = centroids(data.train, data.labels, 4, solver="sgd")
    torch.testing.assert_close(found, torch.log_softmax(centre, 1), rtol=1e-9, atol=1e-9)


def test_kl_centroid_is_the_mean_and_minimises_the_mean_divergence(classifier):
    found = kl_centroids(classifier.train, classifier.labels, 10, 2.0)
    for c in range(10):
        outputs = torch.softmax(classifier.train[classifier.labels == c].double() / 2.0, dim=1)
        torch.testing.assert_close(found[c].exp(), outputs.mean(dim=0), rtol=1e-12, atol=1e-15)
        best = categorical.kl_divergence(outputs.log(), found[c]).mean()
        for other in np.random.default_rng(0).normal(size=(5, 10)):
            assert categorical.kl_divergence(outputs.log(), found[c] + 0.1 * torch.from_numpy(other)).mean() > best


def test_retemper_is_the_authors_rescaling():
    logits = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    at_one = categorical.log_softmax(logits)
    torch.testing.assert_close(categorical.retemper(at_one, 1.0, 5.0), categorical.log_softmax(logits, 5.0))
    assert categorical.retemper(at_one, 2.0, 2.0) is at_one


@pytest.mark.parametrize("solve", [centroids, kl_centroids, sgd_centroids])
def test_a_class_without_sample_is_named(solve):
    with pytest.raises(InputError, match="no sample of class 1 "):
        solve(torch.zeros(2, 3), torch.tensor([0, 2]), 3)


def test_bad_input():
    logits, labels = torch.zeros(3, 3), torch.arange(3)
    with pytest.raises(InputError, match="solver: expected 'weiszfeld' or 'sgd'"):
        centroids(logits, labels, 3, solver="adam")
    with pytest.raises(InputError, match=r"expected shape \(N, 4\)"):
        centroids(logits, labels, 4)
    with pytest.raises(InputError, match="labels: must lie in 0…2, got 1…3"):
        centroids(logits, labels + 1, 3)
    with pytest.raises(InputError, match="labels: expected 3 integers"):
        centroids(logits, labels.float(), 3)
    with pytest.raises(InputError, match="row 0 has NaN"):
        centroids(logits * torch.nan, labels, 3)
    with pytest.raises(InputError, match="temperature"):
        centroids(logits, labels, 3, 0.0)
    with pytest.raises(InputError, match="not a generator"):
        stream_centroids(iter([(logits, labels)]), 3)
    with pytest.raises(InputError, match="empty"):
        stream_centroids([], 3)


def awkward():
    """Few samples, samples along one geodesic, tight clusters, vertices: where a descent crawls or overshoots."""
    for seed in range(12):
        g = torch.Generator().manual_seed(seed)
        labels = torch.arange(12) % 3
        yield "few", torch.randn(12, 3, generator=g, dtype=torch.float64) * 10, labels, 1.0
        a, b = torch.randn(2, 5, 5, generator=g, dtype=torch.float64) * 3
        labels = torch.arange(75) % 5
        t = torch.rand(75, 1, generator=g, dtype=torch.float64)
        near = 1e-4 * torch.randn(75, 5, generator=g, dtype=torch.float64)
        yield "collinear", a[labels] * t + b[labels] * (1 - t) + near, labels, 1.0
        centres = torch.randn(3, 6, generator=g, dtype=torch.float64) * 5
        picked = centres[torch.randint(3, (120,), generator=g)]
        yield "clusters", picked + 0.01 * torch.randn(120, 6, generator=g), torch.arange(120) % 6, 1.0
        hot = 5 * torch.nn.functional.one_hot(torch.arange(400) % 10, 10)
        yield "cold", torch.randn(400, 10, generator=g) * 2 + hot, torch.arange(400) % 10, 0.1
    few = torch.randn(12, 3, generator=torch.Generator().manual_seed(389), dtype=torch.float64) * 10
    yield "valley", few, torch.arange(12) % 3, 1.0


@pytest.mark.parametrize(("name", "logits", "labels", "temperature"), list(awkward()))
def test_awkward_classes_reach_the_optimum(name, logits, labels, temperature):
    n_classes = logits.shape[1]
    found = centroids(logits, labels, n_classes, temperature)
    ours = objectives(logits, labels, found, temperature)
    torch.testing.assert_close(found.exp().sum(dim=1), torch.ones(n_classes, dtype=torch.float64), rtol=0, atol=1e-9)
    for c in range(min(3, n_classes)):
        best = lbfgs_objective(logits[labels == c].double(), temperature, found[c])
        assert ours[c].item() <= best * (1 + 1e-6), name


@pytest.mark.parametrize("scale", [0.1, 30.0, 300.0])
def test_any_start_leads_to_the_optimum(classifier, scale):
    """A start far away: no step may leave the sphere's positive part for nowhere."""
    cold = objectives(classifier.train, classifier.labels, centroids(classifier.train, classifier.labels, 10))
    for seed in range(5):
        noise = torch.randn(10, 10, generator=torch.Generator().manual_seed(seed)) * scale
        found = centroids(classifier.train, classifier.labels, 10, start=categorical.log_softmax(noise))
        warm = objectives(classifier.train, classifier.labels, found)
        torch.testing.assert_close(warm, cold, rtol=1e-6, atol=0)


def test_a_start_is_checked_like_everything_else(classifier):
    start = categorical.log_softmax(torch.eye(10))
    with pytest.raises(InputError, match=r"start: expected log-probabilities \(10, 10\)"):
        centroids(classifier.train, classifier.labels, 10, start=start[:2])
    with pytest.raises(InputError, match="start: row 0 has NaN"):
        centroids(classifier.train, classifier.labels, 10, start=start * torch.nan)
    with pytest.raises(InputError, match="no sample of class 9"):
        centroids(classifier.train, classifier.labels % 9, 10, start=start)


@pytest.mark.parametrize("margin", [300.0, 1000.0])
def test_kl_centroids_keep_probabilities_that_are_too_small_for_a_float(margin):
    logits = torch.tensor([[0.0, -margin], [0.0, -2 * margin], [-margin, 0.0]], dtype=torch.float64)
    found = kl_centroids(logits, torch.tensor([0, 0, 1]), 2)
    assert found[0, 1].item() == pytest.approx(-margin - np.log(2), rel=1e-12)
    assert found[1, 0].item() == pytest.approx(-margin, rel=1e-12)


def test_kl_centroids_of_masked_classes_and_chunks(classifier, monkeypatch):
    masked = classifier.train.clone()
    masked[:, 3] = -torch.inf
    masked[classifier.labels == 3, 3] = 1.0
    found = kl_centroids(masked, classifier.labels, 10)
    assert found[0, 3].item() == -torch.inf
    monkeypatch.setattr("igeood.geometry.precision.CHUNK_ELEMENTS", 70)
    torch.testing.assert_close(kl_centroids(masked, classifier.labels, 10), found, rtol=1e-12, atol=1e-12)


def test_labels_of_any_integer_type(classifier):
    expected = centroids(classifier.train, classifier.labels, 10)
    for dtype in (torch.uint8, torch.int32):
        assert torch.equal(centroids(classifier.train, classifier.labels.to(dtype), 10), expected)
    with pytest.raises(InputError, match="labels: expected 400 integers"):
        centroids(classifier.train, classifier.labels.bool(), 10)


def test_points_that_are_not_kept_between_passes_give_the_same_centroids_to_the_bit(classifier, monkeypatch):
    kept = centroids(classifier.train, classifier.labels, 10)
    monkeypatch.setattr("igeood.geometry.weiszfeld._KEPT", 0)
    assert torch.equal(centroids(classifier.train, classifier.labels, 10), kept)


def test_a_class_that_is_finished_first_is_not_moved_by_the_others():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 6, dtype=torch.float64, generator=generator) * 3
    logits[:50] = torch.tensor([5.0, 1, 0, 0, 0, 0])  # all alike: finished at once
    labels = torch.cat([torch.zeros(50, dtype=torch.int64), 1 + torch.arange(350) % 5])
    found = centroids(logits, labels, 6)
    torch.testing.assert_close(found[0], categorical.log_softmax(logits[0]), rtol=0, atol=1e-12)
    for label in range(1, 6):
        own = logits[labels == label]
        alone = centroids(torch.cat([own, own[:1].expand(5, 6)]), torch.tensor([0] * len(own) + [1, 2, 3, 4, 5]), 6)[0]
        cost = [categorical.distance(own, c).mean().item() for c in (found[label], alone)]
        assert cost[0] == pytest.approx(cost[1], rel=2e-7)


def test_a_path_fits_classes_of_few_samples_and_extreme_temperatures():
    """Two samples have no unique centroid, so nothing is interpolated between theirs."""
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(10, 5, dtype=torch.float64, generator=generator) * 4, torch.arange(10) % 5
    path = categorical.CentroidPath(logits, labels, 5)
    for temperature in (1.7, 1e-3, 1e9, 1e300, 40.0):
        alone = centroids(logits, labels, 5, temperature)
        cost = [categorical.distance(logits / temperature, c[labels]).sum().item() for c in (path(temperature), alone)]
        assert cost[0] == pytest.approx(cost[1], rel=1e-6, abs=1e-12)


@pytest.fixture
def passes(monkeypatch):
    """Counts the passes over the samples."""
    count, plain = [0], Points.sums

    def counted(self, centre):
        count[0] += 1
        return plain(self, centre)

    monkeypatch.setattr(Points, "sums", counted)
    return count


def test_ordinary_classes_take_few_passes(make, passes):
    """14 each on average: a plain Weiszfeld iteration takes hundreds."""
    for n_classes, margin in [(2, 4.0), (3, 1.0), (10, 2.0), (10, 8.0), (10, 20.0)]:
        data = make(n_classes, n=40 * n_classes, margin=margin)
        for temperature in (0.5, 1.0, 20.0):
            centroids(data.train, data.labels, n_classes, temperature)
    assert passes[0] <= 15 * 15


def test_awkward_classes_take_few_passes(passes):
    cases = [*list(awkward())[:8], list(awkward())[-1]]
    for _, logits, labels, temperature in cases:
        centroids(logits, labels, logits.shape[1], temperature)
    assert passes[0] <= 420


def test_a_good_start_takes_fewer_passes(classifier, passes):
    found = centroids(classifier.train, classifier.labels, 10)
    cold, passes[0] = passes[0], 0
    torch.testing.assert_close(centroids(classifier.train, classifier.labels, 10, start=found), found)
    assert passes[0] <= 2 < cold


class Shards(list):
    """Batches that know how often they were read."""

    reads = 0

    def __iter__(self):
        self.reads += 1
        return super().__iter__()


def test_few_samples_are_read_once_and_many_once_a_pass(classifier, passes, monkeypatch):
    data = list(zip(classifier.train.split(100), classifier.labels.split(100), strict=True))
    few, many = Shards(data), Shards(data)
    whole = stream_centroids(few, 10)
    assert few.reads <= 4  # to count the classes, to look at the first, to keep the points
    passes[0] = 0
    monkeypatch.setattr("igeood.geometry.weiszfeld._KEPT", 400 * 12 - 1)
    assert torch.equal(stream_centroids(many, 10), whole)
    assert passes[0] <= many.reads <= 2 * passes[0] + 4
    monkeypatch.setattr("igeood.geometry.weiszfeld._KEPT", 400 * 12)  # the points and two columns more
    kept = Shards(data)
    stream_centroids(kept, 10)
    assert kept.reads == few.reads


def test_the_last_pass_counts(classifier, passes):
    for allowed in (1, 2, 5):
        passes[0] = 0
        figure = r"class \d is within \d\.\de-\d\d \(relative\) of its optimum"
        said = rf"^centroids: {figure} after {allowed} passes, not 1e-12; raise max_passes or tolerance$"
        with pytest.warns(IgeoodWarning, match=said):
            centroids(classifier.train, classifier.labels, 10, max_passes=allowed, tolerance=1e-12)
        assert passes[0] == allowed + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        centroids(classifier.train, classifier.labels, 10)  # 500 passes are enough by default, for 1e-7


def test_the_tolerance_bounds_the_gap(classifier):
    for tolerance in (1e-2, 1e-4, 1e-7):
        found = centroids(classifier.train, classifier.labels, 10, tolerance=tolerance)
        sums = sphere_sums([(classifier.train, classifier.labels)], torch.exp(0.5 * found))
        assert (sums.gap(torch.exp(0.5 * found)) <= tolerance * (1 + 1e-3)).all()
    assert torch.equal(found, centroids(classifier.train, classifier.labels, 10))


def test_a_path_interpolates_and_keeps_what_it_has_fitted(classifier, monkeypatch):
    """From 1 to a million 54 fits are all: 8 a decade, and what is needed on either side."""
    fits = []
    plain = centroids

    def counted(*arguments, **options):
        fits.append(arguments[3])
        return plain(*arguments, **options)

    monkeypatch.setattr("igeood.geometry.centroids.centroids", counted)
    path = categorical.CentroidPath(classifier.train, classifier.labels, 10)
    path(2.0)
    assert len(fits) == 6
    assert min(fits) < 1.2
    assert max(fits) < 6.0
    path(2.01)
    assert len(fits) == 6
    for temperature in np.geomspace(1.0, 1e6, 60):
        found = path(float(temperature))
        if 2 < temperature < 100:
            expected = plain(classifier.train, classifier.labels, 10, float(temperature))
            torch.testing.assert_close(found.exp(), expected.exp(), rtol=0, atol=2e-5)
    assert len(fits) == len(set(fits)) == 54
    done = len(fits)
    for outside in (0.5, 0.9, 1.1e6):
        expected = plain(classifier.train, classifier.labels, 10, outside)
        torch.testing.assert_close(path(outside).exp(), expected.exp(), rtol=0, atol=1e-6)
    assert fits[done:] == [0.5, 0.9, 1.1e6]


@pytest.mark.parametrize(("n_classes", "each", "interpolated"), [(4, 8, True), (4, 7, False)])
def test_a_path_through_few_samples_is_fitted_everywhere(make, n_classes, each, interpolated, passes):
    data = make(n_classes, n=n_classes * each, margin=3.0)
    path = categorical.CentroidPath(data.train, data.labels, n_classes)
    path(3.0)
    passes[0] = 0
    path(3.01)
    assert (passes[0] == 0) == interpolated


def test_fits_of_a_path_start_from_where_their_neighbours_lead(classifier, passes):
    """Five passes each: alone, they take twice as many."""
    path = categorical.CentroidPath(classifier.train, classifier.labels, 10)
    for temperature in np.geomspace(1.0, 1e6, 60):
        path(float(temperature))
    assert passes[0] <= 54 * 5.5


def test_a_path_starts_from_where_the_last_fit_was(classifier, passes):
    path = categorical.CentroidPath(classifier.train, classifier.labels, 10)
    path(0.5)
    cold, passes[0] = passes[0], 0
    path(0.495)
    assert passes[0] < 0.75 * cold
    with pytest.raises(InputError, match=r"^temperature: "):
        path(0.0)


def test_sgd_at_a_temperature_in_chunks_and_of_any_length(make, monkeypatch):
    data = make(4, n=80, margin=2.0)
    whole = sgd_centroids(data.train, data.labels, 4, 3.0)
    torch.testing.assert_close(sgd_centroids(data.train / 3.0, data.labels, 4), whole, rtol=1e-6, atol=1e-6)
    assert torch.equal(centroids(data.train, data.labels, 4, 3.0, "sgd"), whole)
    assert torch.equal(whole, sgd_centroids(data.train, data.labels, 4, 3.0, learning_rate=0.1, epochs=100))
    start = categorical.log_softmax(torch.eye(4))
    torch.testing.assert_close(sgd_centroids(data.train, data.labels, 4, epochs=0), start)
    monkeypatch.setattr("igeood.geometry.precision.CHUNK_ELEMENTS", 30)
    torch.testing.assert_close(sgd_centroids(data.train, data.labels, 4, 3.0), whole, rtol=1e-9, atol=1e-9)
    assert not whole.requires_grad


def test_the_papers_solver_by_its_name():
    logits, labels = torch.tensor([[2.0, 0.0], [3.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 0, 1])
    expected = sgd_centroids(logits, labels, 2, 2.0)
    assert torch.equal(centroids(logits, labels, 2, 2.0, "sgd"), expected)
    assert not torch.allclose(centroids(logits, labels, 2, 2.0), expected)


def test_no_gradient_flows_into_centroids(classifier):
    moved = classifier.train.clone().requires_grad_()
    for solve in (centroids, kl_centroids, sgd_centroids):
        assert not solve(moved, classifier.labels, 10).requires_grad


def test_errors_say_what_came():
    logits, labels = torch.zeros(3, 3), torch.arange(3)
    for solve in (centroids, kl_centroids, sgd_centroids):
        with pytest.raises(InputError, match=r"^logits: expected shape \(N, 3\), got \(3,\)"):
            solve(logits[0], labels, 3)
        with pytest.raises(InputError, match=r"^labels: expected 3 integers, got torch\.int64 of shape \(2,\)"):
            solve(logits, labels[:2], 3)
        with pytest.raises(InputError, match=r"^labels: expected 3 integers, got torch\.float32 of shape \(3,\)"):
            solve(logits, labels.float(), 3)
        with pytest.raises(InputError, match=r"^labels: must lie in 0…2, got -1…1"):
            solve(logits, labels - 1, 3)
        with pytest.raises(InputError, match=r"^labels: no sample of class 1 \(2 of 3 classes have none\); .*centroid"):
            solve(logits, labels * 0, 3)
    with pytest.raises(InputError, match=r"^batches: is read many times; give a list or .*, not a generator$"):
        stream_centroids(iter([(logits, labels)]), 3)
    with pytest.raises(InputError, match=r"^batches: empty; centroids need at least one sample of each class$"):
        stream_centroids([], 3)
    with pytest.raises(InputError, match=r"^batches: empty; centroids need at least one sample of each class$"):
        sphere_sums([], torch.eye(3))
    with pytest.raises(InputError, match=r"^solver: expected 'weiszfeld' or 'sgd', got 'SGD'"):
        centroids(logits, labels, 3, solver="SGD")


def test_default_temperature_is_1(classifier):
    for solve in (centroids, kl_centroids, sgd_centroids):
        found = solve(classifier.train, classifier.labels, 10)
        assert torch.equal(found, solve(classifier.train, classifier.labels, 10, 1.0))
        assert found.dtype == torch.float64
    shards = [(classifier.train, classifier.labels)]
    assert torch.equal(stream_centroids(shards, 10), stream_centroids(shards, 10, 1.0))
    assert torch.equal(
        sphere_sums(shards, torch.eye(10).double()).angle, sphere_sums(shards, torch.eye(10).double(), 1.0).angle
    )
