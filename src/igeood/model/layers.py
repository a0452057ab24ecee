"""A network's layers: their names, the axis of their channels, how they are pooled, and where its blocks end."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from igeood.errors import InputError, UnsuitedError

Layers = Literal["auto"] | Iterable[str]
MOST_LAYERS = 6
FEWEST_LAYERS = 4  # fewer than this, and the largest block is opened

_WRAPPERS = ("module", "_orig_mod")  # where DataParallel, DistributedDataParallel and torch.compile hold a model
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
_CHANNELS_SECOND = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
_CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.MultiheadAttention, nn.RNNBase)
Width = tuple[int, bool]  # of a module's output: channels, and whether they are the last axis


def strip(name: str) -> str:
    """A dotted name without the parts that wrappers add.

    Examples
    --------
    >>> strip("module._orig_mod.layer1.0"), strip("layer1.0")
    ('layer1.0', 'layer1.0')
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def bare(model: nn.Module) -> nn.Module:
    """The model inside of `DataParallel`, `DistributedDataParallel` and `torch.compile`."""
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) or "_orig_mod" in model._modules:
        model = next(model.children())
    return model


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """A model's modules by the names that they have in the bare model, which itself is left out."""
    modules = {"": bare(model)}
    for name, module in sorted(modules[""].named_modules(), key=lambda entry: strip(entry[0]) != entry[0]):
        modules.setdefault(name if strip(name) in modules else strip(name), module)
    return {name: module for name, module in modules.items() if name}


def known_layers(modules: Mapping[str, nn.Module], names: Iterable[str]) -> list[str]:
    """The unique names as `named_modules` has them; raises unless each is there, with or without wrappers' prefixes."""
    layers: dict[str, None] = {}
    for name in names:
        layer = name if name in modules else strip(name)
        if layer not in modules:
            close = difflib.get_close_matches(layer, modules, n=3, cutoff=0.3) or list(modules)[:3]
            raise InputError(f"no {name!r} in the model", argument="layers", cure=f"near names: {', '.join(close)}")
        if isinstance(modules[layer], torch.jit.ScriptModule):
            cure = "name others, use black_box, or give the eager model"
            raise UnsuitedError(
                f"{name!r} is in a scripted or traced graph, which has no hooks", argument="layers", cure=cure
            )
        layers[layer] = None
    return list(layers)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module in a forward pass of N samples.

    Attributes
    ----------
    module : Module
        The module.
    output : Tensor
        What it returned, (N, k, ...).
    layout : {"flat", "second", "last"}
        Which axis of the output has the channels: the second of two, the second, or the last.
    input : Tensor, optional
        The first tensor that it was given.
    shown : Tensor, optional
        (N, T) bool, which tokens of a sequence an attention mask shows.
    """

    module: nn.Module
    output: Tensor
    layout: str
    input: Tensor | None = None
    shown: Tensor | None = None

    @property
    def channels(self) -> int:
        """Width of the feature vector."""
        return self.output.shape[-1 if self.layout == "last" else 1]

    @property
    def size(self) -> int:
        """Values of each channel: pixels or tokens."""
        return self.output.shape[1:].numel() // max(1, self.channels)

    def returns(self, whole: Tensor) -> bool:
        """Whether the output is that of the whole, such as the model's logits."""
        return self.output.shape == whole.shape and torch.equal(self.output.float(), whole.float())


def mean(call: Call) -> Tensor:
    """The mean over all axes but samples and channels, (N, k); tokens that a mask hides do not count.

    Examples
    --------
    >>> mean(Call(nn.Identity(), torch.arange(6.0).reshape(1, 3, 2), "last"))
    tensor([[2., 3.]])
    >>> mean(Call(nn.Identity(), torch.arange(6.0).reshape(1, 3, 2), "second"))
    tensor([[0.5000, 2.5000, 4.5000]])
    """
    features = call.output
    if features.ndim == 2:
        return features.clone()  # the model may go on in place
    if call.shown is not None:
        counts = call.shown.sum(dim=1, keepdim=True).clamp(min=1)
        return torch.where(call.shown[..., None], features, 0.0).sum(dim=1) / counts
    return features.flatten(1, -2).mean(dim=1) if call.layout == "last" else features.flatten(2).mean(dim=2)


@dataclass(frozen=True, eq=False)
class Trace:
    """What happened in one forward pass of a few samples.

    Attributes
    ----------
    model : Module
        The bare model.
    calls : dict of Module to Call
        Modules that returned (N, k, ...), in the order of their ends; without those that were called twice.
    names : dict of Module to str
        Names of the modules, without the parts that wrappers add.
    logits : Tensor
        (N, C) what the model returned.
    """

    model: nn.Module
    calls: Mapping[nn.Module, Call]
    names: Mapping[nn.Module, str]
    logits: Tensor

    @property
    def head(self) -> str | None:
        """Name of the linear layer whose output is the logits, if there is one."""
        linear = (call for call in self.calls.values() if isinstance(call.module, nn.Linear))
        return next((self.names[call.module] for call in linear if call.returns(self.logits)), None)

    def parts(self, module: nn.Module | None = None) -> list[Call]:
        """A module's called children, in order; containers that are not called or end in the logits are opened."""
        parts: list[Call] = []
        for child in (module or self.model).children():
            call = self.calls.get(child)
            if call is None or call.returns(self.logits):
                parts += self.parts(child)
            else:
                parts.append(call)
        return [call for call in self.calls.values() if call in parts]

    def block_ends(self) -> list[str]:
        """Names of the layers at which the network's blocks end.

        The network's parts are read in order: a convolution, a linear layer or a block begins a stage, and what follows
        without changing the width (normalisation, activation, pooling) ends it, as does a transition that shrinks a
        dense block's output.
        """
        parts = self.parts()
        stages = _stages(parts)
        while len(stages) < FEWEST_LAYERS:
            opened = self._open_largest(parts, len(stages))
            if opened is None:
                break
            parts = opened
            stages = _stages(parts)
        return [self.names[call.module] for call in _thin(stages)]

    def _open_largest(self, parts: list[Call], stages: int) -> list[Call] | None:
        """Parts with the block of most parameters replaced by its children, if that gives more stages."""
        for block in sorted(parts, key=lambda part: -sum(w.numel() for w in part.module.parameters())):
            children = self.parts(block.module)
            if not any(child.returns(block.output) for child in children):
                continue  # its children's outputs are not all of its own: a residual block, not a chain
            at = parts.index(block)
            opened = [*parts[:at], *children, *parts[at + 1 :]]
            if len(_stages(opened)) > stages:
                return opened
        return None


def layout_of(module: nn.Module, output: Tensor, width: Width | None) -> tuple[str, Width | None]:
    """Which axis has the channels, and the width that the next module finds.

    Some modules say which axis they work on. After others (containers, activations, pooling) the channels are where the
    module before has put them, if its width is there; else on the other axis. With nothing known they are the last of
    three axes (a sequence), and the second of more (an image).
    """
    if isinstance(module, _CHANNELS_SECOND):
        width = (output.shape[1], False)
    elif isinstance(module, _CHANNELS_LAST):
        width = (output.shape[-1], True)
    if output.ndim == 2:
        return "flat", width
    channels, last = width or (output.shape[1], output.ndim == 3)
    if width and output.shape[-1 if last else 1] != channels == output.shape[1 if last else -1]:
        last = not last  # transposed since, as patches are into tokens
    return "last" if last else "second", width


def _stages(parts: list[Call]) -> list[Call]:
    """The last part of each stage."""
    ends: list[Call] = []
    for part in parts:
        if _begins(part) and not (ends and _is_transition(ends[-1], part)):
            ends.append(part)
        elif ends and (part.channels == ends[-1].channels or _begins(part)):
            ends[-1] = part
    return ends


def _begins(part: Call) -> bool:
    """Whether a part has weights of its own kind: not a lone normalisation, activation or pooling."""
    return not isinstance(part.module, _NORMS) and any(True for _ in part.module.parameters())


def _is_transition(before: Call, part: Call) -> bool:
    """Whether a part shrinks its predecessor's output in both width and size, as between dense blocks."""
    is_block = any(True for _ in before.module.children())
    return is_block and part.channels < before.channels and 1 < part.size < before.size


def _thin(stages: list[Call]) -> list[Call]:
    """At most `MOST_LAYERS` stages: the last of each shape if that leaves enough, else evenly spaced, with the last."""
    if len(stages) <= MOST_LAYERS:
        return stages
    last_of_shape = list({(stage.channels, stage.size): stage for stage in stages}.values())
    if FEWEST_LAYERS <= len(last_of_shape) <= MOST_LAYERS:
        return last_of_shape
    kept = MOST_LAYERS - 1
    return [stages[round(i * (len(stages) - 1) / (kept - 1))] for i in range(kept)]
