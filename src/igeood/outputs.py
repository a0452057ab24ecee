"""What a classifier said of a batch, and how arrays of any kind come in and go out again."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from igeood.errors import InputError

Array = np.ndarray[Any, Any] | Tensor
ArrayLike = Array | Sequence[Any]
Keys = np.ndarray[Any, np.dtype[np.uint64]]

BLOCK_VALUES = 1 << 20
LARGEST = 1e100  # of a feature: sums of squares of larger ones could overflow


@dataclass(frozen=True, eq=False)
class Outputs:
    """Logits of N samples, with the hidden features and the labels where there are any; checked once, here.

    NumPy arrays (or lists) and tensors are welcome; inside they are tensors, and `like` gives a result back in the
    kind that came in. Slicing gives the `Outputs` of some samples.

    Parameters
    ----------
    logits : array
        (N, C), C ≥ 2. Each row needs a finite maximum: −inf is a masked class, NaN and +inf are errors.
    features : mapping of str to array
        For each layer (N, k): finite feature vectors.
    labels : array of int, optional
        (N,) the true class of each sample, in 0…C−1.
    name : str
        What errors call the logits.
    first : int, optional
        Where these samples are a block of more: the number of the first one, for errors.

    Examples
    --------
    >>> outputs = Outputs([[2.0, 0.0], [0.0, 1.0]], labels=[0, 1])
    >>> len(outputs), outputs.n_classes, len(outputs[:1])
    (2, 2, 1)
    """

    logits: Tensor
    features: Mapping[str, Tensor] = field(default_factory=dict)
    labels: Tensor | None = None
    numpy: bool = field(init=False, repr=False)

    def __init__(
        self,
        logits: ArrayLike,
        features: Mapping[str, ArrayLike] | None = None,
        labels: ArrayLike | None = None,
        *,
        name: str = "logits",
        first: int | None = None,
    ) -> None:
        tensor, is_numpy = as_tensor(logits, name)
        _check_shape(tensor, name)
        # features first: where a hidden layer is the culprit, its name should be in the message
        checked = {layer: _features(value, layer, tensor, first) for layer, value in (features or {}).items()}
        check_logits(tensor, name, first)
        self._set(tensor, checked, None if labels is None else _labels(labels, tensor, first), is_numpy)

    def _set(self, logits: Tensor, features: Mapping[str, Tensor], labels: Tensor | None, is_numpy: bool) -> None:
        for name, value in (("logits", logits), ("features", features), ("labels", labels), ("numpy", is_numpy)):
            object.__setattr__(self, name, value)

    @classmethod
    def checked(
        cls, logits: Tensor, features: Mapping[str, Tensor], labels: Tensor | None, is_numpy: bool
    ) -> "Outputs":
        """Build from parts that have been checked already."""
        made = object.__new__(cls)
        made._set(logits, features, labels, is_numpy)
        return made

    @classmethod
    def of(cls, value: "Outputs | ArrayLike", labels: ArrayLike | None = None, name: str = "logits") -> "Outputs":
        """`value` itself if it is an `Outputs` (with `labels` put in where given), else `Outputs` of these logits.

        `name` is what errors call them.
        """
        if not isinstance(value, Outputs):
            return cls(value, labels=labels, name=name)
        if labels is None:
            return value
        return cls.checked(value.logits, value.features, _labels(labels, value.logits, None), value.numpy)

    @classmethod
    def concat(cls, parts: Iterable["Outputs"]) -> "Outputs":
        """All samples of several `Outputs` of the same width and layers, in order."""
        items = list(parts)
        if not items:
            raise InputError("parts: nothing to join; give at least one Outputs")
        if len(items) == 1:
            return items[0]
        labels = [p.labels for p in items if p.labels is not None]
        for part in items[1:]:
            check_alike(items[0], part)
        if 0 < len(labels) < len(items):
            raise InputError(f"labels: {len(items) - len(labels)} of {len(items)} batches have none; give all or none")
        return cls.checked(
            torch.cat([p.logits for p in items]),
            {layer: torch.cat([p.features[layer] for p in items]) for layer in items[0].features},
            torch.cat(labels) if labels else None,
            items[0].numpy,
        )

    def __len__(self) -> int:
        return len(self.logits)

    def __repr__(self) -> str:
        layers = f", layers {', '.join(self.features)}" if self.features else ""
        return f"Outputs({len(self)} samples, {self.n_classes} classes{layers}{', labels' * (self.labels is not None)})"

    def __getitem__(self, rows: slice | Tensor) -> "Outputs":
        labels = None if self.labels is None else self.labels[rows]
        features = {layer: value[rows] for layer, value in self.features.items()}
        return self.checked(self.logits[rows], features, labels, self.numpy)

    def detached(self) -> "Outputs":
        """The same outputs without their gradients."""
        features = {layer: value.detach() for layer, value in self.features.items()}
        return self.checked(self.logits.detach(), features, self.labels, self.numpy)

    @property
    def n_classes(self) -> int:
        """C, the width of the logits."""
        return self.logits.shape[1]

    def like(self, result: Tensor) -> Array:
        """`result` in the kind that came in: NumPy for NumPy, the tensor itself for tensors."""
        return as_kind(result, self.numpy)


def check_alike(first: Outputs, batch: Outputs) -> None:
    """Raise unless a batch has the columns, the layers and their widths of an earlier one."""
    cure = "give batches of one model"
    if batch.n_classes != first.n_classes:
        raise InputError(f"logits: a batch has {batch.n_classes} columns, an earlier one {first.n_classes}; {cure}")
    if list(batch.features) != list(first.features):
        found, before = [", ".join(map(repr, part.features)) or "none" for part in (batch, first)]
        raise InputError(f"features: a batch has layers {found}; an earlier one {before}; {cure}, in one order")
    for layer, value in batch.features.items():
        width = first.features[layer].shape[1]
        if value.shape[1] != width:
            raise InputError(f"features[{layer!r}]: a batch has {value.shape[1]} channels, not {width}; {cure}")


def as_kind(result: Tensor, is_numpy: bool) -> Array:
    """A tensor as NumPy array if `is_numpy`, else as it is."""
    if not is_numpy:
        return result
    array: np.ndarray[Any, Any] = result.detach().cpu().numpy()
    return array


def as_tensor(value: ArrayLike, name: str) -> tuple[Tensor, bool]:
    """Tensor of float32 or float64 from an array of numbers, and whether it came as NumPy (or a list).

    float16 and bfloat16 become float32; integers become float64. Memory is shared where it can be.
    """
    tensor, is_numpy = (value, False) if isinstance(value, Tensor) else (_from_numpy(value, name), True)
    _check_dense(tensor, name)
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise InputError(f"{name}: expected real numbers, got {tensor.dtype}; convert them to float32 or float64")
    tensor = tensor.resolve_neg()  # NumPy knows no negated views
    if not tensor.is_floating_point():
        return tensor.to(torch.float64), is_numpy
    return (tensor.to(torch.float32) if tensor.dtype.itemsize < 4 else tensor), is_numpy


def as_vector(value: ArrayLike, name: str) -> tuple[Tensor, bool]:
    """A 1-D float64 tensor without NaN from an array of numbers, and whether it came as NumPy."""
    tensor, is_numpy = as_tensor(value, name)
    if tensor.ndim != 1:
        raise InputError(
            f"{name}: expected one score a sample, shape (N,); got {tuple(tensor.shape)}; flatten them with .ravel()"
        )
    bad = tensor.isnan().nonzero()
    if len(bad):
        raise InputError(f"{name}: NaN at position {int(bad[0])} ({len(bad)} of {len(tensor)}); remove those samples")
    return tensor.detach().to("cpu", torch.float64), is_numpy


def _check_dense(tensor: Tensor, name: str) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise InputError(f"{name}: expected a dense tensor, got one of layout {tensor.layout}; call .to_dense() first")
    if tensor.is_meta:
        raise InputError(f"{name}: is on the meta device, which holds no values; give a tensor that does")


def _array(value: Any, name: str) -> np.ndarray[Any, Any]:
    try:
        with torch.no_grad():  # a list may hold tensors with gradients
            array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"{name}: cannot be read as an array: {error}; give one, with rows of one length") from None
    if np.ma.is_masked(value):  # the array has what was masked, as if it were not
        place = np.argwhere(np.ma.getmaskarray(value))[0].tolist()
        raise InputError(f"{name}: has masked values, the first at {place}; remove those samples, or fill them")
    return array


def _from_numpy(value: Any, name: str) -> Tensor:
    array = _array(value, name)
    if array.dtype.kind not in "fiu":
        raise InputError(
            f"{name}: expected an array of real numbers, got {type(value).__name__} of {array.dtype}; "
            f"convert them to float32 or float64"
        )
    if array.dtype.kind == "f":
        plain = np.dtype(np.float64 if array.dtype.itemsize >= 8 else np.float32)
    else:
        plain = np.dtype(np.int64)
        if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
            plain = np.dtype(np.float64)
    with np.errstate(over="ignore"):  # what is too large for float64 becomes infinity, which is refused with its place
        array = np.require(array, dtype=plain, requirements=["C", "W"])  # torch has no negative strides, no big-endian
    return torch.from_numpy(array)


def _check_shape(logits: Tensor, name: str) -> None:
    if logits.ndim == 2 and logits.shape[1] >= 2:
        return
    cure = "give a matrix, or join leading axes with .reshape(-1, C)"
    if logits.ndim == 1:
        cure = "a single sample is logits[None, :], the margins of a two-class model are np.stack([-m, m], axis=1)"
    elif logits.ndim == 2:
        cure = "C must be at least 2"
    raise InputError(f"{name}: expected shape (N, C), one row a sample; got {tuple(logits.shape)}; {cure}")


def check_logits(logits: Tensor, name: str = "logits", first: int | None = None) -> None:
    """Raise unless `logits` are (N, C), C ≥ 2, and every row has a finite maximum; `first` as in `Outputs`."""
    _check_shape(logits, name)
    peak = logits.detach().amax(dim=1)  # NaN and +inf show in a row's maximum, and so does a row of nothing but −inf
    bad = (~peak.isfinite()).nonzero()[:, 0]
    if len(bad):
        row = int(bad[0])
        what = "NaN" if bool(peak[row].isnan()) else "+inf" if float(peak[row]) > 0 else "nothing but −inf"
        raise InputError(
            f"{name}: row {row + (first or 0)} has {what} ({_of(bad, logits, 'rows', first)} have NaN, +inf or nothing "
            f"but −inf); "
            f"remove those rows, or look for an overflow in the model that made them"
        )


def _of(bad: Tensor, whole: Tensor, what: str, first: int | None) -> str:
    return f"{len(bad)} of {len(whole)} {what}{'' if first is None else ' read together'}"


def _features(value: ArrayLike, layer: str, logits: Tensor, first: int | None) -> Tensor:
    name = f"features[{layer!r}]"
    tensor, _ = as_tensor(value, name)
    if tensor.ndim != 2 or len(tensor) != len(logits) or not tensor.shape[1]:
        raise InputError(
            f"{name}: expected shape ({len(logits)}, k), got {tuple(tensor.shape)}; give one for each row of logits"
        )
    if tensor.device != logits.device:
        raise InputError(f"{name}: is on {tensor.device}, the logits on {logits.device}; move one of them")
    bad = (~(tensor.detach().abs() <= min(LARGEST, torch.finfo(tensor.dtype).max)).all(dim=1)).nonzero()[:, 0]
    if len(bad):
        share = _of(bad, tensor, "samples", first)
        what = "NaN or infinity" if not bool(tensor[bad[0]].isfinite().all()) else f"a value beyond {LARGEST:g}"
        raise InputError(
            f"{name}: sample {int(bad[0]) + (first or 0)} has {what} ({share} do); "
            f"remove those samples, or look for an overflow in that layer"
        )
    return tensor


def _labels(value: ArrayLike, logits: Tensor, first: int | None) -> Tensor:
    n, classes = logits.shape
    given = value if isinstance(value, Tensor) else _label_array(value)
    tensor = given if isinstance(given, Tensor) else torch.from_numpy(given.astype(np.int64))
    _check_dense(tensor, "labels")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise InputError(f"labels: expected integers, got {tensor.dtype}; convert them to int64")
    if tuple(tensor.shape) != (n,):
        cure = "flatten them with .ravel()" if tensor.numel() == n else "give one class for each sample"
        raise InputError(
            f"labels: expected {n} of them, one for each row of logits; got shape {tuple(tensor.shape)}; {cure}"
        )
    tensor = tensor.to(logits.device, torch.int64)
    bad = ((tensor < 0) | (tensor >= classes)).nonzero()[:, 0]
    if len(bad):
        raise InputError(
            f"labels: {int(given[int(bad[0])])} at position {int(bad[0]) + (first or 0)} is outside 0…{classes - 1} "
            f"({_of(bad, tensor, 'labels', first)} are); number the classes as the {classes} columns of the logits"
        )
    return tensor


def _label_array(value: Any) -> np.ndarray[Any, Any]:
    array = _array(value, "labels")
    if array.dtype.kind == "f" and array.size == 0:
        return array
    if array.dtype.kind not in "iu":
        raise InputError(
            f"labels: expected integers, one class for each sample, got {array.dtype}; {_label_cure(array)}"
        )
    return array


def _label_cure(array: np.ndarray[Any, Any]) -> str:
    if array.ndim == 2 and array.shape[1] > 1:
        return "one-hot labels become integers by .argmax(axis=1)"
    if array.dtype.kind == "f" and np.array_equal(array, np.round(array)):
        return "convert them with .astype(int)"
    return "number the classes in the order of the logits' columns"


def block_rows(n_classes: int, feature_width: int = 0) -> int:
    """Rows that are judged together: about a million values; of wide logits one for each class, up to 8 million values.

    Each block costs a pass over the C × C centroids, which few rows would not be worth.
    Sums depend on it in their last digit, so it depends on nothing but the widths: a file, a loader and an array of
    the same samples get the same scores.
    """
    width = max(1, n_classes + feature_width)
    return max(1, BLOCK_VALUES // width, min(n_classes, 8 * BLOCK_VALUES // width))


def recut(parts: Iterable[Outputs]) -> Iterator[Outputs]:
    """The samples of all parts in blocks of `block_rows` rows; without any, the empty part that came."""
    held: list[Outputs] = []
    cut = False
    for part in parts:
        size = block_rows(part.n_classes, sum(value.shape[1] for value in part.features.values()))
        start = 0
        while (end := start + size - sum(map(len, held))) <= len(part):
            yield Outputs.concat([*held, part[start:end]])
            held, start, cut = [], end, True
        if start < len(part) or not (held or cut):
            held = [kept for kept in held if len(kept)] + [part[start:]]
    if held:
        yield Outputs.concat(held)


class RowBuffer:
    """Rows that come in batches, in one block that doubles: small pieces between large ones would fragment memory."""

    def __init__(self) -> None:
        self._block: Tensor | None = None
        self._n = 0

    def append(self, rows: Tensor) -> None:
        """Copy rows (n, ...) to the end; all batches have rows of one shape."""
        if self._block is None:
            self._block = rows.new_empty((max(4096, len(rows)), *rows.shape[1:]))
        if rows.shape[1:] != self._block.shape[1:]:
            raise InputError(
                f"logits: a batch has {tuple(rows.shape[1:])} columns, an earlier one {tuple(self._block.shape[1:])}; "
                f"give batches of one model"
            )
        end = self._n + len(rows)
        if end > len(self._block):
            bigger = self._block.new_empty((max(end, 2 * len(self._block)), *rows.shape[1:]))
            bigger[: self._n] = self.rows
            self._block = bigger
        self._block[self._n : end] = rows
        self._n = end

    def __len__(self) -> int:
        return self._n

    @property
    def rows(self) -> Tensor:
        """All rows so far."""
        if self._block is None:
            raise InputError("data: no batch to learn from; is it a generator that was read already?")
        return self._block[: self._n]


def row_keys(values: Tensor) -> Keys:
    """A 64-bit key for each row's content, (N,) uint64: equal rows have equal keys, others almost surely not.

    Values are compared as float32, so that a row keeps its key whether it comes as float32 or as float64.
    """
    flat = values.detach().flatten(1).to("cpu", torch.float32) + 0.0  # −0.0 is 0.0
    bits = np.ascontiguousarray(flat.numpy()).view(np.uint32).astype(np.uint64)  # (N, d)
    odd = np.random.default_rng(0x16E00D).integers(2**63, size=bits.shape[1], dtype=np.uint64) * np.uint64(
        2
    ) + np.uint64(1)
    key = ((bits ^ (bits >> np.uint64(15))) * odd).sum(axis=1, dtype=np.uint64)  # low bits of floats are often 0
    keys: Keys = key ^ (key >> np.uint64(29))
    return keys
