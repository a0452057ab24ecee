"""Models of every kind that a guard may meet, each with a plain way to run it, and all that must stay as it was.

A case makes the same model every time it is called: one is guarded, its twin is run by hand.
"""

import random
import threading
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm

CLASSES = 3
Named = namedtuple("Named", "logits hidden")


class Net(nn.Module):
    """A small network with all that can be disturbed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU()
        self.drop, self.hidden, self.fc = nn.Dropout(0.5), nn.Linear(6, 5), nn.Linear(5, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        return self.drop(self.act(self.norm(self.conv(x)))).mean((2, 3))

    def forward(self, x: Tensor) -> Any:
        return self.finish(self.fc(torch.tanh(self.hidden(self.features(x)))))

    def finish(self, logits: Tensor) -> Any:
        return logits


def net(kind: type[Net] = Net) -> Net:
    """A network whose normalisation has seen something."""
    torch.manual_seed(3)
    made = kind()
    with torch.no_grad():
        made.norm.running_mean.uniform_(-0.2, 0.2)
        made.norm.running_var.uniform_(0.5, 2.0)
        for parameter in made.parameters():
            parameter.mul_(2.0)
    return made.eval()


def finishing(finish: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    """A network that returns its logits in another way."""
    return lambda: net(type("Finishing", (Net,), {"finish": lambda _, logits: finish(logits)}))


def forwarding(forward: Callable[[Net, Tensor], Any], **parts: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A network with a forward pass of its own, and perhaps more parts."""

    def init(self: Net) -> None:
        Net.__init__(self)
        for name, part in parts.items():
            setattr(self, name, part())

    return lambda: net(type("Forwarding", (Net,), {"forward": forward, "__init__": init}))


def changed(change: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    """A network to which something was done."""

    def make() -> nn.Module:
        made = net()
        return change(made) or made

    return make


def _training(model: nn.Module) -> None:
    model.train()


def _mixed(model: nn.Module) -> None:
    model.train()
    model.norm.eval()


def _with_gradients(model: nn.Module) -> None:
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * i) if i % 2 else None


def _frozen(model: nn.Module) -> None:
    model.requires_grad_(False)


def _half_frozen(model: nn.Module) -> None:
    model.conv.requires_grad_(False)
    model.fc.bias.requires_grad_(False)


class Recorder:
    """Hooks of the user's own, as methods of an object: they write down that they ran."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def forward(self, module: nn.Module, _: object, __: object) -> None:
        self.calls.append(("forward", id(module)))

    def before(self, module: nn.Module, _: object) -> None:
        self.calls.append(("before", id(module)))

    def backward(self, module: nn.Module, _: object, __: object) -> None:
        self.calls.append(("backward", id(module)))


def _hooked(model: nn.Module) -> None:
    model.recorder = Recorder()
    model.conv.register_forward_hook(model.recorder.forward)
    model.register_forward_pre_hook(model.recorder.before)
    model.act.register_forward_hook(lambda _, __, out: out * 1.5)
    model.hidden.register_forward_pre_hook(lambda _, args: (args[0] + 0.1,))
    model.hidden.register_forward_hook(lambda _, __, out: out - 0.2, prepend=True)
    model.norm.register_full_backward_hook(model.recorder.backward)


def _backward_changed(model: nn.Module) -> None:
    model.hidden.register_full_backward_hook(lambda _, grad_in, __: (-grad_in[0],))


def _shared(model: nn.Module) -> None:
    model.again = model.act  # one module, two names
    model.alike = nn.Linear(5, CLASSES)
    model.alike.weight = model.fc.weight  # two modules, one tensor


def _locked(model: nn.Module) -> None:
    model.lock = threading.Lock()  # cannot be copied


def _spectral(model: nn.Module) -> None:
    parametrizations.spectral_norm(model.hidden)
    parametrizations.weight_norm(model.fc)
    model.train()


def _old_spectral(model: nn.Module) -> None:
    old_spectral_norm(model.hidden)


def _float8(model: nn.Module) -> None:
    model.scale = nn.Parameter(torch.ones(2, 3).to(torch.float8_e4m3fn), requires_grad=False)


def _quantised(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is on its way out, and still met
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def _data_parallel(model: nn.Module) -> nn.Module:
    return nn.DataParallel(model)


def _in_place(self: Net, x: Tensor) -> Tensor:
    x.mul_(2.0).add_(0.5)
    return Net.forward(self, x)


def _in_place_after(self: Net, x: Tensor) -> Tensor:
    hidden = self.hidden(self.features(x))
    out = self.fc(torch.tanh(hidden))
    hidden.zero_()
    return out


def _no_way_back(self: Net, x: Tensor) -> Tensor:
    squashed = torch.exp(-self.features(x))
    out = self.fc(self.hidden(squashed))
    squashed.add_(1.0)
    return out


def _branching(self: Net, x: Tensor) -> Tensor:
    logits = Net.forward(self, x)
    return torch.where(x.flatten(1).sum(1, keepdim=True) > 0, logits, 2 * logits) if x.max() > 0.5 else logits - 1.0


def _drawing(self: Net, x: Tensor) -> Tensor:
    random.random()
    np.random.random()
    return Net.forward(self, x) + 0.0 * torch.randn(1)


def _twice(self: Net, x: Tensor) -> Tensor:
    return Net.forward(self, self.first(self.first(x)))


def _functional_dropout(self: Net, x: Tensor) -> Tensor:
    return Net.forward(self, functional.dropout(x, 0.5, self.training))


def _auxiliary(self: Net, x: Tensor) -> Any:
    logits = Net.forward(self, x)
    return (logits.sum(1), logits) if self.training else logits


class Extra(Net):
    """More than tensors in its state."""

    def get_extra_state(self) -> dict[str, Any]:
        return {"version": 1, "names": ("a", None), "mean": torch.ones(2), "made by": object()}

    def set_extra_state(self, state: object) -> None:
        pass


class Lstm(nn.Module):
    """Rows of the image as a sequence; the recurrent part returns a tuple."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.hidden, self.fc = kind(8, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.hidden(x.flatten(2).transpose(1, 2).reshape(len(x), -1, 8))
        return 3 * self.fc(out[:, -1])


class Transformer(nn.Module):
    """Rows of the image as tokens; the layer has a fast way of its own in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return 3 * self.fc(self.hidden(x.reshape(len(x), -1, 8)).mean(1))


class Functional(nn.Module):
    """No parameter, and logits that are a view of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Flatten()

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x)[:, :CLASSES]


def images(n: int, seed: int, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Images in whose channels the class shows, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % CLASSES
    x = torch.randn(n, 2, 4, 4, generator=generator) + shift
    x[:, 0] += labels[:, None, None] - 1.0
    return x, labels


def compiled(how: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """A network that runs outside of Python."""
    made = net()
    plain = nn.Sequential(OrderedDict(conv=made.conv, norm=made.norm, act=made.act, flat=nn.Flatten()))
    plain.add_module("hidden", nn.Linear(24, 5))
    plain.add_module("fc", made.fc)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is on its way out, and still met
        return how(plain.eval())


def seeded(kind: Callable[..., nn.Module], *args: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return kind(*args).train()

    return make


@dataclass(frozen=True)
class Case:
    """A kind of model.

    Parameters
    ----------
    make : callable
        The model, the same every time.
    logits : callable
        What of its result are the logits.
    layers : names
        What a white box reads of it.
    around : callable
        What the user's code stands in: no gradients, inference mode.
    no_step : str
        Where no input step can be made: what the error says. Where it can, empty.
    no_layers : str
        Where no layer can be read: what the error says.
    tolerance : float
        Of scores, relative and absolute; coarse where the precision is.
    """

    make: Callable[[], nn.Module]
    logits: Callable[[Any], Tensor] = lambda output: output
    layers: tuple[str, ...] = ("act", "hidden")
    around: Callable[[], Any] = nullcontext
    no_step: str = ""
    no_layers: str = ""
    tolerance: float = 1e-6


def _cases() -> dict[str, Case]:
    first = {"logits": lambda output: output[0]}
    named = {"logits": lambda output: output["logits"]}
    coarse = {"tolerance": 2e-2}
    deep = tuple(f"module.{name}" for name in ("act", "hidden"))
    return {
        "evaluation mode": Case(net),
        "training mode": Case(changed(_training)),
        "mixed modes": Case(changed(_mixed)),
        "functional dropout": Case(lambda: forwarding(_functional_dropout)().train()),
        "an auxiliary head in training": Case(lambda: forwarding(_auxiliary)().train()),
        "parameters with gradients": Case(changed(_with_gradients)),
        "parameters frozen": Case(changed(_frozen)),
        "some parameters frozen": Case(changed(_half_frozen)),
        "hooks that change outputs": Case(changed(_hooked)),
        "a hook that changes gradients": Case(changed(_backward_changed)),
        "shared modules and tensors": Case(changed(_shared)),
        "cannot be copied": Case(changed(_locked)),
        "parametrized": Case(changed(_spectral)),
        "spectral norm by a hook": Case(changed(_old_spectral)),
        "data parallel": Case(changed(_data_parallel), layers=deep),
        "double precision": Case(lambda: net().double()),
        "bfloat16": Case(lambda: net().bfloat16(), **coarse),
        "half precision": Case(lambda: net().half(), **coarse),
        "one parameter of float8": Case(changed(_float8)),
        "quantised": Case(changed(_quantised), layers=("hidden",), no_step="no gradient in its input"),
        "more than tensors in its state": Case(lambda: net(Extra)),
        "channels last": Case(lambda: net().to(memory_format=torch.channels_last)),
        "returns a tuple": Case(finishing(lambda f: (f, f.sum())), **first),
        "returns a list": Case(finishing(lambda f: [f]), **first),
        "returns a named tuple": Case(finishing(lambda f: Named(f, f.sum())), **first),
        "returns none first": Case(finishing(lambda f: (None, f)), logits=lambda output: output[1]),
        "returns a mapping": Case(finishing(lambda f: {"loss": f.sum(), "logits": f}), **named),
        "returns an ordered mapping": Case(finishing(lambda f: OrderedDict(hidden=f[:, :2], logits=f)), **named),
        "returns an object": Case(
            finishing(lambda f: SimpleNamespace(loss=None, logits=f)), logits=lambda output: output.logits
        ),
        "changes its input": Case(forwarding(_in_place)),
        "changes a layer's output afterwards": Case(forwarding(_in_place_after)),
        "cannot go backward": Case(
            forwarding(_no_way_back), layers=("hidden",), no_step="no gradient in its input: .*by an inplace operation"
        ),
        "made in inference mode": Case(
            torch.inference_mode()(net), no_step="the model fails on an input of shape .* Inference tensors cannot"
        ),
        "branches on values": Case(forwarding(_branching)),
        "draws random numbers": Case(forwarding(_drawing)),
        "a layer called twice": Case(forwarding(_twice, first=lambda: nn.Conv2d(2, 2, 1))),
        "no gradient in it": Case(forwarding(torch.no_grad()(Net.forward)), no_step="output has no gradient"),
        "inference mode in it": Case(forwarding(torch.inference_mode()(Net.forward)), no_step="output has no gradient"),
        "user without gradients": Case(changed(_training), around=torch.no_grad),
        "user with gradients switched off": Case(net, around=lambda: torch.set_grad_enabled(False)),
        "user in inference mode": Case(net, around=torch.inference_mode),
        "recurrent": Case(seeded(Lstm), layers=("hidden",)),
        "recurrent, gated": Case(seeded(Lstm, nn.GRU), layers=("hidden",)),
        "transformer": Case(seeded(Transformer), layers=("hidden",), tolerance=1e-4),
        "scripted": Case(lambda: compiled(torch.jit.script), no_layers="^layers: .* is scripted or traced"),
        "traced": Case(
            lambda: compiled(lambda model: torch.jit.trace(model, images(2, 0)[0])),
            no_layers="^layers: .* is scripted or traced",
        ),
        "no parameters": Case(seeded(Functional), layers=("hidden",)),
    }


CASES = _cases()
