"""The nearest class of the white box (Eq. 11) beside broadcasting over the classes, and beside Mahalanobis's products.

Broadcasting is the formula as it stands, in float32, on as many rows as make a table of 40 MB: that is its fastest, and
its time is taken as many times over. Mahalanobis is the two matmuls that its score cannot do without, in float64: into
the whitened space and with the means. Made-up class means are spread as those of the DenseNet's last layer, by 0.3 to
0.9 of a channel's deviation; half of the samples belong to a class, half to none.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from igeood.detectors.gaussians import floored_std
from igeood.geometry.gaussian import nearest_distance
from igeood.summary import ClassSums
from samples import densenet
from side_by_side import Row, compare, main, threads

CASES = (
    (10, 342, 4000), (30, 342, 4000), (100, 342, 4000), (1000, 342, 1500), (100, 512, 3000), (1000, 512, 1000),
    (30, 2048, 500), (100, 2048, 2000), (1000, 2048, 1000),
)  # fmt: skip


def broadcast(x: Tensor, means: Tensor, std: Tensor) -> Tensor:
    """Eq. 9–11 for equal deviations, as written: a table of all rows, classes and channels."""
    rho = 2 * math.sqrt(2) * torch.asinh((x[:, None, :] - means).abs() / (2 * math.sqrt(2) * std))  # (N, C, k)
    return rho.square().sum(dim=2).sqrt().min(dim=1).values


def made_up(n_classes: int, k: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Samples (n, k) in float32, class means (C, k) and deviations (k,)."""
    generator = torch.Generator().manual_seed(0)
    spread = 0.3 + 0.6 * torch.rand(k, generator=generator, dtype=torch.float64)
    means = spread * torch.randn(n_classes, k, generator=generator, dtype=torch.float64)
    x = torch.randn(n, k, generator=generator)
    x[::2] += means[torch.randint(n_classes, (len(x[::2]),), generator=generator)].float()
    return x, means, torch.ones(k, dtype=torch.float64)


def real(layer: str, n: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """The same of a layer of the DenseNet on CIFAR-10."""
    train, test = densenet("train"), densenet("test")
    if train is None or test is None or train.labels is None:
        return None
    sums = ClassSums.of(train.features[layer], train.labels, train.n_classes)
    return test.features[layer][:n], sums.mean, floored_std(sums)[0]


def rows(n_classes: int, k: int, n: int) -> list[Row]:
    """One shape, beside both."""
    found = real("relu", n) if (n_classes, k) == (10, 342) else None
    x, means, std = found or made_up(n_classes, k, n)
    wide, origin, whitening = x.double(), means.mean(dim=0), torch.eye(k, dtype=torch.float64)
    few, single = x[: max(1, 10_000_000 // means.numel())], (means.float(), std.float())
    return compare(
        f"C = {n_classes}, k = {k}, N = {len(x)}{', DenseNet' if found else ''}",
        lambda: nearest_distance(x, means, std),
        {
            "Mahalanobis": (lambda: (wide - origin) @ whitening @ means.T, "most", 5 if n_classes <= 30 else 12),
            "broadcasting": (lambda: broadcast(few, *single), "least", 70 if n_classes >= 100 else None),
        },
        scale={"broadcasting": len(x) / len(few)},
    )


def cases() -> Iterator[Row]:
    """Every shape, with one thread and with two."""
    for _ in threads():
        for shape in CASES:
            yield from rows(*shape)


if __name__ == "__main__":
    main("White box: the nearest class", cases)
