r"""The unit sphere that √softmax maps to, where the Fisher–Rao distance is twice the angle (the paper's Eq. 1–2).

Points are made from log-softmax in float64, and angles from chords where an arc cosine would lose digits: distances
keep their relative accuracy down to 0, and gradients are finite everywhere.
"""

import math
from numbers import Real

import torch
from torch import Tensor

from igeood.errors import InputError
from igeood.geometry.precision import exporting, row_chunks, wide

# Above this inner product the arc cosine has lost digits, and the angle is recomputed from the chord.
_NEAR = {torch.float64: 1.0 - 1e-9, torch.float32: 0.9}
_FEW = 16  # centres whose chords are computed in an exported graph, the nearest ones


def log_softmax(logits: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Logarithm of Eq. 1, :math:`\log\operatorname{softmax}(f/T)`, in float64 over the last axis.

    Finite logits of any size are fine (the maximum is subtracted before the division); −inf is a masked class. Nothing
    is checked.

    >>> log_softmax(torch.tensor([1e38, 0.0], dtype=torch.float64)).tolist()
    [0.0, -1e+38]
    """
    return torch.log_softmax(_below_peak(logits) / temperature, dim=-1)


def sphere(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Point on the unit sphere, √softmax(f/T): (..., C) → (..., C); nothing is checked."""
    roots = _below_peak(logits).div_(2.0 * temperature).exp_()  # the largest is 1
    norm: Tensor = torch.linalg.vector_norm(roots, dim=-1, keepdim=True)
    return roots / norm


def retemper(centroids: Tensor, fitted_at: float, temperature: float) -> Tensor:
    """Centroids of one temperature rescaled to another: log-probabilities read as logits, as the authors' code does."""
    if temperature == fitted_at:
        return centroids
    return log_softmax(centroids * fitted_at, temperature)


def sphere_distances(points: Tensor, centres: Tensor) -> Tensor:
    """Distances (N, K) between points (N, C) and centres (K, C) of the unit sphere, by one matmul.

    Pairs so close that the arc cosine of their inner product would lose digits are recomputed from the chord.
    """
    inner = points @ centres.T  # (N, K)
    limit = _NEAR[inner.dtype]
    distances = inner.clamp(max=limit).acos().mul_(2.0)
    if exporting.get():
        inner, near = inner.topk(min(_FEW, inner.shape[1]), dim=1)
        chords = chord_distance(points[:, None], centres[near])
        return distances.scatter(1, near, torch.where(inner > limit, chords, distances.gather(1, near)))
    rows, columns = (inner.detach() > limit).nonzero(as_tuple=True)
    pairs = row_chunks(len(rows), points.shape[-1])
    exact = torch.cat([chord_distance(points[rows[few]], centres[columns[few]]) for few in pairs])
    return distances.index_put_((rows, columns), exact)


def chord_distance(s: Tensor, t: Tensor) -> Tensor:
    """Twice the angle between unit vectors: exact at 0, at π, and in between; its gradient is finite."""
    chord = torch.linalg.vector_norm(s - t, dim=-1)
    return 4.0 * torch.atan2(chord, torch.linalg.vector_norm(s + t, dim=-1))


def check_rows(logits: Tensor, name: str) -> None:
    """Raise unless every row of (..., C) has a finite maximum."""
    if not exporting.get() and not bool(logits.detach().amax(dim=-1).isfinite().all()):
        raise InputError("a row has NaN, +inf or only −inf", argument=name, cure="remove such rows")


def check_temperature(temperature: float) -> None:
    """Raise unless the temperature is a positive finite number."""
    if isinstance(temperature, bool) or not isinstance(temperature, Real) or not 0.0 < float(temperature) < math.inf:
        raise InputError(f"expected a positive finite number, got {temperature!r}", argument="temperature")


def _below_peak(logits: Tensor) -> Tensor:
    """A new float64 tensor of the logits less their row's maximum."""
    logits = wide(logits)
    return logits - logits.detach().amax(dim=-1, keepdim=True)
