"""The black-box detectors against their formulas in 50 digits."""

import math

import mpmath
import numpy as np
import pytest
import torch

import igeood
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


def energy(row, temperature):
    return -temperature * mpmath.log(mpmath.fsum(mpmath.exp(mpmath.mpf(float(f)) / temperature) for f in row))


# each of a row's softmax, the fitted centroids, the row and the temperature
FORMULAS = {
    "msp": lambda q, *_: -max(q),
    "odin": lambda q, *_: -max(q),
    "energy": lambda _, __, row, temperature: energy(row, temperature),
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
    np.testing.assert_allclose(detector(rows), expected, rtol=2e-8, atol=1e-10)
    if temperature < 30:  # else slopes are as small as the rounding of differences
        logits = rows[3:9].double().requires_grad_()
        assert torch.autograd.gradcheck(detector, logits, eps=1e-6, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("temperature", [1.0, 5.0])
def test_centroids_are_those_of_the_geometry(classifier, temperature):
    """A row counts as often as it comes."""
    rows = torch.cat([torch.arange(400), torch.arange(0, 400, 7).repeat(5)])
    train, labels = classifier.train[rows], classifier.labels[rows]
    centroids = igeood.IgeoodLogits(temperature=temperature).fit(train, labels).centroids_
    expected = categorical.centroids(train, labels, 10, temperature)
    torch.testing.assert_close(centroids, expected, rtol=1e-6, atol=1e-6)


def test_extremes_in_closed_form():
    """FR₀ of ten classes: near one centroid and π from nine others, or equally far from all."""
    vertices = torch.eye(10).log()
    assert family.fr0(torch.eye(10) * 1e3, vertices)[0].item() == pytest.approx(9 * math.pi, rel=1e-12)
    assert family.fr0(torch.zeros(1, 10), vertices).item() == pytest.approx(20 * math.acos(0.1**0.5), rel=1e-12)
    assert family.energy(torch.tensor([[1e38, 0.0], [-1e38, -1e38]]), 0.001).isfinite().all()
    assert family.energy(torch.tensor([[3.0, -torch.inf]]), 2.0).item() == -3.0


def test_two_classes_use_the_minimum_and_say_so(make):
    data = make(2)
    detector = igeood.IgeoodLogits().fit(data.train, data.labels)
    smallest = igeood.IgeoodLogits(reduce="min").fit(data.train, data.labels)
    assert [finding.code for finding in detector.findings_] == ["two-classes"]
    assert smallest.findings_ == []
    assert torch.equal(detector(data.test), smallest(data.test))
    between = torch.tensor([[0.1, 0.0], [0.0, 0.2], [0.3, 0.0]])
    assert family.fr0(between, detector.centroids_).std() < 1e-12  # why
    assert detector(between).std() > 1e-3
    assert igeood.IgeoodLogits().fit(make(3).train, make(3).labels).findings_ == []
