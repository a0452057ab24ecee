"""A stand-in for a model: the same logits, the model's own weights."""

import copy
import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

import igeood
from igeood.errors import IgeoodWarning, InputError
from igeood.folding import Folded, _Pair
from igeood.networks import build
from igeood.networks.resnet import ResNet


def settled(net, seed=0):
    """A network in evaluation mode whose normalisations do something."""
    generator = torch.Generator().manual_seed(seed)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d) and module.affine:
            for tensor, low, high in (
                (module.running_mean, -0.5, 0.5),
                (module.running_var, 0.3, 2.0),
                (module.weight.data, 0.5, 1.5),
                (module.bias.data, -0.5, 0.5),
            ):
                tensor.copy_(low + (high - low) * torch.rand(tensor.shape, generator=generator))
    return net.eval()


def small(seed=0, classes=5):
    torch.manual_seed(seed)
    return settled(ResNet((1, 1, 1, 1), classes, width=8), seed)


def images(n, seed=1, size=16):
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(seed))


def folded(net):
    made = Folded(net)
    made.renew()
    return made


def pairs(made):
    return sum(isinstance(module, _Pair) for module in made.modules())


@pytest.mark.parametrize(("name", "expected"), [("resnet-10-16", 12), ("resnet-34", 36), ("densenet-bc-100", 48)])
def test_every_pair_of_the_reference_networks_is_folded(name, expected):
    assert pairs(Folded(build(name))) == expected


def test_logits_and_gradients_are_those_of_float64():
    net, x = small(), images(6)
    wide = copy.deepcopy(net).double()
    leaves = [x.clone().requires_grad_(), x.double().requires_grad_()]
    found, expected = folded(net)(leaves[0]), wide(leaves[1])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    gradients = [
        torch.autograd.grad(v.square().sum(), leaf)[0] for v, leaf in zip((found, expected), leaves, strict=True)
    ]
    torch.testing.assert_close(gradients[0].double(), gradients[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(folded(wide)(x.double()), expected, rtol=1e-12, atol=1e-12)
    assert folded(net)(x[:0]).shape == (0, 5)


def test_the_model_is_not_touched_and_nothing_is_kept_twice():
    net = small().train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    modules = list(net.modules())
    guard = igeood.grey_box(net, fold=True).fit((images(30), torch.arange(30) % 5))
    guard.score(images(4, 2))
    assert list(net.modules()) == modules
    assert all(module.training and not module._forward_hooks for module in modules)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in net.parameters())
    assert {id(p) for p in Folded(net).parameters()} == {id(p) for p in net.parameters()}


def test_a_folded_guard_scores_alike_and_is_saved_as_one(tmp_path):
    net, x, labels = small(), images(150), torch.arange(150) % 5
    plain, fast = (igeood.grey_box(net, epsilon=0.002, fold=fold).fit((x, labels)) for fold in (False, True))
    torch.testing.assert_close(fast.score(x), plain.score(x), rtol=1e-4, atol=1e-4)
    assert torch.equal(fast.score(x), fast.score(x))
    fast.calibrate(images(40, 3))
    verdict = fast.predict(x)
    assert torch.equal(verdict.label, net(x).argmax(1))
    fast.save(tmp_path / "guard.safetensors")
    again = igeood.load(tmp_path / "guard.safetensors", net)
    assert again.inputs.fold
    assert torch.equal(again.score(x), verdict.score)
    assert not igeood.black_box(net).inputs.fold
    with torch.inference_mode():
        assert torch.equal(fast.score(x * 1.0), verdict.score)


def test_what_failed_or_was_empty_does_not_decide():
    net, x, labels = small(), images(30), torch.arange(30) % 5
    guard = igeood.grey_box(net, fold=True)
    with pytest.raises(InputError, match=r"^x: batch 0: the model fails on an input of shape \(\d+, 2, 16, 16\)"):
        guard.fit((x[:, :2], labels))
    net.fc.bias.data[0] = torch.nan
    with pytest.raises(InputError, match=r"^x: batch 0: logits: row 0 has NaN"):
        guard.fit((x, labels))
    net.fc.bias.data[0] = 0.0
    guard.fit((x, labels))
    assert len(guard.score(x[:0])) == 0
    assert guard.inputs._folded[1] is not None
    assert len(igeood.grey_box(net, fold=True).fit((x, labels)).score(x[:0])) == 0


@torch.no_grad()
def trained_on(net):
    for parameter in net.parameters():
        parameter.add_(0.05)


def by_data(net):
    net.conv1.weight.data.mul_(1.5)
    net.bn1.running_mean.add_(0.3)


def new_parameter(net):
    net.conv1.weight = nn.Parameter(net.conv1.weight.detach() * 1.5)


def new_module(net):
    net.relu = nn.Softplus()


def assigned(net):
    net.load_state_dict({name: value.clone() for name, value in small(7).state_dict().items()}, assign=True)


def hooked(net):
    net.conv1.register_forward_hook(lambda _, __, out: out * 0.5)


def another_eps(net):
    net.bn1.eps = 1.0


def another_forward(net):
    first = net.forward
    net.forward = lambda x: first(x) * 2


@pytest.mark.parametrize(
    "change",
    [trained_on, by_data, new_parameter, new_module, assigned, hooked, another_eps, another_forward],
)
def test_it_follows_the_model(change):
    """A stand-in with weights of yesterday would lie without a word."""
    net, x = small(), images(8)
    guard = igeood.grey_box(net, fold=True).fit((images(30), torch.arange(30) % 5))
    before = next(guard.inputs.see(x, guard.detector)).clean.logits
    change(net)
    weights = change in (trained_on, by_data, new_parameter, assigned)
    told = pytest.warns(IgeoodWarning, match="its weights have changed") if weights else nullcontext()
    with told:
        after = next(guard.inputs.see(x, guard.detector)).clean.logits
    torch.testing.assert_close(after, net(x).detach(), rtol=1e-4, atol=1e-4)
    assert (after - before).abs().max() > 1e-3


class Odd(nn.Module):
    """A network of pairs that are none: read twice, called twice, without statistics, with a hook."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(5))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3, track_running_stats=i != 2) for i in range(5))
        self.fc = nn.Linear(3, 4)
        self.convs[3].register_forward_hook(lambda _, __, out: 2 * out)

    def forward(self, x):
        y = self.convs[0](x)
        x = self.norms[0](y) + y
        for _ in range(2):
            x = self.norms[1](self.convs[1](x))
        for i in (2, 3, 4):
            x = self.norms[i](self.convs[i](x))
        return self.fc(functional.relu(x).mean((2, 3)))


def test_what_is_no_pair_stays():
    torch.manual_seed(0)
    net = Odd()
    net.eval()
    for norm in (net.norms[i] for i in (0, 1, 3, 4)):
        norm.running_var.fill_(0.5)
    made = folded(net)
    assert pairs(made) == 1
    torch.testing.assert_close(made(images(4)), net(images(4)), rtol=1e-5, atol=1e-5)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = small()

    def forward(self, x):
        return self.net(x if x.sum() > 0 else -x)


class Views(nn.Module):
    """`view` wants the usual layout."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(784, 5)

    def forward(self, x):
        return self.fc(self.norm(self.conv(x)).view(len(x), -1))


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = small()

    def forward(self, x):
        return self.net(x) + torch.randn(5)


@pytest.mark.parametrize("kind", [Branches, Views, Draws])
def test_a_model_that_cannot_be_folded_runs_as_it_is(kind, caplog):
    torch.manual_seed(0)
    net, x, labels = kind().eval(), images(30), torch.arange(30) % 5
    with caplog.at_level(logging.WARNING, "igeood"):
        fast = igeood.grey_box(net, fold=True).fit((x, labels))
        fast.score(x)
    notes = [record.getMessage() for record in caplog.records if "fold" in record.getMessage()]
    assert len(notes) == 1
    assert "runs as it is" in notes[0]
    if kind is not Draws:
        assert torch.equal(fast.score(x), igeood.grey_box(net).fit((x, labels)).score(x))
