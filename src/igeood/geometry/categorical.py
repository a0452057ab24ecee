r"""Fisher–Rao geometry of softmax outputs (the paper's Eq. 1–3), with the Kullback–Leibler divergence beside it.

The square root maps a probability vector to the unit sphere's positive part, where the Fisher–Rao distance is twice
the angle. Everything here works on those points, made from log-softmax in float64: no clamped arc cosine, so
distances keep their relative accuracy down to 0 and gradients are finite everywhere.
"""

import math

import torch
from torch import Tensor

from igeood.errors import InputError
from igeood.geometry.precision import result_dtype, row_chunks, wide

# Above this inner product the arc cosine has lost digits, and the angle is recomputed from the chord.
_NEAR = {torch.float64: 1.0 - 1e-7, torch.float32: 0.9}


def log_softmax(logits: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Logarithm of Eq. 1, :math:`\log\operatorname{softmax}(f/T)`, in float64 over the last axis.

    Finite logits of any size are fine (the maximum is taken off before the division); −inf is a masked class.

    >>> log_softmax(torch.tensor([1e38, 0.0])).tolist()
    [0.0, -1e+38]
    """
    check_temperature(temperature)
    logits = wide(logits)
    shifted = logits - logits.detach().amax(dim=-1, keepdim=True)
    return torch.log_softmax(shifted / temperature, dim=-1)


def sphere(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Point on the unit sphere, √softmax(f/T): (..., C) → (..., C)."""
    return torch.exp(0.5 * log_softmax(logits, temperature))


def distance(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    r"""Fisher–Rao distance between softmax distributions (Eq. 2): :math:`2\arccos\sum_y\sqrt{p_y q_y}`.

    Parameters
    ----------
    logits_p, logits_q : Tensor
        (..., C) logits or log-probabilities; batch dimensions broadcast.

    Returns
    -------
    Tensor
        (...,) in [0, π]: exactly 0 for equal inputs, π for disjoint ones.

    Examples
    --------
    >>> p = torch.tensor([0.0, -torch.inf])
    >>> [round(distance(p, q).item(), 6) for q in (p, p.flip(0), torch.zeros(2))]
    [0.0, 3.141593, 1.570796]
    """
    _check_classes(logits_p, logits_q, "distance: logits_p and logits_q")
    return _chord_distance(sphere(logits_p), sphere(logits_q)).to(result_dtype(logits_p, logits_q))


def pairwise_distance(logits: Tensor, centroids: Tensor, temperature: float = 1.0) -> Tensor:
    """Fisher–Rao distance of every sample to every centroid (Eq. 2).

    Parameters
    ----------
    logits : Tensor
        (N, C) logits.
    centroids : Tensor
        (K, C) log-probabilities, at the temperature they were fitted for.
    temperature : float
        Applies to `logits` only.

    Returns
    -------
    Tensor
        (N, K) distances.

    Examples
    --------
    >>> vertices = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]])
    >>> pairwise_distance(torch.zeros(1, 2), vertices)
    tensor([[1.5708, 1.5708]])
    """
    _check_pairs(logits, centroids, "pairwise_distance")
    return sphere_distances(sphere(logits, temperature), sphere(centroids)).to(result_dtype(logits, centroids))


def sphere_distances(points: Tensor, centres: Tensor) -> Tensor:
    """Distances (N, K) between points (N, C) and centres (K, C) of the unit sphere, by one matmul.

    Pairs so close that the arc cosine of their inner product would lose digits are recomputed from the chord.
    """
    inner = points @ centres.T  # (N, K)
    limit = _NEAR[inner.dtype]
    out = 2.0 * torch.acos(inner.clamp(max=limit))
    rows, cols = (inner.detach() > limit).nonzero(as_tuple=True)
    if len(rows):
        exact = [_chord_distance(points[rows[c]], centres[cols[c]]) for c in row_chunks(len(rows), points.shape[-1])]
        out = out.index_put((rows, cols), torch.cat(exact))
    return out


def _chord_distance(s: Tensor, t: Tensor) -> Tensor:
    """Twice the angle between unit vectors: exact at 0, at π, and in between; its gradient is finite."""
    chord = torch.linalg.vector_norm(s - t, dim=-1)
    return 4.0 * torch.atan2(chord, torch.linalg.vector_norm(s + t, dim=-1))


def kl_divergence(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    r"""Kullback–Leibler divergence :math:`\sum_y p_y\log(p_y/q_y)` between softmax distributions.

    Parameters
    ----------
    logits_p, logits_q : Tensor
        (..., C) logits or log-probabilities; batch dimensions broadcast.

    Returns
    -------
    Tensor
        (...,) ≥ 0, finite: a probability of 0 in `q` counts as the smallest float64.

    Examples
    --------
    >>> kl_divergence(torch.tensor([0.0, -torch.inf]), torch.zeros(2)).item() == torch.tensor(2.0).log().item()
    True
    """
    _check_classes(logits_p, logits_q, "kl_divergence: logits_p and logits_q")
    log_p, log_q = log_softmax(logits_p), _floored(log_softmax(logits_q))
    terms = log_p.exp() * (_floored(log_p) - log_q)
    return terms.sum(dim=-1).clamp(min=0.0).to(result_dtype(logits_p, logits_q))


def pairwise_kl_divergence(logits: Tensor, centroids: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Divergence :math:`\mathrm{KL}(q(x)\,\|\,\mu_y)` of every sample from every centroid.

    Parameters
    ----------
    logits : Tensor
        (N, C) logits.
    centroids : Tensor
        (K, C) log-probabilities, at the temperature they were fitted for.
    temperature : float
        Applies to `logits` only.

    Returns
    -------
    Tensor
        (N, K) divergences.

    Examples
    --------
    >>> pairwise_kl_divergence(torch.zeros(1, 2), torch.zeros(3, 2))
    tensor([[0., 0., 0.]])
    """
    _check_pairs(logits, centroids, "pairwise_kl_divergence")
    log_p = log_softmax(logits, temperature)
    p = log_p.exp()
    entropy = -(p * _floored(log_p)).sum(dim=-1, keepdim=True)  # (N, 1)
    cross = -p @ _floored(log_softmax(centroids)).T  # (N, K)
    return (cross - entropy).clamp(min=0.0).to(result_dtype(logits, centroids))


def check_temperature(temperature: float, name: str = "temperature") -> None:
    """Raise unless the temperature is a positive finite number."""
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise InputError(f"{name}: expected a positive number, got {temperature!r}")
    if not (math.isfinite(temperature) and temperature > 0):
        raise InputError(f"{name}: must be a positive finite number, got {temperature}")


def _floored(log_p: Tensor) -> Tensor:
    """Log-probabilities with −inf replaced by the smallest normal number's: 0·log 0 = 0, and divergences stay finite."""
    return log_p.clamp(min=math.log(torch.finfo(log_p.dtype).tiny))


def _check_classes(p: Tensor, q: Tensor, what: str) -> None:
    if p.ndim == 0 or q.ndim == 0 or p.shape[-1] != q.shape[-1] or p.shape[-1] == 0:
        raise InputError(f"{what} must share a last axis of C classes; got {tuple(p.shape)} and {tuple(q.shape)}")


def _check_pairs(logits: Tensor, centroids: Tensor, what: str) -> None:
    if logits.ndim != 2 or centroids.ndim != 2 or logits.shape[1] != centroids.shape[1] or logits.shape[1] == 0:
        raise InputError(
            f"{what}: expected logits (N, C) and centroids (K, C); got {tuple(logits.shape)} and {tuple(centroids.shape)}"
        )
