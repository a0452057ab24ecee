"""What a classifier returned for a batch, and how arrays come in and go out again."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from igeood.errors import InputError

Array = np.ndarray[Any, Any] | Tensor
ArrayLike = Array | Sequence[Any]
Keys = np.ndarray[Any, np.dtype[np.uint64]]
Refused = dict[int, str]  # why samples are refused without a score, by their number
NO_KEYS: Keys = np.empty(0, dtype=np.uint64)

HEAD = "|head"  # the block of features that is the input of the classifier's last linear layer
INPUT = "|input"  # the model's own input, flattened; its shape follows in the block's name
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
        For each block (N, k): finite feature vectors. A block is a layer, `layer|statistic`, `HEAD`, or
        `|name` of what a model returns beside its logits.
    labels : array of int, optional
        (N,) the true class of each sample, in 0…C−1.
    keys : array of uint64, optional
        (N,) a hash of each sample's input or id; without it, of its row.
    ids : sequence of names or numbers, optional
        (N,) hashed in place of `keys`: a sample is then known by its id in every step, whatever its outputs.
    name : str
        What errors call the logits.
    first : int
        The number of the first sample, for errors, where these samples are a part of more.
    refused : dict, optional
        Bad rows are noted here by their number, with the reason, and filled with zeros; without it they are errors.

    Examples
    --------
    >>> outputs = Outputs([[2.0, 0.0], [0.0, 1.0]], labels=[0, 1])
    >>> len(outputs), outputs.n_classes, len(outputs[:1]), outputs.identified
    (2, 2, 1, False)
    """

    def __init__(
        self, logits: ArrayLike, features: Mapping[str, ArrayLike] | None = None, labels: ArrayLike | None = None, *,
        keys: Keys | None = None, ids: Any = None, name: str = "logits", first: int = 0,
        refused: Refused | None = None,
    ) -> None:  # fmt: skip
        self.logits, self.numpy = as_tensor(logits, name)
        # features first: where a hidden layer overflows, the error should name that layer
        self.features: Mapping[str, Tensor] = {
            block: _check_features(value, block, self.logits, first, refused)
            for block, value in (features or {}).items()
        }
        self.logits = check_logits(self.logits, name, first, refused)
        self.labels = None if labels is None else _check_labels(labels, self.logits, first)
        if keys is not None and (keys.shape != (len(self),) or keys.dtype != np.uint64):
            problem = f"expected {len(self)} of uint64, one for each row; got {keys.dtype} of shape {keys.shape}"
            raise InputError(f"keys: {problem}; hash ids of other kinds")
        self._keys, self.first, self.refused = keys if ids is None else _checked_ids(ids, len(self)), first, refused
        self.identified = self._keys is not None  # by ids or inputs; else equal rows have equal outputs, no more

    @classmethod
    def checked(
        cls, logits: Tensor, features: Mapping[str, Tensor], labels: Tensor | None, keys: Keys | None = None
    ) -> "Outputs":
        """Build from tensors that have been checked already."""
        outputs, own = object.__new__(cls), {"_keys": keys, "identified": False, "numpy": False}
        return outputs.replace(logits=logits, features=features, labels=labels, first=0, refused=None, **own)

    @classmethod
    def of(
        cls, value: "Outputs | ArrayLike", labels: ArrayLike | None = None, name: str = "logits", ids: Any = None,
        refused: Refused | None = None,
    ) -> "Outputs":  # fmt: skip
        """`value` itself if it is an `Outputs`, with labels and ids added where given; else one of these logits."""
        if not isinstance(value, Outputs):
            return cls(value, labels=labels, name=name, ids=ids, refused=refused)
        added: dict[str, Any] = {} if labels is None else {"labels": _check_labels(labels, value.logits, 0)}
        added |= {} if ids is None else {"_keys": _checked_ids(ids, len(value)), "identified": True}
        return value.replace(**added) if added else value

    @staticmethod
    def concat(parts: Iterable["Outputs"]) -> "Outputs":
        """All samples of several `Outputs` of the same width and blocks, in order."""
        first, *others = items = list(parts)
        if not others:
            return first
        for item in others:
            check_alike(first, item)
        labels = [item.labels for item in items if item.labels is not None]
        keys = [item._keys for item in items if item._keys is not None]
        return first.replace(
            logits=torch.cat([item.logits for item in items]),
            features={block: torch.cat([item.features[block] for item in items]) for block in first.features},
            labels=torch.cat(labels) if labels else None,
            _keys=np.concatenate(keys) if len(keys) == len(items) else None,
            identified=all(item.identified for item in items),
            refused=_joined_refused(items),
        )

    def __len__(self) -> int:
        return len(self.logits)

    def __repr__(self) -> str:
        blocks = f", layers {', '.join(self.features)}" if self.features else ""
        return f"Outputs({len(self)} samples, {self.n_classes} classes{blocks}{', labels' * (self.labels is not None)})"

    def __getitem__(self, rows: slice | Tensor) -> "Outputs":
        keys = None if self._keys is None else self._keys[rows if isinstance(rows, slice) else rows.cpu().numpy()]
        part = self._mapped(lambda value: value[rows]).replace(_keys=keys)
        start, _, step = rows.indices(len(self)) if isinstance(rows, slice) else (0, 0, 0)
        if step == 1 or not self.refused:  # the numbers stay
            return part.replace(first=self.first + start)
        places = (
            range(len(self))[rows]
            if isinstance(rows, slice)
            else rows.nonzero()[:, 0].tolist()
            if (rows.dtype == torch.bool)
            else rows.tolist()
        )
        why = (self.refused.get(self.first + place % len(self)) for place in places)
        return part.replace(first=0, refused={row: reason for row, reason in enumerate(why) if reason})

    def replace(self, **parts: Any) -> "Outputs":
        """The same samples with other attributes, which are not checked; keys of rows follow their new content."""
        other = object.__new__(type(self))
        other.__dict__ = {**self.__dict__, **parts}
        other.__dict__.pop("keys", None)
        return other

    def only(self, blocks: Iterable[str]) -> "Outputs":
        """The same samples with these blocks of features, in this order."""
        return self.replace(features={block: self.features[block] for block in blocks})

    def detached(self) -> "Outputs":
        """The same outputs without their gradients."""
        return self._mapped(Tensor.detach)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "Outputs":
        features = {block: change(value) for block, value in self.features.items()}
        labels = None if self.labels is None else change(self.labels)
        return self.replace(logits=change(self.logits), features=features, labels=labels)

    def keyed(self) -> "Outputs":
        """The same samples, which keep their keys when their logits or features change."""
        return self.replace(_keys=self.keys)

    @cached_property
    def keys(self) -> Keys:
        """(N,) uint64: a hash of each sample's input or id, else of its row of logits and features."""
        return row_keys(self.logits, *self.features.values()) if self._keys is None else self._keys

    @property
    def n_classes(self) -> int:
        """C, the width of the logits."""
        return self.logits.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of logits and features."""
        return sum(value.nbytes for value in (self.logits, *self.features.values()))

    def like(self, result: Tensor) -> Array:
        """`result` in the kind that came in: NumPy for NumPy, the tensor itself for tensors."""
        return as_kind(result, self.numpy)


def _joined_refused(items: Sequence[Outputs]) -> Refused | None:
    """The rows that several `Outputs` have refused, by their numbers in all of them."""
    ends = [item.first + len(item) for item in items]
    follow = all(item.first == end for item, end in zip(items[1:], ends, strict=False))
    if follow and all(item.refused is items[0].refused for item in items):
        return items[0].refused  # they are parts of one whole, numbered through
    refused: Refused = {}
    number = items[0].first
    for item in items:
        take_over(item, number, refused)
        number += len(item)
    return refused


def returned_blocks(names: Iterable[str]) -> list[str]:
    """Blocks of tensors that a model returns by these names beside its logits."""
    return [f"|{name}" for name in names]


def check_alike(first: Outputs, other: Outputs) -> None:
    """Raise unless two `Outputs` have as many classes, the same blocks of the same widths, and both labels or none."""
    new, old = ([("logits", o.n_classes), *((b, v.shape[1]) for b, v in o.features.items())] for o in (other, first))
    if new != old:
        raise InputError(f"outputs: a batch has widths {new}, an earlier one {old}; give batches of one model")
    if (first.labels is None) != (other.labels is None):
        raise InputError("labels: some batches have them and some have none; give all or none")


def as_kind(result: Tensor, is_numpy: bool) -> Array:
    """A tensor as NumPy array if `is_numpy`, else as it is."""
    return result.detach().cpu().numpy() if is_numpy else result


def as_tensor(value: ArrayLike, name: str) -> tuple[Tensor, bool]:
    """Tensor of float32 or float64 from an array of numbers, and whether it came as NumPy array or list.

    float16 and bfloat16 become float32; integers become float64. Memory is shared where it can be.
    """
    is_numpy = not isinstance(value, Tensor)
    array: Any = np.asarray(value) if is_numpy else value
    kind = _kind(array)
    if "float" not in kind and "int" not in kind:
        raise InputError(f"{name}: expected real numbers, got {kind}; convert them to float32 or float64")
    narrow = "float" in kind and array.dtype.itemsize <= 4
    if is_numpy:  # torch has no negative strides, no big-endian and no read-only arrays
        array = torch.from_numpy(np.require(array, np.float32 if narrow else np.float64, ["C", "W"]))
    return array.to(torch.float32 if narrow else torch.float64), is_numpy


def _kind(array: Any) -> str:
    return str(array.dtype) if isinstance(array, Tensor) else array.dtype.name


def as_vector(value: ArrayLike, name: str) -> tuple[Tensor, bool]:
    """A 1-D float64 tensor without NaN from an array of numbers, and whether it came as NumPy."""
    tensor, is_numpy = as_tensor(value, name)
    if tensor.ndim != 1:
        raise InputError(f"{name}: expected shape (N,); got {tuple(tensor.shape)}; flatten the scores with .ravel()")
    bad = tensor.isnan().nonzero()
    if len(bad):
        raise InputError(f"{name}: NaN at position {int(bad[0])} ({len(bad)} of {len(tensor)}); remove those samples")
    return tensor.detach().to("cpu", torch.float64), is_numpy


def refuse(bad: Tensor, name: str, problem: str, cure: str = "remove those rows", first: int = 0) -> None:
    """Raise if any row is bad, (N,); the error has the place of the first one."""
    rows = bad.nonzero()[:, 0]
    if len(rows):
        place = f"row {int(rows[0]) + first} has {problem} ({len(rows)} of {len(bad)} rows here do)"
        raise InputError(f"{name}: {place}; {cure}")


def without(
    bad: Tensor, values: Tensor, name: str, problem: str, cure: str, first: int, refused: Refused | None,
    fill: float = 0.0,
) -> Tensor:  # fmt: skip
    """The values (N, ...) with bad rows, (N,), noted in `refused` and filled; without it these are an error."""
    if refused is None:
        refuse(bad, name, problem, cure, first)
        return values
    rows = bad.nonzero()[:, 0].tolist()
    for row in rows:
        refused.setdefault(first + row, f"{name}: {problem}")
    return values.masked_fill(bad.view(-1, *[1] * (values.ndim - 1)), fill) if rows else values


def take_over(block: Any, first: int, refused: Refused) -> None:
    """Note the samples that a block, whose own numbers start elsewhere, has refused already."""
    own = {row - block.first: why for row, why in (block.refused or {}).items()}
    refused.update({first + row: why for row, why in own.items() if 0 <= row < len(block)})


def check_logits(logits: Tensor, name: str = "logits", first: int = 0, refused: Refused | None = None) -> Tensor:
    """`logits`, (N, C), C ≥ 2, once every row has a finite maximum; `first` and `refused` as in `Outputs`."""
    if logits.ndim != 2 or logits.shape[1] < 2:
        expected = "expected shape (N, C), one row a sample, C at least 2"
        raise InputError(f"{name}: {expected}; got {tuple(logits.shape)}; a single sample is logits[None, :]")
    peak = logits.detach().amax(dim=1)  # NaN and +inf show in a row's maximum, and so does a row of nothing but −inf
    cure = "remove those rows, or look for an overflow in the model"
    return without(~peak.isfinite(), logits, name, "NaN, +inf or nothing but −inf", cure, first, refused)


def _check_features(value: ArrayLike, block: str, logits: Tensor, first: int, refused: Refused | None) -> Tensor:
    name = f"features[{block!r}]"
    tensor, _ = as_tensor(value, name)
    if tensor.ndim != 2 or tensor.shape[:1] != logits.shape[:1] or not tensor.shape[1]:
        shape = tuple(tensor.shape)
        raise InputError(f"{name}: expected shape ({len(logits)}, k), got {shape}; give one for each row of logits")
    if not float(torch.linalg.vector_norm(tensor.detach())) <= LARGEST:  # else no value is larger, and none is NaN
        fine = ((tensor.detach().abs() <= LARGEST) & tensor.isfinite()).all(dim=1)  # in float32 LARGEST is infinite
        cure = "remove those rows, or look for an overflow in that layer"
        return without(~fine, tensor, name, f"NaN, infinity or a value beyond {LARGEST:g}", cure, first, refused)
    return tensor


def _check_labels(value: ArrayLike, logits: Tensor, first: int) -> Tensor:
    n, classes = logits.shape
    array: Any = value if isinstance(value, Tensor) else np.asarray(value)
    if array.shape != (n,) or (n and "int" not in _kind(array)):
        given = f"{_kind(array)} of shape {tuple(array.shape)}"
        cure = "convert them to integers, numbers of the columns of logits"
        if array.ndim == 2:
            cure = "give one class each: labels.argmax(1) of one-hot rows; "
            cure += "guards are not for several classes a sample (multi-hot)"
        raise InputError(f"labels: expected {n} integers, one for each row of logits; got {given}; {cure}")
    tensor = array if isinstance(array, Tensor) else torch.from_numpy(array.astype(np.int64))
    tensor = tensor.to(logits.device, torch.int64)
    outside = (tensor < 0) | (tensor >= classes)
    refuse(outside, "labels", f"a class outside 0…{classes - 1}", "number the classes as the columns of logits", first)
    return tensor


def _checked_ids(ids: Any, n: int) -> Keys:
    """Keys of ids, once there are as many as samples."""
    keys = id_keys(ids)
    if len(keys) != n:
        raise InputError(f"ids: {len(keys)} of them for {n} rows; give one for each")
    return keys


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
        held = [*held, part] if rows else [part]
        rows += len(part)
        while rows >= size:
            whole = Outputs.concat(held)
            yield whole[:size]
            held, rows = [whole[size:]], rows - size
    if rows or (held and whole is None):
        yield Outputs.concat(held)


def id_keys(ids: Any) -> Keys:
    """(N,) uint64: a hash of each id as text, so 7, np.int32(7) and "7" have one key, in every process."""
    texts = (str(one).encode(errors="surrogatepass") for one in (ids.tolist() if hasattr(ids, "tolist") else ids))
    return np.array([int.from_bytes(blake2b(text, digest_size=8).digest(), "big") for text in texts], dtype=np.uint64)


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
