"""Black-box scores and centroids beside the plain way of computing them: ratios, interleaved, medians.

make bench
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from igeood.detectors.logits import fr0
from igeood.geometry import categorical

REPEATS = 7


def medians(jobs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each job, the jobs taking turns."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(REPEATS + 1):  # the first round warms up
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def naive_fr0(logits: Tensor, centroids: Tensor) -> Tensor:
    """Eq. 5 as the paper writes it: a loop over the centroids, the product clamped, the arc cosine taken."""
    p = torch.softmax(logits, dim=1)
    total = torch.zeros(len(logits))
    for centroid in centroids:
        total += 2 * torch.acos((p * centroid.exp()).sqrt().sum(dim=1).clamp(max=1.0))
    return total


def confident(n: int, n_classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(n) % n_classes
    logits = torch.randn(n, n_classes, generator=generator)
    logits[torch.arange(n), labels] += 12.0
    return logits, labels


def main() -> None:
    for threads in (1, 2):
        torch.set_num_threads(threads)
        print(
            f"\nscore, {threads} thread(s)   C      n   of a float64 matmul   of a float32 matmul   speed-up on a loop"
        )
        for n_classes, n in ((10, 50_000), (100, 20_000), (1000, 4_000)):
            logits, labels = confident(n, n_classes)
            centres = categorical.kl_centroids(logits, labels, n_classes)
            wide, wide_centres, single = logits.double(), centres.double(), centres.float()
            found = medians(
                {
                    "ours": lambda f=logits, c=centres: fr0(f, c),
                    "float64": lambda f=wide, c=wide_centres: f @ c.T,
                    "float32": lambda f=logits, c=single: f @ c.T,
                    "loop": lambda f=logits, c=single: naive_fr0(f, c),
                }
            )
            ours = found["ours"]
            print(
                f"{n_classes:22d} {n:6d} {ours / found['float64']:21.1f} {ours / found['float32']:21.1f} "
                f"{found['loop'] / ours:20.1f}"
            )
    print("\ncentroids, 2 threads   C      n   speed-up on 100 full-batch epochs   objective, of theirs")
    for n_classes, n in ((10, 50_000), (100, 20_000)):
        logits, labels = confident(n, n_classes)
        kept: dict[str, Tensor] = {}
        start = time.perf_counter()
        kept["ours"] = categorical.centroids(logits, labels, n_classes)
        middle = time.perf_counter()
        kept["sgd"] = categorical.centroids(logits, labels, n_classes, solver="sgd")
        end = time.perf_counter()
        cost = {
            name: float(categorical.distance(logits, centres[labels]).double().mean()) for name, centres in kept.items()
        }
        print(f"{n_classes:22d} {n:6d} {(end - middle) / (middle - start):35.1f} {cost['ours'] / cost['sgd']:22.4f}")


if __name__ == "__main__":
    main()
