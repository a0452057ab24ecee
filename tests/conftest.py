"""Data that many tests share: small, made here, seeded."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor


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


@pytest.fixture(scope="session")
def classifier() -> Classifier:
    return make_classifier()


@pytest.fixture(scope="session")
def make():
    """`make_classifier`, for tests that need another size."""
    return make_classifier
