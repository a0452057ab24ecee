"""Data that many tests share: small, made here, seeded."""

import os
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: small work is quicker so, and two workers share two cores

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from igeood.outputs import HEAD, Outputs
from igeood.summary import Needs

settings.register_profile(
    "igeood", deadline=None, derandomize=True
)  # no verdict by the clock, the same examples always
settings.load_profile("igeood")


@dataclass(frozen=True)
class Classifier:
    """Logits of a pretend classifier: confident where it knows, unsure where it does not."""

    train: Tensor
    labels: Tensor
    held_out: Tensor
    test: Tensor
    ood: Tensor


def make_classifier(n_classes: int = 10, n: int = 400, margin: float = 8.0, seed: int = 0) -> Classifier:
    generator = torch.Generator().manual_seed(seed)

    def known() -> tuple[Tensor, Tensor]:
        labels = torch.arange(n) % n_classes
        logits = torch.randn(n, n_classes, generator=generator)
        logits[torch.arange(n), labels] += margin * (0.6 + 0.4 * torch.rand(n, generator=generator))
        return logits, labels

    train, labels = known()
    ood = torch.randn(n, n_classes, generator=generator) * 1.5
    return Classifier(train, labels, known()[0], known()[0], ood)


def with_features(logits: Tensor, labels: Tensor | None, seed: int, shift: float) -> Outputs:
    """Outputs with two layers of features: about the class's mean, or about nothing for OOD samples."""
    generator = torch.Generator().manual_seed(seed)
    n_classes = logits.shape[1]
    features = {}
    for layer, width in (("early", 6), ("block.late", 9)):
        means = torch.randn(n_classes, width, generator=torch.Generator().manual_seed(width)) * 2
        noise = torch.randn(len(logits), width, generator=generator)
        features[layer] = noise * 1.5 + shift if labels is None else means[labels] + noise
    return Outputs(logits, features, labels)


@dataclass(frozen=True)
class Known:
    """A classifier's outputs, layers and all."""

    train: Outputs
    held_out: Outputs
    test: Outputs
    ood: Outputs


def make_known(n_classes: int = 10, n: int = 400, seed: int = 0) -> Known:
    c = make_classifier(n_classes, n, seed=seed)
    parts = (c.train, c.held_out, c.test)
    inside = [with_features(part, c.labels, 10 * seed + i, 0.0) for i, part in enumerate(parts)]
    return Known(*inside, with_features(c.ood, None, 10 * seed + 9, 3.0))


@pytest.fixture(scope="session")
def known() -> Known:
    return make_known()


@pytest.fixture(scope="session")
def make_known_() -> Callable[..., Known]:
    """`make_known`, for tests that need another size."""
    return make_known


def suit(outputs: Outputs, needs: Needs) -> Outputs:
    """The same samples with the blocks that a method needs: another statistic of the layers, the input of the head."""
    ending = "" if needs.statistic == "mean" else f"|{needs.statistic}"
    features = {f"{layer}{ending}": value for layer, value in outputs.features.items() if "|" not in layer}
    if needs.head:  # the logits are linear in it
        turn = torch.randn(outputs.n_classes, 16, generator=torch.Generator().manual_seed(0))
        features[HEAD] = outputs.logits @ turn.to(outputs.logits)
    return Outputs(outputs.logits, features, outputs.labels)


@pytest.fixture(scope="session")
def suited() -> Callable[[Outputs, Needs], Outputs]:
    """`suit`, for tests of every method."""
    return suit


@pytest.fixture(scope="session")
def classifier() -> Classifier:
    return make_classifier()


@pytest.fixture(scope="session")
def make():
    """`make_classifier`, for tests that need another size."""
    return make_classifier


@pytest.fixture
def reader_names(classifier):
    """What a reader of the README or of a page of the documentation is taken to have: a model, loaders, arrays."""
    torch.manual_seed(0)
    images, labels = torch.rand(200, 3, 8, 8), torch.arange(200) % 4
    images += 0.3 * labels[:, None, None, None]
    return {
        "model": nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
        "train_loader": [(images[:100], labels[:100])],
        "held_out_loader": [(images[100:], labels[100:])],
        "ood_loader": [torch.rand(50, 3, 8, 8) * 3],
        "x": images[:3],
        "torch": torch,
        "train_logits": classifier.train.numpy(),
        "train_labels": classifier.labels.numpy(),
        "held_out_logits": classifier.held_out.numpy(),
        "test_logits": classifier.test.numpy(),
        "id_scores": torch.arange(30.0),
        "ood_scores": torch.arange(20.0, 40.0),
    }
