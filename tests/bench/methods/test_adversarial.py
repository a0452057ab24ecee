"""FGSM samples: by hand, in pixels, clamped where the range is known."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import igeood
from igeood.bench import fgsm


def samples(*arguments, **options):
    return torch.cat([batch.x for batch in fgsm(*arguments, **options)])


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_the_step_by_hand_each_time(model, data, left_as_found, mode):
    x, labels = data.images(200, 3)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropy(model(leaf), labels), leaf)
    moved = (x + 0.1 * gradient.sign()).clamp(0, 1)
    adversarial = fgsm(model, [(x[:150], labels[:150]), (x[150:], labels[150:])], 0.1)
    for _ in range(2):
        with mode(), left_as_found(model):
            torch.testing.assert_close(torch.cat([batch.x for batch in adversarial]), moved)
    assert adversarial.samples == 200
    assert adversarial.linf == pytest.approx(float((moved - x).abs().flatten(1).amax(1).mean()))
    assert adversarial.accuracy == (model(moved).argmax(1) == labels).double().mean()


@pytest.mark.parametrize("is_labelled", [True, False])
def test_the_step_on_normalised_inputs_is_in_pixels_and_clamped_where_their_mean_is_known(model, data, is_labelled):
    x, labels = data.images(100, 3)
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    centre, scale = (torch.tensor(values)[:, None, None] for values in (mean, std))
    normalised = nn.ModuleList([model])
    normalised.forward = lambda z: model(z * scale + centre)
    z = (x - centre) / scale
    moved = samples(normalised, (z, labels) if is_labelled else z, 0.05, mean, std) * scale + centre
    classes = labels if is_labelled else model(x).argmax(1)
    torch.testing.assert_close(moved, samples(model, (x, classes)), rtol=1e-4, atol=1e-4)
    assert (samples(normalised, (z, classes), 0.05, std=std) * scale + centre).min() < -0.01


def test_they_stand_for_ood_samples_in_tune(model, data):
    guard = igeood.white_box(model, method="igeood").fit(data.train)
    guard.tune(data.held_out, ood=fgsm(model, data.held_out, 0.1), search=None)
    assert (guard.tuning.n_ood, guard.tuning.temperature) == (len(data.held_out.dataset), None)
    assert guard.tuning.strength is not None
    assert guard.tuning.after >= guard.tuning.before
