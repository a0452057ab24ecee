"""A model's outputs: logits and hidden features, batch by batch; the model is left as found."""

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import mode
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from igeood.errors import InputError, UnsuitedError
from igeood.geometry.precision import exporting
from igeood.model.batch import Batch
from igeood.model.layers import Call, Trace, bare, known_layers, layout_of, mean, named_modules
from igeood.outputs import HEAD, OnError, Outputs
from igeood.summary.needs import Needs

Hook = Callable[[nn.Module, Any, Any], None]
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_making = threading.Lock()


class Reader:
    """Runs a model in evaluation mode and reads blocks of features; the model is left as found.

    Threads that run one model take turns.

    Parameters
    ----------
    model : Module
        The classifier; of wrapped ones (`DataParallel`, `torch.compile`) the bare model is read.
    layers : names
        Keys of `model.named_modules()`, or blocks of them; `HEAD` for the input of the last linear layer.
    layouts : mapping
        For each layer which axis has the channels: "flat" (the default), "second" or "last"; for `HEAD` the linear
        layer's name.
    needs : Needs
        How layers are pooled, and how their blocks are named.

    Attributes
    ----------
    blocks : dict of str
        The layer of each block of features.
    weight : Tensor, optional
        One that has the model's device and precision.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[str] = (),
        layouts: Mapping[str, str] | None = None,
        needs: Needs = Needs(),  # noqa: B008 (it is frozen)
    ) -> None:
        if not isinstance(model, nn.Module):
            cure = f"did you mean method={model!r}?" if isinstance(model, str) else "give the classifier itself"
            raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}", argument="model", cure=cure)
        self.model = model
        self.bare = bare(model)
        self.modules = named_modules(model)
        self._pool = needs.pool or mean
        names = (str(name).removesuffix(needs.ending) for name in layers if name != HEAD)
        self.layers = known_layers(self.modules, names)
        self.blocks = dict(zip(needs.named(self.layers), self.layers, strict=True))
        layouts = layouts or {}
        self.layouts = {layer: layouts.get(layer, "flat") for layer in self.layers}
        if HEAD in layers and HEAD in layouts:
            self.layouts[HEAD] = layouts[HEAD]
            (self.blocks[HEAD],) = known_layers(self.modules, [layouts[HEAD]])
        self._hooked = {self.modules[layer] for layer in self.blocks.values()}
        weights = [weight for weight in model.parameters() if weight.is_floating_point()] or [*model.parameters()]
        dtype = mode(weight.dtype for weight in weights) if weights else None
        self.weight = next((each for each in weights if each.dtype == dtype), None)

    def place(self, batch: Batch) -> Batch:
        """A copy of the batch on the model's device, in its precision: the model may work in place."""
        weight = self.weight
        inputs = dict(batch.inputs)
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                like = value if weight is None else weight
                is_float = like.is_floating_point() and value.is_floating_point()
                inputs[name] = value.to(like.device, like.dtype if is_float else value.dtype, copy=True)
        return replace(batch, inputs=inputs)

    def _run(self, model: nn.Module, batch: Batch, hook: Hook, modules: Iterable[nn.Module]) -> Tensor:
        """Logits of a batch, in one pass with a hook and in evaluation mode; everything is put back afterwards."""
        inputs = self.place(batch).inputs
        with _making:
            lock = _locks.setdefault(self.bare, threading.RLock())
        with lock, ExitStack() as stack:
            for module in list(self.model.modules()):
                if getattr(module, "training", False):  # frozen TorchScript has no modes
                    module.training = False
                    stack.callback(setattr, module, "training", True)
            for module in modules:
                stack.callback(module.register_forward_hook(hook).remove)
            logits = logits_of(model(**inputs) if batch.name else model(inputs[""]))
        if logits.ndim == 2 and logits.shape[0] != batch.x.shape[0]:
            problem = f"{len(logits)} rows for {len(batch)} samples"
            raise InputError(problem, argument="model", cure="return one for each")
        return logits

    def trace(self, batch: Batch) -> Trace:
        """Run up to three samples, and note what each module returned."""
        sample = batch[:3]
        width = None
        calls: dict[nn.Module, list[Call]] = {}

        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            nonlocal width
            tensor = first_tensor(output)
            if tensor is not None and tensor.ndim >= 2:
                layout, width = layout_of(module, tensor, width)
                calls.setdefault(module, []).append(Call(module, tensor.clone(), layout, first_tensor(inputs)))

        inner = [m for m in self.bare.modules() if m is not self.bare and not isinstance(m, torch.jit.ScriptModule)]
        with torch.no_grad():
            logits = self._run(self.bare, sample, note, inner)
        once = (each[0] for each in calls.values() if len(each) == 1)
        names = {module: name for name, module in self.modules.items()}
        return Trace(self.bare, {call.module: call for call in once if len(call.output) == len(sample)}, names, logits)

    @property
    def head(self) -> tuple[Tensor, Tensor] | None:
        """Weight and bias of the linear layer whose input is read, on the CPU."""
        if HEAD not in self.blocks:
            return None
        linear: Any = self.modules[self.blocks[HEAD]]
        weight = linear.weight.detach().cpu().clone()
        return weight, weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.detach().cpu().clone()

    def __call__(
        self, batch: Batch, *, labels: bool = False, keys: bool = False, on_error: OnError = "raise"
    ) -> Outputs:
        """Outputs of one batch, with its labels and keys if wanted; differentiable where gradients are on."""
        logits, features = self.tensors(batch)
        classes = batch.labels if labels else None
        classes = classes.clone() if isinstance(classes, Tensor) else classes  # loaders may reuse it
        hashes = batch.keys if keys else None
        return Outputs(logits, features, classes, keys=hashes, reasons=batch.reasons, on_error=on_error)

    def tensors(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits and blocks of features of one batch, as the model has them: nothing is checked."""
        features: dict[str, Any] = dict.fromkeys(self.blocks)
        thread = threading.get_ident()

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            if threading.get_ident() != thread:  # somebody else runs the model by itself
                return
            for block, layer in self.blocks.items():
                if self.modules[layer] is module:
                    if features[block] is not None:
                        raise InputError(f"{layer!r} is called twice", argument="layers", cure="name another")
                    features[block] = self._features(block, layer, inputs, output, batch)

        logits = self._run(self.bare if self.blocks else self.model, batch, keep, self._hooked)
        for block, value in features.items():
            if value is None:
                problem = f"{self.blocks[block]!r} is not called in a forward pass"
                raise InputError(problem, argument="layers", cure="name another")
        return logits, features

    def _features(self, block: str, layer: str, inputs: Any, output: Any, batch: Batch) -> Tensor:
        """Features (N, m) of what a layer was given and returned."""
        before = first_tensor(inputs)
        value = before if block == HEAD else first_tensor(output)
        samples = batch.x.shape[0]
        if value is None or value.ndim < 2 or value.shape[0] != samples:
            what = "no tensor" if value is None else f"a tensor of shape {tuple(value.shape)}"
            problem = f"{layer!r} returns {what}, not (N, k, ...) of N = {samples} samples"
            raise InputError(problem, argument="layers", cure="name another (or is it one sample? Give x[None])")
        value = value if value.dtype == torch.float64 else value.float()  # sums of many float16 values overflow
        if block == HEAD:
            return value.clone()
        layout = self.layouts[layer]
        shown = _shown(batch.inputs.get("attention_mask"), value) if layout == "last" else None
        return self._pool(Call(self.modules[layer], value, layout, before, shown))


def logits_of(output: Any) -> Tensor:
    """Logits in what a model returned: a tensor, a tuple's first, a mapping's or an object's `logits`."""
    value = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    tensor = first_tensor(value)
    if tensor is None:
        raise InputError(f"returned {type(output).__name__}", argument="model", cure="make it return logits (N, C)")
    return tensor


def _shown(mask: Any, value: Tensor) -> Tensor | None:
    """Which tokens of (N, T, k) an attention mask of zeros and ones shows, (N, T) bool."""
    if not isinstance(mask, Tensor) or mask.shape != value.shape[:2]:
        return None
    if mask.is_floating_point() and not exporting.get() and not bool(((mask == 0) | (mask == 1)).all()):
        return None  # what is added to attention
    return mask.to(value.device) != 0


def first_tensor(output: object) -> Tensor | None:
    """The tensor that a module returned, or the first of several."""
    for value in output if isinstance(output, (tuple, list)) else (output,):
        if isinstance(value, Tensor):
            return value
    return None


def reader_for(model: nn.Module, batch: Batch, needs: Needs, layers: Sequence[str] | None = None) -> Reader:
    """A reader of what a detector needs, or of these layers; up to three samples are run through the network."""
    if not (layers or needs.must_read_layers or (needs.reads_layers and layers is None)):
        return Reader(model)
    if len(batch) == 0:
        raise InputError("empty", argument="x", cure="a sample is needed to find the layers: give one")
    trace = Reader(model, layers or ()).trace(batch)
    if not trace.calls:
        problem = "no module inside of the model is called: a scripted, traced or exported graph has none to hook"
        raise UnsuitedError(
            problem, argument="model", cure="use black_box, or give the eager model that it was made of"
        )
    head = [] if trace.head is None else [HEAD]
    if layers is None:
        ends = needs.layers(trace) if callable(needs.layers) else trace.block_ends()
        chosen = needs.blocks([*needs.named(ends), *head])
    else:
        if HEAD in layers and not head:
            raise InputError("the model ends in no linear layer", argument="layers", cure=f"leave {HEAD!r} out")
        chosen = [*layers, *(head if needs.head and needs.layers != "any" and HEAD not in layers else [])]
    if not chosen:
        raise UnsuitedError("the model has none to read", argument="layers", cure="name layers, or use another method")
    reader = Reader(model, chosen, {HEAD: str(trace.head)}, needs)
    for layer in reader.layers:
        call = trace.calls.get(reader.modules[layer])
        reader.layouts[layer] = "flat" if call is None else call.layout
    return reader


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Python's, NumPy's and torch's random states as they were, even if a loader or a model draws from them.

    For work on a loader, not for single predictions: numbers that other threads draw meanwhile are drawn again.
    """
    python = random.getstate()
    legacy = np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)
