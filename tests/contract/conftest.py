"""Outputs of a pretend classifier that every method can learn from, whatever it needs."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import pytest
import torch

import igeood
from igeood.guard import Guard
from igeood.outputs import Outputs

CLASSES, LAYERS = 5, {"early": 4, "block:late": 6}


def make_outputs(seed: int, rows: int = 200, *, is_ood: bool = False) -> Outputs:
    """Confident logits and separated Gaussians in each layer; for OOD samples unsure ones, between the classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % CLASSES
    logits = torch.randn(rows, CLASSES, generator=generator)
    logits[torch.arange(rows), labels] += 0.0 if is_ood else 6.0 + 2.0 * torch.rand(rows, generator=generator)
    features = {}
    for layer, width in LAYERS.items():
        means = torch.full((CLASSES, width), 2.5) if is_ood else 6.0 * torch.eye(CLASSES, width) + 1.0
        features[layer] = means[labels] + torch.randn(rows, width, generator=generator)
    return Outputs(logits, features, None if is_ood else labels)


class Case:
    """A method, and samples for it."""

    def __init__(self, name: str, suited: Callable[..., Outputs]) -> None:
        self.name, self.kind, self.needs = name, igeood.METHODS[name].kind, igeood.METHODS[name].needs
        self.part = lambda *options, **kinds: suited(make_outputs(*options, **kinds), self.needs)
        self.train, self.held_out, self.test = self.part(0), self.part(1), self.part(2, 70)
        self.ood = self.part(3, 70, is_ood=True)

    def make(self) -> igeood.Detector:
        return igeood.detector(self.name)

    @cached_property
    def fitted(self) -> igeood.Detector:
        return self.make().fit(self.train)

    @cached_property
    def guard(self) -> Guard:
        return Guard(self.make()).fit(self.train).calibrate(self.held_out)


@pytest.fixture(scope="session")
def make_case(suited):
    """A case of a method; its fits are made once."""
    cases: dict[Any, Case] = {}
    return lambda name: cases.setdefault((name, igeood.METHODS[name].kind), Case(name, suited))
