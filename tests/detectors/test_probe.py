"""The probe before and after it is tuned, its roots of features, and the energy of masked logits."""

import math

import pytest
import torch

import igeood
from igeood.detectors.logits import centred_energy
from igeood.detectors.probe import signed_roots


def test_it_is_the_evidence_until_it_is_tuned_and_then_learns_the_kind_it_is_shown(known):
    test, ood = known.test, known.ood
    probe = igeood.detector("probe").fit(known.train)
    torch.testing.assert_close(probe(test), igeood.detector("evidence").fit(known.train)(test))
    search = probe.learn_weights(known.held_out, ood[:100])
    assert search.strength in probe.strengths
    assert igeood.metrics.auroc(probe(test), probe(ood[100:])) > 0.95
    loaded = igeood.detector("probe").load_state(probe.state(), 10, probe.widths_)
    assert torch.equal(loaded(test), probe(test))


def test_channels_that_wake_up_after_tuning_do_not_decide(known):
    def asleep(outputs):
        features = {k: torch.cat([v.clamp(min=0), 0 * v[:, :2]], 1) for k, v in outputs.features.items()}
        return outputs.replace(features=features)

    train, held_out, ood, test = map(asleep, (known.train, known.held_out, known.ood, known.test))
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
