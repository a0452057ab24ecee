"""Thresholds keep their promise over thousands of calibration sets."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from igeood import calibration
from igeood.errors import InputError

SPLITS = 2000


def true_rates(n, guarantee, levels, tpr=0.95):
    """Share of in-distribution that the threshold keeps, for each of 2,000 calibration sets of n scores.

    Scores are uniform, in `levels` steps where that is given: then many tie, and the share is known exactly.
    """
    rng = np.random.default_rng([n, len(guarantee), levels or 0])
    rates = np.empty(SPLITS)
    for i in range(SPLITS):
        scores = rng.uniform(size=n)
        if levels:
            scores = np.floor(scores * levels) / levels
        threshold = calibration.threshold(scores, tpr, guarantee)
        rates[i] = threshold if not levels else (math.floor(threshold * levels + 0.5) + 1) / levels
    return rates


@pytest.mark.parametrize("n", [20, 50, 100, 1000])
@pytest.mark.parametrize("levels", [None, 8, 40])
def test_marginal_promise(n, levels):
    rates = true_rates(n, "marginal", levels)
    assert rates.mean() >= 0.95 - 3 * rates.std() / math.sqrt(SPLITS)
    if levels is None:  # and no more is given away than the next order statistic
        assert rates.mean() <= 0.95 + 1 / (n + 1) + 3 * rates.std() / math.sqrt(SPLITS)


@pytest.mark.parametrize("n", [100, 1000])
@pytest.mark.parametrize("levels", [None, 8, 40])
def test_tolerance_promise(n, levels):
    kept = np.mean(true_rates(n, "tolerance", levels) >= 0.95)
    assert kept >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / SPLITS)


def test_the_plain_quantile_breaks_the_promise():
    """Why the order statistic: at n = 50 `np.quantile` keeps 93%, and the test above would catch it."""
    rng = np.random.default_rng(0)
    rates = np.quantile(rng.uniform(size=(SPLITS, 50)), 0.95, axis=1)
    assert rates.mean() < 0.95 - 3 * rates.std() / math.sqrt(SPLITS)


def test_ranks():
    assert calibration.rank(19) == 19
    assert calibration.rank(1000) == 951
    assert calibration.rank(1000, guarantee="tolerance") == 962
    assert calibration.rank(59, guarantee="tolerance") == 59
    assert calibration.rank(99, 0.9) == 90  # 100 · 0.9 is 90, though the float 0.9 is above


@given(st.integers(59, 3000), st.sampled_from([0.8, 0.9, 0.95]), st.sampled_from([0.9, 0.95]))
def test_tolerance_rank_is_the_smallest_that_a_binomial_allows(n, tpr, confidence):
    k = calibration.rank(n, tpr, "tolerance", confidence)
    assert binom.cdf(k - 1, n, tpr) >= confidence - 1e-12
    assert k == 1 or binom.cdf(k - 2, n, tpr) < confidence + 1e-12


@pytest.mark.parametrize(
    ("n", "guarantee", "needed"), [(18, "marginal", 19), (0, "marginal", 19), (58, "tolerance", 59)]
)
def test_too_few_samples_say_how_many_are_needed(n, guarantee, needed):
    with pytest.raises(InputError, match=f"{n} calibration samples .* at least {needed} are needed"):
        calibration.threshold(np.arange(float(n)), guarantee=guarantee)
    assert calibration.threshold(np.arange(float(needed)), guarantee=guarantee) == needed - 1


@pytest.mark.parametrize("tpr", [0.5, 0.9, 0.99, 0.999])
def test_needed_samples_are_exactly_enough(tpr):
    for guarantee in ("marginal", "tolerance"):
        needed = calibration.needed_samples(tpr, guarantee)
        assert calibration.rank(needed, tpr, guarantee) == needed
        with pytest.raises(InputError, match=f"at least {needed} "):
            calibration.rank(needed - 1, tpr, guarantee)


def test_p_values_of_in_distribution_samples_are_valid():
    """P(p ≤ α) ≤ α over calibration sets, ties included."""
    rng = np.random.default_rng(1)
    for levels in (None, 10):
        draws = rng.uniform(size=(4000, 31))
        draws = draws if levels is None else np.floor(draws * levels)
        p = np.array([calibration.p_values(row[:-1], row[-1:])[0] for row in draws])
        for alpha in (0.05, 0.1, 0.5):
            assert np.mean(p <= alpha) <= alpha + 3 * math.sqrt(alpha * (1 - alpha) / len(p))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.lists(st.integers(0, 9), max_size=10))
def test_p_values_are_what_counting_gives(cal, scores):
    found = calibration.p_values(np.array(cal, float), np.array(scores, float))
    assert found.tolist() == [(1 + sum(c >= s for c in cal)) / (len(cal) + 1) for s in scores]


def test_the_kind_of_array_is_kept():
    cal = np.arange(10.0)
    assert isinstance(calibration.p_values(cal, torch.zeros(2)), torch.Tensor)
    assert isinstance(calibration.p_values(torch.from_numpy(cal), [1.0]), np.ndarray)
    assert calibration.benjamini_hochberg(torch.tensor([0.01, 0.9])).dtype == torch.bool


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=20), st.sampled_from([0.05, 0.2]))
def test_benjamini_hochberg_is_the_step_up_rule(p, fdr):
    ordered = sorted(p)
    passing = [k for k, value in enumerate(ordered, 1) if value <= fdr * k / len(p)]
    limit = ordered[passing[-1] - 1] if passing else -1.0
    close = any(math.isclose(value, fdr * k / len(p), rel_tol=1e-9) for k, value in enumerate(ordered, 1))
    if not close:
        assert calibration.benjamini_hochberg(p, fdr).tolist() == [value <= limit for value in p]


def test_false_discoveries_are_bounded():
    rng = np.random.default_rng(2)
    wrong = []
    for _ in range(500):
        cal, inside, outside = rng.normal(size=200), rng.normal(size=40), rng.normal(4.0, 1.0, size=10)
        called = calibration.benjamini_hochberg(calibration.p_values(cal, np.r_[inside, outside]), 0.1)
        wrong.append(called[:40].sum() / max(1, called.sum()))
    assert np.mean(wrong) <= 0.1 + 3 * np.std(wrong) / math.sqrt(len(wrong))


def test_empty_batches():
    assert len(calibration.p_values([1.0], [])) == 0
    assert len(calibration.benjamini_hochberg([])) == 0


def test_bad_input():
    scores = np.arange(100.0)
    with pytest.raises(InputError, match="guarantee: expected 'marginal' or 'tolerance'"):
        calibration.threshold(scores, guarantee="exact")
    with pytest.raises(InputError, match="confidence: must lie"):
        calibration.threshold(scores, guarantee="tolerance", confidence=1.0)
    with pytest.raises(InputError, match="tpr: must lie"):
        calibration.threshold(scores, 1.0)
    with pytest.raises(InputError, match="id_scores: NaN"):
        calibration.threshold(np.full(30, np.nan))
    with pytest.raises(InputError, match=r"^id_scores: empty; give calibration scores$"):
        calibration.p_values([], [1.0])
    with pytest.raises(InputError, match=r"^p: p-values .*lie in"):
        calibration.benjamini_hochberg([1.5])


def test_promises_in_words():
    assert calibration.Calibration(torch.arange(100.0)).promise.startswith("at least 95% of in-distribution")
    tolerant = calibration.Calibration(torch.arange(100.0), 0.9, "tolerance", 0.99)
    assert tolerant.promise.startswith("with 99% confidence, at least 90%")
    assert tolerant.threshold == calibration.threshold(np.arange(100.0), 0.9, "tolerance", 0.99) + tolerant.margin


def test_defaults_are_those_of_the_documentation():
    """A marginal promise of 95%; where a confidence is asked for, 95% too."""
    scores = np.random.default_rng(0).normal(size=200)
    marginal, tolerant = (0.95, "marginal", 0.95), (0.95, "tolerance", 0.95)
    assert calibration.threshold(scores) == calibration.threshold(scores, *marginal)
    assert calibration.threshold(scores, guarantee="tolerance") == calibration.threshold(scores, *tolerant)
    assert calibration.rank(200) == calibration.rank(200, *marginal)
    assert calibration.rank(200, guarantee="tolerance") == calibration.rank(200, *tolerant)
    assert calibration.needed_samples() == calibration.needed_samples(*marginal) == 19
    assert calibration.needed_samples(guarantee="tolerance") == calibration.needed_samples(*tolerant) == 59
    assert calibration.promise(200) == calibration.promise(200, *marginal)
    assert calibration.promise(200, guarantee="tolerance") == calibration.promise(200, *tolerant)
    made = calibration.Calibration(torch.from_numpy(scores))
    assert (made.tpr, made.guarantee, made.confidence, made.left_out) == (*marginal, 0)


def test_promises_in_full():
    assert calibration.promise(50, 0.9) == (
        "at least 90% of in-distribution inputs are kept, on average over calibration sets of 50"
    )
    assert calibration.promise(50, 0.9, "tolerance", 0.995) == (
        "with 99.5% confidence, at least 90% of in-distribution inputs are kept"
    )


@pytest.mark.parametrize("guarantee", ["marginal", "tolerance"])
def test_the_threshold_is_the_score_of_that_rank(guarantee):
    for seed in range(20):
        scores = np.random.default_rng(seed).normal(size=300)
        rank = calibration.rank(300, 0.9, guarantee, 0.8)
        assert calibration.threshold(scores, 0.9, guarantee, 0.8) == sorted(scores)[rank - 1]
        made = calibration.Calibration(torch.from_numpy(scores), 0.9, guarantee, 0.8)
        assert made.scores.tolist() == sorted(scores)
        assert made.threshold == pytest.approx(sorted(scores)[rank - 1], rel=1e-8)
    assert calibration.threshold(range(1, 20)) == 19.0


@pytest.mark.parametrize("tpr", [0.05, 0.3, 0.5, 0.9, 0.95])
@pytest.mark.parametrize("confidence", [0.01, 0.04, 0.5, 0.7, 0.95, 0.999])
def test_needed_samples_are_the_fewest_with_one_above_the_quantile(tpr, confidence):
    """The greatest of n scores keeps a share of tpr with probability 1 − tprⁿ."""
    needed = calibration.needed_samples(tpr, "tolerance", confidence)
    assert 1 - tpr**needed >= confidence - 1e-12
    assert needed == 1 or 1 - tpr ** (needed - 1) < confidence


def test_what_cannot_be_promised_is_said_in_full():
    scores = torch.arange(18.0)
    with pytest.raises(InputError, match=r"^id_scores: 18 calibration samples cannot promise tpr=0\.95; at least 19 "):
        calibration.Calibration(scores)
    said = r"^id_scores: 18 calibration samples cannot promise tpr=0\.9 with confidence 0\.99; at least 44 are needed"
    with pytest.raises(InputError, match=said):
        calibration.Calibration(scores, 0.9, "tolerance", 0.99)
    with pytest.raises(InputError, match=said):
        calibration.threshold(scores, 0.9, "tolerance", 0.99)
    with pytest.raises(InputError, match=r"^id_scores: NaN at position 3"):
        calibration.Calibration(torch.cat([torch.arange(3.0), torch.full((20,), torch.nan)]))


def test_errors_name_the_argument_and_the_place():
    with pytest.raises(InputError, match=r"^id_scores: NaN at position 1"):
        calibration.p_values([0.0, np.nan], [1.0])
    with pytest.raises(InputError, match=r"^scores: NaN at position 0"):
        calibration.p_values([0.0], [np.nan])
    with pytest.raises(InputError, match=r"^p: NaN at position 2"):
        calibration.benjamini_hochberg([0.0, 1.0, np.nan])
    with pytest.raises(InputError, match=r"^fdr: must lie strictly between 0 and 1, got 1\.5"):
        calibration.benjamini_hochberg([0.5], 1.5)
    for value in (1.5, -0.25):
        with pytest.raises(InputError, match=rf"^p: p-values .*lie in \[0, 1\]; position 2 has {value}"):
            calibration.benjamini_hochberg([0.0, 1.0, value, value])
    with pytest.raises(InputError, match=r"^tpr: must lie strictly between 0 and 1, got 1\.5"):
        calibration.needed_samples(1.5)
    with pytest.raises(InputError, match=r"^confidence: must lie strictly between 0 and 1, got 0"):
        calibration.needed_samples(0.9, "tolerance", 0)
    for wrong in ("Marginal", "MARGINAL", "Tolerance", None):
        with pytest.raises(InputError, match=r"^guarantee: expected 'marginal' or 'tolerance', got "):
            calibration.needed_samples(0.95, wrong)


def test_a_p_value_at_the_level_is_called():
    assert calibration.benjamini_hochberg([0.05]).tolist() == [True]
    assert calibration.benjamini_hochberg([0.2, 0.1], 0.2).tolist() == [True, True]
    assert calibration.benjamini_hochberg([0.0, 1.0]).tolist() == [True, False]
    assert calibration.benjamini_hochberg([0.06]).tolist() == [False]
    assert isinstance(calibration.benjamini_hochberg([0.05]), np.ndarray)
    assert isinstance(calibration.benjamini_hochberg(torch.tensor([0.05], dtype=torch.float64)), torch.Tensor)
