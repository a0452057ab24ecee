"""A model's outputs: logits and hidden features, batch by batch; the model is left as found."""

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import mode
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from igeood.errors import InputError, UnsuitedError
from igeood.geometry.plain import is_plain
from igeood.model.batches import Batch, at_batch, batches
from igeood.model.layers import Call, Layers, bare, block_ends, convolutions, known_layers, layout_of, named_modules
from igeood.model.statistics import OF_INPUTS, STATISTICS, running_statistics
from igeood.outputs import HEAD, INPUT, Outputs, returned_blocks

_MISSING = {
    "convolutions": "convolution after a first one",
    "norms": "batch norm with running statistics (other norms keep none, and folded ones are gone)",
}
_CURE = "name layers, from model.named_modules(), or use another method"
Hook = Callable[[nn.Module, Any, Any], None]

_lock = threading.Lock()  # of what readers do to models: modes and hooks
_held: dict[nn.Module, tuple[int, list[nn.Module]]] = {}  # who runs a model now: how many; its modules in training mode


class Reader:
    """Runs a model in evaluation mode and reads blocks of features, from any thread; the model is left as found.

    Parameters
    ----------
    model : Module
        The classifier; of wrapped ones (`DataParallel`, `torch.compile`) the bare model is read.
    layers : names
        Keys of `model.named_modules()`.
    statistic : str
        Of each layer's features: a key of `STATISTICS`.
    head, inputs : bool
        Also read the input of the last linear layer, as block `HEAD`; and the model's own, as block `INPUT`.
    returns : names
        Also read these tensors (N, m), where the model returns them by name beside its logits, as blocks `|name`.
    layouts : mapping, optional
        For each layer which axis has the channels: "flat", "second" or "last"; for `HEAD` the linear layer's name.
        Without it `prepare` decides.

    Attributes
    ----------
    layers : list of str
        Without the prefixes of wrappers.
    layouts : dict
        As above; full once the reader is prepared.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[str] = (), *, statistic: str = "mean", head: bool = False,
        inputs: bool = False, returns: Sequence[str] = (), layouts: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(model, nn.Module):
            hint = f"did you mean method={model!r}?" if isinstance(model, str) else "give the classifier"
            raise InputError(f"model: expected a torch.nn.Module, got {type(model).__name__}; {hint}")
        if statistic not in STATISTICS:
            raise InputError.unknown("statistic", statistic, STATISTICS)
        self.model, self.bare, self.statistic = model, bare(model), statistic
        self._wants_head, self._wants_input, self._returns = head, inputs, tuple(returns)
        self.layers, self.layouts = list(layers), dict(layouts or {})
        self._look()
        ending = "" if statistic == "mean" else f"|{statistic}"
        self._blocks = {f"{layer}{ending}": layer for layer in self.layers}  # the layer of each block
        if head and HEAD in self.layouts:
            (self._blocks[HEAD],) = known_layers(self.modules, [self.layouts[HEAD]])
        self._prepared = self.layouts.keys() >= {*self.layers, *[HEAD] * head}

    def _look(self) -> None:
        """Note the model's modules: walking through them takes longer than to see that they are the same."""
        self.modules = named_modules(self.model)
        self.layers = known_layers(self.modules, self.layers)
        self._parameters = list(self.model.parameters())
        self._tree = list(self.model.modules())
        self._children = [tuple(module._modules.values()) for module in self._tree]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold the model in evaluation mode, and put everything back afterwards. Nests; threads may overlap."""
        with _lock:
            if [tuple(module._modules.values()) for module in self._tree] != self._children:
                self._look()
            users, training = _held.get(self.bare, (0, []))
            training += [module for module in self._tree if module.training]
            _held[self.bare] = users + 1, training
            for module in training:
                module.training = False
        try:
            yield
        finally:
            with _lock:
                users, training = _held.pop(self.bare)
                if users > 1:
                    _held[self.bare] = users - 1, training
                for module in training if users == 1 else ():
                    module.training = True

    def place(self, batch: Batch) -> Batch:
        """A copy of the batch on the model's device, in its precision: the model may work in place."""
        device = self._parameters[0].device if self._parameters else None
        dtypes = [p.dtype for p in self._parameters if p.is_floating_point()]

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            fits = not value.is_floating_point() or not dtypes or value.dtype in dtypes
            return value.to(device, value.dtype if fits else mode(dtypes), copy=True)

        return batch.mapped(move)

    def _run(self, model: nn.Module, batch: Batch, hooks: Iterable[tuple[nn.Module, Hook]]) -> dict[str, Tensor]:
        """Logits of a batch, "", and blocks that the model returns by name, in a `running` block.

        The hooks see this pass alone, not those of other threads.
        """
        inputs, thread = self.place(batch).inputs, threading.get_ident()

        def call(hook: Hook, *of_module: Any) -> None:
            if threading.get_ident() == thread:
                hook(*of_module)

        with ExitStack() as stack:
            with _lock:  # torch counts hooks without one
                for module, hook in hooks:
                    stack.callback(module.register_forward_hook(partial(call, hook)).remove)
            output = model(**inputs) if batch.name else model(inputs[""])
        logits = logits_of(output)
        if logits.ndim == 2 and logits.shape[0] != batch.x.shape[0]:
            cure = "make it return one for each"
            raise InputError(f"model: returned {len(logits)} rows for {len(batch)} samples; {cure}")
        named = [(block, _named(output, block[1:])) for block in returned_blocks(self._returns)]
        return {"": logits, **{block: value for block, value in named if isinstance(value, Tensor)}}

    def watch(self, batch: Batch) -> tuple[dict[nn.Module, Call], Tensor]:
        """Calls of the modules that return (N, k, ...), in the order of their ends; and the logits.

        Up to three samples of the batch are run. Modules that are called twice are left out.
        """
        sample, width = batch[:3], None
        calls: dict[nn.Module, list[Call]] = {}

        def note(module: nn.Module, _: Any, output: Any) -> None:
            nonlocal width
            tensor = first_tensor(output)
            if tensor is not None and tensor.ndim >= 2:
                layout, width = layout_of(module, tensor, width)
                calls.setdefault(module, []).append(Call(module, tensor.clone(), layout))

        inner = [m for m in self.bare.modules() if m is not self.bare and not isinstance(m, torch.jit.ScriptModule)]
        with self.running(), torch.no_grad():
            logits = self._run(self.bare, sample, [(module, note) for module in inner])[""]
        once = {module: call for module, (call, *more) in calls.items() if not more}
        return {module: call for module, call in once.items() if len(call.output) == len(sample)}, logits

    def prepare(self, batch: Batch) -> None:
        """Decide the layouts and find the head, in one forward pass of up to three samples."""
        calls, logits = self.watch(batch)
        for layer in self.layers:
            call = calls.get(self.modules[layer])  # one that is missing cannot be read either
            self.layouts[layer] = "flat" if call is None else call.layout
        if self._wants_head:
            found = self.find_head(calls, logits)
            if found is None:
                cure = "make the model return its last linear layer's output, or use another method"
                raise InputError(f"model: no nn.Linear returns its logits, whose input is wanted; {cure}")
            self._blocks[HEAD] = self.layouts[HEAD] = found
        self._prepared = True

    def find_head(self, calls: Mapping[nn.Module, Call], logits: Tensor) -> str | None:
        """Name of the linear layer whose output is the logits, if there is one."""
        linear = {c.module for c in calls.values() if isinstance(c.module, nn.Linear) and c.returns(logits)}
        return next((name for name, module in self.modules.items() if module in linear), None)

    @property
    def head(self) -> tuple[Tensor, Tensor] | None:
        """Weight and bias of the linear layer whose input is read, on the CPU."""
        if HEAD not in self._blocks:
            return None
        weight, bias = (getattr(self.modules[self._blocks[HEAD]], name) for name in ("weight", "bias"))
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        return weight.detach().cpu().clone(), bias.detach().cpu().clone()

    def __call__(self, batch: Batch, *, labels: bool = False, keys: bool = False) -> Outputs:
        """Outputs of one batch, with its labels and keys if wanted; differentiable where gradients are on."""
        logits, features = self.tensors(batch)
        classes = batch.labels if labels else None
        classes = classes.clone() if isinstance(classes, Tensor) else classes  # loaders may reuse it
        if self._wants_input:  # its shape is read again from the block's name
            name = " ".join(map(str, (INPUT, *batch.x.shape[1:])))
            features = {name: batch.x.flatten(1).to(logits.device), **features}
        known = batch.keys if keys else None
        return Outputs(logits, features, classes, keys=known, first=batch.first, refused=batch.refused)

    def tensors(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits and blocks of features of one batch, as the model has them: nothing is checked."""
        if not self._prepared:
            self.prepare(batch)
        features: dict[str, Tensor] = {}

        def keep(block: str, layer: str, _: nn.Module, inputs: Any, output: Any) -> None:
            if block in features:
                raise InputError(f"layers: {layer!r} is called twice in one forward pass; name a layer that runs once")
            value = first_tensor(inputs if block == HEAD or self.statistic in OF_INPUTS else output)
            features[block] = self._pooled(value, block, layer, batch)

        with self.running():
            hooks = [(self.modules[layer], partial(keep, block, layer)) for block, layer in self._blocks.items()]
            returned = self._run(self.bare if hooks else self.model, batch, hooks)
        for block, layer in self._blocks.items():
            if block not in features:
                raise InputError(f"layers: {layer!r} is not called in the model's forward pass; name another")
        return returned.pop(""), {**{block: features[block] for block in self._blocks}, **returned}

    def _pooled(self, value: Tensor | None, block: str, layer: str, batch: Batch) -> Tensor:
        """Features (N, k) from what a layer returned, (N, k, ...); tokens that an attention mask hides do not count."""
        mask: Any = batch.inputs.get("attention_mask")
        samples = batch.x.shape[0]
        if value is None or value.ndim < 2 or value.shape[0] != samples:
            what = "no tensor" if value is None else f"a tensor of shape {tuple(value.shape)}"
            cure = "name another (or is it one sample? Give a batch: x[None])"
            raise InputError(f"layers: {layer!r} returns {what}, not (N, k, ...) of N = {samples} samples; {cure}")
        wide = value if value.dtype == torch.float64 else value.float()  # sums of many float16 values overflow
        if block == HEAD:
            return wide.clone()
        if value.ndim == 3 and self.layouts[layer] == "last" and _hides(mask, value):
            shown = mask.to(wide.device)[..., None] != 0  # (N, T, 1)
            scale = value.shape[1] / shown.sum(dim=1, keepdim=True).clamp(min=1) if self.statistic == "mean" else 1.0
            wide = torch.where(shown, wide, 0.0) * scale
        return STATISTICS[self.statistic](self.modules[layer], wide, self.layouts[layer])


def logits_of(output: Any) -> Tensor:
    """Logits in what a model returned: a tensor, a tuple's first, a mapping's or an object's `logits`."""
    tensor = first_tensor(_named(output, "logits", None if isinstance(output, Mapping) else output))
    if tensor is None:
        cure = "make it return logits (N, C), as a tensor, or by the name 'logits'"
        raise InputError(f"model: returned {type(output).__name__} without logits; {cure}")
    return tensor


def _named(output: Any, name: str, default: Any = None) -> Any:
    """What a model returned by a name: in a mapping, or as an object's attribute."""
    return output.get(name, default) if isinstance(output, Mapping) else getattr(output, name, default)


def _hides(mask: Any, value: Tensor) -> bool:
    """Whether a mask has a 0 or a 1 for each token of (N, T, k)."""
    if not isinstance(mask, Tensor) or mask.shape != value.shape[:2]:
        return False
    return is_plain() or bool(((mask == 0) | (mask == 1)).all())


def first_tensor(output: object) -> Tensor | None:
    """The tensor that a module returned, or the first of several."""
    values = output if isinstance(output, (tuple, list)) else (output,)
    return next((value for value in values if isinstance(value, Tensor)), None)


def choose_layers(model: nn.Module, batch: Batch, kind: str, *, head: bool = False) -> list[str]:
    """Names of a model's layers, in the order in which they are called.

    Parameters
    ----------
    model : Module
        The network.
    batch : Batch
        Up to three of its samples are run through the network.
    kind : str
        "all", "last", "last two": the ends of the network's blocks, the classifier left out, for `Needs.blocks` to
        choose from; of the last ones with `HEAD` where the classifier's head is linear;
        "convolutions": every one but the first, and the blocks that they make up; "norms": batch norms; "none".
        Modules that are called twice are left out.
    head : bool
        With `HEAD` for the other kinds too.
    """
    if kind == "none" and not head:
        return []
    if len(batch) == 0:
        raise InputError("empty; a sample is needed to find the layers; name the layers, or give one")
    reader = Reader(model)
    calls, logits = reader.watch(batch)
    if kind == "convolutions":
        chosen = convolutions(reader.bare, calls, logits)
    elif kind == "norms":
        chosen = [call for call in calls.values() if running_statistics(call.module) is not None]
    else:
        chosen = [] if kind == "none" else block_ends(reader.bare, calls, logits)
    names = {module: name for name, module in reader.modules.items()}
    layers = [names[call.module] for call in chosen]
    if (head or kind in ("last", "last two")) and reader.find_head(calls, logits) is not None:
        layers.append(HEAD)
    if not layers:
        cure = "use another method" if kind == "norms" else _CURE
        raise UnsuitedError(f"layers: no {_MISSING.get(kind, 'layer to read')} in this model; {cure}")
    return layers


def extract(
    model: nn.Module, loader: Any, layers: Layers = "auto", *, statistic: str = "mean", head: bool = False
) -> Outputs:
    """Logits, features, labels and keys of all samples of a loader, in one forward pass.

    Parameters
    ----------
    model : Module
        Returns logits: as a tensor, first in a tuple, or as `logits` of a mapping or an object.
    loader : iterable of batches
        Tensors, tuples `(x, y)`, or mappings of keywords; or one such batch.
    layers : "auto", "convolutions", "norms" or names
        "auto" takes the ends of the network's blocks; names are keys of `model.named_modules()`; () reads no layer.
    statistic : str
        Of each layer's output.
    head : bool
        Also read the input of the last linear layer.

    Returns
    -------
    Outputs
        On the model's device.
    """
    kind = {"auto": "all", "convolutions": "convolutions", "norms": "norms"}.get(str(layers))
    names = [] if kind else [layers] if isinstance(layers, str) else list(layers)
    reader = Reader(model, names, statistic=statistic, head=head)
    parts = []
    with random_state_kept():
        for number, batch in enumerate(batches(loader, "loader")):
            with at_batch("loader", number), torch.inference_mode(False), torch.no_grad():
                if kind and number == 0:
                    reader = Reader(model, choose_layers(model, batch, kind), statistic=statistic, head=head)
                parts.append(reader(batch, labels=True, keys=True))
    return Outputs.concat(parts)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Python's, NumPy's and torch's random states as they were, even if a loader or a model draws from them.

    For work on a loader, not for single predictions: numbers that other threads draw meanwhile are drawn again.
    """
    python, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)
