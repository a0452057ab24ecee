"""Samples that a guard has seen before: a fact where ids or inputs say so, a question where only outputs are equal."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from igeood.errors import InputError
from igeood.outputs import NO_KEYS, Keys
from igeood.summary.total import KEYS, Summary

Draw = tuple[int, int, float, int]

UNLIKELY = 1e-3  # a smaller probability is no chance
CONFIDENCE = 0.95  # of the upper limit of the share of rows that repeat by chance
CLUMP = 2  # rows that repeat come in pairs or more: a share of n rows is known no better than one of n/2 draws


@dataclass(frozen=True)
class Shared:
    """How many of so many samples are known already, and how many chance explains; None where ids or inputs say so."""

    count: int
    of: int
    chance: int | None

    def with_(self, others: str) -> str:
        """A clause on what is shared with others, such as "training samples"."""
        if self.chance is None:
            return f"{self.count} of {self.of} samples are {others}"
        what = f"{self.count} of {self.of} samples and {others} have equal outputs, perhaps the same samples"
        return f"{what} (chance explains {self.chance})"


@dataclass(frozen=True, eq=False)
class Known:
    """Samples by their keys.

    Attributes
    ----------
    keys : array of uint64
        Sorted: of all samples, or each once.
    rows, repeated : int
        Samples that have these keys, and those among them that share theirs with another.
    identified : bool
        Whether keys are of ids or inputs. If not, they are of outputs, which may be equal by chance.
    draws : tuple
        For each set of outputs that they were drawn from its `mark`, and share and seed of the draw.
    """

    keys: Keys = field(default_factory=NO_KEYS.copy)
    rows: int = 0
    repeated: int = 0
    identified: bool = True
    draws: tuple[Draw, ...] = ()

    @classmethod
    def of(cls, keys: Keys, identified: bool, draws: tuple[Draw, ...] = ()) -> "Known":
        """All samples of one set."""
        counts = np.unique(keys, return_counts=True)[1]
        return cls(np.sort(keys), len(keys), int(counts[counts > 1].sum()), identified, draws)

    @classmethod
    def of_summary(cls, summary: Summary) -> "Known":
        """The training samples, each key once: a million of them at most, with the smallest keys."""
        counts = summary.key_counts
        return cls(summary.keys, int(counts.sum()), int(counts[counts > 1].sum()), summary.identified)

    def joined(self, other: "Known") -> "Known":
        """Samples of either, each as often as in the one that has it more often."""
        if self.rows and self.identified != other.identified:  # keys of two kinds: the new ones
            return other
        return Known.of(merge(self.keys, other.keys), other.identified, self.draws + other.draws)

    def is_of_other_kind(self, identified: bool) -> bool:
        """Whether these are known by ids and others by outputs, or the other way round: none can be known again."""
        return bool(self.rows) and self.identified != identified

    @property
    def repeat_limit(self) -> float:
        """Upper confidence limit of the chance that a new row equals one of these, if it is another sample.

        The share of rows that have an equal row elsewhere in the set estimates it: each was new to all the others.
        """
        from scipy.stats import beta  # noqa: PLC0415 (slow to import)

        draws, hits = self.rows / CLUMP, self.repeated / CLUMP
        return 1.0 if hits >= draws else float(beta.ppf(CONFIDENCE, hits + 1.0, draws - hits))

    def shared(self, other: "Known") -> Shared | None:
        """Samples of another set that are among these; None if there are none, or if chance explains them.

        Equal rows of outputs are no more than a question. They are counted against the larger of the two sets' own
        shares of rows that repeat, in both directions: a few known ones among very many others show in one of them.
        """
        theirs = other.keys[other.keys <= self.keys[-1]] if len(self.keys) == KEYS else other.keys
        count = int(np.isin(theirs, self.keys).sum())
        if not count or self.identified != other.identified:
            return None
        if self.identified:
            return Shared(count, other.rows, None)
        from scipy.stats import binom  # noqa: PLC0415 (slow to import)

        limit, mine = max(self.repeat_limit, other.repeat_limit), np.unique(self.keys)
        found = int(np.isin(mine, theirs).sum())
        if min(binom.sf(count - 1, len(theirs), limit), binom.sf(found - 1, len(mine), limit)) >= UNLIKELY:
            return None
        return Shared(count, other.rows, int(binom.isf(UNLIKELY, len(theirs), limit)))

    def unused(self, keys: Keys, identified: bool) -> Tensor:
        """Which of the samples that have these keys are others than these, (N,) bool.

        Equal rows of outputs are the same samples if these were drawn from that very set, or if there are more of them
        than chance explains.
        """
        drawn = [draw[2:] for draw in self.draws if not identified and draw[:2] == mark(keys)]
        if drawn:  # the very rows are drawn again
            return ~torch.stack([chosen(keys, share, seed, occurrences(keys)) for share, seed in drawn]).any(dim=0)
        is_again = self.identified == identified and (identified or self.shared(Known.of(keys, identified)) is not None)
        return unused(keys, self.keys) if is_again else torch.ones(len(keys), dtype=torch.bool)


def chosen(keys: Keys, share: float, seed: int, occurrence: Any = 0) -> Tensor:
    """Which samples to use, (N,) bool: about `share` of them, drawn by their content and a seed.

    A sample is drawn or not whatever its batch and place, so a loader can be read in any order. Of equal contents each
    occurrence, counted from 0, is drawn on its own: all or none of a frequent one would make two unequal parts.
    """
    if not 0.0 < share <= 1.0:
        raise InputError(f"share: must lie in (0, 1], got {share!r}")
    keys = keys + np.asarray(occurrence, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93)
    mixed = (keys ^ np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    uniform = ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / 2.0**53
    return torch.from_numpy(uniform < share)


def mark(keys: Keys) -> tuple[int, int]:
    """Number and sum of a set's keys: the same for the same rows in any order, and for others almost surely not."""
    return len(keys), int(keys.sum(dtype=np.uint64))


def occurrences(keys: Keys, earlier: Keys = NO_KEYS) -> NDArray[np.int64]:
    """How often each key has occurred before its place, (N,), counting the earlier ones.

    >>> occurrences(np.array([7, 8, 7, 7], dtype=np.uint64), np.array([8], dtype=np.uint64)).tolist()
    [0, 1, 1, 2]
    """
    contents, group, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    order, before = np.argsort(group, kind="stable"), np.empty(len(keys), dtype=np.int64)
    before[order] = np.arange(len(keys)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    before += _times(earlier, contents)[group]
    return before


def merge(first: Keys, second: Keys) -> Keys:
    """Contents of either of two sets, each as often as in the one that has it more often."""
    contents = np.unique(np.concatenate([first, second]))
    return np.repeat(contents, np.maximum(_times(first, contents), _times(second, contents)))


def unused(keys: Keys, used: Keys) -> Tensor:
    """Which of the samples were not used, (N,) bool. A content used m times takes out its first m occurrences.

    >>> unused(np.array([7, 8, 7, 7], dtype=np.uint64), np.array([7, 7], dtype=np.uint64)).tolist()
    [False, True, False, True]
    """
    return torch.from_numpy(occurrences(keys) >= _times(used, keys))


def _times(keys: Keys, contents: Keys) -> NDArray[Any]:
    """How often each content occurs among the keys."""
    ordered = np.sort(keys, kind="stable")  # fast where they are in order
    return np.searchsorted(ordered, contents, "right") - np.searchsorted(ordered, contents, "left")
