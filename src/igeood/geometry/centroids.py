r"""Class centroids of softmax outputs (the paper's Eq. 3), for Fisher–Rao and for Kullback–Leibler.

The Fisher–Rao centroid minimises the *mean distance* to its class's outputs: a geometric median on the sphere.
"""

from typing import Literal

import torch
from torch import Tensor

from igeood.errors import InputError
from igeood.geometry.precision import row_chunks, wide
from igeood.geometry.sphere import check_temperature, chord_distance, log_softmax, sphere
from igeood.geometry.weiszfeld import Chunks, solve
from igeood.outputs import Outputs

Solver = Literal["weiszfeld", "sgd"]
_RATE, _EPOCHS = 0.1, 100  # of the paper's recipe


def centroids(
    logits: Tensor, labels: Tensor, n_classes: int, temperature: float = 1.0,
    solver: Solver = "weiszfeld", *, tolerance: float = 1e-11, max_passes: int = 500,
) -> Tensor:  # fmt: skip
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
        `"sgd"` is the paper's recipe, kept for fidelity: gradient descent on the centroids' logits, from the identity
        matrix, 100 full batches at a rate of 0.1. It stops far from the optimum.
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
    check_temperature(temperature)
    batch = Outputs(logits.detach(), labels=labels)
    if batch.n_classes != n_classes or batch.labels is None:
        raise InputError(f"logits: expected shape (N, {n_classes}), got {tuple(logits.shape)}")
    check_every_class(torch.bincount(batch.labels, minlength=n_classes))
    piece = (batch.logits, batch.labels, torch.ones_like(batch.labels))
    if solver == "sgd":
        return descend(lambda: [piece], n_classes, temperature)
    if solver != "weiszfeld":
        raise InputError(f"solver: expected 'weiszfeld' or 'sgd', got {solver!r}")
    return solve(lambda: [piece], n_classes, temperature, tolerance=tolerance, max_passes=max_passes)


def check_every_class(counts: Tensor) -> None:
    """Raise if a class has no sample; counts is (C,)."""
    missing = (counts == 0).nonzero()[:, 0].tolist()
    if missing:
        problem = f"no sample of class {missing[0]} ({len(missing)} of {len(counts)} classes have none)"
        raise InputError(f"labels: {problem}; give every class at least one")


def solve_kl(chunks: Chunks, n_classes: int, temperature: float = 1.0) -> Tensor:
    """Kullback–Leibler centroids (C, C): the logarithm of each class's mean softmax; arguments as in `solve`."""
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
    return total.log() + peak.clamp(min=torch.finfo(peak.dtype).min) - counts.log()[:, None]


def retemper(centroids: Tensor, fitted_at: float, temperature: float) -> Tensor:
    """Centroids of one temperature rescaled to another: log-probabilities read as logits, as the authors' code does."""
    if temperature == fitted_at:
        return centroids
    return log_softmax(centroids * fitted_at, temperature)


def descend(chunks: Chunks, n_classes: int, temperature: float = 1.0) -> Tensor:
    """Eq. 3 by the paper's recipe: each epoch is one full-batch step of the mean distance in each class.

    Arguments and result are those of `solve`.
    """
    parts = list(chunks())
    total = torch.stack([torch.bincount(labels, wide(weights), n_classes) for _, labels, weights in parts]).sum(dim=0)
    centre = wide(torch.eye(n_classes, device=parts[0][0].device))
    for _ in range(_EPOCHS):
        gradient = torch.zeros_like(centre)
        with torch.enable_grad():
            centre.requires_grad_()
            for logits, labels, weights in parts:
                shares = weights / total[labels]
                for rows in row_chunks(len(logits), n_classes):
                    apart = chord_distance(sphere(logits[rows], temperature), sphere(centre)[labels[rows]])
                    gradient += torch.autograd.grad((apart * shares[rows]).sum(), centre)[0]
        centre = centre.detach() - _RATE * gradient
    return log_softmax(centre)
