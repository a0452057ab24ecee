"""Thresholds and p-values that keep their promise on a finite number of calibration samples.

`is_ood = score > threshold`. With n in-distribution calibration scores, exchangeable with those to come, the k-th
smallest score as threshold keeps, on average over calibration sets, at least a share k/(n+1) of in-distribution
samples; and the share that one calibration set keeps is at least a Beta(k, n+1−k) variable. Ties only raise it.

Ties must stay ties: a sample scored again in another batch, thread or version may differ in its last digits. A guard's
`Calibration` therefore takes all its scores as greater by a margin for rounding, which only keeps more.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from igeood.errors import InputError
from igeood.metrics import Values, exact_fraction
from igeood.outputs import Array, ArrayLike, as_kind, as_vector

Guarantee = Literal["marginal", "tolerance"]

ROUNDING = 1e-9  # of the scores' size: what rounding may change in a score, with much room to spare
_SMALLEST = 1e-12  # the same where scores are about 0, from values about 1
_ALIKE = 1e-14  # of the scores' size: scores no further apart may be those of one input
# What a float32 model's rounding, which differs from batch to batch, may change in a score: a share of it, and where it
# is about 0. Inputs that come again are tied by it, whatever guard scores them.
_CELL, _LEAST_CELL = 1e-5, 1e-8
_OFF_GRID = 0.381966  # a score of 0 does not lie between two cells


@dataclass(frozen=True, eq=False)
class Calibration:
    """A threshold with the scores and the promise it comes from.

    Attributes
    ----------
    scores : Tensor
        (n,) calibration scores, ascending.
    tpr, guarantee, confidence
        As in `threshold`.
    left_out : int
        Samples that were offered but not used, because tuning had seen them.
    trained_on : int
        Samples among those used that equal training samples, more than by chance: with any, nothing is promised.
    """

    scores: Tensor = field(repr=False)
    tpr: float = 0.95
    guarantee: Guarantee = "marginal"
    confidence: float = 0.95
    left_out: int = 0
    trained_on: int = 0
    _place: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        values, _ = as_vector(self.scores, "id_scores")
        object.__setattr__(self, "scores", values.sort().values)
        object.__setattr__(self, "_place", rank(len(values), self.tpr, self.guarantee, self.confidence) - 1)

    @cached_property
    def margin(self) -> float:
        """What rounding may change in a score: threshold and p-values are those of the scores raised by it.

        1e-9 of the score at the threshold or of the median size, the greater; one huge score does not matter. But no
        more than half the way from the threshold's score to the next: where a classifier is so sure that its scores
        differ in their last digits only, these digits count.
        """
        at = self.scores[self._place]
        size = max(abs(float(at)), float(self.scores.abs().median()))
        if not math.isfinite(size):
            return 0.0
        alike = _ALIKE * size
        above = self.scores[self.scores > at + alike]
        gap = float(above[0] - at) if len(above) else math.inf
        return min(ROUNDING * size + _SMALLEST, max(alike, gap / 2))

    @cached_property
    def threshold(self) -> float:
        """`is_ood = score > threshold`: the k-th smallest score (`rank`), raised by the margin."""
        return float(self.raised[self._place])

    def tensor_p_values(self, scores: Tensor) -> Tensor:
        """`p_values` (N,) with the margin, on the scores' device: a score is above the threshold if p ≤ 1 − k/(n+1)."""
        return _p_values(self.raised.to(scores.device), scores.detach().double())

    @cached_property
    def raised(self) -> Tensor:
        """(n,) the scores raised by the margin, ascending."""
        return self.scores + self.margin

    @property
    def promise(self) -> str:
        """What the threshold promises, in a sentence."""
        n, kept = len(self.scores), f"at least {100 * self.tpr:.4g}% of in-distribution inputs are kept"
        if self.trained_on:
            return f"nothing is promised: of {n} calibration samples {self.trained_on} equal training samples"
        if self.guarantee == "marginal":
            return f"{kept}, on average over calibration sets of {n}"
        return f"with {100 * self.confidence:.4g}% confidence, {kept}"


def threshold(
    id_scores: ArrayLike, tpr: float = 0.95, guarantee: Guarantee = "marginal", confidence: float = 0.95
) -> float:
    """Score above which a sample is called out-of-distribution.

    Parameters
    ----------
    id_scores : array
        (n,) scores of in-distribution samples that neither training nor tuning has seen.
    tpr : float
        Share of in-distribution samples to keep.
    guarantee : {"marginal", "tolerance"}
        `"marginal"`: the share kept is at least `tpr` on average over calibration sets. `"tolerance"`: it is at least
        `tpr` with the given confidence, for the calibration set at hand.
    confidence : float
        Of the tolerance version.

    Returns
    -------
    float
        One of the scores: the k-th smallest (`rank`).

    Examples
    --------
    >>> threshold(range(1, 20), tpr=0.95)
    19.0
    """
    values, _ = as_vector(id_scores, "id_scores")
    return float(values.kthvalue(rank(len(values), tpr, guarantee, confidence)).values)


def rank(n: int, tpr: float = 0.95, guarantee: Guarantee = "marginal", confidence: float = 0.95) -> int:
    """Which of the n sorted calibration scores is the threshold, counted from 1.

    Marginal: ⌈(n+1)·tpr⌉. Tolerance: the smallest k with P(Beta(k, n+1−k) ≥ tpr) ≥ confidence. Raises when n is too
    small for the promise, saying how many are needed.

    >>> rank(1000), rank(1000, guarantee="tolerance")
    (951, 962)
    """
    share, needed = exact_fraction(tpr, "tpr"), needed_samples(tpr, guarantee, confidence)
    if n < needed:
        raise InputError(f"{n} cannot promise tpr={tpr:g}", argument="id_scores", cure=f"give at least {needed}")
    if guarantee == "marginal":
        return math.ceil((n + 1) * share)
    from scipy.stats import binom  # noqa: PLC0415 (slow to import)

    return int(binom.ppf(confidence, n, tpr)) + 1  # P(Beta(k, n+1−k) ≥ tpr) = P(Binomial(n, tpr) ≤ k−1)


def needed_samples(tpr: float = 0.95, guarantee: Guarantee = "marginal", confidence: float = 0.95) -> int:
    """The smallest number of calibration samples that can keep the promise.

    >>> needed_samples(), needed_samples(guarantee="tolerance")
    (19, 59)
    """
    share = exact_fraction(tpr, "tpr")
    exact_fraction(confidence, "confidence")  # also where it is not used: it is kept beside the promise
    if guarantee == "marginal":
        return math.ceil(share / (1 - share))
    if guarantee != "tolerance":
        raise InputError.unknown("guarantee", guarantee, ("marginal", "tolerance"))
    from scipy.stats import binom  # noqa: PLC0415 (slow to import)

    n = max(1, math.floor(math.log(1 - confidence) / math.log(tpr)))  # the closed form may be off by rounding
    while binom.cdf(n - 1, n, tpr) < confidence:
        n += 1
    return n


def p_values(id_scores: ArrayLike, scores: ArrayLike) -> Array:
    """Conformal p-value of each score, (1 + #{calibration ≥ score}) / (n + 1): small is out-of-distribution.

    For an in-distribution sample P(p ≤ α) ≤ α, for every α.

    Parameters
    ----------
    id_scores : array
        (n,) calibration scores.
    scores : array
        (N,) scores to compare with them.

    Examples
    --------
    >>> p_values([1.0, 2.0, 3.0], [0.0, 2.5, 9.0]).tolist()
    [1.0, 0.5, 0.25]
    """
    calibration, _ = as_vector(id_scores, "id_scores")
    values, is_numpy = as_vector(scores, "scores")
    if len(calibration) == 0:
        raise InputError("empty", argument="id_scores", cure="give calibration scores")
    result = _p_values(calibration.sort().values, values)
    return as_kind(result.to(scores.device) if isinstance(scores, Tensor) else result, is_numpy)


def _p_values(ascending: Tensor, scores: Tensor) -> Tensor:  # as export/graph.py has it in plain operations
    return (len(ascending) + 1.0 - torch.searchsorted(ascending, scores).double()) / (len(ascending) + 1.0)


class SeededRanks:
    """Ranks of scores among the calibration scores, with ties broken by seeded numbers.

    Parameters
    ----------
    scores : array
        (n,) calibration scores.
    seed : int
        Seed of the numbers that break ties.
    """

    def __init__(self, scores: Values, seed: int) -> None:
        self.seed = seed
        self._cells, cells = np.unique(_in_cells(scores), return_inverse=True)
        self._breakers = np.sort(cells + _draws(seed, 0, 0, len(scores)))  # each score's cell, and its tie-breaker

    def above(self, scores: Values, first: int) -> NDArray[np.int64]:
        """(N,) calibration scores above each score; the scores are those of a stream from its `first` on."""
        cells = _in_cells(scores)
        places = np.searchsorted(self._cells, cells)
        is_tied = np.append(self._cells, np.nan)[places] == cells
        draws = _draws(self.seed, 1, first, len(scores))
        return len(self._breakers) - np.searchsorted(self._breakers, places + np.where(is_tied, draws, 0.0))


def _in_cells(scores: Values) -> Values:
    """Scores on a grid as wide as rounding: those that only rounding sets apart are tied.

    The grid is the same for all guards: one that came from the calibration scores would treat them unlike inputs.
    """
    with np.errstate(over="ignore"):
        return np.floor(np.arcsinh(scores.astype(np.float64) * (_CELL / _LEAST_CELL)) / _CELL + _OFF_GRID)


def _draws(seed: int, stream: int, first: int, n: int) -> Values:
    """(n,) uniform numbers of a stream from its `first` on: the same, however the stream is cut."""
    bits = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)).advance(first // 4)  # it makes four at once
    return np.random.Generator(bits).random(first % 4 + n)[first % 4 :]
