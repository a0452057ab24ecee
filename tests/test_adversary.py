"""Scores are no defence against somebody who knows them: the attack of benchmarks/robustness, on a small network."""

import runpy
from pathlib import Path

import pytest
import torch

import igeood
from igeood.model.batch import as_batch
from igeood.model.reader import reader_for

SIZES = (0.01, 0.1, 0.3)
smallest_size = runpy.run_path(f"{Path(__file__).parents[1]}/benchmarks/robustness/adversary.py")["smallest_size"]


@pytest.mark.parametrize("method", ["msp", "energy", "igeood-logits", "igeood"])
@pytest.mark.parametrize("raising", [False, True])
def test_verdicts_turn_as_the_attack_grows(model, data, method, raising):
    """Refused inputs are walked under the threshold, and kept ones pushed over it."""
    make = igeood.white_box if method == "igeood" else igeood.black_box
    guard = make(model, method=method).fit(data.train).calibrate(data.held_out)
    dark = 0.5 * torch.rand(100, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    reader = reader_for(model, as_batch(dark), guard.detector.needs)
    x = data.test[:100] if raising else dark
    score = lambda z: guard.detector.score(reader(as_batch(z)))  # noqa: E731
    sizes = smallest_size(score, x, guard.threshold, SIZES, raising=raising)
    left = [float((sizes > size).double().mean()) for size in (0.0, *SIZES)]
    assert left[0] == float((guard.predict(x).is_ood != raising).double().mean())
    assert left == sorted(left, reverse=True)
    assert left[0] > 0.5 > left[-1]  # three tenths of the range turn most of what none turns


def test_sizes_are_in_pixel_units_whatever_the_normalisation():
    std, mean = torch.tensor([0.2, 0.5]), torch.tensor([0.4, 0.1])
    pixels = torch.tensor([[0.5, 0.5]])
    ends = {"std": std, "low": (0 - mean) / std, "high": (1 - mean) / std}
    score = lambda z: (z * std + mean).sum(dim=1)  # noqa: E731 (1 in pixels; needs a step of 0.06 in both)
    found = smallest_size(score, (pixels - mean) / std, 0.88, (0.05, 0.07), **ends)
    assert found.tolist() == pytest.approx([0.07])
