"""FR₀ in one loop, for few classes: what the extra `fast` (numba) adds. Without it, the same numbers take longer.

With ten classes a matrix product is so short that the passes over memory between one operation and the next cost
several times as much. Here a block of samples goes through all of them while it is in the cache, side by side, so that
the compiler turns every loop over samples into vector instructions.
"""

import importlib.util
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from igeood.geometry.sphere import sphere

MOST_CLASSES = 32  # above, a library's matrix product is faster
_BLOCK = 128  # samples: their points fit the first cache
_NEAR = 1.0 - 1e-9  # nearer pairs are measured by their chord, as in `sphere_distances`
_HALF_PI = 0.5 * math.pi
_LOWEST = -700.0  # e⁻⁷⁰⁰ is nothing beside the largest, 1
_ROUND = 1.5 * 2.0**52  # added to a small number, it leaves the nearest integer in the lowest bits
_LOG2E = 1.0 / math.log(2.0)
_LOG2_HIGH, _LOG2_LOW = float.fromhex("0x1.62e42fefa0000p-1"), float.fromhex("0x1.cf79abc9e3b39p-40")
_EXP = tuple(1.0 / math.factorial(n) for n in range(13, -1, -1))  # eʳ for |r| ≤ log(2)/2, to 3e-17
_ASIN = (
    0.028169218060881414, -0.010749050339697808, 0.01603551434914882, 0.0078029494773533175, 0.011875494382636922,
    0.013929652902326633, 0.017355259955786323, 0.02237204763174451, 0.03038194736709848, 0.044642857103423646,
    0.07500000000020764, 0.1666666666666665,
)  # fmt: skip  # (asin w − w)/w³ in w², for w ≤ ½: Chebyshev's approximation, to 3e-16

Kernel = Callable[[Any, Any, float, Any], None]


def distance_sums(logits: Tensor, centroids: Tensor, temperature: float) -> Tensor | None:
    """Sum of the Fisher–Rao distances to all centroids, (N,) float64; None where this way is closed or no faster.

    Which way is taken does not depend on the number of samples: one gets the same score alone as among others.

    Parameters
    ----------
    logits : Tensor
        (N, C).
    centroids : Tensor
        (K, C) log-probabilities.
    temperature : float
        Of the logits' softmax.
    """
    few = len(logits) > 0 and max(centroids.shape) <= MOST_CLASSES
    plain = logits.requires_grad or centroids.requires_grad or logits.device.type != "cpu" or temperature < 1e-100
    if not few or plain or logits.dtype not in (torch.float32, torch.float64) or not installed():
        return None
    rows, targets, out = logits.contiguous().numpy(), sphere(centroids).numpy(), np.empty(len(logits))
    if not np.isfinite(rows.max()) or (rows.min() == -np.inf and not np.isfinite(rows.max(axis=1)).all()):
        return None  # the plain path has the right words
    _kernel()(rows, targets, 0.5 / temperature, out)
    return torch.from_numpy(out)


@cache
def installed() -> bool:
    """Whether numba is there."""
    return importlib.util.find_spec("numba") is not None


@cache
def _kernel() -> Kernel:
    from numba import njit  # noqa: PLC0415 (an extra, and slow to import)

    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "nnan", "nsz"}}
    try:
        kept: Kernel = njit(cache=True, **options)(_sums)  # compiled once for all processes
    except RuntimeError:  # there is no folder to write to
        kept = njit(**options)(_sums)
    return kept


def _sums(logits: Any, centres: Any, slope: float, out: Any) -> None:  # noqa: C901, PLR0912 (one loop is the point)
    n, n_classes = logits.shape
    points, power, inner = np.zeros((n_classes, _BLOCK)), np.empty(_BLOCK), np.empty(_BLOCK)
    peak, norm, total = np.zeros(_BLOCK), np.empty(_BLOCK), np.empty(_BLOCK)
    bits = power.view(np.int64)
    for start in range(0, n, _BLOCK):
        size = min(_BLOCK, n - start)  # of the last block the rest is left over from the one before
        for i in range(size):
            peak[i] = logits[start + i, 0]
            for j in range(n_classes):
                points[j, i] = logits[start + i, j]
                peak[i] = max(peak[i], points[j, i])
        norm[:], total[:] = 0.0, 0.0
        for j in range(n_classes):
            x = points[j]
            for i in range(_BLOCK):
                x[i] = max((x[i] - peak[i]) * slope, _LOWEST)
                power[i] = x[i] * _LOG2E + _ROUND
            for i in range(_BLOCK):
                x[i] = (x[i] - (power[i] - _ROUND) * _LOG2_HIGH) - (power[i] - _ROUND) * _LOG2_LOW
            for i in range(_BLOCK):
                bits[i] = (bits[i] + 1023) << 52  # 2 to that integer
            for i in range(_BLOCK):
                value = 0.0
                for c in _EXP:
                    value = value * x[i] + c
                x[i] = value * power[i]
                norm[i] += x[i] * x[i]
        for i in range(_BLOCK):
            norm[i] = 1.0 / math.sqrt(norm[i])
        for j in range(n_classes):
            for i in range(_BLOCK):
                points[j, i] *= norm[i]
        for y in range(len(centres)):
            inner[:] = 0.0
            for j in range(n_classes):
                for i in range(_BLOCK):
                    inner[i] += centres[y, j] * points[j, i]
            for i in range(_BLOCK):  # acos b is π/2 − asin b, or 2 asin √((1 − b)/2): chosen by a product, not a branch
                b = inner[i]
                far, half = 1.0 if b <= 0.5 else 0.0, max(0.5 - 0.5 * b, 0.0)
                near = 1.0 - far
                z, w = far * b * b + near * half, far * b + near * math.sqrt(half)
                value = 0.0
                for c in _ASIN:
                    value = value * z + c
                sine = w + w * z * value
                power[i] = far * (_HALF_PI - sine) + near * 2.0 * sine
                total[i] += power[i]
            if inner[:size].max() > _NEAR:
                for i in range(size):
                    if inner[i] > _NEAR:
                        chord = 0.0
                        for j in range(n_classes):
                            chord += (points[j, i] - centres[y, j]) ** 2
                        total[i] += 2.0 * math.asin(0.5 * math.sqrt(chord)) - power[i]
        for i in range(size):
            out[start + i] = 2.0 * total[i]
