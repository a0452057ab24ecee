"""A stand-in for a model that gives the same logits sooner: normalisation folded into convolutions, channels last.

It has modules of its own but the model's own weights: the model is not touched, nothing is kept twice, and what
training or loading does to the weights is seen in the next batch.
"""

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

log = logging.getLogger("igeood")

CLOSE = 1e-4  # how far the stand-in's logits may be from the model's, of the largest: rounding gives about 1e-6


def stand_in(model: nn.Module, logits: Callable[[nn.Module], Tensor]) -> "Folded | None":
    """A model's stand-in, if it has one that gives the same logits; else None, and the log says why.

    Parameters
    ----------
    model : Module
        The classifier.
    logits : callable
        Runs a model on a few samples.
    """
    if any(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks for module in model.modules()):
        log.warning("fold: the model has hooks, which want its own modules, and runs as it is")
        return None
    expected = logits(model)
    try:
        folded = Folded(model)
        folded.renew()
        difference = float((logits(folded) - expected).abs().max() / expected.abs().max())
    except Exception as error:  # noqa: BLE001 (whatever the model's own code raises, it can run as it is)
        log.warning("fold: the model cannot be folded and runs as it is (%s)", error)
        return None
    if not difference <= CLOSE:
        log.warning("fold: the folded model's logits are off by %.1g; the model runs as it is", difference)
        return None
    return folded


class Folded(nn.Module):
    """A model in evaluation mode, with each batch normalisation folded into the convolution before it.

    Parameters
    ----------
    model : Module
        Can be traced: no branches on values, as `torch.fx` explains where it raises.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        tensors = [*model.parameters(), *model.buffers()]
        self.net = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}).eval()
        self._pairs = []
        for names in list(_pairs(self.net)):
            pair = _Pair(*map(self.net.get_submodule, names))
            if pair.norm.running_mean is not None:  # else it takes each batch's own statistics
                _replace(self.net, names[0], pair)
                _replace(self.net, names[1], nn.Identity())
                self._pairs.append(pair)

    def renew(self) -> None:
        """Fold the weights as they are now."""
        with torch.inference_mode(False), torch.no_grad():
            for pair in self._pairs:
                pair.renew()

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """What the model returns."""
        return self.net(*map(_channels_last, inputs), **{name: _channels_last(v) for name, v in keywords.items()})


def parts(model: nn.Module) -> list[Any]:
    """What a stand-in is made of beside the values of weights: modules, tensors, hooks and attributes."""
    found: list[Any] = []
    for module in model.modules():
        found.append(module)
        for name, value in vars(module).items():
            if isinstance(value, dict):
                found += value.values()
            elif isinstance(value, Tensor) and not value.is_inference():
                found += [value, value._version]
            elif name != "training":
                found.append(value)
    return found


def unchanged(before: list[Any], now: list[Any]) -> bool:
    """Whether two lists of `parts` are of a model that has stayed as it was."""
    if len(before) != len(now):
        return False
    plain = (bool, int, float, str, tuple)
    pairs = zip(before, now, strict=True)
    return all(a is b or (isinstance(a, plain) and type(a) is type(b) and a == b) for a, b in pairs)


class _Pair(nn.Module):
    """A convolution and the batch normalisation after it, as one convolution."""

    def __init__(self, conv: Any, norm: Any) -> None:
        super().__init__()
        self.conv, self.norm = conv, norm
        self.folded: Any = None  # weight and bias, once they are renewed

    def renew(self) -> None:
        conv, norm = self.conv, self.norm
        statistics = (norm.running_mean, norm.running_var, norm.eps)
        weight, bias = fuse_conv_bn_weights(conv.weight, conv.bias, *statistics, norm.weight, norm.bias)
        self.folded = _channels_last(weight.detach()), bias.detach()

    def forward(self, x: Tensor) -> Any:
        return self.conv._conv_forward(x, *self.folded)


def _pairs(net: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of convolutions and of the normalisations that alone read them; each is called once, and has no hook."""
    calls = [node for node in fx.Tracer().trace(net).nodes if node.op == "call_module"]
    times = Counter(node.target for node in calls)

    def plain(node: Any, kind: type[nn.Module]) -> bool:
        if not isinstance(node, fx.Node) or node.op != "call_module" or times[node.target] != 1:
            return False
        module = net.get_submodule(str(node.target))
        return type(module) is kind and not module._forward_hooks and not module._forward_pre_hooks

    for node in calls:
        before: Any = node.args[0] if node.args else None
        if plain(node, nn.BatchNorm2d) and plain(before, nn.Conv2d) and len(before.users) == 1:
            yield str(before.target), str(node.target)


def _replace(net: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(net.get_submodule(parent), child, module)


def _channels_last(value: Any) -> Any:
    is_images = isinstance(value, Tensor) and value.ndim == 4
    return value.contiguous(memory_format=torch.channels_last) if is_images else value
