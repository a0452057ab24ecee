"""Which samples tuning used, so that calibration never sees them again."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from igeood.errors import InputError

Keys = np.ndarray[Any, np.dtype[np.uint64]]


def split(n: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Rows of n samples drawn with a seed: `share` of them, and the others, each in ascending order.

    >>> split(4, 0.5, seed=0)
    (tensor([0, 2]), tensor([1, 3]))
    """
    if not 0.0 < share <= 1.0:
        raise InputError(f"share: must lie in (0, 1], got {share}")
    order = np.random.default_rng(seed).permutation(n)
    cut = max(1, round(share * n))
    return torch.from_numpy(np.sort(order[:cut])), torch.from_numpy(np.sort(order[cut:]))


def row_keys(values: Tensor) -> Keys:
    """A 64-bit key for each row's content, (N,) uint64: equal rows have equal keys, others almost surely not.

    Values are compared as float64, so that a row keeps its key whether it comes as float32 or as float64.
    """
    flat = values.detach().reshape(len(values), -1).to("cpu", torch.float64) + 0.0  # −0.0 is 0.0
    bits = np.ascontiguousarray(flat.numpy()).view(np.uint64)  # (N, d)
    odd = np.random.default_rng(0x16E00D).integers(2**63, size=bits.shape[1], dtype=np.uint64) * np.uint64(
        2
    ) + np.uint64(1)
    mixed = bits ^ (bits >> np.uint64(31))  # the low bits of a float's mantissa are often 0: bring the high ones down
    key = (mixed * odd).sum(axis=1, dtype=np.uint64)
    keys: Keys = key ^ (key >> np.uint64(29))
    return keys


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
