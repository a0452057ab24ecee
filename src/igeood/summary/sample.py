"""A bounded sample of training rows: the same rows whatever the batches, the shards and their order."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from igeood.errors import InputError
from igeood.outputs import BLOCK_VALUES, Keys, Outputs

LAST_KEY = np.uint64(2**64 - 1)
BESIDE = 24  # bytes of a row beside its values: key, label, count
SLACK = 32  # rows are compacted when one row in so many is over


class Sample:
    """For each stratum, the q distinct rows with the smallest keys; equal rows are one row with a count.

    q is the largest number with Σ_c min(n_c, q) · row bytes ≤ budget, where n_c counts the rows of stratum c. It only
    falls as data grow, so a sample of the whole is the sample of its shards' samples.

    Parameters
    ----------
    n_classes : int
        C, the width of the logits.
    widths : mapping of str to int
        Blocks of features beside the logits, and their widths.
    strata : int
        C, or 1 where the rows have no labels.
    budget : int
        Bytes, with what is held while rows are compacted.
    dtype : torch.dtype
        Of the values.
    """

    def __init__(
        self, n_classes: int, widths: Mapping[str, int], strata: int, budget: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.n_classes, self.widths, self.strata, self.budget, self.dtype = n_classes, widths, strata, budget, dtype
        size = row_bytes(n_classes, widths, dtype)
        check_budget(budget, [size], strata)
        self.capacity = budget * SLACK // (size * (SLACK + 1))
        self.totals = np.zeros(strata, dtype=np.int64)  # all rows seen of each stratum
        self._values = torch.empty(0, n_classes + sum(widths.values()), dtype=dtype)
        self._labels = np.empty(0, dtype=np.int64)
        self._counts = np.empty(0, dtype=np.int64)
        self._keys: Keys = np.empty(0, dtype=np.uint64)
        self._size = 0
        self._sorted = True  # whether the rows are distinct, and no more than the rule allows
        self._cutoff: Keys = np.full(strata, LAST_KEY)

    @property
    def quota(self) -> int:
        """q, the rows that a stratum may keep."""
        return quota(self.totals, self.capacity)

    def add(self, outputs: Outputs) -> None:
        """Take in rows; those whose keys are too large are passed over."""
        strata = np.zeros(len(outputs), dtype=np.int64)
        if self.strata > 1 and outputs.labels is not None:
            strata = outputs.labels.cpu().numpy()
        self.totals += np.bincount(strata, minlength=self.strata)
        keys = outputs.keys
        rows = np.flatnonzero(keys <= self._cutoff[strata])
        if len(rows):
            parts = [outputs.logits, *(outputs.features[block] for block in self.widths)]
            ones = np.ones(len(rows), dtype=np.int64)
            self._insert(parts, rows, strata[rows], keys[rows], ones)

    def _insert(
        self, parts: list[Tensor], rows: NDArray[Any], strata: NDArray[Any], keys: Keys, counts: NDArray[Any]
    ) -> None:
        start = 0
        while start < len(rows):
            room = self._make_room(len(rows) - start)
            here, there = slice(start, start + room), slice(self._size, self._size + room)
            at = torch.from_numpy(rows[here])
            column = 0
            for part in parts:
                self._values[there, column : column + part.shape[1]] = part.detach()[at.to(part.device)].cpu()
                column += part.shape[1]
            self._labels[there], self._keys[there] = strata[here], keys[here]
            self._counts[there] = counts[here]
            self._size += len(rows[here])
            self._sorted = False
            start += room

    def _make_room(self, wanted: int) -> int:
        """Rows that fit in now, at least one."""
        limit = self.capacity + max(256, self.capacity // SLACK)
        if self._size + wanted > limit and not self._sorted:
            self._compact()
        if len(self._keys) < min(limit, self._size + wanted):
            self._grow(min(limit, max(4 * len(self._keys), self._size + wanted, 4096)))
        return min(wanted, len(self._keys) - self._size)

    def _grow(self, rows: int) -> None:
        values = torch.empty(rows, self._values.shape[1], dtype=self.dtype)  # memory is taken as it is written
        values[: self._size] = self._values[: self._size]
        self._values = values
        for name in ("_labels", "_keys", "_counts"):
            array = getattr(self, name)
            setattr(self, name, np.resize(array, rows) if len(array) else np.empty(rows, dtype=array.dtype))

    def _compact(self) -> None:
        """Join equal rows, and keep the q smallest keys of each stratum; nothing is copied whole."""
        n, limit = self._size, self.quota
        labels, keys = self._labels[:n], self._keys[:n]
        order = np.lexsort((keys, labels))
        labels, keys = labels[order], keys[order]
        is_new = np.ones(n, dtype=bool)
        is_new[1:] = (keys[1:] != keys[:-1]) | (labels[1:] != labels[:-1])
        starts = np.flatnonzero(is_new)
        counts = np.add.reduceat(self._counts[:n][order], starts)
        labels, keys, rows = labels[starts], keys[starts], order[starts]
        first = np.searchsorted(labels, np.arange(self.strata))
        rank = np.arange(len(labels)) - first[labels]
        self._cutoff[labels[rank == limit - 1]] = keys[rank == limit - 1]
        kept = rank < limit
        labels, keys, counts, rows = labels[kept], keys[kept], counts[kept], rows[kept]
        back = np.argsort(rows)  # rows only move down, so they can move in place
        self._size = len(rows)
        step = max(1, BLOCK_VALUES // self._values.shape[1])
        for start in range(0, self._size, step):
            chunk = rows[back[start : start + step]]
            self._values[start : start + len(chunk)] = self._values[torch.from_numpy(chunk)]
        self._labels[: self._size], self._keys[: self._size] = labels[back], keys[back]
        self._counts[: self._size] = counts[back]
        self._sorted = True

    def settle(self) -> "Sample":
        """Compact, so that the rows are those of the rule."""
        if not self._sorted:
            self._compact()
        return self

    def __len__(self) -> int:
        """Distinct rows that are kept."""
        return self.settle()._size

    @property
    def order(self) -> NDArray[np.int64]:
        """Rows by stratum, then by key: the same for the same data."""
        self.settle()
        return np.lexsort((self._keys[: self._size], self._labels[: self._size]))

    @property
    def kept(self) -> NDArray[np.int64]:
        """Distinct rows kept of each stratum."""
        self.settle()
        return np.bincount(self._labels[: self._size], minlength=self.strata)

    @property
    def keys(self) -> Keys:
        """Keys of the rows, by stratum, ascending."""
        keys: Keys = self._keys[self.order]
        return keys

    def batches(self, per_class: int | None = None) -> Iterator[tuple[Outputs, Tensor]]:
        """The rows in order, in chunks, each with the weights (n,) that make them stand for all rows.

        Parameters
        ----------
        per_class : int, optional
            Only so many rows of each stratum, those with the smallest keys.
        """
        order = self.order
        if per_class is not None:
            labels = self._labels[order]
            order = order[np.arange(len(order)) - np.searchsorted(labels, labels) < per_class]
        held = np.bincount(self._labels[order], self._counts[order], minlength=self.strata)
        factors = self.totals / np.maximum(held, 1.0)
        step = max(1, BLOCK_VALUES // self._values.shape[1])
        for start in range(0, len(order), step):
            rows = order[start : start + step]
            yield self._outputs(rows), torch.from_numpy(self._counts[rows] * factors[self._labels[rows]])

    def outputs(self, per_class: int | None = None) -> tuple[Outputs, Tensor]:
        """All rows in order at once, with their weights: a copy."""
        parts = list(self.batches(per_class))
        if not parts:
            return self._outputs(np.empty(0, dtype=np.int64)), torch.empty(0, dtype=torch.float64)
        return Outputs.concat(part for part, _ in parts), torch.cat([weights for _, weights in parts])

    def _outputs(self, rows: NDArray[np.int64]) -> Outputs:
        values = self._values[torch.from_numpy(rows)]
        features, column = {}, self.n_classes
        for block, width in self.widths.items():
            features[block] = values[:, column : column + width]
            column += width
        labels = torch.from_numpy(self._labels[rows]) if self.strata > 1 else None
        return Outputs.checked(values[:, : self.n_classes], features, labels, self._keys[rows])

    def within(self, budget: int) -> "Sample":
        """A copy that keeps to a budget too."""
        return Sample(self.n_classes, self.widths, self.strata, min(budget, self.budget), self.dtype) + self

    def __add__(self, other: "Sample") -> "Sample":
        budget = min(self.budget, other.budget)
        dtype = torch.promote_types(self.dtype, other.dtype)
        joined = Sample(self.n_classes, self.widths, self.strata, budget, dtype)
        joined.totals = self.totals + other.totals
        for part in (self, other):
            rows = part.order
            joined._insert([part._values], rows, part._labels[rows], part._keys[rows], part._counts[rows])
        return joined.settle()

    def state(self) -> dict[str, Tensor]:
        """Tensors to save."""
        order = self.order
        return {
            "values": self._values[torch.from_numpy(order)],
            "labels": torch.from_numpy(self._labels[order]),
            "keys": torch.from_numpy(self._keys[order].view(np.int64)),
            "counts": torch.from_numpy(self._counts[order]),
            "totals": torch.from_numpy(self.totals),
        }

    def load(self, state: Mapping[str, Tensor]) -> "Sample":
        """Take over what `state` returned."""
        arrays = {name: state[name].numpy() for name in ("labels", "keys", "counts", "totals")}
        self.totals = arrays["totals"].copy()
        rows = np.arange(len(state["values"]))
        keys = arrays["keys"].view(np.uint64)
        self._insert([state["values"]], rows, arrays["labels"], keys, arrays["counts"])
        return self.settle()


def row_bytes(n_classes: int, widths: Mapping[str, int], dtype: torch.dtype) -> int:
    """Bytes of a row with all that belongs to it."""
    return (n_classes + sum(widths.values())) * dtype.itemsize + BESIDE


def check_budget(budget: int, sizes: Sequence[int], strata: int) -> None:
    """Raise unless samples whose rows have these sizes in bytes, and which share a budget, can hold every stratum."""
    needed = len(sizes) * -(-strata * max(sizes) * (SLACK + 1) // SLACK)
    if budget < needed:
        raise InputError(
            f"budget: {budget:,} bytes cannot hold one training row ({sum(sizes)} bytes) of each of {strata} classes; "
            f"give at least {needed:,}"
        )


def quota(totals: NDArray[np.int64], capacity: int) -> int:
    """The largest q with Σ_c min(n_c, q) ≤ capacity; where all rows fit, the largest n_c.

    >>> quota(np.array([3, 10, 100]), 23)
    10
    """
    ordered = np.sort(totals)
    if int(ordered.sum()) <= capacity:
        return max(1, int(ordered[-1]))
    below = np.concatenate([[0], np.cumsum(ordered)[:-1]])  # rows of the strata that keep all
    shares = (capacity - below) // np.arange(len(ordered), 0, -1)
    return int(shares[np.argmax(ordered > shares)])  # the first stratum that cannot keep all
