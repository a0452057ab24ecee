"""A model's outputs: logits and hidden features, batch by batch, with the model left as it was found."""

import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from igeood.errors import InputError
from igeood.layers import Layout, check_layers, find_layers, first_tensor, layout_of, pooled
from igeood.outputs import Keys, Outputs, row_keys

Layers = Literal["auto"] | Iterable[str]
CHUNK = 256  # samples of a bare tensor that go through the model at a time
_LABEL_KEYS = ("labels", "label")
_VALUE_KEYS = ("pixel_values", "inputs_embeds", "input_values", "input_features", "x", "input_ids")


@dataclass(frozen=True)
class Batch:
    """One batch of a loader: the model's inputs, by position or by keyword, and the labels where there are any."""

    inputs: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    labels: Any = None  # as they came; checked where they are wanted

    @property
    def x(self) -> Tensor:
        """The input itself: the only one by position; by keyword, the one that holds values, or the first tensor."""
        x: Tensor = self.inputs[0] if self.inputs else self.keywords[self._name]
        return x

    @property
    def _name(self) -> str:
        tensors = {name: value for name, value in self.keywords.items() if isinstance(value, Tensor)}
        known = [name for name in _VALUE_KEYS if name in tensors]
        floating = [name for name, value in tensors.items() if value.is_floating_point() and "mask" not in name]
        return [*known, *floating, *tensors][0]

    @property
    def keys(self) -> Keys:
        """A key for each sample's content, over all tensors: (N,)."""
        n = len(self)
        parts = [v for v in (*self.inputs, *self.keywords.values()) if isinstance(v, Tensor) and v.ndim and len(v) == n]
        return row_keys(torch.cat([part.detach().reshape(n, -1).float() for part in parts], dim=1) if n else self.x)

    def with_x(self, x: Tensor) -> "Batch":
        """The same batch with another input."""
        if self.inputs:
            return Batch((x,), {}, self.labels)
        return Batch((), {**self.keywords, self._name: x}, self.labels)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: Tensor | slice) -> "Batch":
        n = len(self)

        def pick(value: Any) -> Any:
            return value[rows] if isinstance(value, Tensor) and value.ndim and len(value) == n else value

        keywords = {name: pick(value) for name, value in self.keywords.items()}
        return Batch(tuple(map(pick, self.inputs)), keywords, pick(self.labels))


def batches(source: Any) -> Iterator[Batch]:
    """Batches of a loader, or of one tensor, array, `(x, y)` pair or mapping, cut into pieces of 256 samples."""
    if isinstance(source, (Tensor, np.ndarray, Mapping)) or _is_pair(source):
        whole = as_batch(source)
        for start in range(0, max(1, len(whole)), CHUNK):
            yield whole[slice(start, start + CHUNK)]
        return
    if not isinstance(source, Iterable):
        raise InputError(f"x: expected a tensor, a batch or a loader of batches, got {type(source).__name__}")
    for item in source:
        yield as_batch(item)


def _is_pair(source: Any) -> bool:
    """Whether this is one batch `(x, y)`: a tuple of arrays, or a list as loaders give it, not a list of batches."""
    if not isinstance(source, (tuple, list)) or not source or not isinstance(source[0], (Tensor, np.ndarray)):
        return False
    if isinstance(source, tuple):
        return True
    second = source[1] if len(source) == 2 else None
    return isinstance(second, Tensor) and second.ndim == 1 < source[0].ndim and len(second) == len(source[0])


def as_batch(item: Any) -> Batch:
    """One batch: a tensor or array, a tuple `(x, y)` or `(x, y, ...)`, or a mapping whose entries are keywords."""
    if isinstance(item, Mapping):
        keywords = {name: _tensor(value) for name, value in item.items() if name not in _LABEL_KEYS}
        labels = next((item[name] for name in _LABEL_KEYS if name in item), None)
        if not any(isinstance(value, Tensor) for value in keywords.values()):
            raise InputError(f"batch: the mapping has no tensor among {sorted(item)}")
        return Batch((), keywords, _tensor(labels))
    parts = item if isinstance(item, (tuple, list)) else (item,)
    x = _tensor(parts[0]) if parts else None
    if not isinstance(x, Tensor) or x.ndim == 0:
        raise InputError(f"batch: expected a tensor, a tuple (x, y) or a mapping, got {type(item).__name__}")
    return Batch((x,), {}, _tensor(parts[1]) if len(parts) > 1 else None)


def _tensor(value: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value


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
        ready = self.place(batch)
        logits = logits_of(self.model(*ready.inputs, **ready.keywords))
        missing = [layer for layer in self.layers if layer not in self._seen]
        if missing:
            raise InputError(f"layers: {missing[0]!r} is not called in the model's forward pass; name another")
        features = {layer: self._seen[layer] for layer in self.layers}
        return Outputs(logits, features, batch.labels if labels else None)

    def place(self, batch: Batch) -> Batch:
        """The batch where the model is, in its precision."""

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            try:
                moved = value if self._device is None else value.to(self._device)
            except (RuntimeError, NotImplementedError) as error:
                raise InputError(
                    f"x: is on {value.device} and cannot go to the model's {self._device}: {error}"
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


def logits_of(output: Any) -> Tensor:
    """Logits in what a model returned: a tensor, a tuple's first, a mapping's or an object's `logits`."""
    if isinstance(output, Mapping):
        output = output.get("logits", next(iter(output.values()), None))
    elif hasattr(output, "logits"):
        output = output.logits
    tensor = first_tensor(output)
    if tensor is None:
        raise InputError(f"model: returned {type(output).__name__}; expected logits (N, C), or an object that has them")
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
        names = resolve_layers(model, loader, layers)
        return Outputs.concat(stream(model, loader, names))


def stream(model: nn.Module, loader: Any, layers: Iterable[str] = ()) -> Iterator[Outputs]:
    """Outputs of each batch of a loader, without gradients; between batches the model is as it was."""
    names = list(layers)
    for batch in batches(loader):
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
        first = next(iter(batches(loader)), None)
    if first is None or len(first) == 0:
        raise InputError("loader: empty; 'auto' layers need a sample to run through the model")
    with reading(model) as reader, torch.no_grad():
        sample = reader.place(first[slice(0, 3)])
        return find_layers(model, lambda: logits_of(model(*sample.inputs, **sample.keywords)), len(sample))


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
