"""Class centroids: the optimum, for any chunks and weights, on awkward classes."""

from unittest.mock import Mock

import pytest
import torch
from scipy.optimize import minimize

from igeood.errors import IgeoodWarning
from igeood.geometry import categorical
from igeood.geometry.centroids import _points, _sums, centroids, solve
from igeood.geometry.sphere import chord_distance, sphere


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


def solved(logits, labels, temperature=1.0, *, weights=None, **options):
    """Centroids of all samples as one chunk."""
    weights = torch.ones(len(labels)) if weights is None else weights
    return solve(lambda: [(logits, labels, weights)], logits.shape[1], temperature, **options)


def sums_at(logits, labels, log_centre):
    """One pass at a centre."""
    weights = torch.ones(len(labels), dtype=torch.float64)
    pieces = _points(lambda: [(logits, labels, weights)], len(log_centre), 1.0)
    return _sums(pieces, sphere(log_centre), torch.bincount(labels, weights, len(log_centre)))


@pytest.fixture
def passes(monkeypatch):
    """Counts the passes over the samples."""
    counted = Mock(side_effect=_sums)
    monkeypatch.setattr("igeood.geometry.centroids._sums", counted)
    return counted


def cases():
    """Usual classes; few samples, samples along one geodesic, tight clusters: where a descent crawls or overshoots."""
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        for n_classes, temperature in ((2, 0.5), (10, 0.1), (10, 1.0), (30, 20.0)):
            labels = torch.arange(40 * n_classes) % n_classes
            known = torch.randn(len(labels), n_classes, generator=g) * 2 + 5 * torch.eye(n_classes)[labels]
            yield "usual", known, labels, temperature
        a, b = torch.randn(2, 5, 5, generator=g, dtype=torch.float64) * 3
        labels = torch.arange(75) % 5
        t = torch.rand(75, 1, generator=g, dtype=torch.float64)
        near = 1e-4 * torch.randn(75, 5, generator=g, dtype=torch.float64)
        yield "collinear", a[labels] * t + b[labels] * (1 - t) + near, labels, 1.0
        centres = torch.randn(3, 6, generator=g, dtype=torch.float64) * 5
        picked = centres[torch.randint(3, (120,), generator=g)]
        yield "clusters", picked + 0.01 * torch.randn(120, 6, generator=g), torch.arange(120) % 6, 1.0
    for seed in (0, 59, 120, 235, 389):  # flat valleys, which a step that is not accelerated never leaves
        few = torch.randn(12, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 10
        yield "valley", few, torch.arange(12) % 3, 1.0


@pytest.mark.parametrize(("name", "logits", "labels", "temperature"), list(cases()))
def test_the_objective_is_the_optimum(name, logits, labels, temperature, passes):
    n_classes = logits.shape[1]
    solution = centroids(logits, labels, n_classes, temperature)  # a warning would be an error
    assert passes.call_count <= (50 if name == "usual" and temperature >= 0.5 else 150)
    ours = objectives(logits, labels, solution, temperature)
    torch.testing.assert_close(solution.exp().sum(dim=1), torch.ones(n_classes, dtype=torch.float64), rtol=0, atol=1e-9)
    for c in range(min(3, n_classes)):
        best = lbfgs_objective(logits[labels == c].double(), temperature, solution[c])
        assert ours[c].item() <= best * (1 + 1e-8), name


def test_one_two_identical_and_more_than_half_identical_samples_have_the_centroid_that_is_known():
    """A cluster of equal samples that is not the start: the iteration has to land on it."""
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    rows, labels = logits.repeat(50, 1), torch.arange(4).repeat(50)
    rows[:88] = torch.randn(88, 4, generator=torch.Generator().manual_seed(3))  # 28 of 50 are left
    for few, classes in ((logits, torch.arange(4)), (rows[88:], labels[88:]), (rows, labels)):
        torch.testing.assert_close(centroids(few, classes, 4), categorical.log_softmax(logits), rtol=0, atol=1e-10)
    # of two samples any point of the geodesic is optimal: the distances to both add up to theirs
    logits = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    solution = centroids(logits, torch.arange(6) % 3, 3)
    parts = categorical.distance(logits[:3], solution) + categorical.distance(logits[3:], solution)
    torch.testing.assert_close(parts, categorical.distance(logits[:3], logits[3:]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("share", [0.3, 0.45, 0.5, 0.6, 0.9])
def test_part_of_a_class_at_a_vertex(share):
    """Samples with all mass on their class. With 60% of them the median is the vertex: the others cannot outpull it."""
    labels = torch.arange(500) % 5
    logits = torch.randn(500, 5, generator=torch.Generator().manual_seed(2)) * 2 + 2 * torch.eye(5)[labels]
    at_vertex = torch.arange(500) < share * 500
    logits[at_vertex] = torch.eye(5)[labels[at_vertex]].log()
    solution = centroids(logits, labels, 5)
    assert (sums_at(logits, labels, solution).gap <= 1e-10).all()
    if share >= 0.6:
        assert torch.equal(solution.exp(), torch.eye(5, dtype=torch.float64))


def test_classes_that_are_masked_in_all_or_some_samples(classifier):
    logits = classifier.train.clone()
    logits[:, 3] = logits[::7, 5] = -torch.inf
    for c in (3, 5):
        logits[classifier.labels == c, c] = 4.0
    solution = centroids(logits, classifier.labels, 10)
    assert solution[0, 3] == -torch.inf
    assert (sums_at(logits, classifier.labels, solution).gap <= 1e-10).all()


def test_the_gap_bounds_the_distance_to_the_optimum_and_the_last_pass_counts(classifier, passes):
    """The certificate that stops the iteration holds at any point, not only at the end."""
    optimum = objectives(classifier.train, classifier.labels, centroids(classifier.train, classifier.labels, 10))
    for sharpness in (0.1, 1.0, 8.0):
        sums = sums_at(classifier.train, classifier.labels, torch.eye(10) * sharpness)
        value = 2 * sums.angle / torch.bincount(classifier.labels)
        assert ((value - optimum) / value <= sums.gap + 1e-12).all()
    passes.reset_mock()
    with pytest.warns(IgeoodWarning):
        centroids(classifier.train, classifier.labels, 10, max_passes=5, tolerance=1e-12)
    assert passes.call_count == 6


def test_any_start_leads_to_the_optimum_and_a_good_one_takes_fewer_passes(classifier, passes):
    """Also one far away: no step may leave the sphere's positive part for nowhere."""
    cold = centroids(classifier.train, classifier.labels, 10, 2.0)
    count = passes.call_count
    noise = torch.randn(10, 10, generator=torch.Generator().manual_seed(0))
    starts = [categorical.log_softmax(scale * noise) for scale in (0.1, 30.0, 300.0)]
    starts.append(categorical.retemper(centroids(classifier.train, classifier.labels, 10, 1.9), 1.9, 2.0))
    for start in starts:
        passes.reset_mock()
        warm = solved(classifier.train, classifier.labels, 2.0, start=start)
        torch.testing.assert_close(warm.exp(), cold.exp(), rtol=0, atol=1e-9)
    assert passes.call_count < count


def test_law_a_weight_is_a_repetition(classifier):
    counts = torch.randint(1, 5, (400,), generator=torch.Generator().manual_seed(0))
    rows = torch.arange(400).repeat_interleave(counts)
    repeated = solved(classifier.train[rows], classifier.labels[rows].byte(), 2.0)
    for weights in (counts, 0.01 * counts):
        weighted = solved(classifier.train, classifier.labels, 2.0, weights=weights)
        torch.testing.assert_close(weighted, repeated, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [13, 399])
def test_law_chunks_are_the_whole(classifier, size, monkeypatch):
    parts = [t.split(size) for t in (classifier.train, classifier.labels.int(), torch.ones(400))]
    whole = solved(classifier.train, classifier.labels)
    for elements in (1 << 18, 10 * size):
        monkeypatch.setattr("igeood.geometry.precision.CHUNK_ELEMENTS", elements)
        torch.testing.assert_close(solve(lambda: zip(*parts, strict=True), 10), whole, rtol=1e-9, atol=1e-9)


def test_bad_input(refused):
    bad = {"logits": torch.zeros(3, 4), "labels": torch.tensor([0, 2, 0]), "temperature": 0.0}
    for argument, value in bad.items():
        with refused(argument):
            centroids(**{"logits": torch.zeros(3, 3), "labels": torch.arange(3), "n_classes": 3, argument: value})
