"""FR₀ (Eq. 5) beside one bare matrix product of the same shape, and beside the formula as the paper writes it.

python benchmarks/black_box.py
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from igeood.detectors.logits import fr0
from igeood.geometry import categorical
from samples import logits_of
from side_by_side import Row, compare, main, threads

PRODUCTS = {10: 4.0, 100: 2.5, 1000: 1.4}  # time allowed, in products
SAMPLES = {10: 50_000, 100: 50_000, 1000: 5_000}


def loop(logits: Tensor, centroids: Tensor) -> Tensor:
    """Eq. 5 in the logits' own precision: for each centroid the product of the softmaxes, its root's sum, the angle."""
    p = torch.softmax(logits, dim=1)
    total = torch.zeros(len(logits), dtype=logits.dtype)
    for centroid in centroids.exp():
        total += 2 * torch.acos((p * centroid).sqrt().sum(dim=1).clamp(max=1.0))
    return total


def cases() -> Iterator[Row]:
    for _ in threads():
        for n_classes, n in SAMPLES.items():
            kind, logits, labels = logits_of(n, n_classes)
            centroids = categorical.kl_centroids(logits, labels, n_classes)
            wide, turned, single = logits.double(), centroids.T.contiguous(), centroids.float()
            yield from compare(
                f"C = {n_classes}, N = {n:,}, {kind}",
                lambda f=logits, c=centroids: fr0(f, c),
                {
                    "float64 product": (lambda f=wide, c=turned: f @ c, "most", PRODUCTS[n_classes]),
                    "float32 product": (lambda f=logits, c=single: f @ c.T, "most", None),
                    "loop over centroids": (
                        lambda f=logits, c=single: loop(f, c), "least", 10.0 if n_classes >= 100 else None
                    ),
                },
            )  # fmt: skip


if __name__ == "__main__":
    main("Black-box score, FR₀", cases)
