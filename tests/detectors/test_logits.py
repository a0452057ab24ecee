"""The black-box detectors against their formulas in 50 digits."""

import math

import mpmath
import numpy as np
import pytest
import torch

import igeood
from igeood.bench.sgd import descend
from igeood.detectors import logits as family
from igeood.geometry import categorical

mpmath.mp.dps = 50


def softmax(row, temperature):
    powers = [mpmath.exp(mpmath.mpf(float(f)) / mpmath.mpf(temperature)) for f in row]
    return [p / mpmath.fsum(powers) for p in powers]


def fisher_rao(q, centroid):
    """2 arccos Σ √(q c), of one row and one centroid's log-probabilities."""
    c = [mpmath.exp(mpmath.mpf(float(v))) for v in centroid]
    return 2 * mpmath.acos(min(mpmath.mpf(1), mpmath.fsum(mpmath.sqrt(a * b) for a, b in zip(q, c, strict=True))))


def divergence(q, centroid):
    return mpmath.fsum(p * (mpmath.log(p) - mpmath.mpf(float(v))) for p, v in zip(q, centroid, strict=True))


# each of a row's softmax, the fitted centroids, the row and the temperature
FORMULAS = {
    "msp": lambda q, *_: -max(q),
    "odin": lambda q, *_: -max(q),
    "energy": lambda _, __, row, t: -t * mpmath.log(mpmath.fsum(mpmath.exp(mpmath.mpf(float(f)) / t) for f in row)),
    "kl-sum": lambda q, centroids, *_: -sum(divergence(q, c) for c in centroids),
    "kl-min": lambda q, centroids, *_: min(divergence(q, c) for c in centroids),
    "igeood-logits": lambda q, centroids, *_: -sum(fisher_rao(q, c) for c in centroids),
    "igeood-logits-min": lambda q, centroids, *_: min(fisher_rao(q, c) for c in centroids),
}


@pytest.mark.parametrize("temperature", [0.7, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize("method", FORMULAS)
def test_scores_against_the_papers_formulas_and_gradients_against_differences(classifier, method, temperature):
    detector = igeood.detector(method, temperature=temperature).fit(classifier.train, classifier.labels)
    rows = torch.cat([classifier.test[:6], classifier.ood[:6]])
    centroids = getattr(detector, "centroids_", torch.empty(0, 10))
    expected = [float(FORMULAS[method](softmax(row, temperature), centroids, row, temperature)) for row in rows]
    np.testing.assert_allclose(detector.score(rows), expected, rtol=2e-8, atol=1e-10)
    if temperature < 1000:  # where slopes are as small as the rounding of differences
        logits = rows[3:9].double().requires_grad_()
        assert torch.autograd.gradcheck(detector.score, logits, eps=1e-6, rtol=1e-4, atol=1e-8)


def test_centroids_are_those_of_the_geometry(classifier):
    """A row counts as often as it comes."""
    rows = torch.cat([torch.arange(400), torch.arange(0, 400, 7).repeat(5)])
    train, labels = classifier.train[rows], classifier.labels[rows]
    for temperature in (1.0, 5.0):
        fr = igeood.IgeoodLogits(temperature=temperature).fit(train, labels).centroids_
        torch.testing.assert_close(fr, categorical.centroids(train, labels, 10, temperature), rtol=1e-6, atol=1e-6)
        chances = (train.double() / temperature).softmax(dim=1)
        means = torch.stack([chances[labels == c].mean(dim=0) for c in range(10)])
        kl = igeood.KLDivergence(temperature=temperature).fit(train, labels).centroids_
        torch.testing.assert_close(kl.exp(), means, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("margin", [1.0, 10.0, 30.0])
@pytest.mark.parametrize("n_classes", [10, 100])
def test_fr0_of_float32_is_that_of_float64(make, n_classes, margin):
    data = make(n_classes, 2000, margin)
    logits = 1.1 * data.train.double()  # which float32 has to round
    detector = igeood.IgeoodLogits().fit(logits, data.labels)
    assert (detector.score(logits.float()) - detector.score(logits)).abs().max() <= 1e-6 * n_classes


def test_extremes_in_closed_form():
    """FR₀ of ten classes: near one centroid and π from nine others, or equally far from all."""
    vertices = torch.eye(10).log()
    assert family.fr0(torch.eye(10) * 1e3, vertices)[0].item() == pytest.approx(9 * math.pi, rel=1e-12)
    assert family.fr0(torch.zeros(1, 10), vertices).item() == pytest.approx(24.98, abs=0.01)
    assert family.energy(torch.tensor([[1e38, 0.0], [-1e38, -1e38]]), 0.001).isfinite().all()
    assert family.energy(torch.tensor([[3.0, -torch.inf]]), 2.0).item() == -3.0


def test_two_classes_use_the_minimum_and_say_so(make):
    data = make(2)
    detector = igeood.IgeoodLogits().fit(data.train, data.labels)
    smallest = igeood.IgeoodLogits(reduce="min").fit(data.train, data.labels)
    assert detector.reduce_ == "min"
    assert detector.notes_ == ("two classes: FR₀ is constant between the centroids, so the minimum distance is used",)
    assert smallest.notes_ == ()
    assert torch.equal(detector.score(data.test), smallest.score(data.test))
    between = torch.tensor([[0.1, 0.0], [0.0, 0.2], [0.3, 0.0]])
    assert family.fr0(between, detector.centroids_).std() < 1e-12  # why
    assert detector.score(between).std() > 1e-3
    assert igeood.IgeoodLogits().fit(make(3).train, make(3).labels).notes_ == ()


def test_the_class_of_the_nearest_centroid_and_the_authors_rescaling_of_centroids(classifier):
    detector = igeood.IgeoodLogits().fit(classifier.train, classifier.labels)
    nearest = detector.predict_class(classifier.test)
    assert torch.equal(nearest, categorical.pairwise_distance(classifier.test, detector.centroids_).argmin(1))
    assert (nearest == classifier.test.argmax(1)).double().mean() > 0.99
    assert detector.predict_class(np.empty((0, 10))).shape == (0,)
    fitted = igeood.IgeoodLogits(temperature=5.0, centroid_temperature=1.0).fit(classifier.train, classifier.labels)
    torch.testing.assert_close(fitted.centroids_, torch.log_softmax(detector.centroids_ / 5.0, dim=1))
    recipe = igeood.IgeoodLogits(temperature=5.0, solver="sgd").fit(classifier.train, classifier.labels)
    expected = descend(lambda: [(classifier.train, classifier.labels, torch.ones(400))], 10, 5.0)
    torch.testing.assert_close(recipe.centroids_, expected, rtol=1e-9, atol=1e-9)
    own = igeood.IgeoodLogits(temperature=5.0).fit(classifier.train, classifier.labels)
    assert (fitted.score(classifier.test) - own.score(classifier.test)).abs().max() > 1e-3
