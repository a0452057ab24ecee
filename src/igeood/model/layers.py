"""Which layers of a network to read: the ends of its blocks, found by watching one forward pass."""

import difflib
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from igeood.errors import InputError
from igeood.model.batches import Batch
from igeood.model.runner import Call, Runner, named_modules, strip

__all__ = ["KINDS", "Layers", "check_layers", "choose_layers", "strip"]

Layers = Literal["auto", "convolutions", "norms"] | Iterable[str]
MOST_LAYERS = 6
FEWEST_LAYERS = 4  # fewer than this, and the largest block is opened

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
KINDS = ("none", "last", "last two", "all", "convolutions", "norms")


def check_layers(model: nn.Module, names: Iterable[str]) -> None:
    """Raise unless every name is a key of `model.named_modules()`, with or without the prefixes of wrappers."""
    modules, seen = named_modules(model), set()
    for name in names:
        if not isinstance(name, str):
            raise InputError(f"layers: expected names, keys of model.named_modules(); got {name!r}")
        known = name if name in modules else strip(name)
        if known not in modules:
            close = difflib.get_close_matches(name, modules, n=3, cutoff=0.3) or list(modules)[:3]
            raise InputError(f"layers: the model has no {name!r}; near names: {', '.join(map(repr, close))}")
        if isinstance(modules[known], torch.jit.ScriptModule):
            raise InputError(f"layers: {name!r} is scripted or traced, which hides it; name others, or use black_box")
        if known in seen:
            raise InputError(f"layers: {name!r} is named twice; name each layer once")
        seen.add(known)


def choose_layers(model: nn.Module, batch: Batch, kind: str) -> list[str]:
    """Names of a model's layers, in the order in which they are called.

    Parameters
    ----------
    model : Module
        The network.
    batch : Batch
        Up to three of its samples are run through the network.
    kind : str
        "all": the ends of the network's blocks, the classifier left out; "last" or "last two" of these;
        "convolutions", "norms": every one that is called once; "none".
    """
    if kind == "none":
        return []
    if len(batch) == 0:
        raise InputError("empty; a sample is needed to find the layers; name the layers, or give one")
    runner = Runner(model)
    calls, logits = runner.watch(batch)
    if kind in ("convolutions", "norms"):
        wanted = nn.modules.conv._ConvNd if kind == "convolutions" else _NORMS
        chosen = [call for call in calls.values() if isinstance(call.module, wanted)]
    else:
        chosen = _block_ends(runner.bare, calls, logits)[{"all": 0, "last": -1, "last two": -2}[kind] :]
    if not chosen:
        raise InputError(f"layers: no layer to read in this model ({kind!r}); name some, from model.named_modules()")
    names = {module: name for name, module in named_modules(model).items()}
    return [names[call.module] for call in chosen]


def _block_ends(model: nn.Module, calls: dict[nn.Module, Call], logits: Tensor) -> list[Call]:
    """The layers at which the network's blocks end.

    The network's parts are read in order: a convolution, a linear layer or a block begins a stage, and what follows
    without changing the width (normalisation, activation, pooling) ends it, as does a transition that shrinks a dense
    block's output.
    """
    parts = _parts(model, calls, logits)
    stages = _stages(parts)
    while len(stages) < FEWEST_LAYERS and (opened := _open_largest(parts, len(stages), calls, logits)):
        parts, stages = opened, _stages(opened)
    return _thin(stages)


def _parts(module: nn.Module, calls: dict[nn.Module, Call], logits: Tensor) -> list[Call]:
    """The module's called children, in order; containers that are not called, or that end in the logits, are opened."""
    parts: list[Call] = []
    for child in module.children():
        call = calls.get(child)
        if call is None or call.returns(logits):
            parts += _parts(child, calls, logits)
        else:
            parts.append(call)
    order = {called: i for i, called in enumerate(calls)}
    return sorted(parts, key=lambda call: order[call.module])


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


def _open_largest(parts: list[Call], stages: int, calls: dict[nn.Module, Call], logits: Tensor) -> list[Call] | None:
    """Parts with the block of most parameters replaced by its children, if that gives more stages."""
    for block in sorted(parts, key=lambda part: -sum(w.numel() for w in part.module.parameters())):
        children = _parts(block.module, calls, logits)
        if not any(child.returns(block.output) for child in children):
            continue  # its children's outputs are not all of its own: a residual block, not a chain
        at = parts.index(block)
        opened = [*parts[:at], *children, *parts[at + 1 :]]
        if len(_stages(opened)) > stages:
            return opened
    return None


def _thin(stages: list[Call]) -> list[Call]:
    """At most `MOST_LAYERS` stages: the last of each shape if that leaves enough, else evenly spaced, with the last."""
    if len(stages) <= MOST_LAYERS:
        return stages
    last_of_shape = list({(stage.channels, stage.size): stage for stage in stages}.values())
    if FEWEST_LAYERS <= len(last_of_shape) <= MOST_LAYERS:
        return last_of_shape
    kept = MOST_LAYERS - 1
    return [stages[round(i * (len(stages) - 1) / (kept - 1))] for i in range(kept)]
