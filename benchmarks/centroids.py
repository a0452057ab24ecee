"""Centroids (Eq. 3) beside the paper's recipe, 100 epochs of gradient descent: on all samples at once, and in batches.

The recipe in batches is timed over its first epochs, and its time is multiplied.

python benchmarks/centroids.py
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from igeood.geometry import categorical
from samples import logits_of
from side_by_side import Row, compare, main, threads

N = 50_000
EPOCHS = 100
BATCH = 128
TIMED = 1  # epochs of the recipe in batches that are run


def recipe(logits: Tensor, labels: Tensor, n_classes: int, epochs: int = EPOCHS, batch: int | None = None) -> Tensor:
    """Gradient descent on the mean distance from each sample's softmax to its class's: (C, C) logits."""
    p, centroids = torch.softmax(logits, dim=1), torch.eye(n_classes, requires_grad=True)
    optimiser = torch.optim.SGD([centroids], lr=0.1)
    for _ in range(epochs):
        for rows in torch.arange(len(p)).split(batch or len(p)):
            q = torch.softmax(centroids, dim=1)[labels[rows]]
            inner = (p[rows] * q).sqrt().sum(dim=1).clamp(max=1 - 1e-6)
            optimiser.zero_grad()
            (2 * torch.acos(inner)).mean().backward()
            optimiser.step()
    return centroids.detach()


def objective(logits: Tensor, labels: Tensor, centroids: Tensor) -> float:
    return float(categorical.distance(logits.double(), centroids.double()[labels]).mean())


def cases() -> Iterator[Row]:
    for _ in threads():
        for n_classes in (10, 100):
            kind, logits, labels = logits_of(N, n_classes)
            ours = categorical.centroids(logits, labels, n_classes)
            reached = objective(logits, labels, ours)
            theirs = objective(logits, labels, recipe(logits, labels, n_classes))
            yield from compare(
                f"C = {n_classes}, N = {N:,}, {kind}",
                lambda f=logits, y=labels, c=n_classes: categorical.centroids(f, y, c),
                {
                    "recipe, all samples": (lambda f=logits, y=labels, c=n_classes: recipe(f, y, c), "least", 6.0),
                    "recipe, batches": (
                        lambda f=logits, y=labels, c=n_classes: recipe(f, y, c, TIMED, BATCH), "least", 100.0
                    ),
                },
                scale={"recipe, batches": EPOCHS / TIMED},
                note=f"mean distance {reached:.4f}; of the recipe on all samples {theirs:.4f}",
            )  # fmt: skip


if __name__ == "__main__":
    main("Centroids", cases)
