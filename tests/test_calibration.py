"""Thresholds are order statistics, p-values are counts; a guard's have a margin for rounding."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
