"""Class means and pooled variances of a million features in one pass, beside a bare sum of the columns.

The features come in blocks or small batches: 64 MB of them, again and again, so that they do not stay in the cache.

python benchmarks/class_sums.py
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from igeood import Outputs
from igeood.detectors.features import ClassSums, sum_layers
from samples import densenet
from side_by_side import Row, compare, main, threads

N, K, HELD = 1_000_000, 512, 1 << 15
OFFSET = 100.0


def blocks(x: Tensor, labels: Tensor, n: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The features and labels in blocks of some rows, again and again, until there are n."""
    for start in range(0, n, rows):
        first = start % (len(x) - rows + 1)
        yield x[first : first + rows], labels[first : first + rows]


def column_sum(x: Tensor, labels: Tensor, n: int, rows: int) -> Tensor:
    """In float32, as the features are."""
    total = torch.zeros(x.shape[1])
    for part, _ in blocks(x, labels, n, rows):
        total += part.sum(dim=0)
    return total


def class_sums(x: Tensor, labels: Tensor, n: int, rows: int, logits: Tensor) -> ClassSums:
    """As the blocks come."""
    parts = (ClassSums.of(*part, logits.shape[1]) for part in blocks(x, labels, n, rows))
    total = next(parts)
    for part in parts:
        total += part
    return total


def layer_sums(x: Tensor, labels: Tensor, n: int, rows: int, logits: Tensor) -> ClassSums:
    """As a detector sums them, which gathers small batches."""
    parts = blocks(x, labels, n, rows)
    return sum_layers(Outputs.checked(logits[: len(y)], {"l": f}, y) for f, y in parts)["l"]


def cases() -> Iterator[Row]:
    x = torch.randn(HELD, K, generator=torch.Generator().manual_seed(0)) + OFFSET
    for _ in threads():
        for n_classes, n, rows in ((1000, N, 4096), (10, N // 4, 4096), (1000, N // 8, 128), (10, N // 8, 128)):
            labels, logits = torch.arange(HELD) % n_classes, torch.zeros(rows, n_classes)

            def ours(n: int = n, rows: int = rows, labels: Tensor = labels, logits: Tensor = logits) -> ClassSums:
                job = class_sums if rows > 128 else layer_sums
                return job(x, labels, n, rows, logits)

            def theirs(n: int = n, rows: int = rows, labels: Tensor = labels) -> Tensor:
                return column_sum(x, labels, n, rows)

            yield from compare(f"C = {n_classes}, N = {n:,} by {rows:,}", ours, {"column sum": (theirs, "most", 15.0)})
        yield from real()


def real() -> Iterator[Row]:
    """The DenseNet's last layer, where its outputs have been kept."""
    outputs = densenet("train")
    if outputs is None or outputs.labels is None:
        return
    x, labels = outputs.features["relu"], outputs.labels
    yield from compare(
        f"DenseNet, k = {x.shape[1]}, N = {len(x):,}",
        lambda: ClassSums.of(x, labels, 10),
        {"column sum": (lambda: x.sum(dim=0), "most", None)},
    )


if __name__ == "__main__":
    main("Class means and variances", cases)
