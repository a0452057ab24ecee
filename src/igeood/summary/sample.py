"""A bounded sample of training rows: the same rows whatever the batches, the shards and their order."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from igeood.keys import BLOCK_VALUES, Keys
from igeood.outputs import Outputs

BESIDE = ("labels", "keys", "counts")  # what a row has beside its values, as int64
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
        self.n_classes = n_classes
        self.widths = widths
        self.strata = strata
        self.budget = budget
        self.dtype = dtype
        width = n_classes + sum(widths.values())
        row_bytes = width * dtype.itemsize + 8 * len(BESIDE)
        self.least = -(-strata * row_bytes * (SLACK + 1) // SLACK)  # the budget that a row of each stratum takes
        self.capacity = budget * SLACK // (row_bytes * (SLACK + 1))
        self.totals = np.zeros(strata, dtype=np.int64)  # all rows seen of each stratum
        self._values = torch.empty(0, width, dtype=dtype)
        self._beside = np.empty((len(BESIDE), 0), dtype=np.int64)
        self._size = 0
        self._compacted = True  # whether the rows are distinct, and no more than the rule allows
        self._cutoff: Keys = np.full(strata, 2**64 - 1, dtype=np.uint64)
        self._step = max(1, BLOCK_VALUES // width)  # rows that are copied at a time

    @property
    def quota(self) -> int:
        """q, the rows that a stratum may keep."""
        return quota(self.totals, self.capacity)

    def add(self, outputs: Outputs) -> None:
        """Take in rows; those whose keys are too large are passed over."""
        labels = np.zeros(len(outputs), dtype=np.int64)
        keys = outputs.keys
        if self.strata > 1 and outputs.labels is not None:
            labels = outputs.labels.cpu().numpy()
        self.totals += np.bincount(labels, minlength=self.strata)
        rows = np.flatnonzero(keys <= self._cutoff[labels])
        beside = np.stack([labels[rows], keys[rows].view(np.int64), np.ones_like(rows)])
        self._insert([outputs.logits, *(outputs.features[block] for block in self.widths)], rows, beside)

    def _insert(self, parts: list[Tensor], rows: NDArray[np.int64], beside: NDArray[np.int64]) -> None:
        """Copy rows of the parts, which stand side by side."""
        start = 0
        while start < len(rows):
            room = self._make_room(min(self._step, len(rows) - start))
            here = slice(start, start + room)
            there = slice(self._size, self._size + room)
            at = torch.from_numpy(rows[here])
            self._values[there] = torch.cat([part[at.to(part.device)].cpu() for part in parts], dim=1)
            self._beside[:, there] = beside[:, here]
            self._size += room
            self._compacted = False
            start += room

    def _make_room(self, wanted: int) -> int:
        """Rows that fit in now, at least one."""
        limit = self.capacity + max(min(256, self.capacity), self.capacity // SLACK)
        if self._size + wanted > limit:
            self._compact()
        if self._beside.shape[1] < min(limit, self._size + wanted):
            rows = min(limit, max(4 * self._beside.shape[1], self._size + wanted))
            values = self._values[: self._size]
            beside = self._beside[:, : self._size]
            self._values = torch.empty(rows, values.shape[1], dtype=self.dtype)  # memory is taken as it is written
            self._beside = np.empty((len(BESIDE), rows), dtype=np.int64)
            self._values[: self._size] = values
            self._beside[:, : self._size] = beside
        return min(wanted, self._beside.shape[1] - self._size)

    def _compact(self) -> None:
        """Join equal rows, and keep the q smallest keys of each stratum: the last rows fill the holes of others."""
        if self._compacted:
            return
        order = self._by_key()
        limit = self.quota
        labels, keys, counts = np.take(self._beside, order, axis=1)
        is_new = np.ones(len(order), dtype=bool)
        is_new[1:] = (keys[1:] != keys[:-1]) | (labels[1:] != labels[:-1])
        starts = np.flatnonzero(is_new)
        beside = np.stack([labels[starts], keys[starts], np.add.reduceat(counts, starts)])
        ranks = self._ranks(beside[0])
        last = beside[:, ranks == limit - 1]
        kept = ranks < limit
        if int(self.totals.sum()) > self.capacity:  # while all rows fit, a class may still grow
            self._cutoff[last[0]] = last[1].view(np.uint64)
        rows = order[starts[kept]]
        beside = beside[:, kept]
        is_kept = np.zeros(self._size, dtype=bool)
        is_kept[rows] = True
        self._size = len(rows)
        holes = np.flatnonzero(~is_kept[: self._size])
        tail = np.flatnonzero(is_kept[self._size :]) + self._size
        for start in range(0, len(holes), self._step):
            here = slice(start, start + self._step)
            self._values[torch.from_numpy(holes[here])] = self._values[torch.from_numpy(tail[here])]
        place = np.arange(len(is_kept))
        place[tail] = holes
        self._beside[:, place[rows]] = beside
        self._compacted = True

    def _by_key(self) -> NDArray[np.int64]:
        labels, keys, _ = self._beside[:, : self._size]
        by_key = np.argsort(keys.view(np.uint64), kind="stable")
        small = labels.astype(np.min_scalar_type(self.strata))  # up to 16 bits are sorted by radix
        return by_key[np.argsort(small[by_key], kind="stable")]

    def _ranks(self, labels: NDArray[np.int64]) -> NDArray[np.int64]:
        """Place of each row within its stratum; the labels are sorted."""
        return np.arange(len(labels)) - np.searchsorted(labels, np.arange(self.strata))[labels]

    def __len__(self) -> int:
        """Distinct rows that are kept."""
        self._compact()
        return self._size

    @property
    def order(self) -> NDArray[np.int64]:
        """Rows by stratum, then by key: the same for the same data."""
        self._compact()
        return self._by_key()

    @property
    def kept(self) -> NDArray[np.int64]:
        """Distinct rows kept of each stratum."""
        return np.bincount(self._beside[0, : len(self)], minlength=self.strata)

    def batches(self, per_class: int | None = None, *, features: bool = True) -> Iterator[tuple[Outputs, Tensor]]:
        """The rows in order, in chunks, each with the weights (n,) that make them stand for all rows.

        Parameters
        ----------
        per_class : int, optional
            Only so many rows of each stratum, those with the smallest keys.
        features : bool
            Whether to read features too.
        """
        order = self.order
        if per_class is not None:
            ranks = self._ranks(self._beside[0, order])
            order = order[ranks < per_class]
        labels, keys, counts = np.take(self._beside, order, axis=1)
        held = np.bincount(labels, counts, minlength=self.strata)
        weights = counts * (self.totals / np.maximum(held, 1.0))[labels]
        read = self._values if features else self._values[:, : self.n_classes]
        widths = self.widths if features else {}
        for start in range(0, len(order), self._step):
            here = slice(start, start + self._step)
            values = read[torch.from_numpy(order[here])]
            logits, *blocks = torch.split(values, [self.n_classes, *widths.values()], dim=1)
            classes = torch.from_numpy(labels[here]) if self.strata > 1 else None
            by_name = dict(zip(widths, blocks, strict=True))
            outputs = Outputs.checked(logits, by_name, classes, keys[here].view(np.uint64))
            yield outputs, torch.from_numpy(weights[here])

    def outputs(self, per_class: int | None = None) -> tuple[Outputs, Tensor]:
        """All rows in order at once, with their weights: a copy."""
        outputs, weights = zip(*self.batches(per_class), strict=True)
        return Outputs.concat(outputs), torch.cat(weights)

    def __add__(self, other: "Sample") -> "Sample":
        budget = min(self.budget, other.budget)
        dtype = torch.promote_types(self.dtype, other.dtype)
        joined = Sample(self.n_classes, self.widths, self.strata, budget, dtype)
        for part in (self, other):
            joined += part
        joined._compact()
        return joined

    def __iadd__(self, other: "Sample") -> "Sample":
        """Take in the rows of another sample: in place, unless it has a smaller budget or a wider type."""
        if other.budget < self.budget or torch.promote_types(self.dtype, other.dtype) != self.dtype:
            return self + other
        self.totals = self.totals + other.totals
        beside = other._beside[:, : len(other)]
        rows = np.flatnonzero(beside[1].view(np.uint64) <= self._cutoff[beside[0]])
        self._insert([other._values], rows, np.take(beside, rows, axis=1))
        return self

    def state(self) -> dict[str, Tensor]:
        """Tensors to save."""
        order = self.order
        fields = zip(BESIDE, map(torch.from_numpy, np.take(self._beside, order, axis=1)), strict=True)
        values = self._values[torch.from_numpy(order)]
        return {"values": values, "totals": torch.from_numpy(self.totals), **dict(fields)}

    def load(self, state: Mapping[str, Tensor]) -> "Sample":
        """Take over what `state` returned."""
        self.totals = state["totals"].numpy().copy()
        self._values = state["values"].to(self.dtype)
        self._beside = np.stack([state[name].numpy() for name in BESIDE])
        self._size = len(self._values)
        self._compacted = False
        self._compact()
        return self


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
