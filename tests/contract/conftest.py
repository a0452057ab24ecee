"""Outputs of a pretend classifier that every method can learn from, whatever it needs."""

from functools import cache, cached_property

import pytest
import torch

import igeood
from igeood.guard import Guard
from igeood.outputs import Outputs

pytest.register_assert_rewrite("tests.contract.laws")

CLASSES = 5
LAYERS = {"early": 4, "block:late": 6}


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
    """A method, and samples for it; what is fitted and scored is kept."""

    def __init__(self, name, suited):
        self.name, self.method, self.suited = name, igeood.METHODS[name], suited
        self.needs = self.method.needs
        self.train, self.held_out = self.part(0), self.part(1)
        self.test, self.ood = self.part(2, 70), self.part(3, 70, is_ood=True)

    def part(self, *size, **options):
        """More samples."""
        return self.suited(make_outputs(*size, **options), self.needs)

    def make(self):
        return igeood.detector(self.name)

    @cached_property
    def fitted(self):
        return self.make().fit(self.train)

    @cached_property
    def scores(self):
        """Of the test samples."""
        return self.fitted(self.test)

    @cached_property
    def guard(self):
        return Guard(self.make()).fit(self.train).calibrate(self.held_out)


@pytest.fixture(scope="session")
def make_case(suited):
    """A case of a method; each is made once."""

    @cache
    def make(name, _kind):
        return Case(name, suited)

    return lambda name: make(name, igeood.METHODS[name].kind)
