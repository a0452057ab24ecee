"""The summary itself: rows go in, summaries add, detectors learn from them."""

import os
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from igeood.errors import GuardFileError, InputError
from igeood.files import read_record, write_record
from igeood.outputs import NO_KEYS, Keys, Outputs, check_alike
from igeood.summary.needs import Needs
from igeood.summary.sample import Sample, check_budget, row_bytes
from igeood.summary.sums import ClassSums

BUDGET = 256 << 20  # bytes of training rows that are kept
KEYS = 1 << 20  # keys of training rows that are kept, to recognise them again
HOLDOUT = np.uint64(2**64 // 10)  # rows with smaller keys are held out of the ranges

Ranges = tuple[Tensor, Tensor]


class Summary:
    """Sums and a bounded sample of training rows: all that a detector learns from.

    Summaries of batches, files and machines add with ``+``, in any order: sums up to rounding, the sample to the row.
    It contains outputs of training rows, and so does its file.

    Parameters
    ----------
    needs : Needs
        What to keep.
    budget : int
        Bytes of training rows to keep.
    model : str, optional
        Fingerprint of the model whose outputs these are.

    Attributes
    ----------
    counts : Tensor
        (C,) rows of each class; (1,) without labels.
    sums : dict of ClassSums
        For each block of features.
    ranges : dict of (Tensor, Tensor)
        For each block the minimum and maximum, (C, k) each.
    samples : dict of Sample
        "logits", "features", "statistics": those that the needs name.
    keys : array of uint64
        Sorted unique keys of the training rows, the smallest million of them.

    Examples
    --------
    >>> needs = Needs(labels=True, samples=("logits",))
    >>> a, b = (Summary.of(Outputs([[2.0, x], [x, 1.0]], labels=[0, 1]), needs) for x in (0.0, 0.5))
    >>> (a + b).rows, len((a + b).samples["logits"])
    (4, 4)
    """

    def __init__(self, needs: Needs, *, budget: int = BUDGET, model: str | None = None) -> None:
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
            raise InputError(f"budget: expected a number of bytes, at least 1; got {budget!r}")
        self.needs, self.budget, self.model = needs, budget, model
        self.described = needs.describe()
        self.shape: Outputs | None = None  # no rows, but the widths and blocks of all batches
        self._held: list[Outputs] = []
        self._held_rows = 0
        self._sums: dict[str, ClassSums] = {}
        self._ranges: dict[str, Ranges] = {}
        self._samples: dict[str, Sample] = {}
        self._counts = torch.zeros(0, dtype=torch.int64)
        self._keys, self._new_keys = NO_KEYS, [NO_KEYS]

    @classmethod
    def of(cls, outputs: Outputs, needs: Needs, *, budget: int = BUDGET) -> "Summary":
        """The summary of one batch."""
        return cls(needs, budget=budget).add(outputs)

    def add(self, outputs: Outputs) -> "Summary":
        """Take in a batch of training rows, in place."""
        if len(outputs) == 0:
            return self
        if self.needs.labels and outputs.labels is None:
            raise InputError(
                "labels: this method needs the true class of each row; give (x, y), or fit(logits, labels)"
            )
        if self.described["transform"] and self.needs.transform is None:
            raise InputError(
                f"summary: its row transform {self.described['transform']!r} is not in its file; sum up the batch in a "
                f"summary of its own, and add the two with +"
            )
        batch = outputs.detached().only(self.needs.blocks(outputs.features))
        if self.needs.layers != "none" and not batch.features:
            raise InputError("outputs: no features to learn from; give Outputs(logits, features, labels)")
        self._check(batch)
        # a few rows cost as much to sum as many: they are held, as copies, for the caller may reuse its memory
        self._held_rows += len(batch)
        if self._held_rows >= 4 * max(256, batch.n_classes):
            self._take(Outputs.concat([*self._held, batch]))
            self._held, self._held_rows = [], 0
        else:
            self._held.append(_copy(batch))
        return self

    def _check(self, batch: Outputs) -> None:
        if self.shape is None:
            self.shape = _copy(batch[:0])
            return
        check_alike(self.shape, batch)
        if (self.shape.labels is None) != (batch.labels is None):
            raise InputError("labels: some batches have them and some have none; give all or none")

    def _take(self, batch: Outputs) -> None:
        """Add a batch to sums, ranges, samples and keys."""
        strata = 1 if batch.labels is None else batch.n_classes
        labels = torch.zeros(len(batch), dtype=torch.int64) if batch.labels is None else batch.labels.cpu()
        self._start_samples(batch, strata)
        self._counts = _padded(self._counts, strata) + torch.bincount(labels, minlength=strata)
        for sample in self._samples.values():
            sample.add(batch)
        self._take_sums(batch, strata)
        self._take_keys(batch.keys)

    def _start_samples(self, batch: Outputs, strata: int) -> None:
        if self._samples or not self.needs.samples:
            return
        shapes: dict[str, tuple[dict[str, int], torch.dtype]] = {}
        for kind in self.needs.samples:
            features = {block: value for block, value in batch.features.items() if _kept(block, kind)}
            dtype = reduce(torch.promote_types, (value.dtype for value in features.values()), batch.logits.dtype)
            shapes[kind] = ({block: value.shape[1] for block, value in features.items()}, dtype)
        check_budget(self.budget, [row_bytes(batch.n_classes, *shape) for shape in shapes.values()], strata)
        for kind, (widths, dtype) in shapes.items():
            self._samples[kind] = Sample(batch.n_classes, widths, strata, self._share, dtype)

    @property
    def _share(self) -> int:
        """Bytes of each sample."""
        return self.budget // max(1, len(self.needs.samples))

    def _take_sums(self, batch: Outputs, strata: int) -> None:
        if self.needs.sums == "none" and not self.needs.ranges:
            return
        groups, kept = self._groups(batch)
        n_groups = batch.n_classes if self.needs.group != "label" else strata
        for block, features in batch.features.items():
            rows = features if kept is None else features[kept]
            if self.needs.sums != "none":
                summed = rows if self.needs.transform is None else self.needs.transform(rows)
                part = ClassSums.of(summed.cpu(), groups, n_groups, self.needs.sums)
                self._sums[block] = self._sums[block] + part if block in self._sums else part
            if self.needs.ranges:
                inside = torch.ones(len(rows), dtype=torch.bool)
                if self.needs.holdout:
                    keys = batch.keys if kept is None else batch.keys[kept.cpu().numpy()]
                    inside = torch.from_numpy(keys >= HOLDOUT)
                ranges = _ranges(rows.cpu()[inside], groups[inside], n_groups)
                self._ranges[block] = _joined(self._ranges[block], ranges) if block in self._ranges else ranges

    def _groups(self, batch: Outputs) -> tuple[Tensor, Tensor | None]:
        """The group of each row that is summed, and which rows those are if not all."""
        predicted = batch.logits.argmax(dim=1)
        if self.needs.group == "predicted":
            return predicted.cpu(), None
        if batch.labels is None:
            return torch.zeros(len(batch), dtype=torch.int64), None
        if self.needs.group == "correct":
            kept = predicted == batch.labels
            return batch.labels[kept].cpu(), kept
        return batch.labels.cpu(), None

    def _take_keys(self, keys: Keys) -> None:
        if len(self._keys) == KEYS:
            keys = keys[keys < self._keys[-1]]
        self._new_keys.append(keys.copy())
        if sum(map(len, self._new_keys)) > max(len(self._keys), 1 << 16):
            self._join_keys()

    def _join_keys(self) -> None:
        self._keys, self._new_keys = np.unique(np.concatenate([self._keys, *self._new_keys]))[:KEYS], [NO_KEYS]

    def settle(self) -> "Summary":
        """Take in the batches that are held."""
        held, self._held, self._held_rows = self._held, [], 0
        if held:
            self._take(Outputs.concat(held))
        return self

    @property
    def rows(self) -> int:
        """Training rows."""
        return int(self.counts.sum())

    @property
    def n_classes(self) -> int:
        """C, the width of the logits."""
        return self._filled().n_classes

    @property
    def blocks(self) -> list[str]:
        """The blocks of features, in order."""
        return list(self.widths)

    @property
    def widths(self) -> dict[str, int]:
        """The width of each block."""
        return {block: value.shape[1] for block, value in self._filled().features.items()}

    @property
    def counts(self) -> Tensor:
        """(C,) rows of each class; (1,) without labels."""
        return self.settle()._counts

    @property
    def sums(self) -> dict[str, ClassSums]:
        """Sums of each block."""
        return self.settle()._sums

    @property
    def ranges(self) -> dict[str, Ranges]:
        """Minimum and maximum of each block."""
        return self.settle()._ranges

    @property
    def samples(self) -> dict[str, Sample]:
        """The samples by kind."""
        return self.settle()._samples

    @property
    def keys(self) -> Keys:
        """Sorted unique keys of training rows."""
        self.settle()._join_keys()
        return self._keys

    def _filled(self) -> Outputs:
        if self.shape is None:
            raise InputError("data: no training row; give at least one, or a new loader if this one was read already")
        return self.shape

    def check_classes(self) -> None:
        """Raise unless every class has a row."""
        counts = self.counts
        missing = (counts == 0).nonzero()[:, 0].tolist()
        if missing:
            raise InputError(
                f"labels: no sample of class {missing[0]} ({len(missing)} of {len(counts)} classes have none); "
                f"give every class at least one"
            )

    def __add__(self, other: "Summary") -> "Summary":
        if not isinstance(other, Summary):
            return NotImplemented
        joined = Summary(self.needs, budget=min(self.budget, other.budget), model=self.model)
        _check_addable(self, other)
        filled = [part.settle() for part in (self, other) if part.shape is not None]
        if not filled:
            return joined
        joined.shape = filled[0].shape
        joined._counts = sum((part._counts for part in filled[1:]), start=filled[0]._counts)
        for name, merge in (("_sums", _add), ("_samples", _add), ("_ranges", _joined)):
            tables: list[dict[str, Any]] = [getattr(part, name) for part in filled]
            table = {k: merge(v, tables[1][k]) if len(tables) > 1 else v for k, v in tables[0].items()}
            setattr(joined, name, table)
        if len(filled) == 1:  # rows are added in place
            joined._samples = {kind: sample.within(joined._share) for kind, sample in joined._samples.items()}
        joined._new_keys = [part.keys for part in filled]
        return joined

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the summary to one safetensors file. It contains outputs of training rows."""
        shape = self.settle()._filled()
        tensors = {"counts": self._counts, "keys": torch.from_numpy(self.keys.view(np.int64).copy())}
        parts: dict[str, dict[str, Tensor]] = {f"samples:{k}": sample.state() for k, sample in self._samples.items()}
        for i, block in enumerate(shape.features):
            parts[f"sums:{i}"] = vars(self._sums[block]) if block in self._sums else {}
            parts[f"ranges:{i}"] = dict(zip("lh", self._ranges.get(block, ()), strict=False))
        tensors |= {f"{part}:{name}": tensor for part, state in parts.items() for name, tensor in state.items()}
        record = {
            "kind": "summary", "needs": self.described, "budget": self.budget, "model": self.model,
            "n_classes": shape.n_classes, "labelled": shape.labels is not None,
            "widths": list(self.widths.items()),
            "dtypes": {kind: str(sample.dtype).removeprefix("torch.") for kind, sample in self._samples.items()},
            "contains": "outputs of training rows",
        }  # fmt: skip
        write_record(path, record, tensors)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Summary":
        """Read what `save` wrote. A damaged or foreign file is an error."""
        record, tensors = read_record(path, "summary")
        try:
            return cls._restored(record, tensors)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise GuardFileError(f"path: {path} does not describe a summary ({error}); save it again") from error

    @classmethod
    def _restored(cls, record: dict[str, Any], tensors: dict[str, Tensor]) -> "Summary":
        described, widths, n_classes = record["needs"], dict(record["widths"]), record["n_classes"]
        needs = Needs(**{**described, "transform": None, "samples": tuple(described["samples"])})
        summary = cls(needs, budget=record["budget"], model=record["model"])
        summary.described = {**needs.describe(), "transform": described["transform"]}

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

        labels = torch.empty(0, dtype=torch.int64) if record["labelled"] else None
        features = {block: torch.empty(0, width) for block, width in widths.items()}
        summary.shape = Outputs.checked(torch.empty(0, n_classes), features, labels)
        summary._counts = tensors["counts"]
        summary._keys = tensors["keys"].numpy().view(np.uint64)
        for i, block in enumerate(widths):
            if sums := part(f"sums:{i}:"):
                summary._sums[block] = ClassSums(**sums)
            if ranges := part(f"ranges:{i}:"):
                summary._ranges[block] = (ranges["l"], ranges["h"])
        for kind in needs.samples:
            kept = {block: width for block, width in widths.items() if _kept(block, kind)}
            dtype = getattr(torch, record["dtypes"][kind])
            sample = Sample(n_classes, kept, len(summary._counts), summary._share, dtype)
            summary._samples[kind] = sample.load(part(f"samples:{kind}:"))
        return summary

    def __repr__(self) -> str:
        if self.shape is None:
            return "Summary(no rows)"
        kept = ", ".join(f"{len(sample)} kept with {kind}" for kind, sample in self.samples.items())
        return f"Summary({self.rows} rows, {self.n_classes} classes{', ' * bool(kept)}{kept})"


def _check_addable(one: Summary, other: Summary) -> None:
    """Raise where two summaries cannot add; the error names what differs."""
    pairs: list[tuple[str, Any, Any]] = [
        (name, value, other.described[name]) for name, value in one.described.items() if name != "samples"
    ]
    pairs.append(("samples", list(one.described["samples"]), list(other.described["samples"])))
    if one.shape is not None and other.shape is not None:
        pairs += [("n_classes", one.n_classes, other.n_classes), ("layers", one.blocks, other.blocks)]
        pairs += [("widths", one.widths, other.widths), ("model", one.model, other.model)]
        pairs.append(("labels", one.shape.labels is not None, other.shape.labels is not None))
    for name, first, second in pairs:
        if first != second:
            raise InputError(
                f"summary: {name} differ: {first!r} and {second!r}; add those of one method, model and set of layers"
            )


def _kept(block: str, kind: str) -> bool:
    """Whether a sample of this kind holds a block."""
    is_statistic = "|" in block and not block.startswith("|")
    return kind == "statistics" if is_statistic else kind == "features"


def _copy(batch: Outputs) -> Outputs:
    features = {block: value.clone() for block, value in batch.features.items()}
    labels = None if batch.labels is None else batch.labels.clone()
    return Outputs.checked(batch.logits.clone(), features, labels, batch.numpy, batch.keys.copy())


def _padded(counts: Tensor, size: int) -> Tensor:
    return counts if len(counts) else counts.new_zeros(size)


def _add(one: Any, other: Any) -> Any:
    return one + other


def _ranges(rows: Tensor, groups: Tensor, n_groups: int) -> Ranges:
    low = rows.new_full((n_groups, rows.shape[1]), torch.inf)
    at = groups[:, None].expand_as(rows)
    return low.scatter_reduce(0, at, rows, "amin"), (-low).scatter_reduce(0, at, rows, "amax")


def _joined(one: Ranges, other: Ranges) -> Ranges:
    return torch.minimum(one[0], other[0]), torch.maximum(one[1], other[1])
