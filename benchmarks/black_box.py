"""FR₀ (Eq. 5) beside one bare matrix product of the same shape, and beside the formula as the paper writes it.

The library computes in float64 and is accurate near distance 0; the formula, a loop over the centroids in float32, is
not. The loop is timed over 10 centroids, and its time is multiplied. "Fused" is the extra `fast`, for up to 32 classes.

python benchmarks/black_box.py
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from igeood.detectors.logits import fr0
from igeood.geometry import categorical, fused
from samples import logits_of
from side_by_side import Row, compare, main, threads

CASES = ((10, 50_000), (10, 200_000), (100, 50_000), (1000, 5_000))
PRODUCTS = {10: 4.0, 100: 2.5, 1000: 1.4}  # time allowed, in products
LOOPED = 10  # centroids that the loop is run over


def loop(p: Tensor, centroids: Tensor) -> Tensor:
    """Eq. 5 in float32: for each centroid the product of the softmaxes, its root's sum, and twice the arc cosine."""
    total = torch.zeros(len(p))
    for centroid in centroids:
        total += 2 * torch.acos((p * centroid).sqrt().sum(dim=1).clamp(max=1.0))
    return total


def rows(n_classes: int, n: int, path: str) -> list[Row]:
    kind, logits, labels = logits_of(n, n_classes)
    centroids = categorical.kl_centroids(logits, labels, n_classes)
    wide, turned = logits.double(), centroids.T.contiguous()
    p, part = torch.softmax(logits, dim=1), centroids[:LOOPED].exp().float()
    plain = path == "plain torch"
    most = {10: 12.0, 100: 4.0, 1000: 1.6}[n_classes] if plain else PRODUCTS[n_classes]
    return compare(
        f"C = {n_classes}, N = {n:,}, {kind}, {path}",
        lambda: fr0(logits, centroids),
        {
            "float64 product": (lambda: wide @ turned, "most", most),
            "loop over centroids": (lambda: loop(p, part), "least", 10.0 if n_classes >= 100 else None),
        },
        scale={"loop over centroids": n_classes / len(part)},
    )


def cases() -> Iterator[Row]:
    with_numba = fused.installed()
    for _ in threads():
        for n_classes, n in CASES:
            few = n_classes <= fused.MOST_CLASSES
            for path in ("fused", "plain torch") if few and with_numba else ("plain torch",):
                fused.MOST_CLASSES = 32 if path == "fused" else 0
                yield from rows(n_classes, n, path)
            fused.MOST_CLASSES = 32


if __name__ == "__main__":
    main("Black-box score, FR₀", cases)
