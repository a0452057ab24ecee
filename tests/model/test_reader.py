"""A model's outputs, and the model as it was."""

import copy
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import igeood
from igeood import extract
from igeood.errors import UnsuitedError
from igeood.model.batch import as_batch
from igeood.model.fingerprint import Versions, fingerprint
from igeood.model.reader import Reader, reader_for
from igeood.outputs import HEAD

LAYERS = ["conv", "act", "hidden"]
FLOAT8 = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)
BOTH = igeood.Needs(layers="all", head=True)


def by_hand(model, x):
    """Logits and mean features of a plain run of a copy in evaluation mode."""
    model, features = copy.deepcopy(model).eval(), {}
    for name in LAYERS:

        def keep(_, __, output, name=name):
            features[name] = output.float().clone() if output.ndim == 2 else output.float().mean((2, 3))

        model.get_submodule(name).register_forward_hook(keep)
    with torch.no_grad():
        return model(x.clone().to(model.conv.weight.dtype)), features


def hooked(model):
    model.act.register_forward_hook(lambda _, __, out: out * 1.5)
    model.hidden.register_forward_pre_hook(lambda _, args: (args[0] + 0.1,))


def mixed_modes(model):
    model.norm.eval()
    model.conv.requires_grad_(False)
    model.fc.weight.grad = torch.ones_like(model.fc.weight)


MODELS = {
    "modes and gradients mixed": mixed_modes,
    "hooks of the user's": hooked,
    "parametrised": lambda model: parametrizations.spectral_norm(model.hidden),
    "several precisions": lambda model: model.register_parameter("scale", FLOAT8),
    "bfloat16": nn.Module.bfloat16,
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_evaluation_mode_and_the_model_is_left_as_found(net, images, left_as_found, name, mode):
    MODELS[name](net)
    logits, features = by_hand(net, images[0])
    x = images[0].double() if name == "several precisions" else images[0]
    with mode(), left_as_found(net):
        outputs = extract(net, list(zip(x.split(7), images[1].split(7), strict=True)), LAYERS)
    close = {"rtol": 1e-2, "atol": 1e-2} if name == "bfloat16" else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(outputs.logits, logits, check_dtype=False, **close)
    torch.testing.assert_close(dict(outputs.features), features, check_dtype=False, **close)
    assert torch.equal(outputs.labels, images[1])
    assert np.array_equal(outputs.keys, as_batch(images[0]).keys)
    assert not outputs.logits.requires_grad


def test_models_that_work_in_place(net, images):
    """The user's input stays, and features are those of the moment when they were returned."""

    def forward(x):
        hidden = net.hidden(net.features(x.mul_(2.0).add_(0.5)))
        logits = net.fc(torch.tanh(hidden))
        hidden.zero_()
        return logits

    x, net.forward = images[0].clone(), forward
    pooled = torch.relu(net.eval().norm(net.conv(x * 2 + 0.5))).mean((2, 3))
    outputs = extract(net, x, ["hidden"])
    assert torch.equal(x, images[0])
    torch.testing.assert_close(outputs.features["hidden"], net.hidden(pooled).detach())
    Reader(net)(as_batch(x.requires_grad_())).logits.sum().backward()
    assert x.grad.abs().sum() > 0


def test_models_that_return_logits_and_those_that_do_not(net, images, left_as_found, refused):
    expected = extract(net, images, ()).logits
    for finish in (
        lambda f: (f, f.sum()),
        lambda f: [None, f],
        lambda f: OrderedDict(hidden=f[:, :2], logits=f),
        lambda f: SimpleNamespace(loss=None, logits=f),
    ):
        net.finish = finish
        assert torch.equal(extract(net, images, ()).logits, expected)
    for finish, argument in (
        (lambda f: {"out": f}, "model"),
        (lambda f: f[1:], "model"),
        (lambda f: torch.where(torch.arange(len(f))[:, None] == 2, torch.nan, f), "logits"),
    ):
        net.finish = finish
        with left_as_found(net), refused(argument, "loader: batch 0"):
            extract(net, images, ["conv"])


def test_a_pool_has_blocks_of_its_own_and_the_head_is_the_layer_that_returns_the_logits(net, images, refused):
    def largest(call):
        return call.output.flatten(2).amax(2)

    outputs = extract(net, images, ["conv"], pool=largest, head=True)
    assert list(outputs.features) == ["conv|largest", HEAD]
    torch.testing.assert_close(outputs.features["conv|largest"], net.conv(images[0]).flatten(2).amax(2).detach())
    weight, bias = reader_for(net, as_batch(images), BOTH, ["hidden"]).head
    torch.testing.assert_close((outputs.features[HEAD] @ weight.T + bias).detach(), outputs.logits)
    net.finish = lambda logits: 2 * logits
    with pytest.raises(UnsuitedError):
        extract(net, images, (), head=True)
    with refused("model"):
        Reader("msp")
    for name in ("cnov", 5):
        with refused("layers"):
            extract(net, iter([]), ["act", name])  # before any batch is read


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_wrapped_models_have_the_names_and_the_fingerprint_of_the_bare_one(net, images, left_as_found):
    bare, compiled = reader_for(net, as_batch(images), BOTH, LAYERS), torch.compile(net, backend="eager")
    expected, names = bare(as_batch(images)).detached(), list(extract(net, images).features)
    wrappers = {"module.": nn.DataParallel(net), "_orig_mod.": compiled, "module._orig_mod.": nn.DataParallel(compiled)}
    for prefix, wrapped in wrappers.items():
        assert list(extract(wrapped, images).features) == names
        assert fingerprint(wrapped) == fingerprint(net)
        assert not Versions(wrapped).changed()
        for layers in (LAYERS, [f"{prefix}{layer}" for layer in LAYERS]):
            reader = reader_for(wrapped, as_batch(images), BOTH, layers)
            with left_as_found(wrapped):
                outputs = reader(as_batch(images)).detached()
            assert (reader.layers, reader.layouts) == (LAYERS, bare.layouts)
            torch.testing.assert_close(outputs.features, expected.features)
        torch.testing.assert_close(extract(wrapped, images, ()).logits, expected.logits)


class Sequences(nn.Module):
    """Tokens through a layer that keeps their axis, then the first token's answer."""

    def __init__(self):
        super().__init__()
        self.inner, self.fc = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x, attention_mask=None):  # noqa: ARG002
        return self.fc(self.inner(x)[:, 0])


def test_padding_does_not_count():
    torch.manual_seed(0)
    model, x, lengths = Sequences(), torch.randn(3, 5, 4), (5, 2, 3)
    mask = torch.tensor([[1] * n + [0] * (5 - n) for n in lengths])
    x[mask == 0] = 7.0
    for dtype in (torch.int64, torch.bool, torch.float32):
        padded = extract(model, {"x": x, "attention_mask": mask.to(dtype)}, ["inner"]).features["inner"]
        expected = [model.inner(x[row, :n]).mean(0) for row, n in enumerate(lengths)]
        torch.testing.assert_close(padded, torch.stack(expected).detach())
    added = extract(model, {"x": x, "attention_mask": -1e4 * (1.0 - mask)}, ["inner"]).features["inner"]
    torch.testing.assert_close(added, model.inner(x).mean(1).detach())  # no mask of zeros and ones
