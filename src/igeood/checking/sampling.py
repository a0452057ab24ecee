"""A bounded sample of inputs from a pass over batches, whatever their shapes."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from igeood.checking.faults import kind_of, mask_name
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
            is_chosen = np.zeros(len(every), dtype=bool)
            is_chosen[every.argsort(kind="stable")[: self.limit]] = True  # of equal numbers the first
            sizes = np.cumsum([len(part) for part, _ in self._parts])[:-1]
            pairs = zip(self._parts, np.split(is_chosen, sizes), strict=True)
            self._parts = [(part[rows], batch[torch.from_numpy(rows)]) for (part, batch), rows in pairs if rows.any()]

    def batches(self) -> list[Batch]:
        """The samples by their numbers, those of one shape together; texts are filled up to the longest."""
        longest = max((rows.x.shape[1] for _, rows in self._parts if kind_of(rows) == "tokens"), default=0)
        has_masks = all(mask_name(rows) is not None for _, rows in self._parts)
        groups: dict[Any, list[tuple[Numbers, Batch]]] = {}
        for numbers, rows in self._parts:
            part = _filled(rows, longest) if longest and has_masks else rows
            tensors = [(name, value) for name, value in part.inputs.items() if has_rows(value, len(part))]
            shapes = tuple((name, value.shape[1:], value.dtype) for name, value in tensors)
            groups.setdefault(shapes, []).append((numbers, part))
        return [_joined(group) for group in groups.values()]


def _filled(batch: Batch, length: int) -> Batch:
    shape = batch.x.shape

    def fill(value: Any) -> Any:
        is_text = isinstance(value, Tensor) and value.shape == shape
        return pad(value, (0, length - shape[1])) if is_text else value

    return batch.mapped(fill)


def _joined(group: list[tuple[Numbers, Batch]]) -> Batch:
    """Batches of one shape as one, by their numbers: neighbours are no samples of one class."""
    first = group[0][1]

    def join(name: str) -> Any:
        values = [rows.inputs[name] for _, rows in group]
        are_rows = all(has_rows(value, len(rows)) for value, (_, rows) in zip(values, group, strict=True))
        return torch.cat(values).detach() if are_rows else values[0]

    whole = Batch({name: join(name) for name in first.inputs}, first.name)
    return whole[torch.from_numpy(np.concatenate([numbers for numbers, _ in group]).argsort(kind="stable"))]
