"""Thresholds and p-values that keep their promise on a finite number of calibration samples.

`is_ood = score > threshold`. With n in-distribution calibration scores, exchangeable with those to come, the k-th
smallest score as threshold keeps, on average over calibration sets, at least a share k/(n+1) of in-distribution
samples; and the share that one calibration set keeps is at least a Beta(k, n+1−k) variable. Ties only raise it.

Ties must stay ties: a sample scored again in another batch, thread or version may differ in its last digits. A guard's
`Calibration` therefore takes all its scores as greater by a margin for rounding, which only keeps more.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from igeood.errors import InputError
from igeood.metrics import Values, exact_fraction
from igeood.outputs import Array, ArrayLike, as_kind, as_vector

Guarantee = Literal["marginal", "tolerance"]

SHOWN = 5  # classes in a text
ROUNDING = 1e-9  # of the scores' size: what rounding may change in a score, with much room to spare
_SMALLEST = 1e-12  # the same where scores are about 0, from values about 1
_ALIKE = 1e-14  # of the scores' size: scores no further apart may be those of one input
# What a float32 model's rounding, which differs from batch to batch, may change in a score: a share of it, and where it
# is about 0. Inputs that come again are tied by it, whatever guard scores them.
_CELL, _LEAST_CELL = 1e-5, 1e-8
_OFF_GRID = 0.381966  # a score of 0 does not lie between two cells


class ClassShare(NamedTuple):
    """How many of the calibration samples of one predicted class are kept, with an exact interval."""

    label: int
    name: str
    n: int
    kept: float
    low: float
    high: float
    threshold: float


class Places(NamedTuple):
    """Where a score lies among the calibration scores, and what that means, for all groups of classes at once.

    A group of n scores has n+1 places. The number of `values` below a score is its place; with several groups, what
    `keys` has below the sum of that number and the `offsets` of the class.

    Attributes
    ----------
    values : Tensor
        (L,) the scores of all groups, raised, ascending.
    offsets : Tensor
        (C+1,) for each class L+1 times the number of its group; the last is that of all samples.
    keys : Tensor
        (L+G,) for each score of group g the number of values below it, and L for its last place; plus g·(L+1).
    p_values, above : Tensor
        (L+G,) the p-value of a score in that place, and whether it is above the group's threshold.
    """

    values: Tensor
    offsets: Tensor
    keys: Tensor
    p_values: Tensor
    above: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """A threshold, or one for each predicted class, with the scores and the promise it comes from.

    Attributes
    ----------
    scores : Tensor
        (n,) calibration scores, ascending.
    tpr, guarantee, confidence
        As in `threshold`.
    labels : Tensor, optional
        (n,) the classifier's answer for each of the scores.
    n_classes : int
        C, where there are labels.
    per_class : bool
        Each class that has samples enough for the promise has its own threshold and p-values; the others have those
        of all samples.
    left_out : array of int
        Places of the samples that were offered but not used, because training or tuning had seen them; among those of
        all ranks, one rank after the other.
    trained_on : int
        Samples among those used that are training samples, where too few others are left: nothing is promised.
    classes : tuple of str, optional
        The classes' names.
    """

    scores: Tensor
    tpr: float = 0.95
    guarantee: Guarantee = "marginal"
    confidence: float = 0.95
    labels: Tensor | None = None
    n_classes: int = 0
    per_class: bool = False
    left_out: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    trained_on: int = 0
    classes: tuple[str, ...] | None = None
    _place: int = field(init=False)

    def __post_init__(self) -> None:
        values, _ = as_vector(self.scores, "id_scores")
        ordered = values.sort()
        object.__setattr__(self, "scores", ordered.values)
        if self.labels is not None:
            object.__setattr__(self, "labels", self._checked_labels()[ordered.indices])
        elif self.per_class:
            raise InputError("none", argument="labels", cure="give the classifier's answer for each score")
        object.__setattr__(self, "_place", rank(len(values), self.tpr, self.guarantee, self.confidence) - 1)

    def _checked_labels(self) -> Tensor:
        labels = torch.as_tensor(self.labels).cpu()
        is_fine = labels.shape == self.scores.shape and labels.dtype == torch.int64
        if not is_fine or not bool(((labels >= 0) & (labels < self.n_classes)).all()):
            problem = f"expected {len(self.scores)} integers below {self.n_classes}, one for each score"
            raise InputError(problem, argument="labels")
        return labels

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
        """`is_ood = score > threshold`: the k-th smallest score (`rank`) of all, raised by the margin."""
        return float(self.raised[self._place])

    @cached_property
    def raised(self) -> Tensor:
        """(n,) the scores raised by the margin, ascending."""
        return self.scores + self.margin

    def thresholds(self, labels: Tensor) -> Tensor:
        """The threshold for each of these answers, (N,)."""
        limits = [self.own.get(label, self).threshold for label in range(self.n_classes)]
        return torch.tensor([*limits, self.threshold], dtype=torch.float64, device=labels.device)[labels]

    def look_up(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each score (N,) is above its threshold, and its p-value, among the samples of the same threshold."""
        table = Places(*(part.to(scores.device) for part in self.places))
        place = torch.searchsorted(table.values, scores.detach().double())
        if self.own:
            place = torch.searchsorted(table.keys, table.offsets[labels] + place)
        return table.above[place], table.p_values[place]

    @cached_property
    def own(self) -> "dict[int, Calibration]":
        """The calibration of each class that has samples enough for its own."""
        if not self.per_class or self.labels is None:
            return {}
        needed = needed_samples(self.tpr, self.guarantee, self.confidence)
        sizes = torch.bincount(self.labels, minlength=self.n_classes).tolist()
        parts = torch.split(self.scores[self.labels.argsort(stable=True)], sizes)
        options = (self.tpr, self.guarantee, self.confidence)
        return {label: Calibration(part, *options) for label, part in enumerate(parts) if len(part) >= needed}

    @cached_property
    def places(self) -> Places:
        """The places of scores among those of the classes that have their own, and of all samples."""
        parts = [*self.own.values(), self]
        values = torch.cat([part.raised for part in parts]).sort().values
        step = len(values) + 1
        last = torch.tensor([len(values)])
        keys = [torch.cat([torch.searchsorted(values, p.raised), last]) + i * step for i, p in enumerate(parts)]
        below = [torch.arange(len(part.scores) + 1.0, dtype=torch.float64) for part in parts]
        p_values = torch.cat([(len(each) - each) / len(each) for each in below])
        kept = [int((part.raised <= part.threshold).sum()) for part in parts]
        above = torch.cat([each >= n for each, n in zip(below, kept, strict=True)])
        groups = torch.full((self.n_classes + 1,), len(parts) - 1)
        groups[list(self.own)] = torch.arange(len(parts) - 1)
        return Places(values, groups * step, torch.cat(keys), p_values, above)

    def by_class(self, confidence: float = 0.95) -> list[ClassShare]:
        """The share of the calibration samples of each predicted class that is kept, the smallest first.

        Classes without samples are not listed.
        """
        if self.labels is None:
            return []
        limits = self.thresholds(torch.arange(self.n_classes))
        n = torch.bincount(self.labels, minlength=self.n_classes).numpy()
        kept = torch.bincount(self.labels[self.scores <= limits[self.labels]], minlength=self.n_classes).numpy()
        columns = (n, kept / np.maximum(n, 1), *exact_interval(kept, n, confidence), limits.numpy())
        names = self.classes or [str(label) for label in range(self.n_classes)]
        present = np.flatnonzero(n).tolist()
        shares = [ClassShare(c, names[c], *(column[c].item() for column in columns)) for c in present]
        return sorted(shares, key=lambda share: (share.kept, -share.n))

    @property
    def promise(self) -> str:
        """What the threshold promises, in a sentence."""
        n, kept = len(self.scores), f"at least {100 * self.tpr:.4g}% of in-distribution inputs"
        if self.trained_on:
            return f"nothing is promised: of {n} calibration samples {self.trained_on} are training samples"
        sets, others = f" of {n}", ""
        if self.own:
            sets = ""
            kept = f"for each predicted class {kept}"
        if self.per_class and len(self.own) < self.n_classes:
            needed = needed_samples(self.tpr, self.guarantee, self.confidence)
            few = f"{self.n_classes - len(self.own)} of {self.n_classes} classes have fewer than {needed} samples"
            others = f"; but {few}, and share the threshold of all {n}"
        if self.guarantee == "marginal":
            return f"{kept} are kept, on average over calibration sets{sets}{others}"
        return f"with {100 * self.confidence:.4g}% confidence, {kept} are kept{others}"

    def __repr__(self) -> str:
        """The promise, and the classes of which the smallest share is kept."""
        lines = [f"Calibration({self.promise})"]
        for _, name, n, kept, low, high, _ in self.by_class()[:SHOWN]:
            lines.append(f"  class {name}: {kept:.1%} of {n} samples are kept ({low:.1%} to {high:.1%})")
        return "\n".join(lines)


def exact_interval(kept: Any, n: Any, confidence: float = 0.95) -> tuple[Values, Values]:
    """Clopper and Pearson's interval of a share of which `kept` of n samples were seen, for arrays too.

    >>> tuple(round(float(end), 3) for end in exact_interval(19, 20))
    (0.751, 0.999)
    """
    from scipy.stats import beta  # noqa: PLC0415 (slow to import)

    low = np.where(kept > 0, beta.ppf((1.0 - confidence) / 2.0, kept, n - kept + 1), 0.0)
    high = np.where(kept < n, beta.ppf((1.0 + confidence) / 2.0, kept + 1, n - kept), 1.0)
    return low, high


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
    return _needed_for_tolerance(tpr, confidence)


@lru_cache(maxsize=64)
def _needed_for_tolerance(tpr: float, confidence: float) -> int:
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
    below = torch.searchsorted(calibration.sort().values, values).double()
    result = (len(calibration) + 1.0 - below) / (len(calibration) + 1.0)
    return as_kind(result.to(scores.device) if isinstance(scores, Tensor) else result, is_numpy)


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
