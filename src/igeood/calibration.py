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

import torch
from torch import Tensor

from igeood.errors import InputError
from igeood.metrics import exact_fraction
from igeood.outputs import Array, ArrayLike, as_kind, as_vector

Guarantee = Literal["marginal", "tolerance"]

ROUNDING = 1e-9  # of the scores' size: what rounding may change in a score, with much room to spare
_SMALLEST = 1e-12  # the same where scores are about 0, from values about 1
_ALIKE = 1e-14  # of the scores' size: scores no further apart may be those of one input


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
        raised = self.raised.to(scores.device)
        return (len(raised) + 1.0 - torch.searchsorted(raised, scores.detach().double()).double()) / (len(raised) + 1.0)

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
        promise = f"tpr={tpr:g}" if guarantee == "marginal" else f"tpr={tpr:g} with confidence {confidence:g}"
        raise InputError(f"id_scores: {n} calibration samples cannot promise {promise}; at least {needed} are needed")
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
        raise InputError(f"guarantee: expected 'marginal' or 'tolerance', got {guarantee!r}")
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
        (N,) scores to judge.

    Examples
    --------
    >>> p_values([1.0, 2.0, 3.0], [0.0, 2.5, 9.0]).tolist()
    [1.0, 0.5, 0.25]
    """
    calibration, _ = as_vector(id_scores, "id_scores")
    values, is_numpy = as_vector(scores, "scores")
    if len(calibration) == 0:
        raise InputError("id_scores: empty; give calibration scores")
    places = torch.searchsorted(calibration.sort().values, values).double()
    result = (len(calibration) + 1.0 - places) / (len(calibration) + 1.0)
    return as_kind(result.to(scores.device) if isinstance(scores, Tensor) else result, is_numpy)
