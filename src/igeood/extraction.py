"""A model's outputs: logits and hidden features, batch by batch, with the model left as it was found."""

import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from igeood.batches import Batch, at_batch, batches
from igeood.errors import InputError
from igeood.layers import Layout, check_layers, find_layers, first_tensor, layout_of, pooled
from igeood.outputs import Outputs

Layers = Literal["auto"] | Iterable[str]
# what a model raises of an input that does not fit; classes derived from them have a meaning of their own
_MISFITS = (
    RuntimeError,
    NotImplementedError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AssertionError,
    torch.jit.Error,
)


class Reader:
    """Runs a model and reads its layers. Make one with `reading`, which also puts everything back.

    Parameters
    ----------
    model : Module
        The classifier.
    layers : list of str
        Keys of `model.named_modules()`.
    """

    def __init__(self, model: nn.Module, layers: list[str]) -> None:
        self.model = model
        self.layers = layers
        self._seen: dict[str, Tensor] = {}
        self._layout: Layout | None = None  # of the last module that has one
        self._samples = 0
        self._thread = threading.get_ident()
        weights = next(iter(model.parameters()), None)
        self._device = None if weights is None else weights.device
        if self._device is not None and self._device.type == "meta":
            raise InputError("model: its weights are on the meta device, which holds no values; load them first")
        self._dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]

    def __call__(self, batch: Batch, *, labels: bool = False) -> Outputs:
        """Outputs of one batch, with its labels if they are wanted; differentiable where gradients are on."""
        self._seen.clear()
        self._layout, self._samples = None, len(batch)
        logits = run(self.model, self.place(batch))
        missing = [layer for layer in self.layers if layer not in self._seen]
        if missing:
            raise InputError(f"layers: {missing[0]!r} is not called in the model's forward pass; name another")
        features = {layer: self._seen[layer] for layer in self.layers}
        known = batch.labels if labels else None
        return Outputs(logits, features, known.clone() if isinstance(known, Tensor) else known)  # loaders reuse buffers

    def place(self, batch: Batch) -> Batch:
        """The batch where the model is, in its precision."""

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            try:
                moved = value if self._device is None else value.to(self._device)
            except (RuntimeError, NotImplementedError) as error:
                raise InputError(
                    f"x: is on {value.device} and cannot go to the model's {self._device}: {error}; move it there"
                ) from None
            fits = not moved.is_floating_point() or not self._dtypes or moved.dtype in self._dtypes
            return moved if fits else moved.to(self._dtypes[0])

        keywords = {name: move(value) for name, value in batch.keywords.items()}
        return Batch(tuple(map(move, batch.inputs)), keywords, batch.labels)

    def watch(self, module: nn.Module, _: object, __: object) -> None:
        """Forward hook that notes where the last module with a layout has put its channels."""
        if threading.get_ident() == self._thread:
            self._layout = layout_of(module) or self._layout

    def hook(self, layer: str) -> Callable[[nn.Module, object, object], None]:
        """Forward hook that keeps a layer's feature; calls from other threads are not ours."""

        def keep(_: nn.Module, __: object, output: object) -> None:
            if threading.get_ident() != self._thread:
                return
            if layer in self._seen:
                raise InputError(f"layers: {layer!r} is called twice in one forward pass; name a layer that runs once")
            tensor = first_tensor(output)
            if tensor is None or tensor.ndim < 2 or len(tensor) != self._samples:
                what = type(output).__name__ if tensor is None else f"a tensor of shape {tuple(tensor.shape)}"
                raise InputError(
                    f"layers: {layer!r} returns {what}, not features (N, k, ...) of N = {self._samples} samples; "
                    f"name another (or is it one sample? Give a batch: x[None])"
                )
            self._seen[layer] = pooled(tensor, self._layout)

        return keep


def run(model: nn.Module, batch: Batch) -> Tensor:
    """Logits of a batch. The model gets copies, since it may work in place; what it raises is told with the input."""

    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    keywords = {name: copied(value) for name, value in batch.keywords.items()}
    try:
        output = model(*map(copied, batch.inputs), **keywords)
    except _MISFITS as error:
        if type(error) not in _MISFITS or "DefaultCPUAllocator" in str(error):  # memory that runs out is no misfit
            raise
        what = " ".join(str(error).split())
        raise InputError(
            f"the model fails on an input of shape {tuple(batch.x.shape)}, {batch.x.dtype}: {type(error).__name__}: "
            f"{what[:160]}{'…' * (len(what) > 160)}; give it inputs like those of its training, or mend it"
        ) from error
    logits = logits_of(output)
    if logits.ndim == 2 and len(logits) != len(batch):
        raise InputError(f"model: returned {len(logits)} rows for {len(batch)} samples; make it give a row for each")
    return logits


def logits_of(output: Any) -> Tensor:
    """Logits in what a model returned: a tensor, a tuple's first, a mapping's or an object's `logits`."""
    if isinstance(output, Mapping):
        tensors = {name: value for name, value in output.items() if isinstance(value, Tensor)}
        if "logits" not in output and len(tensors) > 1:
            raise InputError(f"model: returned a mapping of {', '.join(map(repr, tensors))}; name the logits 'logits'")
        output = output.get("logits", next(iter(tensors.values()), None))
    elif hasattr(output, "logits"):
        output = output.logits
    tensor = first_tensor(output)
    if tensor is None:
        raise InputError(
            f"model: returned {type(output).__name__}; make it return logits (N, C), or an object that has them"
        )
    return tensor


@contextmanager
def reading(model: nn.Module, layers: Iterable[str] = ()) -> Iterator[Reader]:
    """Hooks on the layers and the model in evaluation mode; afterwards everything is as it was, whatever happened."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    names = list(layers)
    check_layers(model, names)
    reader = Reader(model, names)
    modules = dict(model.named_modules())
    with _evaluating(model):
        handles = []
        try:
            if names:  # before the layers' own hooks, which want to know
                watched = (module for module in modules.values() if layout_of(module) is not None)
                handles += [module.register_forward_hook(reader.watch) for module in watched]
            handles += [modules[name].register_forward_hook(reader.hook(name)) for name in names]
            yield reader
        finally:
            for handle in handles:
                handle.remove()


def extract(model: nn.Module, loader: Any, layers: Layers = "auto") -> Outputs:
    """Logits, features and labels of all samples of a loader, in one forward pass.

    Parameters
    ----------
    model : Module
        Returns logits: as a tensor, first in a tuple, or as `logits` of a mapping or an object.
    loader : iterable of batches
        Tensors, tuples `(x, y)`, or mappings of keywords; or one such batch.
    layers : "auto" or names
        Keys of `model.named_modules()`; () reads the logits only.

    Returns
    -------
    Outputs
        On the model's device. For more data than memory holds, use `stream`.
    """
    with random_state_kept():
        parts = list(stream(model, loader, layers))
    with at_batch("loader", len(parts) - 1):
        return Outputs.concat(parts)


def stream(model: nn.Module, loader: Any, layers: Layers = ()) -> Iterator[Outputs]:
    """Outputs of each batch of a loader, without gradients; between batches the model is as it was."""
    names = [] if layers == "auto" else resolve_layers(model, loader, layers)
    for number, batch in enumerate(batches(loader, "loader")):
        with at_batch("loader", number):
            if layers == "auto" and number == 0:
                names = auto_layers(model, batch)
            with reading(model, names) as reader, torch.no_grad():
                outputs = reader(batch, labels=True)
        yield outputs


def resolve_layers(model: nn.Module, loader: Any, layers: Layers) -> list[str]:
    """Layer names: those given, or the ends of the model's blocks, found with the loader's first samples."""
    if layers != "auto":
        names = [layers] if isinstance(layers, str) else list(layers)
        check_layers(model, names)
        return names
    if isinstance(loader, Iterator):
        raise InputError("loader: 'auto' layers read its first batch, so it must be re-iterable; a generator is not")
    with random_state_kept():
        first = next(batches(loader, "loader"))
    return auto_layers(model, first)


def auto_layers(model: nn.Module, batch: Batch) -> list[str]:
    """The ends of the model's blocks, found with a batch's first samples."""
    if len(batch) == 0:
        raise InputError("empty; 'auto' layers need a sample to run through the model; name the layers")
    with reading(model) as reader, torch.no_grad():
        sample = reader.place(batch[slice(0, 3)])
        return find_layers(model, lambda: run(model, sample), len(sample))


class _Modes:
    """How many calls hold a model in evaluation mode, and the training modes to put back after the last of them."""

    def __init__(self) -> None:
        self.holders = 0
        self.training: list[nn.Module] = []


_lock = threading.Lock()
_modes: "weakref.WeakKeyDictionary[nn.Module, _Modes]" = weakref.WeakKeyDictionary()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode while any call needs it. A model that is in evaluation mode already is not touched."""
    with _lock:
        modes = _modes.setdefault(model, _Modes())
        modes.holders += 1
        training = [module for module in model.modules() if module.training]
        for module in training:
            module.training = False
        modes.training += training
    try:
        yield
    finally:
        with _lock:
            modes.holders -= 1
            if modes.holders == 0:
                for module in modes.training:
                    module.training = True
                modes.training = []


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Python's, NumPy's and torch's random states as they were, even if a loader or a model drew from them.

    For work on a loader, not for single predictions: what other threads draw in the meantime is drawn again.
    """
    python, legacy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        if not torch.equal(torch_state, torch.get_rng_state()):
            torch.set_rng_state(torch_state)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
