r"""Fisher–Rao geometry of softmax outputs (the paper's Eq. 1–3).

`distances` takes prepared centroids (`prepare`) and checks nothing, for scoring row after row.
"""

from collections.abc import Callable

from torch import Tensor

from igeood.errors import InputError
from igeood.geometry.centroids import centroids
from igeood.geometry.precision import by_rows, result_dtype
from igeood.geometry.sphere import (
    check_rows,
    check_temperature,
    chord_distance,
    log_softmax,
    retemper,
    sphere,
    sphere_distances,
)

__all__ = ["centroids", "distance", "distances", "log_softmax", "pairwise_distance", "prepare", "retemper"]

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
    >>> import torch
    >>> p = torch.tensor([0.0, -torch.inf])
    >>> [round(distance(p, q).item(), 6) for q in (p, p.flip(0), torch.zeros(2))]
    [0.0, 3.141593, 1.570796]
    """
    if logits_p.shape[-1:] != logits_q.shape[-1:]:
        shapes = f"{tuple(logits_p.shape)} and {tuple(logits_q.shape)}"
        raise InputError(f"expected as many classes, got shapes {shapes}", argument="logits_p, logits_q")
    check_rows(logits_p, "logits_p")
    check_rows(logits_q, "logits_q")
    return chord_distance(sphere(logits_p), sphere(logits_q)).to(result_dtype(logits_p, logits_q))


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
    >>> import torch
    >>> vertices = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]])
    >>> pairwise_distance(torch.zeros(1, 2), vertices)
    tensor([[1.5708, 1.5708]])
    """
    if logits.ndim != 2 or centroids.ndim != 2 or logits.shape[1] != centroids.shape[1]:
        shapes = f"{tuple(logits.shape)} and {tuple(centroids.shape)}"
        raise InputError(f"expected shapes (N, C) and (K, C), got {shapes}", argument="logits, centroids")
    check_temperature(temperature)
    check_rows(logits, "logits")
    check_rows(centroids, "centroids")
    dtype = result_dtype(logits, centroids)
    return distances(logits, prepare(centroids), temperature, lambda values: values.to(dtype))


def prepare(centroids: Tensor) -> Tensor:
    """Square roots (K, C) of centroids (K, C), given as log-probabilities: what `distances` takes."""
    return sphere(centroids).contiguous()


def distances(logits: Tensor, roots: Tensor, temperature: float = 1.0, reduce: Reduce | None = None) -> Tensor:
    """Distances (N, K) in float64 to prepared centroids, or `reduce` of them; nothing is checked.

    `reduce` gets the values of some samples, (n, K): those of all samples are then never held together.
    """

    def of_rows(rows: Tensor) -> Tensor:
        values = sphere_distances(sphere(rows, temperature), roots)
        return values if reduce is None else reduce(values)

    return by_rows(of_rows, logits, max(roots.shape))
