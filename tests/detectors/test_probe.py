"""The probe before and after it is tuned, its roots of features, and the energy of masked logits."""

import math

import pytest
import torch

import igeood
from igeood.detectors.logits import centred_energy
from igeood.detectors.probe import signed_roots
from igeood.outputs import Outputs

LAYERS = {"first": 5, "before": 6, "last": 8}


def draw(seed, rows=400, classes=4, *, is_ood=False):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % classes
    features = {}
    for layer, width in LAYERS.items():
        means = 3 * torch.rand(classes, width, generator=torch.Generator().manual_seed(width))
        z = (means.flip(1) if is_ood else means)[labels] + 0.5 * torch.randn(rows, width, generator=generator)
        features[layer] = z - 1
    logits = torch.randn(rows, classes, generator=generator) + (2.0 if is_ood else 6.0) * torch.eye(classes)[labels]
    return Outputs(logits, features, labels)


def test_it_is_the_evidence_until_it_is_tuned_and_then_learns_the_kind_it_is_shown():
    train, held_out, test = draw(0), draw(2, 300), draw(3, 300)
    ood = draw(4, 200, is_ood=True)
    probe = igeood.detector("probe").fit(train)
    torch.testing.assert_close(probe(test), igeood.detector("evidence").fit(train)(test))
    search = probe.learn_weights(held_out, ood[:100])
    assert search.strength in probe.strengths
    assert igeood.metrics.auroc(probe(test), probe(ood[100:])) > 0.95
    loaded = igeood.detector("probe").load_state(probe.state(), 4, probe.widths_)
    assert torch.equal(loaded(test), probe(test))


def test_channels_that_wake_up_after_tuning_do_not_decide():
    def asleep(outputs):
        features = {k: torch.cat([v.clamp(min=0), 0 * v[:, :2]], 1) for k, v in outputs.features.items()}
        return outputs.replace(features=features)

    train, held_out, ood, test = (asleep(part) for part in (draw(0), draw(2), draw(4, is_ood=True), draw(3)))
    probe = igeood.detector("probe").fit(train)
    probe.learn_weights(held_out, ood)
    before = probe(test)
    for value in test.features.values():
        value[:, -1] = 0.5
    assert (probe(test) - before).abs().max() < 1e3  # it was 1e150, by a division by nearly nothing


def test_roots_and_energies_of_degenerate_rows():
    rows = torch.tensor([[3.0, -1.0, 0.0], [0.0, 0.0, 0.0]])
    expected = torch.tensor([[math.sqrt(0.75), -0.5, 0.0], [0.0, 0.0, 0.0]]).double()
    torch.testing.assert_close(signed_roots(rows), expected)
    masked = torch.tensor([[1.0, 3.0, -torch.inf]])
    assert centred_energy(masked).item() == pytest.approx(math.log(math.exp(-1) + math.exp(1)))
