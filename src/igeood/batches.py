"""What comes in, batch by batch: a loader's items, or one tensor, array, pair or mapping cut into pieces."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from igeood.errors import IgeoodWarning, InputError
from igeood.outputs import Keys, row_keys

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
        if isinstance(self.labels, Tensor) and self.labels.ndim == 1 and len(self.labels) != n:
            raise InputError(f"labels: {len(self.labels)} of them for {n} samples; give each sample its own")

        def pick(value: Any) -> Any:
            return value[rows] if isinstance(value, Tensor) and value.ndim and len(value) == n else value

        keywords = {name: pick(value) for name, value in self.keywords.items()}
        return Batch(tuple(map(pick, self.inputs)), keywords, pick(self.labels))


def batches(source: Any, name: str = "x") -> Iterator[Batch]:
    """Batches of a loader, or of one tensor, array, `(x, y)` pair or mapping, cut into pieces of 256 samples.

    `name` is what errors call the source. A loader that ends before its own length is a warning.
    """
    if isinstance(source, (Tensor, np.ndarray, Mapping)) or _is_pair(source):
        with at_batch(name, 0):
            whole = as_batch(source)
        for start in range(0, max(1, len(whole)), CHUNK):
            yield whole[slice(start, start + CHUNK)]
        return
    if not isinstance(source, Iterable):
        raise InputError(
            f"{name}: expected a tensor, a batch or a loader of batches, got {type(source).__name__}; give one of them"
        )
    number = -1
    for number, item in enumerate(_items(source)):
        with at_batch(name, number):
            batch = as_batch(item)
        yield batch
    if number < 0:
        raise InputError(f"{name}: empty: no batch in the loader; give a new one if it was a generator, read already")
    promised = 0
    with suppress(Exception):  # a length is a courtesy; one that fails, as some do, says nothing
        promised = len(source) if isinstance(source, DataLoader) else 0  # others may count samples
    if number + 1 < promised:  # a dataset that raises StopIteration ends its loader without a word
        warnings.warn(
            f"{name}: the loader ended after {number + 1} of its {promised} batches and the rest is missing; look for "
            f"a StopIteration in its dataset",
            IgeoodWarning,
            stacklevel=5,
        )


_loading: ContextVar[bool | None] = ContextVar("_loading", default=None)  # whether the caller had gradients on


@contextmanager
def without_gradients() -> Iterator[None]:
    """No gradients for a guard's own work; loaders that are read in it run as the caller would run them."""
    before = _loading.set(torch.is_grad_enabled())
    try:
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        _loading.reset(before)


def _items(source: Iterable[Any]) -> Iterator[Any]:
    """A loader's items, made as in a loop of the user's own: with gradients on or off, as they were or as it sets them.

    One may attack its images, another run an encoder.
    """
    end, outer = object(), _loading.get()
    on = torch.is_grad_enabled() if outer is None else outer
    item, items = None, None
    while item is not end:
        with torch.inference_mode(False), torch.set_grad_enabled(on):
            items = iter(source) if items is None else items
            item = next(items, end)
            on = torch.is_grad_enabled()
        if item is not end:
            yield item


@contextmanager
def at_batch(name: str, number: int) -> Iterator[None]:
    """Errors of a batch with its place; what a model itself has raised stays their cause."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{name}: batch {number}: {error}") from error.__cause__


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
            raise InputError(f"the mapping has no tensor among {sorted(map(str, item))}; give the model's inputs in it")
        return Batch((), keywords, _label_tensor(labels))
    parts = item if isinstance(item, (tuple, list)) else (item,)
    x = _tensor(parts[0]) if parts else None
    if not isinstance(x, Tensor) or x.ndim == 0:
        raise InputError(f"expected a tensor, a tuple (x, y) or a mapping, got {_kind(item)}; give one of them")
    return Batch((x,), {}, _label_tensor(parts[1]) if len(parts) > 1 else None)


def _tensor(value: Any) -> Any:
    return torch.from_numpy(np.require(value, requirements=["C", "W"])) if isinstance(value, np.ndarray) else value


def _label_tensor(value: Any) -> Any:
    """Labels that can be cut like the inputs, where they are a list of numbers."""
    if isinstance(value, (list, tuple)) and value and all(isinstance(label, (int, np.integer)) for label in value):
        return torch.tensor(value)
    return _tensor(value)


def _kind(value: Any) -> str:
    inside = f" of {type(value[0]).__name__}" if isinstance(value, (tuple, list)) and value else ""
    return f"{type(value).__name__}{inside}"
