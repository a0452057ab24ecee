r"""The unit sphere that √softmax maps to, where the Fisher–Rao distance is twice the angle (the paper's Eq. 1–2).

Points are made from log-softmax in float64, and angles from chords where an arc cosine would lose digits: distances
keep their relative accuracy down to 0, and gradients are finite everywhere.
"""

import math
from numbers import Real

import torch
from torch import Tensor

from igeood.errors import InputError
from igeood.geometry.plain import is_plain
from igeood.geometry.precision import row_chunks, wide

# Above this inner product the arc cosine has lost digits, and the angle is recomputed from the chord.
_NEAR = {torch.float64: 1.0 - 1e-9, torch.float32: 0.9}
_FEW, _DIRECT = 16, 1 << 14  # in plain mode: so many centres may be as near; of fewer values all chords are computed


def log_softmax(logits: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Logarithm of Eq. 1, :math:`\log\operatorname{softmax}(f/T)`, in float64 over the last axis.

    Finite logits of any size are fine (the maximum is taken off before the division); −inf is a masked
    class. Nothing is checked.

    >>> log_softmax(torch.tensor([1e38, 0.0], dtype=torch.float64)).tolist()
    [0.0, -1e+38]
    """
    return torch.log_softmax(_below_peak(logits).div_(temperature), dim=-1)


def sphere(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Point on the unit sphere, √softmax(f/T): (..., C) → (..., C); nothing is checked."""
    roots = _below_peak(logits).div_(2.0 * temperature).exp_()  # the largest is 1
    norm: Tensor = torch.linalg.vector_norm(roots, dim=-1, keepdim=True)
    return roots / norm


def _below_peak(logits: Tensor) -> Tensor:
    """A new float64 tensor of the logits less their row's maximum."""
    logits = wide(logits)
    return logits - logits.detach().amax(dim=-1, keepdim=True)


def sphere_distances(points: Tensor, centres: Tensor) -> Tensor:
    """Distances (N, K) between points (N, C) and centres (K, C) of the unit sphere, by one matmul.

    Pairs so close that the arc cosine of their inner product would lose digits are recomputed from the chord.
    """
    if is_plain() and centres.numel() <= _DIRECT:
        return chord_distance(points[:, None], centres)
    inner = points @ centres.T  # (N, K)
    limit = _NEAR[inner.dtype]
    if is_plain():
        most, near = inner.topk(min(_FEW, inner.shape[1]), dim=1)
        out = inner.clamp(max=limit).acos() * 2.0
        chords = chord_distance(points[:, None], centres[near])
        return out.scatter(1, near, torch.where(most > limit, chords, out.gather(1, near)))
    rows, cols = (inner.detach() > limit).nonzero(as_tuple=True)
    out = inner.clamp_(max=limit).acos_().mul_(2.0)
    if len(rows):
        exact = [chord_distance(points[rows[c]], centres[cols[c]]) for c in row_chunks(len(rows), points.shape[-1])]
        out = out.index_put_((rows, cols), torch.cat(exact))
    return out


def chord_distance(s: Tensor, t: Tensor) -> Tensor:
    """Twice the angle between unit vectors: exact at 0, at π, and in between; its gradient is finite."""
    chord = torch.linalg.vector_norm(s - t, dim=-1)
    return 4.0 * torch.atan2(chord, torch.linalg.vector_norm(s + t, dim=-1))


def check_rows(logits: Tensor, name: str) -> None:
    """Raise unless every row of (..., C) has a finite maximum."""
    if not bool(logits.detach().amax(dim=-1).isfinite().all()):
        raise InputError(f"{name}: a row has NaN, +inf or nothing but −inf; remove such rows")


def check_temperature(temperature: float, name: str = "temperature") -> None:
    """Raise unless the temperature is a positive finite number."""
    if isinstance(temperature, bool) or not isinstance(temperature, Real) or not 0.0 < float(temperature) < math.inf:
        raise InputError(f"{name}: must be a positive finite number, got {temperature!r}")
