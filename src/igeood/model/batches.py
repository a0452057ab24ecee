"""What comes in, batch by batch: a loader's items, or one tensor, array, pair or mapping cut into pieces."""

import copy
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import length_hint
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from igeood.errors import IgeoodWarning, InputError, UnsuitedError
from igeood.model.failing import Collated, LostError, tolerant
from igeood.outputs import Keys, Refused, row_keys, take_over, without

log = logging.getLogger("igeood")

CHUNK = 256  # samples of a bare tensor that go through the model at a time
LABELS = ("labels", "label")


class NoRowsError(InputError):
    """A source of batches that has none."""


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
    first, refused
        As in `Outputs`.
    """

    inputs: Mapping[str, Any]
    name: str = ""
    labels: Any = None
    first: int = 0
    refused: Refused | None = None
    identified: ClassVar[bool] = True  # its keys are of inputs

    @property
    def x(self) -> Tensor:
        """The input that holds the samples."""
        x: Tensor = self.inputs[self.name]
        return x

    @property
    def keys(self) -> Keys:
        """A key of each sample's content, over all tensors: (N,). Zeros at the end, such as padding, do not count."""
        parts = [value for _, value in sorted(self.inputs.items()) if has_rows(value, len(self))]
        return row_keys(*(part.float() if part.is_floating_point() else part.cpu().double() for part in parts))

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

        start = rows.start if isinstance(rows, slice) and self.refused is not None else None
        first = self.first + (start or 0)
        return replace(self.mapped(pick), labels=pick(self.labels), first=first)


def has_rows(value: Any, n: int) -> bool:
    """Whether this is a tensor with a row for each of n samples."""
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == n


def batches(source: Any, name: str = "x", refused: Refused | None = None) -> Iterator[Any]:
    """Batches of a loader, or of one tensor, array, `(x, y)` pair or mapping, cut into pieces of 256 samples.

    `name` is what errors call the source. With `refused`, samples that a loader's data set fails on, or whose input has
    NaN, are noted there; others stand in for them.
    """
    if is_batch(source):
        with at_batch(name, 0):
            whole = as_batch(source, 0, refused)
            n, labels = len(whole), whole.labels
            if n > CHUNK and isinstance(labels, Tensor) and not has_rows(labels, n):
                raise InputError(f"labels: {labels.numel()} of them for {n} samples; give each sample its own")
        yield from [whole[start : start + CHUNK] for start in range(0, n, CHUNK)] if n > CHUNK else [whole]
        return
    if not isinstance(source, Iterable) or hasattr(source, "column_names"):  # as Hugging Face's data sets have
        cure = "wrap a data set: DataLoader(dataset, batch_size=64)"
        raise InputError(f"{name}: expected a batch or a loader of them, got {type(source).__name__}; {cure}")
    number, first = -1, 0
    for number, item in enumerate(source if refused is None else tolerant(source)):
        with at_batch(name, number):
            batch = as_batch(item) if refused is None else _survivors(item, first, refused)
        first += len(batch)
        yield batch
    if number < 0:
        raise NoRowsError(f"{name}: empty: no batch in the loader; give a new one if it was a generator, read already")
    if isinstance(source, DataLoader) and number + 1 < length_hint(source):  # a dataset's StopIteration ends it early
        problem = f"the loader ended after {number + 1} batches, too early"
        warnings.warn(f"{name}: {problem}; fix it", IgeoodWarning, stacklevel=2)


@dataclass(frozen=True)
class _Unpadded:
    """The samples that a sampler gives this rank, without those that it repeats at the end."""

    sampler: DistributedSampler[Any]

    def __iter__(self) -> Iterator[Any]:
        return islice(self.sampler, len(self))

    def __len__(self) -> int:
        return len(range(self.sampler.rank, len(self.sampler.dataset), self.sampler.num_replicas))  # type: ignore[arg-type]


def _distributed_sampler(source: Any) -> DistributedSampler[Any] | None:
    batch_sampler = source.batch_sampler if isinstance(source, DataLoader) else None
    sampler = getattr(source if batch_sampler is None else batch_sampler, "sampler", None)
    return sampler if isinstance(sampler, DistributedSampler) else None


def unpadded(source: Any, name: str | None = None) -> Any:
    """A loader like this one without the samples that its `DistributedSampler` repeats so that ranks get equally many.

    With a name for the source, the first rank logs how many these are on all ranks.
    """
    sampler = _distributed_sampler(source)
    repeated = 0 if sampler is None else sampler.total_size - len(sampler.dataset)  # type: ignore[arg-type]
    if sampler is None or repeated <= 0:  # of drop_last
        return source
    if name is not None and sampler.rank == 0:
        what = "%s: left out %d samples, which the DistributedSampler repeats so that %d ranks get equally many"
        log.warning(what, name, repeated, sampler.num_replicas)
    loader, batch_sampler = copy.copy(source), copy.copy(source.batch_sampler)
    (loader if batch_sampler is None else batch_sampler).__dict__["sampler"] = _Unpadded(sampler)
    vars(loader).update(batch_sampler=batch_sampler, _iterator=None)  # a loader does not let them be set
    return loader


def sampled_places(source: Any) -> Tensor:
    """Places in the data set, (n,), of the samples of a loader with a `DistributedSampler`; (0,) for other sources."""
    is_batched = _distributed_sampler(source) is not None and source.batch_sampler is not None
    return torch.tensor([*chain.from_iterable(unpadded(source).batch_sampler)] if is_batched else [], dtype=torch.int64)


def _survivors(item: Any, first: int, refused: Refused) -> Batch | LostError:
    """A batch of a `tolerant` loader, with the samples that failed noted as refused."""
    if not isinstance(item, Collated):
        return as_batch(item, first, refused)
    refused.update({first + row: why for row, why in item.failed.items()})
    return LostError(len(item.failed)) if item.batch is None else as_batch(item.batch, first, refused)


@contextmanager
def at_batch(name: str, number: int) -> Iterator[None]:
    """Put the batch's place before the message of an `InputError`, unless it is of the model."""
    try:
        yield
    except UnsuitedError:
        raise
    except InputError as error:
        raise InputError(f"{name}: batch {number}: {error}") from error.__cause__


def is_batch(source: Any) -> bool:
    """Whether this is one batch; of lists, `[x, y]` as loaders give it is one, others are lists of batches."""
    if not isinstance(source, (tuple, list)):
        return isinstance(source, (Tensor, np.ndarray, Mapping, Batch))
    if not source or not isinstance(source[0], (Tensor, np.ndarray)):
        return False
    x, *others = [tuple(getattr(item, "shape", ())) for item in source]
    is_pair = len(others) == 1 and x[:1] == others[0][:1] and len(x) != len(others[0])
    return isinstance(source, tuple) or is_pair


def as_batch(item: Any, first: int = 0, refused: Refused | None = None) -> Batch:
    """One batch: a tensor or array, a tuple `(x, y)` or `(x, y, ...)`, or a mapping whose entries are keywords.

    Of a mapping's tensors the first that has floating-point values and is no mask holds the samples. `first` and
    `refused` as in `Outputs`.
    """
    if isinstance(item, Batch):
        if refused is not None:
            take_over(item, first, refused)
        return replace(item, first=first, refused=refused)
    entries = item
    if not isinstance(item, Mapping):
        x, labels, *_ = (*item, None, None) if isinstance(item, (tuple, list)) else (item, None)
        entries = {"": x, "labels": labels}
    inputs = {name: _tensor(value) for name, value in entries.items() if name not in LABELS}
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.ndim}
    if not tensors:
        given = f"a mapping of {sorted(map(str, item))}" if isinstance(item, Mapping) else type(item).__name__
        raise InputError(f"expected a tensor, a tuple (x, y) or a mapping with tensors, got {given}; give one")
    name = min(tensors, key=lambda name: ("mask" in name, not tensors[name].is_floating_point()))
    labels = next((entries[name] for name in LABELS if name in entries), None)
    inputs[name] = _checked_input(tensors[name], first, refused)
    return Batch(inputs, name, _label_tensor(labels), first, refused)


def _checked_input(x: Tensor, first: int, refused: Refused | None) -> Tensor:
    """Inputs that a model can take: no NaN, no infinity, no images of bytes."""
    if x.dtype == torch.uint8:
        raise InputError("images of bytes (uint8); give floats, scaled and normalised as in training")
    if x.is_floating_point() and not math.isfinite(x.detach().sum().item()):  # one pass; a sum may also overflow
        bad = ~x.isfinite().reshape(len(x), -1).all(dim=1)
        return without(bad, x, "inputs", "NaN or infinity", "remove those rows", first, refused)
    return x


def _tensor(value: Any) -> Any:
    return torch.from_numpy(np.require(value, requirements=["C", "W"])) if isinstance(value, np.ndarray) else value


def _label_tensor(value: Any) -> Any:
    """Labels that can be cut like the inputs, where they are numbers."""
    listed = isinstance(value, (list, tuple)) and value and all(isinstance(item, (int, np.integer)) for item in value)
    return torch.tensor(value) if listed else _tensor(value)
