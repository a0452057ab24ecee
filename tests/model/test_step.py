"""One signed-gradient step."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from igeood.errors import InputError
from igeood.guard.inputs import ModelInputs
from igeood.model.batches import as_batch
from igeood.model.reader import Reader
from igeood.model.step import check_channels, check_epsilon, fgsm, signed_step, stepped


def lowers(*steps):
    """A detector whose scores are given: which, and the layers that are read after its steps."""
    return SimpleNamespace(
        _scorable=lambda outputs: outputs,
        step_scores=lambda outputs: [(score(outputs), layers) for score, layers in steps],
    )


ENERGY = lowers((lambda outputs: -outputs.logits.logsumexp(1), None))


@pytest.fixture(scope="module")
def trained(model, data):
    return model, *data.images(200, 3)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_the_step_by_hand(trained, left_as_found, mode):
    net, x, _ = trained
    std = (0.2, 0.3, 0.4)
    leaf = x[:20].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(-net(leaf).logsumexp(1).sum(), leaf)
    with mode(), left_as_found(net):
        reader = Reader(net, ["1"])
        clean, after = stepped(reader, as_batch(x[:20].clone()), ENERGY, (0.0, 0.01, 0.02), std)
    torch.testing.assert_close(clean.logits, net(x[:20]).detach())
    assert after[0] is clean
    for outputs, epsilon in zip(after[1:], (0.01, 0.02), strict=True):
        moved = x[:20] - epsilon / torch.tensor(std)[:, None, None] * gradient.sign()
        torch.testing.assert_close(outputs.logits, net(moved).detach())
        torch.testing.assert_close(outputs.features["1"], net[:2](moved).mean((2, 3)).detach())
        assert not outputs.logits.requires_grad
    assert (after[1].logits.logsumexp(1) > clean.logits.logsumexp(1)).all()  # the score went down


def test_each_layer_may_have_a_step_of_its_own(trained):
    net, x, _ = trained
    scores = {name: (lambda outputs, name=name: outputs.features[name].square().sum(1)) for name in ("1", "3")}
    detector = lowers(*((score, (name,)) for name, score in scores.items()))
    reader = Reader(net, ["1", "3"])
    clean, (after,) = stepped(reader, as_batch(x[:9]), detector, (0.01,))
    assert torch.equal(after.logits, clean.logits)
    for name, score in scores.items():
        leaf = x[:9].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(score(reader(as_batch(leaf))).sum(), leaf)
        moved = reader(as_batch(x[:9] - 0.01 * gradient.sign()))
        torch.testing.assert_close(after.features[name], moved.features[name].detach())


def test_sizes_and_channels():
    for epsilon in (-0.1, float("nan"), "big"):
        with pytest.raises(InputError, match=r"^epsilon: must be a finite number ≥ 0, in pixel units"):
            check_epsilon(epsilon)
    assert check_channels(np.float32(0.5), "std") == 0.5
    assert check_channels(torch.tensor([1.0, 2.0]), "std") == [1.0, 2.0]
    for bad, positive in (("a", False), ([], False), ([[1.0]], False), (0, True)):
        with pytest.raises(InputError, match=r"^std: expected a finite(, positive)? number, or one for each chan"):
            check_channels(bad, "std", positive=positive)
    with pytest.raises(InputError, match="std: expected one number, or one for each of 3 channels"):
        signed_step(torch.zeros(1, 3, 2, 2), torch.ones(1, 3, 2, 2), 0.1, (0.1, 0.2))


def test_a_model_without_gradient(trained):
    hard = nn.Module()
    hard.forward = lambda x: (x.flatten(1)[:, :3] > 0.5).float()
    with pytest.raises(InputError, match=r"^model: its output has no gradient in the input"):
        stepped(Reader(hard), as_batch(trained[1][:2]), ENERGY, (0.1,))
