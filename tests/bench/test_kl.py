"""Kullback–Leibler centroids and divergences against scipy, means and known values."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import entropy

from igeood.bench.kl import kl_divergences, prepare_kl, solve_kl


def solved(logits, labels, temperature=1.0, weights=None):
    weights = torch.ones(len(labels)) if weights is None else weights
    return solve_kl(lambda: [(logits, labels, weights)], logits.shape[1], temperature)


def divergences(logits, centres, temperature=1.0):
    return kl_divergences(logits, prepare_kl(centres), temperature)


def test_divergences_are_scipys_and_those_of_chunks(monkeypatch):
    f, c = torch.randn(2, 20, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 5
    expected = entropy((f / 2).softmax(1).numpy()[:, None], c.softmax(1).numpy(), axis=2)
    for elements in (1 << 18, 70):
        monkeypatch.setattr("igeood.geometry.precision.CHUNK_ELEMENTS", elements)
        np.testing.assert_allclose(divergences(f, c, 2.0).numpy(), expected, rtol=1e-9, atol=1e-12)
    assert (divergences(f, f).diagonal().abs() <= 1e-13).all()


def test_divergences_from_classes_without_mass():
    """Each counts its p for 10,000: the logarithm of 0 in q."""
    p = torch.tensor([[0.0, 0.0, -torch.inf], [0.0, -torch.inf, -torch.inf]], dtype=torch.float64)
    q = torch.tensor([[0.0, -torch.inf, -torch.inf], [0.0, 0.0, 0.0]], dtype=torch.float64)
    half, third = 0.5 * 1e4 - math.log(2), math.log(3)
    expected = torch.tensor([[half, third - math.log(2)], [0.0, third]], dtype=torch.float64)
    torch.testing.assert_close(divergences(p, q), expected, rtol=1e-12, atol=1e-12)


def test_the_centroid_is_the_mean_whatever_the_chunks_and_a_weight_is_a_repetition(classifier):
    solution = solved(classifier.train, classifier.labels, 2.0)
    for c in range(10):
        outputs = torch.softmax(classifier.train[classifier.labels == c].double() / 2.0, dim=1)
        torch.testing.assert_close(solution[c].exp(), outputs.mean(dim=0), rtol=1e-12, atol=1e-15)
    parts = [t.split(13) for t in (classifier.train, classifier.labels.int(), torch.ones(400))]
    torch.testing.assert_close(solve_kl(lambda: zip(*parts, strict=True), 10, 2.0), solution, rtol=1e-9, atol=1e-9)
    counts = torch.randint(1, 5, (400,), generator=torch.Generator().manual_seed(0))
    rows = torch.arange(400).repeat_interleave(counts)
    repeated = solved(classifier.train[rows], classifier.labels[rows])
    torch.testing.assert_close(solved(classifier.train, classifier.labels, weights=counts), repeated, rtol=1e-9, atol=0)


def test_centroids_of_probabilities_that_no_float_holds():
    for margin in (300.0, 1000.0):
        logits = torch.tensor([[0.0, -margin], [0.0, -2 * margin], [-margin, 0.0]], dtype=torch.float64)
        solution = solved(logits, torch.tensor([0, 0, 1]))
        assert solution[0, 1].item() == pytest.approx(-margin - np.log(2), rel=1e-12)
        assert solution[1, 0].item() == pytest.approx(-margin, rel=1e-12)
    masked = solved(torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]), torch.tensor([0, 1]))
    assert masked[0].tolist() == [0.0, -torch.inf]
