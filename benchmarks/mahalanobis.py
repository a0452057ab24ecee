"""Mahalanobis scores of features beside pytorch-ood's, which takes one matmul a class.

pytorch-ood is timed on a part of the classes, and its time is multiplied: its loop over them is all that it does. It is
not among this project's requirements: `pip install --no-deps pytorch-ood`; without it, a loop written here stands in.

python benchmarks/mahalanobis.py
"""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from igeood.detectors.features import ClassSums, mahalanobis_distance, whiten
from samples import densenet
from side_by_side import Row, compare, main, threads

TIMED = 10  # classes that theirs is run on
Scorer = Callable[[Tensor], Tensor]


class Absent(ModuleType):
    """Stands for torchvision where it is missing: pytorch-ood imports it for networks that are not used here."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        return sys.modules.get(f"{self.__name__}.{name}", nn.Module)


def pytorch_ood(means: Tensor, precision: Tensor) -> Scorer | None:
    """Their score of features for these statistics; None if it cannot be imported."""
    try:
        import torchvision  # noqa: F401, PLC0415
    except Exception:  # noqa: BLE001 (one that was built for another torch fails in its own ways)
        for name in ("torchvision", "torchvision.transforms", "torchvision.models", "torchvision.models.resnet"):
            sys.modules[name] = Absent(name)
    try:
        from pytorch_ood.detector import Mahalanobis  # noqa: PLC0415
    except ImportError:
        return None
    theirs = Mahalanobis(None)
    theirs.mu, theirs.precision = means, precision
    scorer: Scorer = theirs.predict_features
    return scorer


def loop(means: Tensor, precision: Tensor) -> Scorer:
    """The same score by a loop over the classes."""

    def score(x: Tensor) -> Tensor:
        apart = (x - mean for mean in means)
        return torch.stack([0.5 * ((a @ precision) * a).sum(dim=1) for a in apart]).amin(dim=0)

    return score


def samples() -> Iterator[tuple[str, Tensor, Tensor, int]]:
    """What they are, features, labels and the number of classes."""
    real, name = densenet("train"), "relu"
    if real is not None and real.labels is not None:
        yield f"DenseNet, k = {real.features[name].shape[1]}", real.features[name], real.labels, 10
    generator = torch.Generator().manual_seed(0)
    for n_classes, k in ((100, 512), (1000, 512)):
        labels = torch.arange(6000) % n_classes
        means = torch.randn(n_classes, k, generator=generator)
        yield f"k = {k}", means[labels] + torch.randn(6000, k, generator=generator), labels, n_classes


def cases() -> Iterator[Row]:
    for number in threads():
        for kind, x, labels, n_classes in samples():
            sums = ClassSums.of(x, labels, n_classes, full=True)
            whitening = whiten(sums.covariance)
            precision, part = (whitening @ whitening.T).float(), min(n_classes, TIMED)
            score, means = x[:2000].contiguous(), sums.mean.float()
            found, name = pytorch_ood(means, precision), "pytorch-ood"
            if found is None:
                found, name = loop(means, precision), "loop (pytorch-ood is missing)"
            ours, _ = mahalanobis_distance(score[:100], sums.mean, whitening)
            apart = float((2 * found(score[:100]) / ours - 1).abs().max())
            timed = (pytorch_ood if name == "pytorch-ood" else loop)(means[:part], precision)
            assert timed is not None
            yield from compare(
                f"C = {n_classes}, {kind}",
                lambda x=score, m=sums.mean, w=whitening: mahalanobis_distance(x, m, w),
                {
                    name: (lambda f=timed, x=score: f(x), "least", 20.0 if n_classes == 1000 else None),
                    "matmuls, float64": (
                        lambda x=score, m=sums.mean, w=whitening: (x.double() @ w) @ (m @ w).T, "most", None
                    ),
                },
                scale={name: n_classes / part},
                note=f"theirs {apart:.0e} off in float32",
            )  # fmt: skip
        if number == 1:
            yield from much()


def much() -> Iterator[Row]:
    """What memory many wide features take."""
    n_classes, k = 1000, 2048
    x = torch.randn(4000, k)
    means, whitening = torch.randn(n_classes, k).double(), torch.eye(k).double()
    yield from compare(
        f"C = {n_classes}, k = {k}, N = 4,000",
        lambda: mahalanobis_distance(x, means, whitening),
        {"matmuls, float64": (lambda: (x.double() @ whitening) @ (means @ whitening).T, "most", None)},
    )


if __name__ == "__main__":
    main("Mahalanobis", cases)
