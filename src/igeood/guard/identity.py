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


def unseen(offered: Seen, fitted_on: Seen, tuned_on: Sequence[Seen], needed: int) -> tuple[NDArray[np.bool_], int, int]:
    """Which of the samples offered may calibrate a guard, (N,): those that neither training nor tuning has seen.

    Where these are fewer than needed, training samples serve too, and nothing is promised. The numbers are those of
    samples that tuning used, and of training samples that serve.
    """
    is_new = np.ones(len(offered.keys), dtype=bool)
    for seen in tuned_on:
        is_new &= ~seen.among(offered.keys, offered.identified)
    n_new = int(is_new.sum())
    n_tuned = len(is_new) - n_new
    is_trained = is_new & fitted_on.among(offered.keys, offered.identified)
    n_trained = int(is_trained.sum())
    if n_new - n_trained >= needed:
        return is_new & ~is_trained, n_tuned, 0
    if n_new < needed:
        used = f" ({n_tuned} more were used by tune)" if n_tuned else ""
        cure = f"give at least {needed} that neither training nor tune has used, or a lower {{tpr}}"
        raise InputError(f"{n_new} samples{used} are too few", argument="id_data", cure=cure)
    return is_new, n_tuned, n_trained


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
