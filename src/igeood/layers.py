"""Which layers of a network to read: the ends of its blocks, found by watching one forward pass."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from igeood.errors import InputError

MOST_LAYERS = 6
FEWEST_LAYERS = 4  # fewer than this, and the largest block is opened


@dataclass(frozen=True)
class Call:
    """One call of a module in the forward pass."""

    name: str
    module: nn.Module
    output: Tensor | None

    @property
    def channels(self) -> int:
        """Width of the feature that this output gives."""
        return 0 if self.output is None else pooled(self.output, self.module).shape[1]

    @property
    def size(self) -> int:
        """Values for each channel: pixels or tokens."""
        return 0 if self.output is None else self.output[0].numel() // max(1, self.channels)


def check_layers(model: nn.Module, layers: list[str]) -> None:
    """Raise unless every layer is a key of `model.named_modules()`."""
    known = [name for name, _ in model.named_modules() if name]
    for layer in layers:
        if not isinstance(layer, str):
            raise InputError(f"layers: expected names, keys of model.named_modules(); got {layer!r}")
        if layer not in known:
            close = difflib.get_close_matches(layer, known, n=3, cutoff=0.3) or known[:3]
            raise InputError(f"layers: the model has no {layer!r}; near names: {', '.join(map(repr, close))}")
    if len(set(layers)) != len(layers):
        raise InputError(f"layers: {layers} names a layer twice")


def find_layers(model: nn.Module, run: Callable[[], Tensor]) -> list[str]:
    """Names of the layers at which the network's blocks end, in the order in which they are called.

    The network's parts are read in order: a convolution, a linear layer or a block begins a stage, and what follows
    without changing the width (normalisation, activation, pooling) ends it, as does a transition that shrinks a dense
    block's output. The classifier itself is left out.

    Parameters
    ----------
    model : Module
        The network.
    run : callable
        Runs a small batch through the model and returns its logits.
    """
    calls, logits = _watch(model, run)
    parts = _parts(model, "", calls, logits)
    stages = _stages(parts)
    while len(stages) < FEWEST_LAYERS:
        opened = _open_largest(parts, stages, calls, logits)
        if opened is None:
            break
        parts, stages = opened, _stages(opened)
    if not stages:
        raise InputError("layers: 'auto' found no layer to read in this model; name some, from model.named_modules()")
    return [stage.name for stage in _thin(stages)]


def _watch(model: nn.Module, run: Callable[[], Tensor]) -> tuple[dict[str, Call], Tensor]:
    """Run the model and note each module's output, in the order of their ends; modules called twice are left out."""
    calls: dict[str, Call] = {}
    twice: set[str] = set()

    def hook_for(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, _: object, output: object) -> None:
            if name in calls:
                twice.add(name)
            calls[name] = Call(name, module, first_tensor(output))

        return hook

    handles = [module.register_forward_hook(hook_for(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            logits = run()
    finally:
        for handle in handles:
            handle.remove()
    return {name: call for name, call in calls.items() if name not in twice}, logits


def _parts(module: nn.Module, prefix: str, calls: dict[str, Call], logits: Tensor) -> list[Call]:
    """The module's called children, in order; containers that are not called, or that end in the logits, are opened."""
    found: list[Call] = []
    for child_name, child in module.named_children():
        name = f"{prefix}{child_name}"
        call = calls.get(name)
        if call is None or call.output is None or _gives(call.output, logits):
            found += _parts(child, f"{name}.", calls, logits)
        elif call.output.ndim >= 2:
            found.append(call)
    order = {name: i for i, name in enumerate(calls)}
    return sorted(found, key=lambda call: order[call.name])


def _gives(output: Tensor, whole: Tensor | None) -> bool:
    """Whether a module's output is that of the whole, such as the model's logits."""
    return whole is not None and output.shape == whole.shape and torch.equal(output.float(), whole.float())


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
    kinds = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
    return not isinstance(part.module, kinds) and any(True for _ in part.module.parameters())


def _is_transition(before: Call, part: Call) -> bool:
    """Whether a part shrinks its predecessor's output in both width and size, as between dense blocks."""
    is_block = any(True for _ in before.module.children())
    return is_block and part.channels < before.channels and 1 < part.size < before.size


def _open_largest(parts: list[Call], stages: list[Call], calls: dict[str, Call], logits: Tensor) -> list[Call] | None:
    """Parts with the block of most parameters replaced by its children, if that gives more stages."""
    blocks = sorted(parts, key=lambda p: -sum(w.numel() for w in p.module.parameters()))
    for block in blocks:
        children = _parts(block.module, f"{block.name}.", calls, logits)
        if not any(_gives(child.output, block.output) for child in children if child.output is not None):
            continue  # what its children give is not all that it gives: a residual block, not a chain
        at = parts.index(block)
        opened = [*parts[:at], *children, *parts[at + 1 :]]
        if len(_stages(opened)) > len(stages):
            return opened
    return None


def _thin(stages: list[Call]) -> list[Call]:
    """At most `MOST_LAYERS` stages: the last of each shape if that leaves enough, else evenly spaced, with the last."""
    if len(stages) <= MOST_LAYERS:
        return stages
    last_of_shape = list({(s.channels, s.size): s for s in stages}.values())
    if FEWEST_LAYERS <= len(last_of_shape) <= MOST_LAYERS:
        return last_of_shape
    kept = MOST_LAYERS - 1
    return [stages[round(i * (len(stages) - 1) / (kept - 1))] for i in range(kept)]


def first_tensor(output: object) -> Tensor | None:
    """The tensor that a module returned, or the first of several."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, (tuple, list)):
        return next((value for value in output if isinstance(value, Tensor)), None)
    return None


def pooled(output: Tensor, module: nn.Module) -> Tensor:
    """One feature vector a sample, (N, k) float32 or float64: the mean over all axes but samples and channels.

    Channels are the second axis where convolutions made the output, and the last one where linear layers did.
    """
    wide = output if output.dtype in (torch.float32, torch.float64) else output.float()
    if wide.ndim <= 2:
        return wide
    if _channels_last(module, wide.ndim):
        return wide.flatten(1, -2).mean(dim=1)
    return wide.flatten(2).mean(dim=2)


_CONVS = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.GroupNorm)
_TOKENS = (nn.Linear, nn.LayerNorm, nn.MultiheadAttention, nn.Embedding, nn.RNNBase)
_POOLS = (nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd)


def _channels_last(module: nn.Module, axes: int) -> bool:
    """Whether an output is (N, T, D) or (N, H, W, D): made by linear layers, or by nothing known."""
    if _has(module, _TOKENS):
        return not _has(module, _CONVS)
    return axes == 3 and not _has(module, (*_CONVS, *_POOLS))


def _has(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    return any(isinstance(part, kinds) for part in module.modules())
