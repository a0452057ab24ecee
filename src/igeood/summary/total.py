"""The summary itself: rows go in, summaries add, detectors learn from them."""

import copy
import os
from collections.abc import Iterable
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from igeood.errors import GuardFileError, InputError
from igeood.files import read_bytes, read_record, record_bytes, write_record
from igeood.outputs import NO_KEYS, Keys, Outputs, check_alike
from igeood.summary.needs import Needs
from igeood.summary.sample import Sample
from igeood.summary.sums import ClassSums

BUDGET = 256 << 20  # bytes of training rows that are kept
KEYS = 1 << 20  # keys of training rows that are kept, to recognise them again
HOLDOUT = np.uint64(2**64 // 10)  # rows with smaller keys are held out of the ranges


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
        For each block of features; with the minimum and maximum of each class where the needs ask for ranges.
    samples : dict of Sample
        "logits", "features", "statistics": those that the needs name.
    head : tuple of Tensor, optional
        Weight (C, k) and bias (C,) of the classifier's head, where the needs ask for it and there is a model.
    keys, key_counts : array
        Sorted unique keys of the training rows, the smallest million of them; and how many rows have each.
    identified : bool
        Whether the keys are of ids or of a model's inputs, in every batch; else they are of rows of outputs.
    about : dict
        What is the same for all rows, as JSON values, where it is known: `classes`, their names; `preparation`, how
        images become inputs; `probabilities`, whether the model gives these.

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
        self.counts = torch.zeros((), dtype=torch.int64)
        self.sums: dict[str, ClassSums] = {}
        self.samples: dict[str, Sample] = {}
        self.head: tuple[Tensor, Tensor] | None = None
        self.identified = True
        self.about: dict[str, Any] = {}
        self.glimpse: Outputs | None = None  # the first rows, to look at once
        self._keys, self._key_counts = [NO_KEYS], [np.empty(0, dtype=np.int64)]

    @classmethod
    def of(cls, outputs: Outputs, needs: Needs, *, budget: int = BUDGET) -> "Summary":
        """The summary of one batch."""
        return cls(needs, budget=budget).add(outputs)

    def add(self, outputs: Outputs) -> "Summary":
        """Take in a batch of training rows, in place. A few rows cost as much to sum as a thousand."""
        if len(outputs) == 0:
            return self
        batch = self._needed(outputs)
        if self.shape is None:
            self._start(batch[torch.arange(0)])  # a copy, which holds none of the batch's memory
        check_alike(self._filled(), batch)
        labels = torch.zeros(len(batch), dtype=torch.int64) if batch.labels is None else batch.labels.cpu()
        self.counts = self.counts + torch.bincount(labels, minlength=len(self.counts))
        for sample in self.samples.values():
            sample.add(batch)
        if self.needs.is_summed:
            self._take_sums(batch, labels)
        self.identified &= outputs.identified
        self._take_keys(batch.keys, np.ones(len(batch), dtype=np.int64))
        return self

    def _needed(self, outputs: Outputs) -> Outputs:
        """What the needs ask for of a batch, once it has that."""
        if self.needs.labels and outputs.labels is None:
            raise InputError("labels: this method needs the class of each row; give (x, y), or fit(logits, labels)")
        if self.described["transform"] and self.needs.transform is None:
            problem = f"its row transform {self.described['transform']!r} is not in its file"
            raise InputError(f"summary: {problem}; sum up the batch in a summary of its own, and add the two with +")
        batch = outputs.detached().only(self.needs.blocks(outputs.features))
        if self.needs.layers != "none" and not batch.features:
            raise InputError("outputs: no features to learn from; give features, or columns feature.<layer>")
        return batch

    def _start(self, shape: Outputs) -> None:
        """Get ready for rows of this shape: its widths, types, and whether it has labels."""
        kinds, samples = self.needs.samples, dict[str, Sample]()
        strata = 1 if shape.labels is None else shape.n_classes
        for kind in kinds:
            features = {block: value for block, value in shape.features.items() if _kind(block) == kind}
            dtype = reduce(torch.promote_types, (value.dtype for value in features.values()), shape.logits.dtype)
            widths = {block: value.shape[1] for block, value in features.items()}
            samples[kind] = Sample(shape.n_classes, widths, strata, self.budget // len(kinds), dtype)
        _check_budget(samples, self.budget)
        self.shape, self.samples, self.counts = shape, samples, torch.zeros(strata, dtype=torch.int64)

    def _take_sums(self, batch: Outputs, labels: Tensor) -> None:
        needs, groups, n_groups = self.needs, labels, len(self.counts)
        rows = torch.ones(len(batch), dtype=torch.bool)
        if needs.group != "label":
            predicted, n_groups = batch.logits.argmax(dim=1).cpu(), batch.n_classes
            groups, rows = (predicted, rows) if needs.group == "predicted" else (labels, predicted == labels)
        inside = torch.from_numpy(batch.keys >= HOLDOUT) if needs.holdout else torch.ones_like(rows)
        for block, features in batch.features.items():
            values = features.cpu() if bool(rows.all()) else features.cpu()[rows]
            summed = values if needs.transform is None else needs.transform(values)
            part = ClassSums.of(summed, groups[rows], n_groups, needs.sums)
            if needs.ranges:
                part = part.with_ranges(values[inside[rows]], groups[rows & inside])
            self.sums[block] = self.sums[block] + part if block in self.sums else part

    @property
    def keys(self) -> Keys:
        """Sorted unique keys of training rows."""
        self._compact_keys()
        return self._keys[0]

    @property
    def key_counts(self) -> NDArray[np.int64]:
        """How many training rows have each key: exact, for the keys that are kept were kept from the start."""
        self._compact_keys()
        return self._key_counts[0]

    def _take_keys(self, keys: Keys, counts: NDArray[np.int64]) -> None:
        is_small = keys <= (self._keys[0][-1] if len(self._keys[0]) == KEYS else np.uint64(2**64 - 1))
        self._keys.append(keys[is_small])
        self._key_counts.append(counts[is_small])
        if sum(map(len, self._keys[1:])) > max(len(self._keys[0]) >> 2, 1 << 16):
            self._compact_keys()

    def _compact_keys(self) -> None:
        if len(self._keys) > 1:
            keys, place = np.unique(np.concatenate(self._keys), return_inverse=True)
            counts = np.zeros(len(keys), dtype=np.int64)
            np.add.at(counts, place, np.concatenate(self._key_counts))
            self._keys, self._key_counts = [keys[:KEYS]], [counts[:KEYS]]

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes, where they are known."""
        return self.about.get("classes")

    @property
    def rows(self) -> int:
        """Training rows."""
        return int(self.counts.sum())

    @property
    def n_classes(self) -> int:
        """C, the width of the logits."""
        return self._filled().n_classes

    @property
    def widths(self) -> dict[str, int]:
        """The blocks of features, in order, and their widths."""
        return {block: value.shape[1] for block, value in self._filled().features.items()}

    def _filled(self) -> Outputs:
        if self.shape is None:
            raise InputError("data: no training row; give at least one, or a new loader if this one was read already")
        return self.shape

    def __add__(self, other: "Summary") -> "Summary":
        if not isinstance(other, Summary):
            return NotImplemented
        joined = Summary(self.needs, budget=self.budget, model=self.model)
        joined.described = self.described
        joined += self
        joined += other
        return joined

    def __iadd__(self, other: "Summary") -> "Summary":
        """Take in another summary in place: many of them add with the memory of two."""
        if not isinstance(other, Summary):
            return NotImplemented
        _check_addable(self, other)
        if self.needs.transform is None:  # a file has none
            self.needs = other.needs
        self.budget = min(self.budget, other.budget)
        self.model, self.head = self.model or other.model, self.head or other.head
        self.about = {**other.about, **self.about}
        if other.shape is None:
            return self
        if self.shape is None:
            self._start(other.shape)
        self.counts = self.counts + other.counts
        self.sums = {k: self.sums[k] + v if k in self.sums else v for k, v in other.sums.items()}
        for kind, sample in other.samples.items():
            self.samples[kind] += sample
        _check_budget(self.samples, self.budget)  # of a wider type, rows are larger
        self.identified &= other.identified
        self._take_keys(other.keys, other.key_counts)
        return self

    def only(self, blocks: Iterable[str]) -> "Summary":
        """The same summary with the sums of these blocks of features."""
        other = copy.copy(self)
        other.sums = {block: self.sums[block] for block in blocks if block in self.sums}
        return other

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the summary to one safetensors file. It contains outputs of training rows."""
        write_record(path, *self._state())

    def to_bytes(self) -> bytes:
        """What `save` writes."""
        return record_bytes(*self._state())

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """All that is not a tensor, and the tensors."""
        shape = self.shape
        widths = {} if shape is None else self.widths
        tensors = {"counts": self.counts, "keys": torch.from_numpy(self.keys.view(np.int64))}
        tensors["key_counts"] = torch.from_numpy(self.key_counts)
        parts = {f"samples:{kind}": sample.state() for kind, sample in self.samples.items()}
        parts |= {"head": dict(zip(("weight", "bias"), self.head or (), strict=False))}
        parts |= {f"sums:{i}": vars(self.sums[block]) for i, block in enumerate(widths) if block in self.sums}
        tensors |= {f"{part}:{name}": tensor for part, state in parts.items() for name, tensor in state.items()}
        record = {
            "kind": "summary", "needs": self.described, "budget": self.budget, "model": self.model,
            "n_classes": None if shape is None else shape.n_classes, "widths": list(widths.items()),
            "labelled": shape is not None and shape.labels is not None, "about": self.about,
            "dtypes": {kind: str(sample.dtype).removeprefix("torch.") for kind, sample in self.samples.items()},
            "identified": self.identified, "contains": "outputs of training rows",
        }  # fmt: skip
        return record, tensors

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Summary":
        """Read what `save` wrote. A damaged or foreign file is an error."""
        return cls._checked(*read_record(path, "summary"), path)

    @classmethod
    def from_bytes(cls, content: bytes) -> "Summary":
        """Read what `to_bytes` returned."""
        return cls._checked(*read_bytes(content, "summary"), "the summary")

    @classmethod
    def _checked(cls, record: dict[str, Any], tensors: dict[str, Tensor], path: Any) -> "Summary":
        try:
            return cls._restored(record, tensors)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise GuardFileError(f"path: {path} does not describe a summary ({error}); save it again") from error

    @classmethod
    def _restored(cls, record: dict[str, Any], tensors: dict[str, Tensor]) -> "Summary":
        described, widths, n_classes = record["needs"], dict(record["widths"]), record["n_classes"]
        tuples = {name: tuple(described[name]) for name in ("samples", "returns")}
        needs = Needs(**{**described, **tuples, "transform": None})
        summary = cls(needs, budget=record["budget"], model=record["model"])
        summary.described = {**needs.describe(), "transform": described["transform"]}
        summary.about = record.get("about", {})
        if n_classes is None:  # no row
            return summary

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

        dtypes = {kind: getattr(torch, name) for kind, name in record["dtypes"].items()}
        features = {block: torch.empty(0, width, dtype=dtypes.get(_kind(block))) for block, width in widths.items()}
        labels = torch.empty(0, dtype=torch.int64) if record["labelled"] else None
        summary._start(Outputs.checked(torch.empty(0, n_classes, dtype=dtypes.get("logits")), features, labels))
        summary.counts, summary._keys = tensors["counts"], [tensors["keys"].numpy().view(np.uint64)]
        summary.identified = record.get("identified", summary.model is not None)  # older files have neither
        summary._key_counts = [tensors.get("key_counts", torch.ones(len(tensors["keys"]), dtype=torch.int64)).numpy()]
        if needs.is_summed:
            summary.sums = {block: ClassSums(**part(f"sums:{i}:")) for i, block in enumerate(widths)}
        for kind, sample in summary.samples.items():
            sample.load(part(f"samples:{kind}:"))
        if head := part("head:"):
            summary.head = head["weight"], head["bias"]
        return summary

    def __repr__(self) -> str:
        if self.shape is None:
            return "Summary(no rows)"
        kept = "".join(f", {len(sample)} kept with {kind}" for kind, sample in self.samples.items())
        return f"Summary({self.rows} rows, {self.n_classes} classes{kept})"


def _check_addable(one: Summary, other: Summary) -> None:
    """Raise where two summaries cannot add; the error names what differs."""
    pairs = [(name, value, other.described[name]) for name, value in one.described.items()]
    if one.shape is not None and other.shape is not None:
        check_alike(one.shape, other.shape)
        pairs.append(("model", one.model, other.model))
    pairs += [(name, value, other.about.get(name, value)) for name, value in one.about.items()]
    for name, first, second in pairs:
        if first != second:
            raise InputError(f"summary: {name} differ: {first!r} and {second!r}; add those of one method and model")


def _check_budget(samples: dict[str, Sample], budget: int) -> None:
    needed = len(samples) * max((sample.least for sample in samples.values()), default=0)
    if budget < needed:
        problem = f"{budget:,} bytes cannot hold one training row of each class"
        raise InputError(f"budget: {problem}; give at least {needed:,} ({-(-needed // 2**20)} MiB)")


def _kind(block: str) -> str:
    """Which sample holds a block."""
    return "statistics" if "|" in block and not block.startswith("|") else "features"
