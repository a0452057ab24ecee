"""What a classifier returned for a batch, and how arrays come in and go out again."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from igeood.errors import InputError

Array = np.ndarray[Any, Any] | Tensor
ArrayLike = Array | Sequence[Any]
Keys = np.ndarray[Any, np.dtype[np.uint64]]
NO_KEYS: Keys = np.empty(0, dtype=np.uint64)

HEAD = "|head"  # the block of features that is the input of the classifier's last linear layer
BLOCK_VALUES = 1 << 20
LARGEST = 1e100  # of a feature: sums of squares of larger ones could overflow


class Outputs:
    """Logits of N samples, with hidden features and labels where there are any. Arrays are checked here, once.

    NumPy arrays (or lists) and tensors are accepted; inside they are tensors, and `like` converts a result back to the
    kind that came in. Slicing returns the `Outputs` of some samples.

    Parameters
    ----------
    logits : array
        (N, C), C ≥ 2. Each row needs a finite maximum: −inf is a masked class, NaN and +inf are errors.
    features : mapping of str to array
        For each block (N, k): finite feature vectors. A block is a layer, `layer|statistic`, or `HEAD`.
    labels : array of int, optional
        (N,) the true class of each sample, in 0…C−1.
    keys : array of uint64, optional
        (N,) a hash of each sample's input or id; without it, of its row.
    name : str
        What errors call the logits.
    first : int
        The number of the first sample, for errors, where these samples are a part of more.

    Examples
    --------
    >>> outputs = Outputs([[2.0, 0.0], [0.0, 1.0]], labels=[0, 1])
    >>> len(outputs), outputs.n_classes, len(outputs[:1])
    (2, 2, 1)
    """

    _row_keys: Keys | None = None

    def __init__(
        self, logits: ArrayLike, features: Mapping[str, ArrayLike] | None = None, labels: ArrayLike | None = None, *,
        keys: Keys | None = None, name: str = "logits", first: int = 0,
    ) -> None:  # fmt: skip
        tensor, is_numpy = as_tensor(logits, name)
        _check_shape(tensor, name)
        # features first: where a hidden layer overflows, the error should name that layer
        blocks = {block: _check_features(value, block, tensor, first) for block, value in (features or {}).items()}
        check_logits(tensor, name, first)
        if keys is not None and (keys.shape != (len(tensor),) or keys.dtype != np.uint64):
            problem = f"expected {len(tensor)} of uint64, one for each row; got {keys.dtype} of shape {keys.shape}"
            raise InputError(f"keys: {problem}; hash ids of other kinds")
        self.logits, self.numpy = tensor, is_numpy
        self.features: Mapping[str, Tensor] = blocks
        self.labels = None if labels is None else _check_labels(labels, tensor, first)
        self._keys, self.first = keys, first

    @classmethod
    def checked(
        cls, logits: Tensor, features: Mapping[str, Tensor], labels: Tensor | None, is_numpy: bool = False,
        keys: Keys | None = None,
    ) -> "Outputs":  # fmt: skip
        """Build from tensors that have been checked already."""
        parts = {"logits": logits, "features": features, "labels": labels}
        return object.__new__(cls)._with(**parts, numpy=is_numpy, _keys=keys, first=0)

    @classmethod
    def of(cls, value: "Outputs | ArrayLike", labels: ArrayLike | None = None, name: str = "logits") -> "Outputs":
        """`value` itself if it is an `Outputs`, with `labels` added where given; else `Outputs` of these logits."""
        if not isinstance(value, Outputs):
            return cls(value, labels=labels, name=name)
        return value if labels is None else value._with(labels=_check_labels(labels, value.logits, 0))

    @staticmethod
    def concat(parts: Iterable["Outputs"]) -> "Outputs":
        """All samples of several `Outputs` of the same width and blocks, in order."""
        items = list(parts)
        if not items:
            raise InputError("parts: nothing to join; give at least one Outputs")
        if len(items) == 1:
            return items[0]
        for item in items[1:]:
            check_alike(items[0], item)
        labels = [item.labels for item in items if item.labels is not None]
        if 0 < len(labels) < len(items):
            raise InputError(f"labels: {len(items) - len(labels)} of {len(items)} batches have none; give all or none")
        keys = [item._keys for item in items if item._keys is not None]
        features = {block: torch.cat([item.features[block] for item in items]) for block in items[0].features}
        logits, classes = torch.cat([item.logits for item in items]), torch.cat(labels) if labels else None
        all_keys = np.concatenate(keys) if len(keys) == len(items) else None
        return items[0]._with(logits=logits, features=features, labels=classes, _keys=all_keys, _row_keys=None)

    def __len__(self) -> int:
        return len(self.logits)

    def __repr__(self) -> str:
        blocks = f", layers {', '.join(self.features)}" if self.features else ""
        return f"Outputs({len(self)} samples, {self.n_classes} classes{blocks}{', labels' * (self.labels is not None)})"

    def __getitem__(self, rows: slice | Tensor) -> "Outputs":
        keys = None if self._keys is None else self._keys[rows if isinstance(rows, slice) else rows.cpu().numpy()]
        first = self.first + ((rows.start or 0) if isinstance(rows, slice) else 0)
        return self._mapped(lambda value: value[rows], _keys=keys, _row_keys=None, first=first)

    def only(self, blocks: Iterable[str]) -> "Outputs":
        """The same samples with these blocks of features, in this order."""
        return self._with(features={block: self.features[block] for block in blocks}, _row_keys=None)

    def with_logits(self, logits: Tensor) -> "Outputs":
        """The same samples with other logits."""
        return self._with(logits=logits, _row_keys=None)

    def keyed(self) -> "Outputs":
        """The same samples, which keep their keys when their logits or features change."""
        return self._with(_keys=self.keys)

    def _with(self, **parts: Any) -> "Outputs":
        other = object.__new__(type(self))
        other.__dict__ = {**self.__dict__, **parts}
        return other

    def _mapped(self, change: Callable[[Tensor], Tensor], **parts: Any) -> "Outputs":
        features = {block: change(value) for block, value in self.features.items()}
        labels = None if self.labels is None else change(self.labels)
        return self._with(logits=change(self.logits), features=features, labels=labels, **parts)

    def detached(self) -> "Outputs":
        """The same outputs without their gradients."""
        return self._mapped(Tensor.detach)

    def cloned(self) -> "Outputs":
        """The same outputs in memory of their own."""
        return self._mapped(Tensor.clone)

    def as_tensors(self) -> "Outputs":
        """The same outputs, whose results stay tensors."""
        return self._with(numpy=False)

    @property
    def keys(self) -> Keys:
        """(N,) uint64: a hash of each sample's input or id, else of its row of logits and features."""
        if self._keys is not None:
            return self._keys
        if self._row_keys is None:
            self._row_keys = row_keys(self.logits, *self.features.values())
        return self._row_keys

    @property
    def n_classes(self) -> int:
        """C, the width of the logits."""
        return self.logits.shape[1]

    def like(self, result: Tensor) -> Array:
        """`result` in the kind that came in: NumPy for NumPy, the tensor itself for tensors."""
        return as_kind(result, self.numpy)


def check_alike(first: Outputs, other: Outputs) -> None:
    """Raise unless two `Outputs` have the same number of classes, and blocks of the same widths and order."""
    cure = "give batches of one model"
    if other.n_classes != first.n_classes:
        raise InputError(f"logits: a batch has {other.n_classes} columns, an earlier one {first.n_classes}; {cure}")
    widths = [{block: value.shape[1] for block, value in each.features.items()} for each in (other, first)]
    if list(widths[0].items()) != list(widths[1].items()):
        raise InputError(f"features: a batch has layers of widths {widths[0]}, an earlier one {widths[1]}; {cure}")


def as_kind(result: Tensor, is_numpy: bool) -> Array:
    """A tensor as NumPy array if `is_numpy`, else as it is."""
    return result.detach().cpu().numpy() if is_numpy else result


def as_tensor(value: ArrayLike, name: str) -> tuple[Tensor, bool]:
    """Tensor of float32 or float64 from an array of numbers, and whether it came as NumPy array or list.

    float16 and bfloat16 become float32; integers become float64. Memory is shared where it can be.
    """
    if isinstance(value, Tensor):
        if value.is_complex() or value.dtype == torch.bool or value.layout != torch.strided:
            kind = value.dtype if value.layout == torch.strided else value.layout
            raise InputError(f"{name}: expected a dense array of real numbers, got {kind}; convert it to float32 first")
        if not value.is_floating_point():
            return value.to(torch.float64), False
        return (value.to(torch.float32) if value.dtype.itemsize < 4 else value), False
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"{name}: cannot be read as an array: {error}; give rows of one length") from error
    if array.dtype.kind not in "fiu":
        raise InputError(f"{name}: expected real numbers, got {array.dtype}; convert them to float32 or float64")
    wide = array.dtype.kind != "f" or array.dtype.itemsize >= 8
    # torch has no negative strides, no big-endian and no read-only arrays
    return torch.from_numpy(np.require(array, np.float64 if wide else np.float32, ["C", "W"])), True


def as_vector(value: ArrayLike, name: str) -> tuple[Tensor, bool]:
    """A 1-D float64 tensor without NaN from an array of numbers, and whether it came as NumPy."""
    tensor, is_numpy = as_tensor(value, name)
    if tensor.ndim != 1:
        raise InputError(f"{name}: expected shape (N,); got {tuple(tensor.shape)}; flatten the scores with .ravel()")
    bad = tensor.isnan().nonzero()
    if len(bad):
        raise InputError(f"{name}: NaN at position {int(bad[0])} ({len(bad)} of {len(tensor)}); remove those samples")
    return tensor.detach().to("cpu", torch.float64), is_numpy


def _check_shape(logits: Tensor, name: str) -> None:
    if logits.ndim == 2 and logits.shape[1] >= 2:
        return
    cure = "C must be at least 2" if logits.ndim == 2 else "a single sample is logits[None, :]"
    raise InputError(f"{name}: expected shape (N, C), one row a sample; got {tuple(logits.shape)}; {cure}")


def check_logits(logits: Tensor, name: str = "logits", first: int = 0) -> None:
    """Raise unless `logits` are (N, C), C ≥ 2, and every row has a finite maximum; `first` as in `Outputs`."""
    _check_shape(logits, name)
    peak = logits.detach().amax(dim=1)  # NaN and +inf show in a row's maximum, and so does a row of nothing but −inf
    if bool(peak.isfinite().all()):
        return
    bad = (~peak.isfinite()).nonzero()[:, 0]
    row = int(bad[0])
    what = "NaN" if bool(peak[row].isnan()) else "+inf" if float(peak[row]) > 0 else "nothing but −inf"
    problem = f"row {row + first} has {what} ({len(bad)} of {len(logits)} rows here are not finite)"
    raise InputError(f"{name}: {problem}; remove those rows, or look for an overflow in the model")


def _check_features(value: ArrayLike, block: str, logits: Tensor, first: int) -> Tensor:
    name = f"features[{block!r}]"
    tensor, _ = as_tensor(value, name)
    if tensor.ndim != 2 or len(tensor) != len(logits) or not tensor.shape[1]:
        shape = tuple(tensor.shape)
        raise InputError(f"{name}: expected shape ({len(logits)}, k), got {shape}; give one for each row of logits")
    if tensor.device != logits.device:
        raise InputError(f"{name}: is on {tensor.device}, the logits on {logits.device}; move one of them")
    if float(torch.linalg.vector_norm(tensor.detach())) <= LARGEST:  # so no value is larger, and none is NaN
        return tensor
    fine = ((tensor.detach().abs() <= LARGEST) & tensor.isfinite()).all(dim=1)  # in float32 LARGEST is infinite
    if not bool(fine.all()):
        row = int((~fine).nonzero()[0])
        what = f"a value beyond {LARGEST:g}" if bool(tensor[row].isfinite().all()) else "NaN or infinity"
        problem = f"sample {row + first} has {what} ({int((~fine).sum())} of {len(tensor)} samples here do)"
        raise InputError(f"{name}: {problem}; remove those samples, or look for an overflow in that layer")
    return tensor


def _check_labels(value: ArrayLike, logits: Tensor, first: int) -> Tensor:
    n, classes = logits.shape
    try:
        array = value if isinstance(value, Tensor) else np.asarray(value)
    except ValueError as error:
        raise InputError(f"labels: cannot be read as an array: {error}; give one class for each sample") from error
    if tuple(array.shape) != (n,):
        cure = "take .argmax(axis=1) of one-hot labels" if array.ndim == 2 else "give one class for each sample"
        raise InputError(f"labels: expected {n}, one for each row of logits; got shape {tuple(array.shape)}; {cure}")
    if n and "int" not in str(getattr(array.dtype, "name", array.dtype)):
        raise InputError(f"labels: expected integers, got {array.dtype}; convert them to int64")
    tensor = array if isinstance(array, Tensor) else torch.from_numpy(array.astype(np.int64))
    tensor = tensor.to(logits.device, torch.int64)
    outside = ((tensor < 0) | (tensor >= classes)).nonzero()
    if len(outside):
        row = int(outside[0])
        problem = f"{int(tensor[row])} at position {row + first} is outside 0…{classes - 1} ({len(outside)} of {n} are)"
        raise InputError(f"labels: {problem}; number the classes as the {classes} columns of the logits")
    return tensor


def block_rows(n_classes: int, feature_width: int = 0) -> int:
    """Rows that are scored together: about a million values; of wide logits one for each class, up to 8 million values.

    Sums depend on it in their last digit, so it depends on nothing but the widths: a file, a loader and an array of
    the same samples get the same scores.
    """
    width = max(1, n_classes + feature_width)
    return max(1, BLOCK_VALUES // width, min(n_classes, 8 * BLOCK_VALUES // width))


def recut(parts: Iterable[Outputs]) -> Iterator[Outputs]:
    """The samples of all parts in blocks of `block_rows` rows; without any, the empty part that came."""
    held: list[Outputs] = []
    rows, whole = 0, None
    for part in parts:
        size = block_rows(part.n_classes, sum(value.shape[1] for value in part.features.values()))
        held = held if rows else []
        held.append(part)
        rows += len(part)
        while rows >= size:
            whole = Outputs.concat(held)
            yield whole[:size]
            held, rows = [whole[size:]], rows - size
    if rows or (held and whole is None):
        yield Outputs.concat(held)


def row_keys(*values: Tensor) -> Keys:
    """A 64-bit hash of each row's content, (N,) uint64: equal rows have equal keys, others almost surely not.

    A row keeps its key whether its values come as float32 or as float64. Keys are uniform, so those with the smallest
    keys are a random sample.
    """
    n = len(values[0])
    total = np.zeros(n, dtype=np.uint64)
    for place, value in enumerate(values):
        flat = value.detach().reshape(n, value.shape[1:].numel())
        step = max(1, (BLOCK_VALUES >> 3) // max(1, flat.shape[1]))  # a megabyte of 64-bit numbers
        odd = np.random.default_rng([0x16E00D, place]).integers(2**63, size=flat.shape[1], dtype=np.uint64)
        odd = odd * np.uint64(2) + np.uint64(1)
        total += np.concatenate([_mixed_sum(block.cpu(), odd) for block in torch.split(flat, step)])
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        total ^= total >> np.uint64(33)
        total *= np.uint64(factor)
    return total ^ (total >> np.uint64(33))


def _mixed_sum(block: Tensor, odd: Keys) -> Keys:
    """Sum over columns of mixed bits times odd numbers; zeros add nothing, nor what float32 leaves of such values."""
    single = block.to(torch.float32) + 0.0  # −0.0 is 0.0
    bits = single.contiguous().numpy().view(np.uint32).astype(np.uint64)
    total: Keys = ((bits ^ (bits >> np.uint64(15))) * odd).sum(axis=1, dtype=np.uint64)
    if block.dtype != torch.float64:
        return total
    return total + _mixed_sum(torch.where(single.isfinite(), block - single, 0.0).to(torch.float32), odd[::-1])
