"""Class centroids: the optimum, for any chunks and weights, on awkward classes."""

import itertools
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from igeood.errors import IgeoodWarning, InputError
from igeood.geometry import categorical
from igeood.geometry.centroids import centroids, solve_kl
from igeood.geometry.sphere import chord_distance, sphere
from igeood.geometry.weiszfeld import _read, _sums, solve


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


def solved(logits, labels, temperature=1.0, *, solver=solve, weights=None, **options):
    """Centroids of all samples as one chunk."""
    weights = torch.ones(len(labels)) if weights is None else weights
    return solver(lambda: [(logits, labels, weights)], logits.shape[1], temperature, **options)


def sums_at(logits, labels, log_centre):
    """One pass at a centre."""
    weights = torch.ones(len(labels), dtype=torch.float64)
    pieces = _read(lambda: [(logits, labels, weights)], len(log_centre), 1.0)
    return _sums(pieces, sphere(log_centre), torch.bincount(labels, weights, len(log_centre)))


@pytest.fixture
def passes(monkeypatch):
    """Counts the passes over the samples."""
    counted = Mock(side_effect=_sums)
    monkeypatch.setattr("igeood.geometry.weiszfeld._sums", counted)
    return counted


@pytest.mark.parametrize(("n_classes", "margin"), [(2, 4.0), (3, 1.0), (10, 2.0), (10, 8.0), (10, 20.0), (30, 6.0)])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 20.0])
def test_objective_is_the_optimum_and_below_the_papers_recipe(make, n_classes, margin, temperature, passes):
    data = make(n_classes, n=40 * n_classes, margin=margin)
    solution = centroids(data.train, data.labels, n_classes, temperature)
    assert passes.call_count <= 50
    ours = objectives(data.train, data.labels, solution, temperature)
    recipe = centroids(data.train, data.labels, n_classes, temperature, "sgd")
    assert (ours <= objectives(data.train, data.labels, recipe, temperature) * (1 + 1e-12)).all()
    for c in range(min(n_classes, 3)):
        best = lbfgs_objective(data.train[data.labels == c], temperature, solution[c])
        assert ours[c].item() <= best * (1 + 1e-9)


def awkward():
    """Few samples, samples along one geodesic, tight clusters, vertices: where a descent crawls or overshoots."""
    for seed in range(6):
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
        labels = torch.arange(400) % 10
        yield "cold", torch.randn(400, 10, generator=g) * 2 + 5 * torch.eye(10)[labels], labels, 0.1
    for seed in (59, 120, 235, 389):  # flat valleys, which a step that is not accelerated, or not ahead, never leaves
        few = torch.randn(12, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 10
        yield "valley", few, torch.arange(12) % 3, 1.0


@pytest.mark.parametrize(("name", "logits", "labels", "temperature"), list(awkward()))
def test_awkward_classes_reach_the_optimum(name, logits, labels, temperature, passes):
    n_classes = logits.shape[1]
    solution = centroids(logits, labels, n_classes, temperature)  # a warning would be an error
    assert passes.call_count <= 150
    ours = objectives(logits, labels, solution, temperature)
    torch.testing.assert_close(solution.exp().sum(dim=1), torch.ones(n_classes, dtype=torch.float64), rtol=0, atol=1e-9)
    for c in range(min(3, n_classes)):
        best = lbfgs_objective(logits[labels == c].double(), temperature, solution[c])
        assert ours[c].item() <= best * (1 + 1e-8), name


def test_one_two_identical_and_more_than_half_identical_samples_have_the_centroid_that_is_known():
    """A cluster of equal samples that is not the start: the iteration has to land on it."""
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    expected = categorical.log_softmax(logits)
    torch.testing.assert_close(centroids(logits, torch.arange(4), 4), expected, rtol=0, atol=1e-12)
    rows, labels = logits.repeat(50, 1), torch.arange(4).repeat(50)
    torch.testing.assert_close(centroids(rows, labels, 4), expected, rtol=0, atol=1e-10)
    rows[:88] = torch.randn(88, 4, generator=torch.Generator().manual_seed(3))  # 28 of 50 are left
    torch.testing.assert_close(centroids(rows, labels, 4), expected, rtol=0, atol=1e-10)
    # of two samples any point of the geodesic is optimal: the distances to both add up to theirs
    logits = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    solution = centroids(logits, torch.arange(6) % 3, 3)
    parts = categorical.distance(logits[:3], solution) + categorical.distance(logits[3:], solution)
    torch.testing.assert_close(parts, categorical.distance(logits[:3], logits[3:]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("share", [0.3, 0.4, 0.45, 0.5, 0.6, 0.9])
def test_part_of_a_class_at_a_vertex(share):
    """Samples with all mass on their class. With 60% of them the median is the vertex: the others cannot outpull it."""
    n_classes, n = 5, 500
    labels = torch.arange(n) % n_classes
    logits = torch.randn(n, n_classes, generator=torch.Generator().manual_seed(2)) * 2
    logits[torch.arange(n), labels] += 2
    at_vertex = torch.arange(n) < share * n
    logits[at_vertex] = -torch.inf
    logits[at_vertex, labels[at_vertex]] = 0.0
    solution = centroids(logits, labels, n_classes)
    assert (sums_at(logits, labels, solution).gap <= 1e-10).all()
    if share >= 0.6:
        assert torch.equal(solution.exp(), torch.eye(n_classes, dtype=torch.float64))


def test_classes_that_are_masked_in_all_or_some_samples(classifier):
    logits = classifier.train.clone()
    logits[:, 3] = logits[::7, 5] = -torch.inf
    for c in (3, 5):
        logits[classifier.labels == c, c] = 4.0
    solution = centroids(logits, classifier.labels, 10)
    assert not solution.isnan().any()
    assert solution[0, 3] == -torch.inf
    assert (sums_at(logits, classifier.labels, solution).gap <= 1e-10).all()


def test_the_gap_bounds_the_distance_to_the_optimum_and_the_last_pass_counts(classifier, passes):
    """The certificate that stops the iteration holds at any point, not only at the end."""
    optimum = objectives(classifier.train, classifier.labels, centroids(classifier.train, classifier.labels, 10))
    for sharpness in (0.1, 1.0, 4.0, 8.0):
        sums = sums_at(classifier.train, classifier.labels, torch.eye(10) * sharpness)
        value = 2 * sums.angle / torch.bincount(classifier.labels)
        assert ((value - optimum) / value <= sums.gap + 1e-12).all()
    for tolerance in (1e-2, 1e-4, 1e-7):
        solution = centroids(classifier.train, classifier.labels, 10, tolerance=tolerance)
        assert (sums_at(classifier.train, classifier.labels, solution).gap <= tolerance * (1 + 1e-3)).all()
    for allowed in (1, 5):
        passes.reset_mock()
        with pytest.warns(IgeoodWarning, match=rf"^centroids: class \d is .* after {allowed} passes, not 1e-12; raise"):
            centroids(classifier.train, classifier.labels, 10, max_passes=allowed, tolerance=1e-12)
        assert passes.call_count == allowed + 1


def test_any_start_leads_to_the_optimum_and_a_good_one_takes_fewer_passes(classifier, passes):
    """Also one far away: no step may leave the sphere's positive part for nowhere."""
    cold = centroids(classifier.train, classifier.labels, 10, 2.0)
    count = passes.call_count
    for scale, seed in itertools.product((0.1, 30.0, 300.0), range(5)):
        noise = torch.randn(10, 10, generator=torch.Generator().manual_seed(seed)) * scale
        warm = solved(classifier.train, classifier.labels, 2.0, start=categorical.log_softmax(noise))
        torch.testing.assert_close(warm.exp(), cold.exp(), rtol=0, atol=1e-9)
    neighbour = categorical.retemper(centroids(classifier.train, classifier.labels, 10, 1.9), 1.9, 2.0)
    for start, most in ((cold, 1), (neighbour, count - 1)):
        passes.reset_mock()
        warm = solved(classifier.train, classifier.labels, 2.0, start=start)
        assert passes.call_count <= most
        torch.testing.assert_close(warm.exp(), cold.exp(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("solver", [solve, solve_kl])
def test_law_a_weight_is_a_repetition(classifier, solver):
    counts = torch.randint(1, 5, (400,), generator=torch.Generator().manual_seed(0))
    rows = torch.arange(400).repeat_interleave(counts)
    repeated = solved(classifier.train[rows], classifier.labels[rows].byte(), 2.0, solver=solver)
    for weights in (counts, 0.01 * counts):
        weighted = solved(classifier.train, classifier.labels, 2.0, solver=solver, weights=weights)
        torch.testing.assert_close(weighted, repeated, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [13, 64, 399])
def test_law_chunks_are_the_whole(classifier, size, monkeypatch):
    parts = [t.split(size) for t in (classifier.train, classifier.labels.int(), torch.ones(400))]
    chunks = Mock(side_effect=lambda: zip(*parts, strict=True))
    for solver in (solve, solve_kl):
        whole = solved(classifier.train, classifier.labels, solver=solver)
        chunks.reset_mock()
        torch.testing.assert_close(solver(chunks, 10), whole, rtol=1e-9, atol=1e-9)
        assert chunks.call_count == 1  # few samples are read once
    torch.testing.assert_close(solve(chunks, 10, keep_bytes=31_999), solve(chunks, 10), rtol=1e-12, atol=1e-12)
    assert chunks.call_count > 5
    monkeypatch.setattr("igeood.geometry.precision.CHUNK_ELEMENTS", 10 * size)
    torch.testing.assert_close(solve(chunks, 10), solve(chunks, 10, keep_bytes=0), rtol=1e-12, atol=1e-12)


def test_sgd_takes_the_papers_path(make, monkeypatch):
    """100 steps of 0.1 from the identity, checked against a plain loop over the classes."""
    data = make(4, n=80, margin=2.0)
    centre = torch.eye(4, dtype=torch.float64)
    for _ in range(100):
        centre = centre.requires_grad_()
        own = [categorical.distance(data.train[data.labels == c].double() / 3, centre[c]).mean() for c in range(4)]
        centre = (centre - 0.1 * torch.autograd.grad(sum(own), centre)[0]).detach()
    whole = centroids(data.train.clone().requires_grad_(), data.labels, 4, 3.0, "sgd")
    assert not whole.requires_grad
    torch.testing.assert_close(whole, torch.log_softmax(centre, 1), rtol=1e-9, atol=1e-9)
    monkeypatch.setattr("igeood.geometry.precision.CHUNK_ELEMENTS", 30)
    torch.testing.assert_close(centroids(data.train, data.labels, 4, 3.0, "sgd"), whole, rtol=1e-9, atol=1e-9)


def test_kl_centroid_is_the_mean_and_minimises_the_mean_divergence(classifier):
    solution = solved(classifier.train, classifier.labels, 2.0, solver=solve_kl)
    for c in range(10):
        outputs = torch.softmax(classifier.train[classifier.labels == c].double() / 2.0, dim=1)
        torch.testing.assert_close(solution[c].exp(), outputs.mean(dim=0), rtol=1e-12, atol=1e-15)
        others = solution[c] + 0.1 * torch.from_numpy(np.random.default_rng(0).normal(size=(5, 10)))
        logs = categorical.prepare_kl(torch.cat([solution[c][None], others]))
        best, *worse = categorical.kl_divergences(outputs.log(), logs).mean(dim=0)
        assert min(worse) > best
    for margin in (300.0, 1000.0):  # probabilities that are too small for a float
        logits = torch.tensor([[0.0, -margin], [0.0, -2 * margin], [-margin, 0.0]], dtype=torch.float64)
        solution = solved(logits, torch.tensor([0, 0, 1]), solver=solve_kl)
        assert solution[0, 1].item() == pytest.approx(-margin - np.log(2), rel=1e-12)
        assert solution[1, 0].item() == pytest.approx(-margin, rel=1e-12)
    masked = solved(torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]), torch.tensor([0, 1]), solver=solve_kl)
    assert masked[0].tolist() == [0.0, -torch.inf]


def test_bad_input():
    for change, message in (
        ({"logits": torch.zeros(3, 4)}, r"logits: expected shape \(N, 3\), got \(3, 4\)"),
        ({"labels": torch.tensor([0, 2, 0])}, r"labels: no sample of class 1 \(1 of 3 classes have none\); give every"),
        ({"temperature": 0.0}, "temperature: must be"),
        ({"solver": "SGD"}, "solver: expected 'weiszfeld' or 'sgd', got 'SGD'"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            centroids(**{"logits": torch.zeros(3, 3), "labels": torch.arange(3), "n_classes": 3, **change})
