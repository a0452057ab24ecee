"""Outputs of a pretend classifier that every method can learn from, whatever it needs."""

from dataclasses import dataclass
from functools import cached_property

import pytest
import torch

import igeood
from igeood.guard import Guard
from igeood.outputs import HEAD, Outputs
from igeood.summary import Needs

CLASSES, ROWS = 5, 200
LAYERS = {"early": 4, "block.late": 6}


def make_outputs(needs: Needs, seed: int, *, is_ood: bool = False, rows: int = ROWS) -> Outputs:
    """Confident logits and separated Gaussians in each layer; for OOD samples unsure ones, between the classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % CLASSES
    logits = torch.randn(rows, CLASSES, generator=generator)
    if not is_ood:
        logits[torch.arange(rows), labels] += 6.0 + 2.0 * torch.rand(rows, generator=generator)
    ending = "" if needs.statistic == "mean" else f"|{needs.statistic}"
    features = {}
    for layer, width in LAYERS.items():
        noise = torch.randn(rows, width, generator=generator)
        means = 6.0 * torch.eye(CLASSES, width, dtype=torch.float32) + 1.0
        features[layer + ending] = 2.5 + noise if is_ood else means[labels] + noise
    if needs.head:  # the logits are linear in it
        turn = torch.randn(CLASSES, 8, generator=torch.Generator().manual_seed(0))
        features[HEAD] = logits @ turn
    return Outputs(logits, features, None if is_ood else labels)


@dataclass(frozen=True)
class Case:
    """A method, and samples for it."""

    name: str

    @property
    def kind(self) -> type:
        return igeood.METHODS[self.name].kind

    @cached_property
    def needs(self) -> Needs:
        return self.kind.needs

    def make(self):
        return igeood.detector(self.name)

    def part(self, seed: int, **options) -> Outputs:
        return make_outputs(self.needs, seed, **options)

    @cached_property
    def train(self) -> Outputs:
        return self.part(0)

    @cached_property
    def held_out(self) -> Outputs:
        return self.part(1)

    @cached_property
    def test(self) -> Outputs:
        return self.part(2, rows=70)

    @cached_property
    def ood(self) -> Outputs:
        return self.part(3, is_ood=True, rows=70)

    @cached_property
    def fitted(self):
        return self.make().fit(self.train)

    @cached_property
    def guard(self) -> Guard:
        return Guard(self.make()).fit(self.train).calibrate(self.held_out)


@pytest.fixture(scope="session")
def cases():
    """One case for each method, its fits made once."""
    return {name: Case(name) for name in igeood.METHODS}


@pytest.fixture
def make_case():
    """`Case`, for a method that a test registers."""
    return Case
