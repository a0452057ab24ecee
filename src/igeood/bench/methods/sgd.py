"""Class centroids by the paper's recipe for Eq. 3, kept for fidelity: it stops far from the optimum."""

from typing import Any

import torch
from torch import Tensor

import igeood
from igeood.geometry.categorical import retemper
from igeood.geometry.centroids import Chunks
from igeood.geometry.precision import row_chunks, wide
from igeood.geometry.sphere import chord_distance, log_softmax, sphere

_RATE = 0.1
_EPOCHS = 100


def descend(chunks: Chunks, n_classes: int, temperature: float = 1.0) -> Tensor:
    """Gradient descent on the centroids' logits, from the identity matrix, 100 full batches at a rate of 0.1.

    Each epoch is one step of the mean distance in each class. Arguments and result are those of
    `igeood.geometry.centroids.solve`.
    """
    pieces = list(chunks())
    totals = [torch.bincount(labels, wide(weights), n_classes) for _, labels, weights in pieces]
    total = torch.stack(totals).sum(dim=0)
    logits = pieces[0][0]
    centre = wide(torch.eye(n_classes, logits.shape[1], device=logits.device))
    for _ in range(_EPOCHS):
        gradient = torch.zeros_like(centre)
        with torch.enable_grad():
            centre.requires_grad_()
            for logits, labels, weights in pieces:
                shares = weights / total[labels]
                for rows in row_chunks(len(logits), n_classes):
                    distances = chord_distance(sphere(logits[rows], temperature), sphere(centre)[labels[rows]])
                    gradient += torch.autograd.grad((distances * shares[rows]).sum(), centre)[0]
        centre = centre.detach() - _RATE * gradient
    return log_softmax(centre)


@igeood.register("igeood-logits-sgd", title="IGEOOD (SGD)", style=("#D55E00", ":", "o"))
class IgeoodLogitsSgd(igeood.IgeoodLogits):
    """IGEOOD on logits with centroids by `descend`; options as in `IgeoodLogits`."""

    def solve_centroids(self, chunks: Chunks, near: Any, *, roughly: bool) -> Tensor:
        """The paper's recipe."""
        del near, roughly
        fitted_at = self.centroid_temperature or self.temperature
        centroids = descend(chunks, len(self.classes_), fitted_at)
        return retemper(centroids, fitted_at, self.temperature)
