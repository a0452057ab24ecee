"""One signed-gradient step."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from igeood.model.batch import as_batch
from igeood.model.reader import Reader
from igeood.model.step import check_channels, check_epsilon, signed_step, stepped


def lowers(*steps):
    """A detector with these scores to lower, each with the layers that are read after its step."""
    scores = lambda outputs: [(score(outputs), layers) for score, layers in steps]  # noqa: E731
    return SimpleNamespace(step_scores=scores, probabilities=False)


ENERGY = lowers((lambda outputs: -outputs.logits.logsumexp(1), None))


@pytest.fixture(scope="module")
def x(data):
    return data.images(20, 3)[0]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_the_step_by_hand(model, x, left_as_found, mode):
    std = (0.2, 0.3, 0.4)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(-model(leaf).logsumexp(1).sum(), leaf)
    with mode(), left_as_found(model):
        reader = Reader(model, ["1"], {"1": "second"})
        clean, *after = stepped(reader, as_batch(x.clone()), ENERGY, (0.0, 0.01, 0.02), std)
    torch.testing.assert_close(clean.logits, model(x).detach())
    for outputs, epsilon in zip(after, (0.01, 0.02), strict=True):
        moved = x - epsilon / torch.tensor(std)[:, None, None] * gradient.sign()
        torch.testing.assert_close(outputs.logits, model(moved).detach())
        torch.testing.assert_close(outputs.features["1"], model[:2](moved).mean((2, 3)).detach())
        assert not outputs.logits.requires_grad
        assert torch.equal(outputs.predicted, clean.predicted)
    assert (after[0].logits.logsumexp(1) > clean.logits.logsumexp(1)).all()  # the score went down


def test_each_layer_may_have_a_step_of_its_own(model, x):
    scores = {name: (lambda outputs, name=name: outputs.features[name].square().sum(1)) for name in ("1", "3")}
    detector = lowers(*((score, (name,)) for name, score in scores.items()))
    reader = Reader(model, ["1", "3"], {"1": "second", "3": "second"})
    clean, after = stepped(reader, as_batch(x), detector, (0.0, 0.01))
    assert torch.equal(after.logits, clean.logits)
    for name, score in scores.items():
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(score(reader(as_batch(leaf))).sum(), leaf)
        moved = reader(as_batch(x - 0.01 * gradient.sign()))
        torch.testing.assert_close(after.features[name], moved.features[name].detach())


def test_sizes_and_channels(refused):
    for epsilon in (-0.1, float("nan"), "big", True):
        with refused("epsilon"):
            check_epsilon(epsilon)
    assert (check_channels(np.float32(0.5), "std"), check_channels(torch.ones(2), "std")) == (0.5, [1.0, 1.0])
    for bad, positive in (("a", False), ([], False), ([[1.0]], False), (0, True)):
        with refused("std"):
            check_channels(bad, "std", positive=positive)
    with refused("std"):
        signed_step(torch.zeros(1, 3, 2, 2), torch.ones(1, 3, 2, 2), 0.1, (0.1, 0.2))


def test_a_model_without_gradient(x, refused):
    hard = nn.Module()
    hard.forward = lambda x: (x.flatten(1)[:, :3] > 0.5).float()
    with refused("model"):
        stepped(Reader(hard), as_batch(x), ENERGY, (0.1,))
    with refused("x"):
        stepped(Reader(hard), as_batch(x.long()), ENERGY, (0.1,))
