"""The summary itself: rows go in, summaries add, detectors learn from them."""

import os
from functools import reduce
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from igeood.errors import InputError
from igeood.files import describing, read_bytes, read_record, record_bytes, write_record
from igeood.keys import Keys
from igeood.outputs import Outputs, check_alike
from igeood.summary.needs import SUMS, Needs, by_correct, by_label, by_prediction, by_unheld_label
from igeood.summary.sample import Sample
from igeood.summary.sums import ClassSums, LengthSums, unit_rows

_OWN: tuple[Any, ...] = (by_label, by_prediction, by_correct, by_unheld_label, unit_rows, LengthSums)
OWN = {value.__qualname__: value for value in _OWN}  # what the needs of a file may name
BUDGET = 256 << 20  # bytes of training rows that are kept
KEYS = 1 << 20  # keys of training rows that are kept, to recognise them again


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
    samples : dict of Sample
        "logits", "features": those that the needs name.
    head : tuple of Tensor, optional
        Weight (C, k) and bias (C,) of the classifier's head, where the needs ask for it and there is a model.
    keys, key_counts : array
        Sorted unique keys of the training rows, the smallest million of them; and how many rows have each.
    identified : bool
        Whether the keys are of ids or of a model's inputs, in every batch.
    about : dict
        What is the same for all rows, as JSON values: `classes`, `preparation`, `probabilities`, `layouts`.
    preview : Outputs, optional
        The first rows' logits and labels; files do not keep them.

    Examples
    --------
    >>> needs = Needs(labels=True, samples=("logits",))
    >>> a, b = (Summary.of(Outputs([[2.0, x], [x, 1.0]], labels=[0, 1]), needs) for x in (0.0, 0.5))
    >>> (a + b).rows, len((a + b).samples["logits"])
    (4, 4)
    """

    def __init__(self, needs: Needs, *, budget: int = BUDGET, model: str | None = None) -> None:
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
            raise InputError(f"expected a number of bytes, at least 1; got {budget!r}", argument="budget")
        self.needs = needs
        self.described = needs.describe()
        self.budget = budget
        self.model = model
        self.shape: Outputs | None = None  # no rows, but the widths and blocks of all batches
        self.counts = torch.zeros((), dtype=torch.int64)
        self.sums: dict[str, Any] = {}
        self.samples: dict[str, Sample] = {}
        self.head: tuple[Tensor, Tensor] | None = None
        self.identified = True
        self.about: dict[str, Any] = {}
        self.preview: Outputs | None = None
        self._keys: list[Keys] = [np.empty(0, dtype=np.uint64)]
        self._key_counts: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]

    @classmethod
    def of(cls, outputs: Outputs, needs: Needs, *, budget: int = BUDGET) -> "Summary":
        """The summary of one batch."""
        return cls(needs, budget=budget).add(outputs)

    def add(self, outputs: Outputs) -> "Summary":
        """Take in a batch of training rows, in place. A few rows cost as much to sum as a thousand."""
        if len(outputs) == 0:
            return self
        outputs.check_valid()
        batch = self._needed(outputs)
        if self.shape is None:
            self._start(batch[torch.arange(0)])  # a copy, which holds none of the batch's memory
        check_alike(self._filled(), batch)
        self.counts = self.counts + torch.bincount(by_label(batch), minlength=len(self.counts))
        for sample in self.samples.values():
            sample.add(batch)
        if self.needs.sums != "none":
            self._add_sums(batch)
        self.identified &= outputs.identified
        self._add_keys(batch.keys, np.ones(len(batch), dtype=np.int64))
        return self

    def _needed(self, outputs: Outputs) -> Outputs:
        """What the needs ask for of a batch, once it has that."""
        if self.needs.labels and outputs.labels is None:
            raise InputError("they are needed", argument="labels", cure="give labels, (x, y), or a column `label`")
        if self.described != self.needs.describe():
            raise InputError("it lacks its method's functions", argument="summary", cure="add two summaries with +")
        batch = outputs.detached().only(self.needs.blocks(outputs.features))
        if self.needs.must_read_layers and not batch.features:
            raise InputError("no features", argument="outputs", cure="give features, or columns feature.<layer>")
        return batch

    def _start(self, shape: Outputs) -> None:
        """Get ready for rows of this shape: its widths, types, and whether it has labels."""
        strata = 1 if shape.labels is None else shape.n_classes
        share = self.budget // max(1, len(self.needs.samples))
        samples: dict[str, Sample] = {}
        for name in self.needs.samples:
            features = shape.features if name == "features" else {}
            dtype = reduce(torch.promote_types, (value.dtype for value in features.values()), shape.logits.dtype)
            widths = {block: value.shape[1] for block, value in features.items()}
            samples[name] = Sample(shape.n_classes, widths, strata, share, dtype)
        _check_budget(samples, self.budget)
        self.shape = shape
        self.samples = samples
        self.counts = torch.zeros(strata, dtype=torch.int64)

    def _add_sums(self, batch: Outputs) -> None:
        needs = self.needs
        groups = needs.group(batch)
        n_groups = len(self.counts) if needs.group is by_label else batch.n_classes
        rows = groups >= 0
        is_whole = bool(rows.all())
        for block, features in batch.features.items():
            values = features.cpu() if is_whole else features.cpu()[rows]
            values = values if needs.transform is None else needs.transform(values)
            if isinstance(needs.sums, str):
                part: Any = ClassSums.of(values, groups[rows], n_groups, needs.sums)
            else:
                part = needs.sums.of(values, groups[rows], n_groups)  # type: ignore[attr-defined]
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

    def _add_keys(self, keys: Keys, counts: NDArray[np.int64]) -> None:
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
            self._keys = [keys[:KEYS]]
            self._key_counts = [counts[:KEYS]]

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
            raise InputError("no training row", argument="data", cure="give at least one; a generator is read once")
        return self.shape

    def __add__(self, other: "Summary") -> "Summary":
        if not isinstance(other, Summary):
            return NotImplemented
        total = Summary(self.needs, budget=self.budget, model=self.model)
        total.described = self.described
        total += self
        total += other
        return total

    def __iadd__(self, other: "Summary") -> "Summary":
        """Take in another summary in place: many of them add with the memory of two."""
        if not isinstance(other, Summary):
            return NotImplemented
        _check_addable(self, other)
        if self.described != self.needs.describe():  # it comes from a file, which has no functions
            self.needs = other.needs
        self.budget = min(self.budget, other.budget)
        self.model = self.model or other.model
        self.head = self.head or other.head
        self.about = {**other.about, **self.about}
        self.preview = self.preview or other.preview
        if other.shape is None:
            return self
        if self.shape is None:
            self._start(other.shape)
        self.counts = self.counts + other.counts
        mine = self.sums
        self.sums = {k: self._typed(mine[k]) + self._typed(v) if k in mine else v for k, v in other.sums.items()}
        for name, sample in other.samples.items():
            self.samples[name] += sample
        _check_budget(self.samples, self.budget)  # rows of a wider type are larger
        self.identified &= other.identified
        self._add_keys(other.keys, other.key_counts)
        return self

    def _typed(self, sums: Any) -> Any:
        """Sums as an object of their class, which those of a file may lack."""
        if not isinstance(sums, SimpleNamespace):
            return sums
        if not callable(self.needs.sums):
            raise InputError("it lacks its class of sums", argument="summary", cure="load it with its method's {needs}")
        return self.needs.sums(**vars(sums))

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
        for name, sample in self.samples.items():
            tensors |= {f"samples:{name}:{key}": tensor for key, tensor in sample.state().items()}
        for number, block in enumerate(widths):
            if block in self.sums:
                tensors |= {f"sums:{number}:{key}": tensor for key, tensor in vars(self.sums[block]).items()}
        if self.head is not None:
            tensors |= {"head:weight": self.head[0], "head:bias": self.head[1]}
        record = {
            "kind": "summary",
            "needs": self.described,
            "budget": self.budget,
            "model": self.model,
            "n_classes": None if shape is None else shape.n_classes,
            "widths": list(widths.items()),
            "labelled": shape is not None and shape.labels is not None,
            "about": self.about,
            "dtypes": {name: str(sample.dtype).removeprefix("torch.") for name, sample in self.samples.items()},
            "identified": self.identified,
            "contains": "outputs of training rows",
        }
        return record, tensors

    @classmethod
    def load(cls, path: str | os.PathLike[str], needs: Needs | None = None) -> "Summary":
        """Read what `save` wrote; with the `needs` of a method that has functions of its own, its sums can be added."""
        record, tensors = read_record(path, "summary")
        with describing(path, "summary"):
            return _restore(record, tensors, needs)

    @classmethod
    def from_bytes(cls, content: bytes, needs: Needs | None = None) -> "Summary":
        """Read what `to_bytes` returned."""
        return _restore(*read_bytes(content, "summary"), needs)

    def __repr__(self) -> str:
        if self.shape is None:
            return "Summary(no rows)"
        kept = "".join(f", {len(sample)} kept with {name}" for name, sample in self.samples.items())
        return f"Summary({self.rows} rows, {self.n_classes} classes{kept})"


def _restore(record: dict[str, Any], tensors: dict[str, Tensor], needs: Needs | None) -> Summary:
    described = record["needs"]
    if needs is None or needs.describe() != described:
        plain = {name: described[name] for name in ("layers", "head", "labels")}
        sums = described["sums"] if described["sums"] in SUMS else OWN.get(described["sums"], "none")
        functions = {name: OWN[described[name]] for name in ("group", "transform") if described[name] in OWN}
        needs = Needs(**plain, **functions, sums=sums, samples=tuple(described["samples"]))
    summary = Summary(needs, budget=record["budget"], model=record["model"])
    summary.described = described
    summary.about = record["about"]
    if record["n_classes"] is None:  # no row
        return summary

    def part(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    dtypes = {name: getattr(torch, dtype) for name, dtype in record["dtypes"].items()}
    features = {str(b): torch.empty(0, width, dtype=dtypes.get("features")) for b, width in record["widths"]}
    labels = torch.empty(0, dtype=torch.int64) if record["labelled"] else None
    dtype = dtypes.get("logits", dtypes.get("features"))
    summary._start(Outputs.checked(torch.empty(0, record["n_classes"], dtype=dtype), features, labels))
    summary.counts = tensors["counts"]
    summary.identified = record["identified"]
    summary._keys = [tensors["keys"].numpy().view(np.uint64)]
    summary._key_counts = [tensors["key_counts"].numpy()]
    if described["sums"] != "none":
        kind: Any = ClassSums if described["sums"] in SUMS else SimpleNamespace
        kind = needs.sums if callable(needs.sums) else kind
        summary.sums = {block: kind(**part(f"sums:{number}:")) for number, block in enumerate(features)}
    for name, sample in summary.samples.items():
        sample.load(part(f"samples:{name}:"))
    if "head:weight" in tensors:
        summary.head = (tensors["head:weight"], tensors["head:bias"])
    return summary


def _check_addable(one: Summary, other: Summary) -> None:
    """Raise where two summaries cannot add; the error names what differs."""
    pairs = [(name, value, other.described[name]) for name, value in one.described.items()]
    if one.shape is not None and other.shape is not None:
        check_alike(one.shape, other.shape)
        pairs.append(("model", one.model, other.model))
    pairs += [(name, value, other.about.get(name, value)) for name, value in one.about.items()]
    for name, mine, theirs in pairs:
        if mine != theirs:
            raise InputError(f"{name}: {mine!r} and {theirs!r}", argument="summary", cure="add those made alike")


def _check_budget(samples: dict[str, Sample], budget: int) -> None:
    needed = len(samples) * max((sample.least for sample in samples.values()), default=0)
    if budget < needed:
        raise InputError(f"{budget:,} bytes hold no row of each class", argument="budget", cure=f"give {needed:,}")
