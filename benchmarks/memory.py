"""What each kernel holds at its peak beyond its input and its output, at large sizes; the fitted statistics apart.

"128 MB" is what is allowed. Freed blocks go back to the system at once here; elsewhere the allocator keeps some, and a
process may show half as much again. Centroids are sought to 1e-3. The metrics hold a sorted copy of the scores, 8 bytes
each, whatever their number: above 16 million they are over the limit.

python benchmarks/memory.py
"""

import ctypes
import time
from collections.abc import Iterator
from itertools import chain

import torch

from igeood.detectors import features, logits
from igeood.geometry import categorical, gaussian
from igeood.metrics import evaluate
from samples import confident_logits
from side_by_side import Job, Row, main, peak_memory, threads

ALLOWED = 128.0


Named = Iterator[tuple[str, Job]]


def of_logits(n: int, n_classes: int) -> Named:
    f, y = confident_logits(n, n_classes)
    centroids = categorical.kl_centroids(f, y, n_classes)
    size = f"C = {n_classes}, N = {n:,}"
    yield f"FR₀, {size}", lambda: logits.fr0(f, centroids)
    yield f"nearest centroid, {size}", lambda: logits.fr_min(f, centroids)
    yield f"KL, {size}", lambda: logits.kl_sum(f, centroids)
    yield f"energy, {size}", lambda: logits.energy(f)
    yield f"KL centroids, {size}", lambda: categorical.kl_centroids(f, y, n_classes)
    yield f"centroids, {size}", lambda: categorical.centroids(f, y, n_classes, tolerance=1e-3)


def of_features(n: int, n_classes: int, k: int) -> Named:
    x, labels = torch.randn(n, k), torch.arange(n) % n_classes
    means, whitening = torch.randn(n_classes, k).double(), torch.eye(k).double()
    size = f"C = {n_classes}, k = {k}, N = {n:,}"
    yield f"white box, {size}", lambda: gaussian.nearest_distance(x, means, whitening[0] + 1.0)
    yield f"Mahalanobis, {size}", lambda: features.mahalanobis_distance(x, means, whitening)
    yield f"means and σ, {size}", lambda: state(features.ClassSums.of(x, labels, n_classes))
    yield f"means and Σ, {size}", lambda: state(features.ClassSums.of(x, labels, n_classes, full=True))


def of_scores(n: int) -> Named:
    scores = torch.randn(n).double().numpy()
    yield f"metrics, N = {n:,}", lambda: evaluate(scores[::2], scores[1::2])


def state(sums: features.ClassSums) -> list[torch.Tensor]:
    """What is fitted."""
    return [sums.count, sums.origin, sums.shift, sums.scatter]


def cases() -> Iterator[Row]:
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # freed blocks of 1 MB and more go back at once
    for number in threads():
        families = (of_logits(20_000, 1000), of_logits(80_000, 100), of_logits(2_000_000, 10))
        for name, job in chain(*families, of_features(6_000, 1000, 2048), of_scores(4_000_000)):
            start = time.perf_counter()
            held = peak_memory(job)
            if held is None:
                raise SystemExit("memory can be measured on Linux only")
            seconds = time.perf_counter() - start
            yield Row(name, number, "128 MB", seconds, seconds, held / ALLOWED, most=1.0, memory=held)


if __name__ == "__main__":
    main("Memory", cases)
