"""What comes in, batch by batch: a loader's items, or one tensor, array, pair or mapping cut into pieces."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from igeood.errors import IgeoodWarning, InputError
from igeood.outputs import Keys, row_keys

CHUNK = 256  # samples of a bare tensor that go through the model at a time
_LABELS = ("labels", "label")
_VALUES = ("pixel_values", "inputs_embeds", "input_values", "input_features", "x", "input_ids")


@dataclass(frozen=True)
class Batch:
    """The model's inputs, by position or by keyword, and the labels where there are any.

    Parameters
    ----------
    inputs : tuple
        By position.
    keywords : mapping
        By name.
    labels
        As they came; checked where they are used.
    """

    inputs: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    labels: Any = None

    @property
    def x(self) -> Tensor:
        """The input that holds the samples: by keyword, a known name, the first floating-point one or the first."""
        x: Tensor = self.inputs[0] if self.inputs else self.keywords[self._name]
        return x

    @property
    def _name(self) -> str:
        tensors = {name: value for name, value in self.keywords.items() if isinstance(value, Tensor)}
        known = [name for name in _VALUES if name in tensors]
        floating = [name for name, value in tensors.items() if value.is_floating_point() and "mask" not in name]
        return [*known, *floating, *tensors][0]

    @property
    def keys(self) -> Keys:
        """A key of each sample's content, over all tensors: (N,)."""
        n = len(self)
        parts = [v for v in (*self.inputs, *self.keywords.values()) if isinstance(v, Tensor) and v.ndim and len(v) == n]
        return row_keys(torch.cat([part.detach().reshape(n, part.shape[1:].numel()).float() for part in parts], dim=1))

    def with_x(self, x: Tensor) -> "Batch":
        """The same batch with another input."""
        return replace(self, inputs=(x,)) if self.inputs else replace(self, keywords={**self.keywords, self._name: x})

    def mapped(self, change: Callable[[Any], Any]) -> "Batch":
        """The same batch with every input changed."""
        return Batch(tuple(map(change, self.inputs)), {k: change(v) for k, v in self.keywords.items()}, self.labels)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: Tensor | slice) -> "Batch":
        n = len(self)
        if isinstance(self.labels, Tensor) and self.labels.ndim == 1 and len(self.labels) != n:
            raise InputError(f"labels: {len(self.labels)} of them for {n} samples; give each sample its own")

        def pick(value: Any) -> Any:
            return value[rows] if isinstance(value, Tensor) and value.ndim and len(value) == n else value

        return replace(self.mapped(pick), labels=pick(self.labels))


def batches(source: Any, name: str = "x") -> Iterator[Batch]:
    """Batches of a loader, or of one tensor, array, `(x, y)` pair or mapping, cut into pieces of 256 samples.

    `name` is what errors call the source. A loader that ends before its own length is a warning.
    """
    if isinstance(source, (Tensor, np.ndarray, Mapping)) or _is_pair(source):
        with at_batch(name, 0):
            whole = as_batch(source)
            starts = range(0, len(whole), CHUNK) if len(whole) > CHUNK else ()
            pieces = [whole[start : start + CHUNK] for start in starts]
        yield from pieces or [whole]
        return
    if not isinstance(source, Iterable):
        raise InputError(f"{name}: expected a batch or a loader of them, got {type(source).__name__}; give one of both")
    count = 0
    for count, item in enumerate(source, start=1):
        with at_batch(name, count - 1):
            batch = as_batch(item)
        yield batch
    if count == 0:
        raise InputError(f"{name}: empty: no batch in the loader; give a new one if it was a generator, read already")
    promised = length_hint(source) if isinstance(source, DataLoader) else 0  # others may count samples
    if count < promised:  # a dataset that raises StopIteration ends its loader silently
        cure = "look for a StopIteration in its dataset"
        warnings.warn(f"{name}: the loader ended after {count} of its {promised} batches; {cure}", IgeoodWarning, 4)


@contextmanager
def at_batch(name: str, number: int) -> Iterator[None]:
    """Put the batch's place before the message of an `InputError`."""
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
        keywords = {name: _tensor(value) for name, value in item.items() if name not in _LABELS}
        if not any(isinstance(value, Tensor) for value in keywords.values()):
            raise InputError(f"the mapping has no tensor among {sorted(map(str, item))}; give the model's inputs in it")
        batch = Batch((), keywords, _label_tensor(next((item[name] for name in _LABELS if name in item), None)))
    else:
        parts = item if isinstance(item, (tuple, list)) else (item,)
        x = _tensor(parts[0]) if parts else None
        if not isinstance(x, Tensor) or x.ndim == 0:
            raise InputError(f"expected a tensor, a tuple (x, y) or a mapping, got {type(item).__name__}; give one")
        batch = Batch((x,), {}, _label_tensor(parts[1]) if len(parts) > 1 else None)
    check_input(batch.x)
    return batch


def check_input(x: Tensor) -> None:
    """Raise unless a model can take this input: no NaN, no infinity, no images of bytes."""
    if x.dtype == torch.uint8:
        raise InputError("images of bytes (uint8); give floats, scaled and normalised as in training")
    if not x.is_floating_point() or math.isfinite(x.detach().sum().item()):  # one pass; a sum may also overflow
        return
    bad = (~x.isfinite().reshape(len(x), -1).all(dim=1)).nonzero()[:, 0]
    if len(bad):
        raise InputError(f"sample {int(bad[0])} has NaN or infinity ({len(bad)} of {len(x)} do); remove those samples")


def _tensor(value: Any) -> Any:
    return torch.from_numpy(np.require(value, requirements=["C", "W"])) if isinstance(value, np.ndarray) else value


def _label_tensor(value: Any) -> Any:
    """Labels that can be cut like the inputs, where they are numbers."""
    listed = isinstance(value, (list, tuple)) and value and all(isinstance(item, (int, np.integer)) for item in value)
    return torch.tensor(value) if listed else _tensor(value)
