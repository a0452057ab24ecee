"""A model's outputs: logits and hidden features, batch by batch; the model is left as found."""

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
        Keys of `model.named_modules()`.
    layouts : mapping
        For each layer which axis has the channels: "flat", "second" or "last"; for `HEAD`, if its input is read too,
        the linear layer's name.
    pool : callable, optional
        Makes features (N, m) of a layer's `Call`; by default the mean.
    ending : str
        What the names of blocks have after the layer's.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[str] = (),
        layouts: Mapping[str, str] | None = None,
        *,
        pool: Callable[[Call], Tensor] | None = None,
        ending: str = "",
    ) -> None:
        if not isinstance(model, nn.Module):
            cure = f"did you mean method={model!r}?" if isinstance(model, str) else "give the classifier itself"
            raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}", argument="model", cure=cure)
        self.model = model
        self.bare = bare(model)
        self.modules = named_modules(model)
        self.layers = known_layers(self.modules, layers)
        self.layouts = dict(layouts or {})
        self._pool = pool or mean
        self._blocks = {f"{layer}{ending}": layer for layer in self.layers}  # the layer of each block
        if HEAD in self.layouts:
            (self._blocks[HEAD],) = known_layers(self.modules, [self.layouts[HEAD]])
        self._hooked = list(dict.fromkeys(self.modules[layer] for layer in self._blocks.values()))
        weights = list(model.parameters())
        dtypes = [weight.dtype for weight in weights if weight.is_floating_point()]
        fitting = (weight for weight in weights if not dtypes or weight.dtype == mode(dtypes))
        self._weight = next(fitting, None)  # has the model's device and precision

    def place(self, batch: Batch) -> Batch:
        """A copy of the batch on the model's device, in its precision: the model may work in place."""
        weight = self._weight

        def placed(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if weight is None or not (weight.is_floating_point() and value.is_floating_point()):
                return value.to(value.device if weight is None else weight.device, copy=True)
            return value.to(weight.device, weight.dtype, copy=True)

        return batch.mapped(placed)

    def _run(self, model: nn.Module, batch: Batch, hooks: Iterable[tuple[nn.Module, Hook]]) -> Tensor:
        """Logits of a batch, in one pass with hooks and in evaluation mode; everything is put back afterwards."""
        inputs = self.place(batch).inputs
        with _making:
            lock = _locks.setdefault(self.bare, threading.RLock())
        with lock, ExitStack() as stack:
            for module in list(self.model.modules()):
                if module.training:
                    module.training = False
                    stack.callback(setattr, module, "training", True)
            for module, hook in hooks:
                stack.callback(module.register_forward_hook(hook).remove)
            logits = logits_of(model(**inputs) if batch.name else model(inputs[""]))
        if logits.ndim == 2 and logits.shape[0] != batch.x.shape[0]:
            raise InputError(
                f"{len(logits)} rows for {len(batch)} samples", argument="model", cure="return one for each"
            )
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
            logits = self._run(self.bare, sample, [(module, note) for module in inner])
        once = {module: found[0] for module, found in calls.items() if len(found) == 1}
        names = {module: name for name, module in self.modules.items()}
        fitting = {module: call for module, call in once.items() if len(call.output) == len(sample)}
        return Trace(self.bare, fitting, names, logits)

    @property
    def head(self) -> tuple[Tensor, Tensor] | None:
        """Weight and bias of the linear layer whose input is read, on the CPU."""
        if HEAD not in self._blocks:
            return None
        linear: Any = self.modules[self._blocks[HEAD]]
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
        features: dict[str, Tensor] = {}
        thread = threading.get_ident()

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            if threading.get_ident() != thread:  # somebody else runs the model by itself
                return
            for block, layer in self._blocks.items():
                if self.modules[layer] is module:
                    if block in features:
                        raise InputError(f"{layer!r} is called twice", argument="layers", cure="name another")
                    features[block] = self._features(block, layer, inputs, output, batch)

        hooks = [(module, keep) for module in self._hooked]
        logits = self._run(self.bare if hooks else self.model, batch, hooks)
        for block, layer in self._blocks.items():
            if block not in features:
                raise InputError(f"{layer!r} is not called in a forward pass", argument="layers", cure="name another")
        return logits, {block: features[block] for block in self._blocks}

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
    names = list(layers or ())
    if layers is None and needs.layers != "none":
        names = needs.layers(trace) if callable(needs.layers) else trace.block_ends()
    available = names if trace.head is None else [*names, HEAD]
    blocks = Needs(layers=needs.layers, head=needs.head).blocks(available) if layers is None else names
    if needs.head and trace.head is not None and HEAD not in blocks and needs.layers != "any":
        blocks = [*blocks, HEAD]
    if not blocks:
        raise UnsuitedError("the model has none to read", argument="layers", cure="name layers, or use another method")
    modules = named_modules(model)
    chosen = known_layers(modules, [name for name in blocks if name != HEAD])
    calls = {name: trace.calls.get(modules[name]) for name in chosen}
    layouts = {name: "flat" if call is None else call.layout for name, call in calls.items()}
    if HEAD in blocks:
        layouts[HEAD] = str(trace.head)
    return Reader(model, chosen, layouts, pool=needs.pool, ending=needs.ending)


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
