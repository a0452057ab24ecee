r"""Class centroids of softmax outputs (the paper's Eq. 3), for Fisher–Rao and for Kullback–Leibler.

The Fisher–Rao centroid minimises the *mean distance* to its class's outputs: a geometric median on the sphere.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from igeood.errors import InputError
from igeood.geometry.precision import row_chunks, wide
from igeood.geometry.sphere import check_temperature, chord_distance, log_softmax, sphere
from igeood.geometry.weiszfeld import Chunks, Piece, check_every_class, solve
from igeood.outputs import check_logits


def centroids(
    logits: Tensor,
    labels: Tensor,
    n_classes: int,
    temperature: float = 1.0,
    solver: Literal["weiszfeld", "sgd"] = "weiszfeld",
    *,
    weights: Tensor | None = None,
    start: Tensor | None = None,
    tolerance: float = 1e-11,
    max_passes: int = 500,
) -> Tensor:
    r"""Fisher–Rao centroid of each class (Eq. 3): :math:`\arg\min_\mu \frac1{N_y}\sum_i d(q(x_i), \mu)`.

    Parameters
    ----------
    logits : Tensor
        (N, C) training logits.
    labels : Tensor
        (N,) class of each sample; every class needs at least one.
    n_classes : int
        C.
    temperature : float
        Temperature of the softmax; the centroids are for use at this temperature.
    solver : {"weiszfeld", "sgd"}
        `"sgd"` is the paper's recipe (see `sgd_centroids`), kept for fidelity; it does not converge.
    weights : Tensor, optional
        (N,) positive weight of each sample, such as how often it occurs; 1 by default.
    start : Tensor, optional
        (C, C) log-probabilities to start Weiszfeld from, such as the centroids of a neighbouring temperature.
    tolerance : float
        Stop when each class's objective is within this relative distance of its optimum, or rounding prevents it.
    max_passes : int
        Passes after which to stop anyway, with a warning.

    Returns
    -------
    Tensor
        (C, C) log-probabilities, float64 where the device has it.

    Examples
    --------
    >>> logits = torch.tensor([[2.0, 0.0], [3.0, 0.0], [0.0, 3.0]])
    >>> centroids(logits, torch.tensor([0, 0, 1]), 2).exp()[1]
    tensor([0.0474, 0.9526], dtype=torch.float64)
    """
    chunks = _checked(logits, labels, weights, n_classes, temperature)
    if solver == "sgd":
        return sgd_centroids(logits, labels, n_classes, temperature, weights=weights)
    if solver != "weiszfeld":
        raise InputError(f"solver: expected 'weiszfeld' or 'sgd', got {solver!r}")
    if start is not None:
        if tuple(start.shape) != (n_classes, n_classes):
            raise InputError(f"start: expected log-probabilities ({n_classes}, {n_classes}), got {tuple(start.shape)}")
        check_logits(start, "start")
    return solve(chunks, n_classes, temperature, start=start, tolerance=tolerance, max_passes=max_passes)


def kl_centroids(
    logits: Tensor, labels: Tensor, n_classes: int, temperature: float = 1.0, *, weights: Tensor | None = None
) -> Tensor:
    """Kullback–Leibler centroid of each class: the arithmetic mean of its softmax outputs.

    Parameters
    ----------
    logits, labels, n_classes, temperature, weights
        As in `centroids`.

    Returns
    -------
    Tensor
        (C, C) log-probabilities.

    Examples
    --------
    >>> kl_centroids(torch.tensor([[0.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]), 2).exp()
    tensor([[0.5000, 0.5000],
            [0.2689, 0.7311]], dtype=torch.float64)
    """
    return solve_kl(_checked(logits, labels, weights, n_classes, temperature), n_classes, temperature)


def solve_kl(chunks: Chunks, n_classes: int, temperature: float = 1.0) -> Tensor:
    """Kullback–Leibler centroids (C, C) in one pass over the chunks, which are those of `solve`."""
    peak = torch.full((n_classes, n_classes), -torch.inf, dtype=torch.float64)
    total, counts = torch.zeros_like(peak), torch.zeros_like(peak[0])
    for chunk in chunks():
        for rows in row_chunks(len(chunk[0]), n_classes):
            logits, labels, weights = chunk[0][rows], chunk[1][rows].long(), wide(chunk[2][rows])
            log_q = log_softmax(logits, temperature)
            peak, total, counts = peak.to(log_q), total.to(log_q), counts.to(log_q)
            highest = peak.scatter_reduce(0, labels[:, None].expand_as(log_q), log_q, "amax")
            finite = highest.clamp(min=torch.finfo(peak.dtype).min)  # −inf: a class masked in every sample
            total *= torch.exp(peak - finite)  # Σ exp of differences, so that no small probability is lost
            total.index_add_(0, labels, torch.exp(log_q - finite[labels]) * weights[:, None])
            counts.index_add_(0, labels, weights)
            peak = highest
    check_every_class(counts)
    return total.log() + peak.clamp(min=torch.finfo(peak.dtype).min) - counts.log()[:, None]


def retemper(centroids: Tensor, fitted_at: float, temperature: float) -> Tensor:
    """Centroids of one temperature rescaled to another: log-probabilities read as logits, as the authors' code does."""
    if temperature == fitted_at:
        return centroids
    return log_softmax(centroids * fitted_at, temperature)


def sgd_centroids(
    logits: Tensor,
    labels: Tensor,
    n_classes: int,
    temperature: float = 1.0,
    *,
    weights: Tensor | None = None,
    learning_rate: float = 0.1,
    epochs: int = 100,
) -> Tensor:
    """Eq. 3 by the paper's recipe: gradient descent on the centroids' logits, from the identity matrix.

    Each epoch is one full-batch step of the mean distance in each class. It stops far from the optimum: use it to
    reproduce, `centroids` to detect.

    Parameters
    ----------
    logits, labels, n_classes, temperature, weights
        As in `centroids`.
    learning_rate, epochs
        The paper's values by default.

    Returns
    -------
    Tensor
        (C, C) log-probabilities.
    """
    ((logits, classes, weights),) = _checked(logits, labels, weights, n_classes, temperature)()
    counts = torch.bincount(classes, weights, n_classes)
    check_every_class(counts)
    shares = weights / counts[classes]
    with torch.enable_grad():
        centre = torch.eye(n_classes, dtype=counts.dtype, device=logits.device).requires_grad_()
        for _ in range(epochs):
            gradient = torch.zeros_like(centre)
            for rows in row_chunks(len(logits), n_classes):
                apart = chord_distance(sphere(logits[rows], temperature), sphere(centre)[classes[rows]])
                gradient += torch.autograd.grad((apart * shares[rows]).sum(), centre)[0]
            centre = (centre - learning_rate * gradient).detach().requires_grad_()
    return log_softmax(centre.detach())


def _checked(
    logits: Tensor, labels: Tensor, weights: Tensor | None, n_classes: int, temperature: float
) -> Callable[[], list[Piece]]:
    """One chunk of all samples, for `solve`."""
    check_temperature(temperature)
    if logits.ndim != 2 or logits.shape[1] != n_classes:
        raise InputError(f"logits: expected shape (N, {n_classes}), got {tuple(logits.shape)}")
    if labels.shape != logits.shape[:1] or labels.is_floating_point() or labels.dtype == torch.bool:
        raise InputError(f"labels: expected {len(logits)} integers, got {labels.dtype} of shape {tuple(labels.shape)}")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < n_classes:
        raise InputError(f"labels: must lie in 0…{n_classes - 1}, got {int(labels.min())}…{int(labels.max())}")
    check_logits(logits)
    weights = torch.ones(len(logits), device=logits.device) if weights is None else weights
    if weights.shape != labels.shape or not bool(((weights > 0) & weights.isfinite()).all()):
        raise InputError(f"weights: expected {len(logits)} positive numbers, got shape {tuple(weights.shape)}")
    piece = (logits.detach(), labels.long(), wide(weights))
    return lambda: [piece]
