"""Scores are no defence against somebody who knows them: the attack of benchmarks/robustness, on a small network."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import igeood
from igeood.model.batches import as_batch
from igeood.model.reader import Reader

PATH = Path(__file__).parent.parent / "benchmarks" / "robustness" / "adversary.py"
SIZES = (0.01, 0.1, 0.3)


@pytest.fixture(scope="module")
def adversary():
    spec = importlib.util.spec_from_file_location("adversary", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def images(n, seed, classes=4):
    """Pictures (n, 1, 6, 6) in [0, 1] whose class is the quarter that is bright; without classes, no quarter is."""
    draw = torch.Generator().manual_seed(seed)
    x = 0.5 * torch.rand(n, 1, 6, 6, generator=draw)
    labels = torch.arange(n) % max(classes, 1)
    for i, label in enumerate(labels if classes else ()):
        row, column = divmod(int(label), 2)
        x[i, :, 3 * row : 3 * row + 3, 3 * column : 3 * column + 3] += 0.5
    return x, labels


@pytest.fixture(scope="module")
def trained():
    """A classifier of the quarters, never retrained afterwards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 16, 4))
    x, labels = images(400, 0)
    parameters = list(model.parameters())
    for _ in range(60):  # by hand: torch.optim takes seconds to import
        gradients = torch.autograd.grad(nn.functional.cross_entropy(model(x), labels), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=0.5)
    return model.eval().requires_grad_(False)


@pytest.fixture(params=["msp", "energy", "igeood-logits", "igeood"])
def guard(request, trained):
    make = igeood.white_box if request.param == "igeood" else igeood.black_box
    return make(trained, method=request.param).fit([images(400, 1)]).calibrate(images(400, 2)[0])


def needed(adversary, guard, x, **options):
    """The smallest of the sizes that turns each verdict."""
    reader = Reader(guard.inputs.model, guard.layers)
    return adversary.smallest_size(
        lambda z: guard.detector.score(reader(as_batch(z))), x, guard.threshold, SIZES, **options
    )


@pytest.mark.parametrize("raising", [False, True])
def test_verdicts_turn_as_the_attack_grows(adversary, guard, raising):
    """Refused inputs are walked under the threshold, and kept ones pushed over it."""
    x = images(100, 3, classes=4 if raising else 0)[0]
    sizes = needed(adversary, guard, x, raising=raising)
    left = [float((sizes > size).double().mean()) for size in (0.0, *SIZES)]
    assert left[0] == float((guard.predict(x).is_ood != raising).double().mean())
    assert left[0] > 0.85
    assert left == sorted(left, reverse=True)
    assert raising or left[1] > 0.5  # a hundredth is too little here
    assert left[-1] < 0.1


def test_the_attack_stays_in_the_box_and_in_the_range_of_images(adversary):
    """A score that can never be low enough: every step is taken, and each input that it sees is looked at."""
    seen = []

    def score(z):
        seen.append(z.detach().clone())
        return 5 + z.flatten(1).sum(dim=1)

    x = torch.tensor([[0.0, 0.02, 0.5], [1.0, 0.9, 0.3]])
    found = adversary.smallest_size(score, x, 1.0, (0.1,), steps=8)
    assert found.tolist() == [math.inf, math.inf]
    assert len(seen) == 1 + 9  # as it is, and after 0 to 8 steps
    for z in seen:
        assert ((z - x).abs() <= 0.1 + 1e-6).all()
        assert z.min() >= 0
        assert z.max() <= 1
    assert torch.allclose(seen[-1], (x - 0.1).clamp(min=0))


def test_sizes_are_in_pixel_units_whatever_the_normalisation(adversary):
    std, mean = torch.tensor([0.2, 0.5]), torch.tensor([0.4, 0.1])
    pixels = torch.tensor([[0.5, 0.5]])
    found = adversary.smallest_size(
        lambda z: (z * std + mean).sum(dim=1),  # 1 in pixels; needs a step of 0.06 in both
        (pixels - mean) / std, 0.88, (0.05, 0.07), std=std, low=(0 - mean) / std, high=(1 - mean) / std,
    )  # fmt: skip
    assert found.tolist() == pytest.approx([0.07])
