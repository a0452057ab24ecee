"""Which samples tuning used, so that calibration never sees them again."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from igeood.errors import InputError
from igeood.outputs import Keys


def chosen(keys: Keys, share: float, seed: int) -> Tensor:
    """Which samples to use, (N,) bool: about `share` of them, drawn by their content and a seed.

    A sample is drawn or not whatever its batch and place, so a loader can be read in any order.
    """
    if not 0.0 < share <= 1.0:
        raise InputError(f"share: must lie in (0, 1], got {share!r}")
    mixed = (keys ^ np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    uniform = ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / 2.0**53
    return torch.from_numpy(uniform < share)


def merge(first: Keys, second: Keys) -> Keys:
    """Contents used by either of two tunings, each as often as the one that used it more."""
    contents = np.unique(np.concatenate([first, second]))
    return np.repeat(contents, np.maximum(_times(first, contents), _times(second, contents)))


def unused(keys: Keys, used: Keys) -> Tensor:
    """Which of the samples were not used, (N,) bool. A content used m times takes out its first m occurrences.

    >>> unused(np.array([7, 8, 7, 7], dtype=np.uint64), np.array([7, 7], dtype=np.uint64)).tolist()
    [False, True, False, True]
    """
    contents, group, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    times = _times(used, contents)
    order = np.argsort(group, kind="stable")
    occurrence = np.empty(len(keys), dtype=np.int64)
    occurrence[order] = np.arange(len(keys)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return torch.from_numpy(occurrence >= times[group])


def _times(keys: Keys, contents: Keys) -> np.ndarray[Any, np.dtype[np.int64]]:
    """How often each content occurs among the keys."""
    ordered = np.sort(keys)
    return np.searchsorted(ordered, contents, "right") - np.searchsorted(ordered, contents, "left")
