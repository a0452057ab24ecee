"""The promises, exactly where ranks can be counted and by simulation where they cannot; and wrong versions, caught.

*Counted.* Exchangeable samples are as good as one bag of n+1, of which each is the new one with the same probability.
So a promise is checked by leaving out each in turn: nothing is left to chance, and every pattern of ties is a case.

*Simulated.* Each assertion has a bound that a right implementation crosses with a probability below `ERROR`: of a
binomial, of the empirical distribution function (Dvoretzky, Kiefer, Wolfowitz, with Massart's constant), or 5.7
standard errors of a mean. There are fewer than 100 of them: all pass with a probability of 1 − 1e-6. Seeds are fixed.
"""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.stats import binom, norm

import igeood
from igeood.calibration import Calibration, benjamini_hochberg, needed_samples, p_values, rank, threshold
from igeood.guard import Guard
from igeood.outputs import Outputs

ERROR = 1e-8
WIDTH = float(norm.isf(ERROR / 2))  # standard errors: 5.7


def plain_quantile(scores, tpr):
    return float(np.quantile(scores, tpr))


def one_rank_lower(scores, tpr):
    return float(np.sort(scores)[rank(len(scores), tpr) - 2])


def raised(scores, tpr):
    """The threshold of a guard, with its margin for rounding."""
    return Calibration(torch.as_tensor(scores), tpr).threshold


def without_one(id_scores, scores):
    """P-values without the new sample's own count."""
    return np.array([np.mean(np.asarray(id_scores) >= s) for s in scores])


def ties(size):
    """Every pattern of ties among `size` samples, as samples: the lengths of the groups are all that matters."""
    for steps in itertools.product((0.0, 1.0), repeat=size - 1):
        yield np.cumsum((0.0, *steps))


def bags(n):
    """n+1 samples: all apart, tied in many ways, and all tied."""
    rng = np.random.default_rng(n)
    apart = rng.normal(size=n + 1)
    yield "apart", apart
    for levels in (2, 8, 40):
        yield f"{levels} levels", np.floor(levels * rng.uniform(size=n + 1))
    yield "the upper half tied", np.minimum(apart, np.median(apart))
    yield "the lower half tied", np.maximum(apart, np.median(apart))
    yield "all tied", np.zeros(n + 1)


def kept(bag, rule, tpr):
    """Of the n+1 samples, those that are kept by the threshold that the others make."""
    values, counts = np.unique(bag, return_counts=True)
    new = np.searchsorted(bag, values) if (np.diff(bag) >= 0).all() else [list(bag).index(v) for v in values]
    return sum(
        int(count) for value, count, i in zip(values, counts, new, strict=True) if value <= rule(np.delete(bag, i), tpr)
    )


# -- thresholds


@pytest.mark.parametrize("rule", [threshold, raised])
@pytest.mark.parametrize("tpr", [0.9, 0.95, 0.99])
@pytest.mark.parametrize("n", [19, 20, 50, 100, 1000])
def test_the_marginal_promise_is_kept_whatever_the_ties(n, tpr, rule):
    if n < needed_samples(tpr):
        with pytest.raises(igeood.errors.InputError, match="cannot promise"):
            rule(np.arange(float(n)), tpr)
        return
    share = Fraction(repr(tpr))
    for name, bag in bags(n):
        if rule is raised and n == 1000 and name == "apart":
            bag = bag[::10]  # noqa: PLW2901 (a thousand objects take long)
        found = Fraction(kept(bag, rule, tpr), len(bag))
        assert found >= share, name
        if name == "apart":  # and no more is given away than the next rank
            assert found == Fraction(rank(len(bag) - 1, tpr), len(bag)) < share + Fraction(1, len(bag))


@pytest.mark.parametrize("tpr", [0.5, 0.8, 0.9])
def test_every_pattern_of_ties_keeps_the_marginal_promise(tpr):
    for bag in ties(11):  # all 1,024
        assert Fraction(kept(bag, threshold, tpr), 11) >= Fraction(repr(tpr))


@pytest.mark.parametrize("wrong", [plain_quantile, one_rank_lower])
@pytest.mark.parametrize(("n", "tpr"), [(19, 0.95), (20, 0.9), (50, 0.95), (100, 0.99), (1000, 0.95)])
def test_wrong_thresholds_are_caught(n, tpr, wrong):
    assert Fraction(kept(dict(bags(n))["apart"], wrong, tpr), n + 1) < Fraction(repr(tpr))


@pytest.mark.parametrize(("n", "tpr"), [(19, 0.95), (100, 0.99), (1000, 0.95)])
def test_new_samples_are_kept_as_promised(n, tpr):
    """Of uniform scores a threshold t keeps the share t: its mean over calibration sets is rank/(n+1), no less."""
    draws = np.random.default_rng([n, 1]).uniform(size=(10_000, n))
    k = rank(n, tpr)
    error = WIDTH * math.sqrt(k * (n + 1 - k) / ((n + 1) ** 2 * (n + 2)) / len(draws))  # of the mean of Beta(k, n+1−k)
    draws.partition((k - 2, k - 1), axis=1)
    assert draws[0, k - 1] == threshold(draws[0], tpr)
    assert abs(draws[:, k - 1].mean() - k / (n + 1)) <= error
    assert draws[:, k - 2].mean() < k / (n + 1) - error  # one rank lower is caught


@pytest.mark.parametrize(
    ("n", "tpr", "confidence"), [(59, 0.95, 0.95), (100, 0.9, 0.99), (200, 0.95, 0.9), (1000, 0.95, 0.95)]
)
def test_the_tolerance_promise_has_its_confidence(n, tpr, confidence):
    """The rank is the first whose chance to keep a share `tpr` is the confidence, in exact fractions, and in draws."""
    k = rank(n, tpr, "tolerance", confidence)
    share = Fraction(repr(tpr))
    up, whole = share.as_integer_ratio()
    terms = [
        math.comb(n, i) * up**i * (whole - up) ** (n - i) for i in range(k)
    ]  # that i of n uniform scores are below
    chance, lower = Fraction(sum(terms), whole**n), Fraction(sum(terms[:-1]), whole**n)
    assert chance >= Fraction(repr(confidence)) > lower
    draws = np.random.default_rng([n, 2]).uniform(size=(20_000, n))
    draws.partition((k - 2, k - 1), axis=1)
    assert draws[0, k - 1] == threshold(draws[0], tpr, "tolerance", confidence)
    enough = int((draws[:, k - 1] >= tpr).sum())
    low, high = (binom.ppf(q, len(draws), float(chance)) for q in (ERROR, 1 - ERROR))
    assert low <= enough <= high
    assert int((draws[:, k - 2] >= tpr).sum()) < low  # one rank lower is caught


@pytest.mark.parametrize("levels", [4, 40])
def test_the_tolerance_promise_with_ties(levels):
    """Scores in steps: a threshold at step j keeps a share (j+1)/levels."""
    n, tpr, confidence = 100, 0.9, 0.95
    draws = np.floor(levels * np.random.default_rng(levels).uniform(size=(1500, n)))
    shares = np.array([(threshold(row, tpr, "tolerance", confidence) + 1) / levels for row in draws])
    assert int((shares >= tpr - 1e-12).sum()) >= binom.ppf(ERROR, len(draws), confidence)


# -- p-values


def p_of_each(bag, rule):
    """The p-value of each sample of a bag, from the others."""
    return np.array([rule(np.delete(bag, i), bag[i : i + 1])[0] for i in range(len(bag))])


def too_small(p):
    """Whether some share α of the bag's p-values or more has p < α: then P(p ≤ α) ≤ α fails for it."""
    size = len(p)
    return any((p <= (j + 0.5) / size).sum() > j for j in range(size))


@pytest.mark.parametrize("n", [1, 19, 50, 100])
def test_p_values_are_uniform_or_above_for_every_share_at_once(n):
    for name, bag in bags(n):
        p = p_of_each(bag, p_values)
        assert not too_small(p), name
        if name == "apart":  # exactly uniform
            np.testing.assert_allclose(np.sort(p), np.arange(1, n + 2) / (n + 1), rtol=1e-12)
    assert too_small(p_of_each(dict(bags(n))["apart"], without_one))


def test_every_pattern_of_ties_has_valid_p_values():
    assert not any(too_small(p_of_each(bag, p_values)) for bag in ties(9))  # all 256


@pytest.mark.parametrize("levels", [None, 5])
def test_p_values_of_new_samples(levels):
    """Their empirical distribution is nowhere above the uniform one by more than its own error, nor far below."""
    n, sets = 19, 20_000
    draws = np.random.default_rng(3).uniform(size=(sets, n + 1))
    draws = draws if levels is None else np.floor(levels * draws)
    p = np.sort([p_values(row[:-1], row[-1:])[0] for row in draws])
    error = math.sqrt(math.log(1 / ERROR) / (2 * sets))
    grid = np.arange(0, n + 2) / (n + 1)
    reached = np.searchsorted(p, grid + 1e-12, "right") / sets
    assert (reached <= grid + error).all()
    wrong = np.array([(row[:-1] >= row[-1]).mean() for row in draws])
    assert (np.searchsorted(np.sort(wrong), grid + 1e-12, "right") / sets > grid + error).any() or levels
    if levels is None:
        assert (reached >= grid - error).all()


# -- a guard's own: with the margin for rounding


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
            assert np.array_equal(s > made.threshold, np.asarray(made.p_values(s)) <= alpha + 1e-9)


@pytest.mark.parametrize("size", [1e-13, 1e-3, 1.0, 1e9])
def test_rounding_does_not_refuse_what_the_threshold_keeps(size):
    scores = size * np.repeat(np.random.default_rng(5).normal(size=10), 10)
    made = Calibration(torch.from_numpy(scores))
    again = scores + np.maximum(1e-10 * np.abs(scores), 1e-13)
    exact = threshold(scores)
    assert ((scores <= exact) == (again <= made.threshold)).all()
    assert ((scores <= exact) & (again > exact)).any()  # without the margin they would be refused
    assert made.threshold <= exact + 2e-9 * np.abs(scores).max() + 1e-12
    assert (np.asarray(made.p_values(again)) >= p_values(scores, scores)).all()


def test_one_huge_score_does_not_widen_the_margin():
    scores = np.r_[np.arange(99.0), 1e38]
    made = Calibration(torch.from_numpy(scores))
    assert made.threshold == pytest.approx(threshold(scores), rel=1e-8)
    assert made.margin < 1e-6
    infinite = Calibration(torch.from_numpy(np.r_[np.arange(9.0), np.full(91, np.inf)]), 0.9)
    assert infinite.threshold == math.inf
    assert np.asarray(infinite.p_values([0.0, np.inf])).tolist() == [1.0, 92 / 101]


# -- false discoveries


@pytest.mark.parametrize("levels", [None, 1])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_false_discoveries_stay_below_their_rate(share, levels):
    """Benjamini and Hochberg's on p-values that share their calibration set: at most fdr · (1 − share) are wrong."""
    rng, fdr, n, batch = np.random.default_rng([7, round(10 * share)]), 0.2, 60, 40
    foreign = np.arange(batch) < round(share * batch)
    wrong, careless = [], []
    for _ in range(1500):
        scores, new = rng.normal(size=n), rng.normal(size=batch) + 3.0 * foreign
        if levels:
            scores, new = np.round(levels * scores), np.round(levels * new)
        called = benjamini_hochberg(p_values(scores, new), fdr)
        wrong.append((called & ~foreign).sum() / max(1, called.sum()))
        careless.append((new > scores.max()).any())  # without the new sample's own count p is 0, and called
    error = WIDTH * np.std(wrong) / math.sqrt(len(wrong))
    assert np.mean(wrong) <= fdr * (1.0 - share) + error
    if share == 0.0 and levels is None:  # every call is wrong, and that version makes far too many
        assert np.mean(careless) > fdr + error


# -- through every detector

REPEATS, CALIBRATION, TEST, TPR = 120, 19, 21, 0.9


@pytest.fixture(scope="module")
def parts(make_known_):
    """Training samples, those to tune on, and many to draw from."""
    pool = make_known_(5, n=REPEATS * (CALIBRATION + TEST), seed=5)
    small = make_known_(5, n=100, seed=6)
    return small.train, small.held_out, small.ood, pool.held_out


def draws(pool, *, distinct=None):
    """Calibration and test samples, again and again: all apart, or out of a few distinct ones."""
    rng = np.random.default_rng(distinct or 0)
    size = CALIBRATION + TEST
    rows = rng.permutation(len(pool)) if distinct is None else rng.integers(distinct, size=len(pool))
    for start in range(0, len(rows) - size + 1, size):
        both = pool[torch.from_numpy(rows[start : start + size])]
        yield both[:CALIBRATION], both[CALIBRATION:]


def kept_shares(guard, pool, *, also=None, distinct=None):
    """Share of test samples kept, for each pair of draws; `also` is calibrated on too."""
    shares = []
    for calibration, test in draws(pool, distinct=distinct):
        guard.calibrate(calibration if also is None else Outputs.concat([also, calibration]), TPR)
        assert len(guard.calibration.scores) == CALIBRATION
        shares.append(1.0 - float(guard.predict(test).is_ood.double().mean()))
    assert len(shares) == REPEATS
    return np.array(shares)


def assert_promise(shares, *, ties=False):
    """The mean share is rank/(n+1) = 0.9, or more with ties. Of one rank lower it would be 0.85."""
    t = 18 * 2 / (20**2 * 21)  # the variance of Beta(18, 2), the share that a threshold keeps
    error = WIDTH * math.sqrt((t + (0.9 * 0.1 - t) / TEST) / REPEATS)
    assert error < 0.05
    assert shares.mean() >= TPR - error
    assert ties or shares.mean() <= TPR + error


@pytest.mark.parametrize("method", sorted(igeood.METHODS))
def test_every_detector_keeps_what_its_guard_promises(method, parts):
    train, _, _, pool = parts
    guard = Guard(igeood.detector(method)).fit(train)
    assert_promise(kept_shares(guard, pool))
    assert_promise(kept_shares(guard, pool, distinct=6), ties=True)


@pytest.mark.parametrize("method", sorted(igeood.METHODS))
def test_so_it_does_tuned_and_after_saving(method, parts, tmp_path):
    train, validation, ood, pool = parts
    guard = Guard(igeood.detector(method)).fit(train).tune(validation, ood, share=1.0)
    guard.save(tmp_path / "guard.safetensors")
    loaded = igeood.load(tmp_path / "guard.safetensors")
    shares = kept_shares(loaded, pool, also=validation)  # what it was tuned on is left out
    assert loaded.calibration.left_out == len(validation)
    assert_promise(shares)
    calibration, test = next(draws(pool))
    verdicts = [g.calibrate(Outputs.concat([validation, calibration]), TPR).predict(test) for g in (guard, loaded)]
    assert torch.equal(verdicts[0].is_ood, verdicts[1].is_ood)
    assert torch.equal(verdicts[0].p_value, verdicts[1].p_value)


@pytest.mark.parametrize("size", [1e-9, 1.0, 28.0])
def test_the_margin_leaves_last_digits_that_tell_samples_apart(size):
    rng = np.random.default_rng(0)
    scores = -size * (
        1 - 10.0 ** rng.uniform(-13, -10, 2000)
    )  # a classifier that is sure of all: no tie, all nearly −size
    calibration = Calibration(torch.from_numpy(scores))
    assert calibration.margin > 0
    exact = threshold(scores)
    assert np.sum((scores > exact) & (scores <= calibration.threshold)) <= 1
