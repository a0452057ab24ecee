r"""Kullback–Leibler in place of Fisher–Rao, as in the paper's comparison: centroids, and divergences from them."""

import torch
from torch import Tensor

from igeood.geometry.categorical import Reduce
from igeood.geometry.centroids import Chunks
from igeood.geometry.precision import by_rows, row_chunks, wide
from igeood.geometry.sphere import log_softmax

_LOG_ZERO = -1e4


def solve_kl(chunks: Chunks, n_classes: int, temperature: float = 1.0) -> Tensor:
    """Centroids (C, C): the logarithm of each class's mean softmax; arguments as in `centroids.solve`."""
    peak = torch.full((n_classes, n_classes), -torch.inf, dtype=torch.float64)
    total = torch.zeros_like(peak)
    counts = torch.zeros_like(peak[0])
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


def prepare_kl(centroids: Tensor) -> Tensor:
    """Finite log-probabilities (K, C) of centroids (K, C): what `kl_divergences` takes."""
    return _floored(log_softmax(centroids))


def kl_divergences(logits: Tensor, log_q: Tensor, temperature: float = 1.0, reduce: Reduce | None = None) -> Tensor:
    r"""Divergences :math:`\mathrm{KL}(q(x)\,\|\,\mu_y)` (N, K) of samples from prepared centroids.

    Arguments as in `categorical.distances`. They are finite: the logarithm of a probability of 0 in μ counts as
    −10,000.
    """

    def of_rows(rows: Tensor) -> Tensor:
        log_p = log_softmax(rows, temperature)
        p = log_p.exp()
        negative_entropy = (p * _floored(log_p)).sum(dim=-1, keepdim=True)  # (n, 1)
        divergences = (negative_entropy - p @ log_q.T).clamp(min=0.0)
        return divergences if reduce is None else reduce(divergences)

    return by_rows(of_rows, logits, max(log_q.shape))


def _floored(log_p: Tensor) -> Tensor:
    """Log-probabilities with −inf replaced: 0·log 0 = 0, and divergences stay finite."""
    return log_p.masked_fill(log_p == -torch.inf, _LOG_ZERO)
