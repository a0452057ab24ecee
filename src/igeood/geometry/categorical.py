r"""Fisher–Rao geometry of softmax outputs (the paper's Eq. 1–3), with the Kullback–Leibler divergence beside it.

Functions of centroids come in two forms: one that takes log-probabilities and checks its arguments, and one that takes
prepared centroids (`prepare`, `prepare_kl`) and checks nothing, for scoring row after row.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from igeood.errors import InputError
from igeood.geometry.centroids import centroids, kl_centroids, retemper, sgd_centroids
from igeood.geometry.precision import broadcastable, by_rows, result_dtype
from igeood.geometry.sphere import (
    check_rows,
    check_temperature,
    chord_distance,
    log_probabilities,
    log_softmax,
    sphere,
    sphere_distances,
)

__all__ = [
    "centroids",
    "check_temperature",
    "distance",
    "distance_sum",
    "distances",
    "kl_centroids",
    "kl_divergence",
    "kl_divergences",
    "log_softmax",
    "pairwise_distance",
    "pairwise_kl_divergence",
    "prepare",
    "prepare_kl",
    "retemper",
    "sgd_centroids",
]

_LOG_ZERO = -1e4
Reduce = Callable[[Tensor], Tensor]


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
    _check_classes(logits_p, logits_q, "distance")
    return chord_distance(sphere(logits_p), sphere(logits_q)).to(result_dtype(logits_p, logits_q))


def pairwise_distance(
    logits: Tensor, centroids: Tensor, temperature: float = 1.0, reduce: Reduce | None = None
) -> Tensor:
    """Fisher–Rao distance of every sample to every centroid (Eq. 2).

    Parameters
    ----------
    logits : Tensor
        (N, C) logits.
    centroids : Tensor
        (K, C) log-probabilities, at the temperature they were fitted for.
    temperature : float
        Applies to `logits` only.
    reduce : callable, optional
        What to keep of the values of some samples, (n, K) in float64, such as their sum over the centroids: those of
        all samples are then never held together.

    Returns
    -------
    Tensor
        (N, K) distances, or what `reduce` makes of them.

    Examples
    --------
    >>> vertices = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]])
    >>> pairwise_distance(torch.zeros(1, 2), vertices)
    tensor([[1.5708, 1.5708]])
    """
    _check_pairs(logits, centroids, temperature, "pairwise_distance")
    dtype = result_dtype(logits, centroids)
    return distances(logits, prepare(centroids), temperature, reduce or (lambda d: d.to(dtype)))


def distance_sum(logits: Tensor, centroids: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Sum of each sample's distances to all centroids, :math:`\sum_y d(q(x), \mu_y)`, (N,) in float64.

    Parameters
    ----------
    logits, centroids, temperature
        As in `pairwise_distance`.

    Examples
    --------
    >>> distance_sum(torch.zeros(1, 2), torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]])).item()
    3.14159...
    """
    _check_pairs(logits, centroids, temperature, "distance_sum")
    return distances(logits, prepare(centroids), temperature, lambda d: d.sum(dim=1))


def prepare(centroids: Tensor) -> Tensor:
    """Square roots (K, C) of centroids (K, C), given as log-probabilities: what `distances` takes."""
    return sphere(centroids).contiguous()


def distances(logits: Tensor, roots: Tensor, temperature: float = 1.0, reduce: Reduce | None = None) -> Tensor:
    """`pairwise_distance` in float64 to prepared centroids, without checks."""

    def of_rows(f: Tensor) -> Tensor:
        apart = sphere_distances(sphere(f, temperature), roots)
        return apart if reduce is None else reduce(apart)

    return by_rows(of_rows, logits, max(roots.shape))


def kl_divergence(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    r"""Kullback–Leibler divergence :math:`\sum_y p_y\log(p_y/q_y)` between softmax distributions.

    Parameters
    ----------
    logits_p, logits_q : Tensor
        (..., C) logits or log-probabilities; batch dimensions broadcast.

    Returns
    -------
    Tensor
        (...,) ≥ 0, finite: the logarithm of a probability of 0 in `q` counts as −10,000.

    Examples
    --------
    >>> kl_divergence(torch.tensor([0.0, -torch.inf]), torch.zeros(2)).item() == torch.tensor(2.0).log().item()
    True
    """
    _check_classes(logits_p, logits_q, "kl_divergence")
    log_p = log_probabilities(logits_p)
    terms = log_p.exp() * (_floored(log_p) - prepare_kl(logits_q))
    return terms.sum(dim=-1).clamp(min=0.0).to(result_dtype(logits_p, logits_q))


def pairwise_kl_divergence(
    logits: Tensor, centroids: Tensor, temperature: float = 1.0, reduce: Reduce | None = None
) -> Tensor:
    r"""Divergence :math:`\mathrm{KL}(q(x)\,\|\,\mu_y)` of every sample from every centroid.

    Parameters
    ----------
    logits, centroids, temperature, reduce
        As in `pairwise_distance`.

    Returns
    -------
    Tensor
        (N, K) divergences, or what `reduce` makes of them.

    Examples
    --------
    >>> pairwise_kl_divergence(torch.zeros(1, 2), torch.zeros(3, 2))
    tensor([[0., 0., 0.]])
    """
    _check_pairs(logits, centroids, temperature, "pairwise_kl_divergence")
    dtype = result_dtype(logits, centroids)
    return kl_divergences(logits, prepare_kl(centroids), temperature, reduce or (lambda d: d.to(dtype)))


def prepare_kl(centroids: Tensor) -> Tensor:
    """Finite log-probabilities (K, C) of centroids (K, C): what `kl_divergences` takes."""
    return _floored(log_probabilities(centroids))


def kl_divergences(logits: Tensor, log_q: Tensor, temperature: float = 1.0, reduce: Reduce | None = None) -> Tensor:
    """`pairwise_kl_divergence` in float64 from prepared centroids, without checks."""

    def of_rows(f: Tensor) -> Tensor:
        log_p = log_probabilities(f, temperature)
        p = log_p.exp()
        negative_entropy = (p * _floored(log_p)).sum(dim=-1, keepdim=True)  # (n, 1)
        divergences = (negative_entropy - p @ log_q.T).clamp(min=0.0)
        return divergences if reduce is None else reduce(divergences)

    return by_rows(of_rows, logits, max(log_q.shape))


def _floored(log_p: Tensor) -> Tensor:
    """Log-probabilities with −inf replaced: 0·log 0 = 0, and divergences stay finite."""
    return log_p.masked_fill(log_p == -torch.inf, _LOG_ZERO)


def _check_classes(p: Tensor, q: Tensor, what: str) -> None:
    _check_tensors(p, q, what)
    if not (p.ndim and q.ndim and p.shape[-1] == q.shape[-1] > 0 and broadcastable(p, q)):
        raise InputError(
            f"{what}: logits_p and logits_q must broadcast, with the same last axis of C classes; "
            f"got {tuple(p.shape)} and {tuple(q.shape)}"
        )
    check_rows(p, "logits_p")
    check_rows(q, "logits_q")


def _check_pairs(logits: Tensor, centroids: Tensor, temperature: float, what: str) -> None:
    _check_tensors(logits, centroids, what)
    if logits.ndim != 2 or centroids.ndim != 2 or logits.shape[1] != centroids.shape[1] or logits.shape[1] == 0:
        raise InputError(
            f"{what}: expected logits (N, C) and centroids (K, C); "
            f"got {tuple(logits.shape)} and {tuple(centroids.shape)}"
        )
    check_temperature(temperature)
    check_rows(logits)
    check_rows(centroids, "centroids")


def _check_tensors(first: Tensor, second: Tensor, what: str) -> None:
    for value in (first, second):
        if not isinstance(value, Tensor):
            raise InputError(f"{what}: expected tensors, got {type(value).__name__}; torch.as_tensor makes one")
