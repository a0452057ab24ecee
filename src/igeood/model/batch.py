"""What a model takes, batch by batch: a loader's items, or one tensor, array, pair or mapping cut into pieces."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from igeood.errors import InputError, NoRowsError
from igeood.keys import Keys, row_keys
from igeood.outputs import OnError, note_bad_rows

Numbers = Callable[..., Any]  # makes numbers of labels that are names
CHUNK = 256  # samples of a bare tensor that go through the model at a time


@dataclass(frozen=True)
class Batch:
    """The model's inputs, by keyword or one by position, and the labels where there are any.

    Parameters
    ----------
    inputs : mapping
        By keyword; the one by position has the name "".
    name : str
        Of the input that holds the samples.
    labels
        As they came; checked where they are used.
    reasons : dict
        Rows that cannot be used, whose values are zeros, with the reason.
    """

    inputs: Mapping[str, Any]
    name: str = ""
    labels: Any = None
    reasons: dict[int, str] = field(default_factory=dict)

    @property
    def x(self) -> Tensor:
        """The input that holds the samples."""
        x: Tensor = self.inputs[self.name]
        return x

    @property
    def keys(self) -> Keys:
        """A key of each sample's content, over all tensors: (N,). Zeros at the end, such as padding, do not count."""
        tensors = [value for _, value in sorted(self.inputs.items()) if has_rows(value, len(self))]
        return row_keys(*(value.float() if value.is_floating_point() else value.cpu().double() for value in tensors))

    def with_x(self, x: Tensor) -> "Batch":
        """The same batch with another input."""
        return replace(self, inputs={**self.inputs, self.name: x})

    def mapped(self, change: Callable[[Any], Any]) -> "Batch":
        """The same batch with every input changed."""
        return replace(self, inputs={name: change(value) for name, value in self.inputs.items()})

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: Tensor | slice) -> "Batch":
        n = len(self)

        def pick(value: Any) -> Any:
            return value[rows] if has_rows(value, n) else value

        places = torch.arange(n)[rows].tolist() if self.reasons else []
        reasons = {new: self.reasons[old] for new, old in enumerate(places) if old in self.reasons}
        return replace(self.mapped(pick), labels=pick(self.labels), reasons=reasons)


def has_rows(value: Any, n: int) -> bool:
    """Whether this is a tensor with a row for each of n samples."""
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == n


def batches(data: Any, name: str = "x", on_error: OnError = "raise", numbers: Numbers | None = None) -> Iterator[Batch]:
    """Batches of a loader, or of one tensor, array, `(x, y)` pair or mapping, cut into pieces of 256 samples.

    `name` is what errors call the data; `on_error` is about inputs with NaN; `numbers` makes labels of names.
    """
    if is_batch(data):
        whole = as_batch(data, on_error, numbers)
        n = len(whole)
        if n > CHUNK and isinstance(whole.labels, Tensor) and not has_rows(whole.labels, n):
            raise InputError(f"{whole.labels.numel()} of them for {n} samples", argument="labels", cure="give one each")
        for start in range(0, max(n, 1), CHUNK):
            yield whole[start : start + CHUNK] if n > CHUNK else whole
        return
    if not isinstance(data, Iterable) or hasattr(data, "column_names"):  # as Hugging Face's data sets have
        raise InputError(f"expected batches, got {type(data).__name__}", argument=name, cure="give DataLoader(dataset)")
    is_empty = True
    for number, item in enumerate(data):
        is_empty = False
        try:
            batch = as_batch(item, on_error, numbers)
        except InputError as error:
            raise error.within(f"{name}: batch {number}") from error.__cause__
        yield batch
    if is_empty:
        raise NoRowsError("no batch in the loader", argument=name, cure="give samples; a generator is read once")


def is_batch(data: Any) -> bool:
    """Whether this is one batch; of lists, `[x, y]` as loaders give it is one, others are lists of batches."""
    if not isinstance(data, (tuple, list)):
        return isinstance(data, (Tensor, np.ndarray, Mapping, Batch))
    if not data or not isinstance(data[0], (Tensor, np.ndarray)):
        return False
    if isinstance(data, tuple):
        return True
    shapes = [tuple(getattr(item, "shape", ())) for item in data]
    return len(shapes) == 2 and shapes[0][:1] == shapes[1][:1] and len(shapes[0]) != len(shapes[1])


def as_batch(item: Any, on_error: OnError = "raise", numbers: Numbers | None = None) -> Batch:
    """One batch: a tensor or array, a tuple `(x, y)` or `(x, y, ...)`, or a mapping whose entries are keywords.

    Of a mapping's tensors the first that has floating-point values and is no mask holds the samples.
    """
    if isinstance(item, Batch):
        return item
    parts = item if isinstance(item, (tuple, list)) else (item,)
    inputs = dict(item) if isinstance(item, Mapping) else dict(zip(("", "labels"), parts, strict=False))
    for name, value in inputs.items():
        if isinstance(value, np.ndarray) and value.dtype.kind not in "OUT":
            inputs[name] = torch.from_numpy(np.require(value, requirements=["C", "W"]))
    labels = inputs.pop("labels", inputs.pop("label", None))
    if isinstance(labels, (list, tuple)) and labels and all(isinstance(label, (int, np.integer)) for label in labels):
        labels = torch.tensor(labels)
    elif numbers is not None and labels is not None and not isinstance(labels, Tensor):
        labels = numbers(labels)
    tensors = [name for name, value in inputs.items() if isinstance(value, Tensor) and value.ndim]
    if not tensors:
        given = f"a mapping of {sorted(map(str, item))}" if isinstance(item, Mapping) else type(item).__name__
        raise InputError(f"expected a tensor, a tuple (x, y) or a mapping with tensors, got {given}")
    name = min(tensors, key=lambda name: ("mask" in name, not inputs[name].is_floating_point()))
    reasons: dict[int, str] = {}
    inputs[name] = _checked_input(inputs[name], reasons, on_error)
    return Batch(inputs, name, labels, reasons)


def _checked_input(x: Tensor, reasons: dict[int, str], on_error: OnError) -> Tensor:
    """Inputs that a model can take: no NaN, no infinity, no images of bytes."""
    if x.dtype == torch.uint8:
        raise InputError("images of bytes (uint8)", argument="inputs", cure="give floats, scaled as in training")
    if not x.is_floating_point() or math.isfinite(x.detach().sum().item()):  # one pass; a sum may also overflow
        return x
    is_bad = ~x.isfinite().reshape(len(x), -1).all(dim=1)
    note_bad_rows(is_bad, "inputs", "NaN or infinity", "look where they come from", reasons, on_error)
    return x.masked_fill(is_bad.view(-1, *[1] * (x.ndim - 1)), 0.0) if reasons else x
