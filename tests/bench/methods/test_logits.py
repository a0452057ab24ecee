"""Kullback–Leibler and SGD centroids in place of Fisher–Rao ones, and Bayesian search: against scipy and plain code."""

import math
import sys

import numpy as np
import pytest
import torch
from scipy.stats import entropy

import igeood
from igeood.bench import bayes
from igeood.bench.methods.kl import KLDivergence, kl_divergences, prepare_kl, solve_kl
from igeood.bench.methods.sgd import IgeoodLogitsSgd
from igeood.errors import MissingExtraError
from igeood.geometry import categorical


@pytest.mark.parametrize("elements", [1 << 18, 70])
@pytest.mark.parametrize("reduce", ["sum", "min"])
def test_kl_is_scipys_divergence_from_the_means(classifier, reduce, elements, monkeypatch):
    """A row counts as often as it comes, and chunks do not matter."""
    monkeypatch.setattr("igeood.geometry.precision.CHUNK_ELEMENTS", elements)
    rows = torch.cat([torch.arange(400), torch.arange(0, 400, 7).repeat(5)])
    labels = classifier.labels[rows]
    detector = KLDivergence(reduce=reduce, temperature=5.0).fit(classifier.train[rows], labels)
    chances = (classifier.train[rows].double() / 5.0).softmax(dim=1)
    means = torch.stack([chances[labels == c].mean(dim=0) for c in range(10)])
    torch.testing.assert_close(detector.centroids_.exp(), means, rtol=1e-9, atol=1e-12)
    apart = entropy((classifier.ood.double() / 5.0).softmax(dim=1).numpy()[:, None], means.numpy(), axis=2)
    expected = -apart.sum(axis=1) if reduce == "sum" else apart.min(axis=1)
    np.testing.assert_allclose(detector(classifier.ood), expected, rtol=1e-8, atol=1e-10)


def test_kl_of_probabilities_that_no_float_holds():
    """The logarithm of 0 in q counts as −10,000."""
    p = torch.tensor([[0.0, 0.0, -torch.inf], [0.0, -torch.inf, -torch.inf]], dtype=torch.float64)
    q = torch.tensor([[0.0, -torch.inf, -torch.inf], [0.0, 0.0, 0.0]], dtype=torch.float64)
    half, third = 0.5 * 1e4 - math.log(2), math.log(3)
    expected = torch.tensor([[half, third - math.log(2)], [0.0, third]], dtype=torch.float64)
    torch.testing.assert_close(kl_divergences(p, prepare_kl(q)), expected, rtol=1e-12, atol=1e-12)
    logits = torch.tensor([[0.0, -1000.0], [0.0, -2000.0], [-1000.0, -torch.inf]], dtype=torch.float64)
    centroids = solve_kl(lambda: [(logits, torch.tensor([0, 0, 1]), torch.ones(3))], 2)
    assert centroids[0, 1].item() == pytest.approx(-1000.0 - math.log(2), rel=1e-12)
    assert centroids[1].tolist() == [0.0, -torch.inf]


def test_sgd_takes_the_papers_path(make, monkeypatch):
    """100 steps of 0.1 from the identity, by a plain loop over the classes."""
    data = make(4, n=80, margin=2.0)
    centre = torch.eye(4, dtype=torch.float64)
    for _ in range(100):
        centre = centre.requires_grad_()
        own = [categorical.distance(data.train[data.labels == c].double() / 3, centre[c]).mean() for c in range(4)]
        centre = (centre - 0.1 * torch.autograd.grad(sum(own), centre)[0]).detach()
    for elements in (1 << 18, 30):
        monkeypatch.setattr("igeood.geometry.precision.CHUNK_ELEMENTS", elements)
        recipe = IgeoodLogitsSgd(temperature=3.0).fit(data.train, data.labels).centroids_
        torch.testing.assert_close(recipe, torch.log_softmax(centre, 1), rtol=1e-9, atol=1e-9)


def test_bayesian_search_reaches_the_sweep(make, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.setattr(bayes, "TRIALS", 10)
    data = make(10, n=600, margin=5.0)

    def trials(**options):
        guard = igeood.black_box(method="igeood-logits").fit(data.train, data.labels)
        return guard.tune(data.held_out, data.ood, share=1.0, **options).tuning.trials

    searched = trials(search=bayes.search)
    sweep = [trial["tnr"] for trial in trials() if trial["temperature"] >= 1.0]
    assert max(trial["tnr"] for trial in searched) >= max(sweep) - 0.02
    assert trials(search=bayes.search) == searched
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtraError):
        trials(search=bayes.search)
