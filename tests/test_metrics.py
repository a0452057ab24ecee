"""Metrics against scikit-learn, and against counting."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from igeood import metrics

KINDS = {"continuous": 9, "tied": 1, "heavily tied": 0, "constant": -3}  # digits that are left


def counted_tnr(id_scores, ood_scores, tpr):
    """Try every threshold in ascending order; the first that keeps enough decides."""
    for threshold in sorted(id_scores):
        kept = sum(s <= threshold for s in id_scores)
        if Fraction(kept, len(id_scores)) >= Fraction(str(tpr)):
            return sum(s > threshold for s in ood_scores) / len(ood_scores)
    raise AssertionError


def scores_of(kind, seed):
    rng = np.random.default_rng(seed)
    n, m = 20 * rng.integers(1, 15, 2)  # 0.95 · 20 is 19, though the float 0.95 is a little below
    return rng.normal(size=n).round(KINDS[kind]), rng.normal(0.7, 1.0, size=m).round(KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_scikit_learn(kind):
    for seed in range(5):
        inside, outside = scores_of(kind, seed)
        positive = np.repeat([1, 0], [len(inside), len(outside)])
        confidence = -np.r_[inside, outside]
        assert metrics.auroc(inside, outside) == pytest.approx(roc_auc_score(positive, confidence), abs=1e-12)
        assert metrics.aupr(inside, outside) == pytest.approx(average_precision_score(positive, confidence), abs=1e-12)


@pytest.mark.parametrize("tpr", [0.05, 0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("kind", KINDS)
def test_tnr_is_what_counting_gives(kind, tpr):
    for seed in range(3):
        inside, outside = scores_of(kind, seed)
        assert metrics.tnr_at_tpr(inside, outside, tpr) == counted_tnr(inside, outside, tpr)


scores = st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=30)


@given(scores, scores)
def test_law_monotone_maps_change_nothing_and_evaluate_is_the_three(inside, outside):
    evaluation = metrics.evaluate(inside, outside)
    assert evaluation == metrics.evaluate(*([np.exp(s) * 3 - 1 for s in side] for side in (inside, outside)))
    assert (evaluation.auroc, evaluation.aupr) == (metrics.auroc(inside, outside), metrics.aupr(inside, outside))
    assert evaluation.tnr_at_tpr == metrics.tnr_at_tpr(inside, outside, 0.95)


def test_any_kind_of_array_and_infinite_scores():
    inside, outside = [0.0, 1.0, 2.0], [1.5, 2.5]
    for convert in (list, np.array, torch.tensor, lambda x: torch.tensor(x, dtype=torch.float16)):
        assert metrics.auroc(convert(inside), convert(outside)) == 5 / 6
    assert metrics.auroc([-np.inf, 0.0], [np.inf, np.inf]) == 1.0
    assert metrics.evaluate([np.inf, 0.0], [-np.inf, np.inf, -0.0]).auroc == pytest.approx((0.5 + 1.5) / 6)


def test_bad_scores_and_rates(refused):
    for bad in ([], [0.0, np.nan], ["a"], [[0.0]]):
        for metric in (metrics.tnr_at_tpr, metrics.auroc, metrics.aupr, metrics.evaluate):
            with refused("id_scores"):
                metric(bad, [0.0])
            with refused("ood_scores"):
                metric([0.0], bad)
    for tpr in (0.0, 1.0, np.nan, "0.95", True):
        with refused("tpr"):
            metrics.tnr_at_tpr([1.0], [2.0], tpr)
