"""The promises, exactly where ranks can be counted and by simulation where they cannot; and wrong versions, caught.

*Counted.* Exchangeable samples are as good as one bag of n+1, of which each is the new one with the same probability.
So a promise is checked by leaving out each in turn: nothing is left to chance, and every pattern of ties is a case.

*Simulated.* Each assertion has a bound that a right implementation crosses with a probability below `ERROR`.
"""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.stats import norm

import igeood
from igeood.calibration import Calibration, p_values, rank, threshold
from igeood.guard import Guard
from igeood.outputs import Outputs

ERROR = 1e-8
WIDTH = float(norm.isf(ERROR / 2))  # standard errors: 5.7
RIGHT = {"threshold": threshold, "guard's": lambda scores, tpr: Calibration(torch.as_tensor(scores), tpr).threshold}


def bags(n):
    """n+1 samples: all apart, tied in many ways, and all tied."""
    rng = np.random.default_rng(n)
    apart = rng.normal(size=n + 1)
    levels = {f"{steps} levels": np.floor(steps * rng.uniform(size=n + 1)) for steps in (1, 2, 8, 40)}
    halves = {"upper half tied": np.minimum(apart, np.median(apart)), "lower": np.maximum(apart, np.median(apart))}
    return {"apart": apart, **levels, **halves}


def kept(bag, rule, tpr):
    """Of the n+1 samples, those that are kept by the threshold that the others make."""
    values, first, counts = np.unique(bag, return_index=True, return_counts=True)
    is_kept = [value <= rule(np.delete(bag, i), tpr) for value, i in zip(values, first, strict=True)]
    return int(counts[is_kept].sum())


@pytest.mark.parametrize("rule", RIGHT.values(), ids=RIGHT)
@pytest.mark.parametrize(("n", "tpr"), [(19, 0.95), (20, 0.95), (50, 0.9), (99, 0.9), (100, 0.99), (400, 0.95)])
def test_the_marginal_promise_is_kept_whatever_the_ties(n, tpr, rule):
    share = Fraction(repr(tpr))
    for name, bag in bags(n).items():
        shares = Fraction(kept(bag, rule, tpr), len(bag))
        assert shares >= share, name
        if name == "apart":  # and no more is given away than the next rank
            assert shares == Fraction(rank(n, tpr), n + 1) < share + Fraction(1, n + 1)


@pytest.mark.parametrize(("n", "tpr", "confidence"), [(59, 0.95, 0.95), (100, 0.9, 0.99), (200, 0.95, 0.9)])
def test_the_tolerance_promise_has_its_confidence(n, tpr, confidence):
    """The rank is the first whose chance to keep a share `tpr` is the confidence, in exact fractions."""
    k = rank(n, tpr, "tolerance", confidence)
    up, whole = Fraction(repr(tpr)).as_integer_ratio()
    terms = [math.comb(n, i) * up**i * (whole - up) ** (n - i) for i in range(k)]  # that i of n scores are below
    chance, lower = Fraction(sum(terms), whole**n), Fraction(sum(terms[:-1]), whole**n)
    assert chance >= Fraction(repr(confidence)) > lower


def p_of_each(bag):
    """The p-value of each sample of a bag, from the others."""
    return np.array([p_values(np.delete(bag, i), bag[i : i + 1])[0] for i in range(len(bag))])


def too_small(p):
    """Whether some share α of the bag's p-values or more has p < α: then P(p ≤ α) ≤ α fails for it."""
    return any((p <= (j + 0.5) / len(p)).sum() > j for j in range(len(p)))


@pytest.mark.parametrize("n", [1, 19, 50, 100])
def test_p_values_are_uniform_or_above_for_every_share_at_once(n):
    for name, bag in bags(n).items():
        p = p_of_each(bag)
        assert not too_small(p), name
        if name == "apart":  # exactly uniform
            np.testing.assert_allclose(np.sort(p), np.arange(1, n + 2) / (n + 1), rtol=1e-12)
            assert too_small(p - 1 / (n + 1))  # without the new sample's own count


def test_every_pattern_of_ties_keeps_the_marginal_promise_and_has_valid_p_values():
    """All 512 among ten samples: the lengths of the groups are all that matters."""
    for steps in itertools.product((0.0, 1.0), repeat=9):
        bag = np.cumsum((0.0, *steps))
        assert all(Fraction(kept(bag, threshold, tpr), 10) >= Fraction(repr(tpr)) for tpr in (0.5, 0.8, 0.9))
        assert not too_small(p_of_each(bag))


# -- through every detector

REPEATS, CALIBRATION, TEST, TPR = 80, 19, 70, 0.9


@pytest.fixture(scope="module")
def parts(make_known_):
    """Training samples, those to tune on, and many to draw from."""
    small, large = make_known_(5, n=100, seed=6), make_known_(5, n=REPEATS * (CALIBRATION + TEST), seed=5)
    return small.train, small.held_out, small.ood, large.held_out


def assert_promise(guard, pool, *, also=None, distinct=None):
    """Over many draws the mean share kept is rank/(n+1) = 0.9, or more with ties; of one rank lower it would be 0.85.

    `also` is calibrated on too; `distinct` draws out of so few samples.
    """
    rng = np.random.default_rng(0)
    rows = rng.permutation(len(pool)) if distinct is None else rng.integers(distinct, size=len(pool))
    shares = []
    for chosen in torch.from_numpy(rows).split(CALIBRATION + TEST):
        calibration, test = pool[chosen[:CALIBRATION]], pool[chosen[CALIBRATION:]]
        guard.calibrate(calibration if also is None else Outputs.concat([also, calibration]), TPR)
        assert len(guard.calibration.scores) == CALIBRATION
        shares.append(1.0 - float(guard.predict(test).is_ood.double().mean()))
    assert len(shares) == REPEATS
    t = 18 * 2 / (20**2 * 21)  # the variance of Beta(18, 2), the share that a threshold keeps
    error = WIDTH * math.sqrt((t + (0.9 * 0.1 - t) / TEST) / REPEATS)
    assert error < 0.05
    assert np.mean(shares) >= TPR - error
    assert distinct or np.mean(shares) <= TPR + error


@pytest.mark.parametrize("method", sorted(igeood.METHODS))
def test_every_detector_keeps_what_its_guard_promises(method, parts, suited, tmp_path):
    """Fitted; and tuned, saved and loaded, where what it was tuned on is left out."""
    train, validation, ood, pool = (suited(part, igeood.METHODS[method].needs) for part in parts)
    guard = Guard(igeood.detector(method)).fit(train)
    assert_promise(guard, pool)
    assert_promise(guard, pool, distinct=6)
    guard.tune(validation, ood, share=1.0).save(tmp_path / "guard")
    loaded = igeood.load(tmp_path / "guard")
    assert_promise(loaded, pool, also=validation)
    assert len(loaded.calibration.left_out) == len(validation)
