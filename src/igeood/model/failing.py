"""Samples that cannot be read: a data set, or the model, fails on them."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, default_convert

from igeood.errors import IgeoodError, is_of_disk
from igeood.outputs import Refused

if TYPE_CHECKING:
    from igeood.model.batches import Batch

T = TypeVar("T")


class LostError(Exception):
    """A batch of which no sample can be read."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.samples = samples

    def __len__(self) -> int:
        return self.samples


def surviving(read: Callable[["Batch"], T], batch: "Batch", refused: Refused) -> T:
    """What `read` returns for a batch; samples on which it fails are noted as refused, and others stand in for them.

    Only where it fails are the samples read one at a time. Where none of them fails alone, the error is the batch's.
    """
    try:
        return read(batch)
    except Exception as error:  # noqa: BLE001 (a model may raise anything)
        whole = error
        check_of_sample(error)
    failed: Refused = {}
    for row in range(len(batch)):
        try:
            read(batch[row : row + 1])
        except IgeoodError:  # noqa: PERF203
            raise whole from None
        except Exception as error:  # noqa: BLE001
            check_of_sample(error)
            failed[row] = f"model: {_line(error)}"
    if not failed:
        raise whole
    for row, why in failed.items():
        refused.setdefault(batch.first + row, why)
    good = next((row for row in range(len(batch)) if row not in failed), None)
    if good is None:
        raise LostError(len(batch)) from whole
    return read(batch[torch.tensor([good if row in failed else row for row in range(len(batch))])])


def check_of_sample(error: Exception) -> None:
    """Raise an error that says nothing of one sample: the library's own, of the memory, or of the disk."""
    of_machine = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
    if is_of_disk(error) or isinstance(error, (IgeoodError, *of_machine)):
        raise error


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def tolerant(source: Any) -> Any:
    """A loader like this one, which gives `Collated` batches; others than loaders of single samples as they are."""
    is_plain = isinstance(source, DataLoader) and type(source).__iter__ is DataLoader.__iter__
    is_of_samples = is_plain and source.batch_sampler is not None
    if not is_of_samples or isinstance(source.dataset, IterableDataset):
        return source
    loader = copy.copy(source)
    changes = {"dataset": _Batches(source.dataset, source.collate_fn), "collate_fn": default_convert, "_iterator": None}
    vars(loader).update(changes)  # a loader does not let them be set
    return loader


@dataclass(frozen=True)
class Collated:
    """What a loader made of a batch's samples, or None if it has none; those that failed, with the reason."""

    batch: Any
    failed: Refused


class _Batches:
    """A data set of `Collated` batches, in which the first good sample stands in for those that failed.

    All else is the data set's own.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        vars(self).update(dataset=dataset, collate=collate)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)

    def __getitems__(self, indices: list[Any]) -> Collated:
        """A batch: its samples at once, if the data set can do that and none fails; else one at a time."""
        failed: Refused = {}

        def sample(row: int, index: Any) -> Any:
            try:
                return self.dataset[index]
            except Exception as error:  # noqa: BLE001 (a data set may raise anything)
                check_of_sample(error)
                failed[row] = _line(error)

        try:
            samples = list(self.dataset.__getitems__(indices))
        except Exception:  # noqa: BLE001
            samples = [sample(row, index) for row, index in enumerate(indices)]
        good = next((row for row in range(len(samples)) if row not in failed), None)
        if good is None:
            return Collated(None, failed)
        return Collated(self.collate([samples[good if row in failed else row] for row in range(len(samples))]), failed)
