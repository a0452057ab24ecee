"""Which layers of a network to read: the ends of its blocks, found by watching one forward pass."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from igeood.errors import InputError

MOST_LAYERS = 6
FEWEST_LAYERS = 4  # fewer than this, and the largest block is opened


@dataclass(frozen=True)
class Layout:
    """Where a module puts its channels: their number, and whether they are the last axis or the second."""

    channels: int
    last: bool


@dataclass(frozen=True)
class Call:
    """One call of a module in the forward pass."""

    name: str
    module: nn.Module
    output: Tensor | None
    layout: Layout | None = None

    @property
    def channels(self) -> int:
        """Width of the feature that this output gives."""
        return 0 if self.output is None else pooled(self.output, self.layout).shape[1]

    @property
    def size(self) -> int:
        """Values for each channel: pixels or tokens."""
        return 0 if self.output is None else self.output[0].numel() // max(1, self.channels)


def check_layers(model: nn.Module, layers: list[str]) -> None:
    """Raise unless every layer is a key of `model.named_modules()`."""
    modules = dict(model.named_modules())
    known = [name for name in modules if name]
    for layer in layers:
        if not isinstance(layer, str):
            raise InputError(f"layers: expected names, keys of model.named_modules(); got {layer!r}")
        if layer not in known:
            close = difflib.get_close_matches(layer, known, n=3, cutoff=0.3) or known[:3]
            raise InputError(f"layers: the model has no {layer!r}; near names: {', '.join(map(repr, close))}")
        if isinstance(modules[layer], torch.jit.ScriptModule):
            raise InputError(
                f"layers: {layer!r} is scripted or traced and cannot be read; name others, or use black_box"
            )
    if len(set(layers)) != len(layers):
        raise InputError(f"layers: {layers} names a layer twice")


def find_layers(model: nn.Module, run: Callable[[], Tensor], samples: int) -> list[str]:
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
    samples : int
        Size of that batch: layers whose first axis is another are left out.
    """
    calls, logits = _watch(model, run, samples)
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


def _watch(model: nn.Module, run: Callable[[], Tensor], samples: int) -> tuple[dict[str, Call], Tensor]:
    """Run the model and note each module's output, in the order of their ends; modules called twice are left out."""
    calls: dict[str, Call] = {}
    twice: set[str] = set()
    layout: Layout | None = None

    def hook_for(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, _: object, output: object) -> None:
            nonlocal layout
            layout = layout_of(module) or layout
            if name in calls:
                twice.add(name)
            tensor = first_tensor(output)
            usable = tensor is not None and tensor.ndim >= 2 and len(tensor) == samples
            calls[name] = Call(name, module, tensor.clone() if tensor is not None and usable else None, layout)

        return hook

    parts = {n: m for n, m in model.named_modules() if n and not isinstance(m, torch.jit.ScriptModule)}
    handles = [module.register_forward_hook(hook_for(name)) for name, module in parts.items()]
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
        else:
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


def layout_of(module: nn.Module) -> Layout | None:
    """Layout of what a single module with weights gives; None for containers, activations, pooling."""
    for kinds, attribute, last in _LAYOUTS:
        if isinstance(module, kinds):
            width = getattr(module, attribute)
            return Layout(width if isinstance(width, int) else width[-1], last)
    if isinstance(module, nn.RNNBase):
        return Layout((module.proj_size or module.hidden_size) * (1 + module.bidirectional), True)
    return None


_LAYOUTS: tuple[tuple[Any, str, bool], ...] = (
    (nn.modules.conv._ConvNd, "out_channels", False),
    ((nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm), "num_features", False),
    (nn.GroupNorm, "num_channels", False),
    (nn.Linear, "out_features", True),
    (nn.LayerNorm, "normalized_shape", True),
    (nn.Embedding, "embedding_dim", True),
    (nn.MultiheadAttention, "embed_dim", True),
)


def pooled(output: Tensor, layout: Layout | None) -> Tensor:
    """One feature vector a sample, (N, k) float32 or float64: the mean over all axes but samples and channels.

    Channels are on the axis where the module before has put them, if its width is found there; else on the other one.
    With nothing known they are the last of three axes (a sequence), and the second of more (an image).
    """
    wide = output if output.dtype in (torch.float32, torch.float64) else output.float()
    if wide.ndim <= 2:
        return wide.clone()  # the next module may work in place
    last = wide.ndim == 3 if layout is None else layout.last
    if layout is not None and wide.shape[-1 if last else 1] != layout.channels == wide.shape[1 if last else -1]:
        last = not last  # transposed since, as patches are into tokens
    if last:
        return wide.flatten(1, -2).mean(dim=1)
    return wide.flatten(2).mean(dim=2)
