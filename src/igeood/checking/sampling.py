"""A bounded sample of inputs from a pass over batches, whatever their shapes."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from igeood.checking.faults import kind_of
from igeood.model.batch import Batch, has_rows

Numbers = NDArray[np.float64]


class Sample:
    """The samples with the smallest numbers of all that were added, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._parts: list[tuple[Numbers, Batch]] = []

    def add(self, batch: Batch, numbers: Numbers) -> None:
        """Add samples with their numbers, (N,)."""
        self._parts.append((numbers, batch))
        every = np.concatenate([part for part, _ in self._parts])
        if len(every) > self.limit:
            most = np.partition(every, self.limit - 1)[self.limit - 1] if self.limit else -np.inf
            self._parts = [(part[part <= most], rows[torch.from_numpy(part <= most)]) for part, rows in self._parts]
        self._parts = [(part, rows) for part, rows in self._parts if len(part)]

    def batches(self) -> list[Batch]:
        """The samples, those of one shape together, in the order of their numbers; texts are filled up to the longest.

        Of equal numbers there may be more than the limit.
        """
        return joined(rows for _, rows in self._parts)


def joined(parts: Iterable[Batch]) -> list[Batch]:
    """Batches as few as their shapes allow; texts with a mask are filled up to the longest."""
    batches = [one.mapped(lambda value: value.detach() if isinstance(value, Tensor) else value) for one in parts]
    longest = max((one.x.shape[1] for one in batches if kind_of(one) == "tokens"), default=0)
    if longest and all(any("mask" in name for name in one.inputs) for one in batches):
        batches = [_filled(one, longest) for one in batches]
    groups: dict[Any, list[Batch]] = {}
    for one in batches:
        shapes = (name, tuple(v.shape[1:]), v.dtype) if has_rows(v := one.inputs[name := one.name], len(one)) else ()
        groups.setdefault((shapes, *one.inputs), []).append(one)
    return [_cat(group) for group in groups.values()]


def _filled(batch: Batch, length: int) -> Batch:
    shape = batch.x.shape

    def fill(value: Any) -> Any:
        is_text = isinstance(value, Tensor) and value.shape == shape
        return pad(value, (0, length - shape[1])) if is_text else value

    return batch.mapped(fill)


def _cat(group: list[Batch]) -> Batch:
    first = group[0]

    def join(name: str) -> Any:
        values = [one.inputs[name] for one in group]
        are_rows = all(has_rows(value, len(one)) for value, one in zip(values, group, strict=True))
        return torch.cat(values) if are_rows else values[0]

    return Batch({name: join(name) for name in first.inputs}, first.name)
