r"""Kullback–Leibler in place of Fisher–Rao, as in the paper's comparison: centroids, and divergences from them."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import igeood
from igeood.detectors.logits import CentroidDetector
from igeood.geometry.categorical import Reduce
from igeood.geometry.centroids import Chunks
from igeood.geometry.precision import by_rows, row_chunks, wide
from igeood.geometry.sphere import log_softmax
from igeood.outputs import Outputs

_LOG_ZERO = -1e4


def solve_kl(chunks: Chunks, n_classes: int, temperature: float = 1.0) -> Tensor:
    """Centroids (K, C): the logarithm of each class's mean softmax; arguments as in `centroids.solve`."""
    peak = torch.tensor(-torch.inf)
    total = torch.zeros(())
    counts = torch.zeros(n_classes)
    for chunk in chunks():
        width = chunk[0].shape[1]
        for rows in row_chunks(len(chunk[0]), width):
            labels = chunk[1][rows].long()
            weights = wide(chunk[2][rows])
            log_q = log_softmax(chunk[0][rows], temperature)
            peak = peak.to(log_q).expand(n_classes, width)
            total = total.to(log_q).expand(n_classes, width).clone()
            counts = counts.to(log_q)
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


@igeood.register("kl-min", title="KL (min)", fixed={"reduce": "min"}, style=("#CC79A7", "--", "<"))
@igeood.register("kl-sum", title="KL (sum)", fixed={"reduce": "sum"}, style=("#CC79A7", "-", "v"))
class KLDivergence(CentroidDetector):
    """Eq. 5 with Kullback–Leibler divergences from the classes' mean softmax outputs, as in the paper's comparison.

    Parameters
    ----------
    reduce : {"sum", "min"}
        Sum over the classes (negated: it is higher for in-distribution), or the nearest class alone.
    temperature : float
        Of the softmax, for centroids and samples alike.
    probabilities : bool
        The arrays hold probabilities, not logits.
    """

    def solve_centroids(self, chunks: Chunks, near: Any, *, roughly: bool) -> Tensor:
        """Logarithms of the classes' mean softmax outputs."""
        del near, roughly
        return solve_kl(chunks, len(self.classes_), self.temperature)

    @cached_property
    def _prepared(self) -> Tensor:
        return prepare_kl(self.centroids_)

    def compare(self, outputs: Outputs, reduce: Reduce | None) -> Tensor:
        """Divergences of rows from centroids."""
        prepared = self._prepared.to(outputs.logits.device)
        return kl_divergences(outputs.logits, prepared, self.temperature, reduce)
