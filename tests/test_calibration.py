"""Thresholds are order statistics, p-values are counts; a guard's have a margin for rounding."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, norm

from igeood import calibration
from igeood.calibration import Calibration, p_values, rank, threshold


@pytest.mark.parametrize("guarantee", ["marginal", "tolerance"])
@pytest.mark.parametrize("tpr", [0.3, 0.5, 0.9, 0.95, 0.999])
def test_needed_samples_are_exactly_enough(tpr, guarantee, refused):
    needed = calibration.needed_samples(tpr, guarantee)
    assert rank(needed, tpr, guarantee) == needed
    if guarantee == "tolerance":  # the greatest of n scores keeps a share of tpr with probability 1 − tprⁿ
        assert 1 - tpr**needed >= 0.95 - 1e-12 > 1 - tpr ** (needed - 1) - 1e-9
    if needed > 1:
        with refused("id_scores"):
            threshold(np.arange(needed - 1.0), tpr, guarantee)


@pytest.mark.parametrize("guarantee", ["marginal", "tolerance"])
def test_the_threshold_is_the_score_of_that_rank(guarantee):
    for seed in range(10):
        scores = np.random.default_rng(seed).normal(size=300)
        expected = sorted(scores)[rank(300, 0.9, guarantee, 0.8) - 1]
        assert threshold(scores, 0.9, guarantee, 0.8) == expected
        made = Calibration(torch.from_numpy(scores), 0.9, guarantee, 0.8)
        assert expected < made.threshold <= expected + 1e-8


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.lists(st.integers(0, 9), max_size=10))
def test_p_values_are_what_counting_gives(cal, scores):
    expected = [(1 + sum(c >= s for c in cal)) / (len(cal) + 1) for s in scores]
    for kind, convert in ((np.ndarray, np.array), (torch.Tensor, torch.tensor)):
        p = p_values(cal, convert([float(s) for s in scores]))  # the kind is that of the scores
        assert isinstance(p, kind)
        assert p.tolist() == expected


@pytest.mark.parametrize(
    ("function", "arguments", "argument"),
    [
        (threshold, (np.arange(18.0), 1.0), "tpr"),
        (threshold, (np.arange(18.0), 0.9, "exact"), "guarantee"),
        (threshold, (np.arange(18.0), 0.9, "marginal", 1.0), "confidence"),
        (Calibration, (torch.arange(18.0), 0.9, "tolerance", 0.99), "id_scores"),
        (p_values, ([], [1.0]), "id_scores"),
    ],
)
def test_bad_input(function, arguments, argument, refused):
    with refused(argument):
        function(*arguments)


@pytest.mark.parametrize("levels", [None, 3, 1])
@pytest.mark.parametrize("guarantee", ["marginal", "tolerance"])
def test_verdict_and_p_value_say_the_same(levels, guarantee):
    rng = np.random.default_rng(4)
    for size in (1e-9, 1.0, 1e6):
        scores = rng.normal(size=120) if levels is None else np.floor(levels * rng.uniform(size=120))
        made = Calibration(torch.from_numpy(size * (scores - 0.7)), 0.9, guarantee)
        alpha = 1.0 - rank(120, 0.9, guarantee) / 121
        near = np.array([made.threshold, *made.scores, *(made.scores + made.margin), *rng.normal(size=50) * size])
        for s in (near, np.nextafter(near, np.inf), np.nextafter(near, -np.inf)):
            assert np.array_equal(
                s > made.threshold, made.look_up(torch.from_numpy(s), None)[1].numpy() <= alpha + 1e-9
            )


@pytest.mark.parametrize("size", [1e-13, 1e-3, 1.0, 1e9])
def test_rounding_does_not_refuse_what_the_threshold_keeps(size):
    scores = size * np.repeat(np.random.default_rng(5).normal(size=10), 10)
    made = Calibration(torch.from_numpy(scores))
    again = scores + np.maximum(1e-10 * np.abs(scores), 1e-13)
    exact = threshold(scores)
    assert ((scores <= exact) == (again <= made.threshold)).all()
    assert ((scores <= exact) & (again > exact)).any()  # without the margin they would be refused
    assert made.threshold <= exact + 2e-9 * np.abs(scores).max() + 1e-12
    assert (made.look_up(torch.from_numpy(again), None)[1].numpy() >= p_values(scores, scores)).all()


def test_one_huge_score_does_not_widen_the_margin():
    scores = np.r_[np.arange(99.0), 1e38]
    made = Calibration(torch.from_numpy(scores))
    assert made.threshold == pytest.approx(threshold(scores), rel=1e-8)
    assert made.margin < 1e-6
    infinite = Calibration(torch.from_numpy(np.r_[np.arange(9.0), np.full(91, np.inf)]), 0.9)
    assert infinite.threshold == math.inf
    assert infinite.look_up(torch.tensor([0.0, torch.inf]), None)[1].tolist() == [1.0, 92 / 101]


@pytest.mark.parametrize("size", [1e-9, 1.0, 28.0])
def test_the_margin_leaves_last_digits_that_tell_samples_apart(size):
    """A classifier that is sure of all: no tie, all scores nearly −size."""
    scores = -size * (1 - 10.0 ** np.random.default_rng(0).uniform(-13, -10, 2000))
    calibration = Calibration(torch.from_numpy(scores))
    assert calibration.margin > 0
    assert np.sum((scores > threshold(scores)) & (scores <= calibration.threshold)) <= 1


# -- a threshold for each predicted class


def by_counting(cal, labels, score, label, tpr):
    """Whether a score is above the threshold of its class, and its p-value; of all samples where the class has few."""
    mine = [c for c, of in zip(cal, labels, strict=True) if of == label]
    mine = sorted(mine if len(mine) >= calibration.needed_samples(tpr) else cal)
    return score > mine[rank(len(mine), tpr) - 1], (1 + sum(c >= score for c in mine)) / (len(mine) + 1)


@given(st.data())
def test_each_class_has_the_places_that_counting_gives(data):
    pairs = st.tuples(st.integers(0, 9), st.integers(0, 3))
    cal, labels = zip(*data.draw(st.lists(pairs, min_size=4, max_size=60)), strict=True)
    made = Calibration(torch.tensor(cal), 0.75, labels=torch.tensor(labels), n_classes=5, per_class=True)
    asked = data.draw(st.lists(st.tuples(st.integers(-1, 11), st.integers(-1, 4)), min_size=1, max_size=20))
    scores, answers = (torch.tensor(column) for column in zip(*asked, strict=True))
    above, p = made.look_up(scores.double(), answers)
    expected = [by_counting(cal, labels, score, label, 0.75) for score, label in asked]
    assert list(zip(above.tolist(), p.tolist(), strict=True)) == expected
    assert torch.equal(above, scores > made.thresholds(answers))


SPLITS, SIZES, SPREADS, TPR = 300, np.array([50, 100, 200, 500, 1000]), np.array([0.3, 1.0, 2.0, 4.0, 8.0]), 0.95


@pytest.mark.parametrize("guarantee", ["marginal", "tolerance"])
@pytest.mark.parametrize("cell", [0.0, 0.5])
def test_every_class_keeps_its_share_over_300_splits_with_ties(cell, guarantee):
    """Normal scores of five classes of unequal sizes and spreads; of 0.5 wide cells the narrowest has three or four.

    What a threshold keeps is known. Bounds are three standard errors.
    """
    draw, confidence = np.random.default_rng(7), 0.8  # of 50 samples no rank has 0.95
    labels = torch.from_numpy(np.repeat(np.arange(5), SIZES))

    def scores():
        values = draw.normal(size=len(labels)) * SPREADS[labels]
        return torch.from_numpy(values if cell == 0.0 else (values / cell).round() * cell)

    def truly_kept(thresholds):
        edges = thresholds if cell == 0.0 else ((thresholds / cell).round() + 0.5) * cell
        return norm.cdf(edges / SPREADS)

    every, common, small = np.empty((SPLITS, 5)), np.empty((SPLITS, 5)), np.empty((SPLITS, 5))
    for split in range(SPLITS):
        known, options = scores(), {"labels": labels, "n_classes": 5}
        made = Calibration(known, TPR, guarantee, confidence, per_class=True, **options)
        every[split] = truly_kept(made.thresholds(torch.arange(5)).numpy())
        common[split] = truly_kept(np.full(5, Calibration(known, TPR, guarantee, confidence, **options).threshold))
        small[split] = np.bincount(labels, made.look_up(scores(), labels)[1] <= 0.2) / SIZES
    error = every.std(axis=0) / SPLITS**0.5
    assert error.max() < 0.003
    assert (every.mean(axis=0) >= TPR - 3 * error).all()
    assert common.mean(axis=0).min() < 0.93  # without it, of the widest class
    for marginal in (every @ SIZES / SIZES.sum(), common @ SIZES / SIZES.sum()):
        assert marginal.mean() >= TPR - 3 * marginal.std() / SPLITS**0.5
    assert (small.mean(axis=0) <= 0.2 + 3 * small.std(axis=0) / SPLITS**0.5).all()  # p-values
    if guarantee == "tolerance":
        assert ((every >= TPR).mean(axis=0) >= confidence - 3 * (0.8 * 0.2 / SPLITS) ** 0.5).all()


def test_classes_with_few_samples_share_the_threshold_of_all_and_are_counted():
    scores, labels = torch.arange(100.0), torch.arange(100) % 2
    labels[:10] = 2
    made = Calibration(scores, 0.9, labels=labels, n_classes=4, per_class=True)
    assert set(made.own) == {0, 1, 2}
    made = Calibration(scores, 0.95, labels=labels, n_classes=4, per_class=True)
    assert set(made.own) == {0, 1}
    assert made.thresholds(torch.tensor([2, 3, -1])).tolist() == [made.threshold] * 3
    assert "2 of 4" in made.promise
    none = Calibration(scores, 0.99, labels=labels, n_classes=4, per_class=True)
    assert "4 of 4" in none.promise
    assert none.look_up(torch.tensor([200.0]), torch.tensor([0]))[1].item() == 1 / 101


def test_the_share_kept_of_each_class_has_an_exact_interval():
    labels = torch.arange(300) % 3
    scores = torch.arange(300.0) - 150.0 * (labels == 0)
    shares = {share.label: share for share in Calibration(scores, 0.9, labels=labels, n_classes=4).by_class()}
    assert set(shares) == {0, 1, 2}
    assert shares[0].kept == 1.0 > shares[1].kept
    for share in shares.values():
        test = binomtest(round(share.kept * share.n), share.n).proportion_ci(0.95)
        assert (share.low, share.high) == pytest.approx((test.low, test.high))


@pytest.mark.parametrize("labels", [None, torch.zeros(3, dtype=torch.int64), torch.full((40,), 2), torch.zeros(40)])
def test_answers_must_be_one_for_each_score_and_of_the_classes(labels, refused):
    with refused("labels"):
        Calibration(torch.arange(40.0), labels=labels, n_classes=2, per_class=True)
