"""Which samples a guard has seen: by id, by input, or for arrays by rows that are otherwise unique."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from igeood.errors import InputError
from igeood.keys import Keys

MORE_THAN_CHANCE = 10.0  # times the share of rows that repeat within a set
FEW_REPEATS = 1e-3  # of rows without ids: where more of them repeat, equal rows are not taken for one sample


@dataclass(frozen=True, eq=False)
class Seen:
    """Samples that a step has used.

    Attributes
    ----------
    keys : array of uint64
        Sorted where they were used, and as often as they were.
    identified : bool
        Whether keys are of ids or inputs; otherwise they are of rows of outputs.
    drawn_from : tuple of int, optional
        `fingerprint` of the keys of the whole set that they were drawn from.
    """

    keys: Keys = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    identified: bool = True
    drawn_from: tuple[int, int] | None = None

    def among(self, keys: Keys, identified: bool) -> NDArray[np.bool_]:
        """Which of the samples with these keys have been seen, (N,)."""
        if not identified and self.drawn_from == fingerprint(keys):  # the very set: as many of equal rows as were used
            return occurrences(keys) < _times(self.keys, keys)
        shared = np.isin(keys, self.keys)
        chance = max(_repeats(self.keys), _repeats(keys))  # rows without ids may be equal, and other samples
        is_sure = identified or chance <= FEW_REPEATS or float(shared.mean()) > MORE_THAN_CHANCE * chance
        return shared & (is_sure and self.identified == identified)


@dataclass(frozen=True, eq=False)
class Unseen:
    """Which samples may calibrate a guard: those that neither training nor tuning has seen.

    Where these are fewer than needed, training samples serve too, and nothing is promised.

    Attributes
    ----------
    is_used : array of bool
        (N,) which samples serve.
    tuned_on, trained_on : int
        Samples that tuning used, and training samples among those that serve.
    identified : bool
        Whether they are known by ids or inputs.
    is_other_kind : bool
        Whether training samples are known otherwise, so that they cannot be compared.
    """

    is_used: NDArray[np.bool_]
    tuned_on: int
    trained_on: int
    identified: bool
    is_other_kind: bool

    @classmethod
    def of(cls, offered: Seen, fitted_on: Seen, tuned_on: Sequence[Seen], needed: int) -> "Unseen":
        """Of samples that are offered, in their order."""
        keys, identified = offered.keys, offered.identified
        is_tuned = np.zeros(len(keys), dtype=bool)
        for seen in tuned_on:
            is_tuned |= seen.among(keys, identified)
        is_trained = ~is_tuned & fitted_on.among(keys, identified)
        n_tuned = int(is_tuned.sum())
        n_trained = int(is_trained.sum())
        kinds = (identified, len(fitted_on.keys) > 0 and identified != fitted_on.identified)
        if len(keys) - n_tuned - n_trained >= needed:
            return cls(~is_tuned & ~is_trained, n_tuned, 0, *kinds)
        if len(keys) - n_tuned < needed:
            used = f" ({n_tuned} more were used by tune)" if n_tuned else ""
            cure = f"give at least {needed} that neither training nor tune has used, or a lower {{tpr}}"
            raise InputError(f"{len(keys) - n_tuned} samples{used} are too few", argument="id_data", cure=cure)
        return cls(~is_tuned, n_tuned, n_trained, *kinds)


def draw(keys: Keys, occurrence: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """A uniform number in [0, 1) for each sample, (N,), by its content and a seed, whatever its batch and place.

    Of equal contents each occurrence, counted from 0, has its own: all or none of a frequent one would make two unequal
    parts.
    """
    keys = keys + occurrence.astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93)
    mixed = (keys ^ np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / 2.0**53


def fingerprint(keys: Keys) -> tuple[int, int]:
    """Number and sum of a set's keys: the same for the same rows in any order, and for others almost surely not."""
    return len(keys), int(keys.sum(dtype=np.uint64))


def occurrences(keys: Keys, earlier: Keys | None = None) -> NDArray[np.int64]:
    """How often each key has occurred before its place, (N,), counting the earlier ones.

    >>> occurrences(np.array([7, 8, 7, 7], dtype=np.uint64), np.array([8], dtype=np.uint64)).tolist()
    [0, 1, 1, 2]
    """
    contents, group, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    order = np.argsort(group, kind="stable")
    before = np.empty(len(keys), dtype=np.int64)
    before[order] = np.arange(len(keys)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return before if earlier is None else before + _times(np.sort(earlier), contents)[group]


def _times(ordered: Keys, contents: Keys) -> NDArray[np.int64]:
    """How often each content occurs among the sorted keys."""
    return np.searchsorted(ordered, contents, "right") - np.searchsorted(ordered, contents, "left")


def _repeats(keys: Keys) -> float:
    """The share of keys that occur before."""
    return 1.0 - len(np.unique(keys)) / len(keys) if len(keys) else 0.0
