"""What a classifier returned for N inputs, checked once, and how arrays come in and go out again."""

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from igeood.errors import InputError
from igeood.keys import Keys, id_keys, row_keys

Array = np.ndarray[Any, Any] | Tensor
ArrayLike = Array | Sequence[Any]
OnError = Literal["raise", "refuse"]

HEAD = "|head"  # the block of features that is the input of the classifier's last linear layer
NUMERAL = re.compile(r"-?\d+")  # a label that is a number, as text
LARGEST = 1e100  # of a feature: sums of squares of larger ones could overflow


class Outputs:
    """Logits of N samples, with hidden features and labels where there are any. Arrays are checked here, once.

    Parameters
    ----------
    logits : array
        (N, C), C ≥ 2; NumPy, lists or tensors. −inf is a masked class; a row needs a finite maximum.
    features : mapping of str to array
        For each block (N, k). A block is a layer, `layer|pool`, or `HEAD`.
    labels : array of int, optional
        (N,) the true class of each sample, in 0…C−1.
    keys : array of uint64, optional
        (N,) a hash of each sample's input.
    ids : sequence of names or numbers, optional
        (N,) hashed in place of `keys`.
    name : str
        What errors call the logits.
    on_error : {"raise", "refuse"}
        Whether a row with NaN or infinity is an error, or a row that is not valid.
    reasons : dict, optional
        Rows that are known to be bad, with the reason.
    first : int
        The number of the first row, for errors.

    Attributes
    ----------
    valid : Tensor
        (N,) bool; the values of a row that is not valid are zeros.
    reasons : dict of int to str
        Why rows are not valid.
    predicted : Tensor
        (N,) the classifier's answer on the clean input.
    identified : bool
        Whether keys are of ids or inputs. Otherwise they are of the rows themselves.

    Examples
    --------
    >>> outputs = Outputs([[2.0, 0.0], [0.0, float("nan")]], labels=[0, 1], on_error="refuse")
    >>> len(outputs), outputs.n_classes, outputs.valid.tolist()
    (2, 2, [True, False])
    """

    def __init__(
        self,
        logits: ArrayLike,
        features: Mapping[str, ArrayLike] | None = None,
        labels: ArrayLike | None = None,
        *,
        keys: Keys | None = None,
        ids: Any = None,
        name: str = "logits",
        on_error: OnError = "raise",
        reasons: Mapping[int, str] | None = None,
        first: int = 0,
    ) -> None:
        if on_error not in ("raise", "refuse"):
            raise InputError.unknown("on_error", on_error, ["raise", "refuse"])
        self.logits, self.numpy = as_tensor(logits, name)
        if self.logits.ndim != 2 or self.logits.shape[1] < 2:
            problem = f"expected shape (N, C), one row a sample, C at least 2; got {tuple(self.logits.shape)}"
            cure = "a single sample is logits[None, :]" if self.logits.ndim == 1 else "give a column for each class"
            raise InputError(problem, argument=name, cure=cure)
        n = len(self.logits)
        self.reasons = dict(reasons or {})
        self.features: dict[str, Tensor] = {}
        # features first: where a hidden layer overflows, the error should name that layer
        for block, value in (features or {}).items():
            argument = f"features[{block!r}]"
            self.features[block] = _checked_features(value, argument, n, self.reasons, on_error, first)
        peak = self.logits.detach().amax(dim=1)  # NaN and +inf show in a row's maximum, as does a row of −inf alone
        if not bool(peak.isfinite().all()):
            problem = "NaN, +inf or nothing but −inf"
            cure = "look for an overflow in the model"
            note_bad_rows(~peak.isfinite(), name, problem, cure, self.reasons, on_error, first)
        if self.reasons:
            bad = ~self.valid[:, None]
            self.logits = self.logits.masked_fill(bad, 0.0)
            self.features = {block: value.masked_fill(bad, 0.0) for block, value in self.features.items()}
        self.labels = None if labels is None else checked_labels(labels, self.logits, first)
        self._keys = keys if keys is None and ids is None else _checked_keys(keys, ids, n)
        self._predicted: Tensor | None = None

    @classmethod
    def checked(
        cls, logits: Tensor, features: Mapping[str, Tensor], labels: Tensor | None = None, keys: Keys | None = None
    ) -> "Outputs":
        """Build from tensors that have been checked already."""
        outputs = object.__new__(cls)
        vars(outputs).update(logits=logits, features=dict(features), labels=labels, reasons={}, numpy=False)
        vars(outputs).update(_keys=keys, _predicted=None)
        return outputs

    @classmethod
    def of(cls, value: "Outputs | ArrayLike", labels: ArrayLike | None = None, *, ids: Any = None) -> "Outputs":
        """`value` itself if it is an `Outputs`, with labels and ids added where given; else those of these logits."""
        if not isinstance(value, Outputs):
            return cls(value, labels=labels, ids=ids)
        if labels is not None:
            value = value.replace(labels=checked_labels(labels, value.logits, 0))
        return value if ids is None else value.replace(_keys=_checked_keys(None, ids, len(value)))

    @staticmethod
    def concat(parts: Iterable["Outputs"]) -> "Outputs":
        """All samples of several `Outputs` of the same width and blocks, in order."""
        items = list(parts)
        first = items[0]
        if len(items) == 1:
            return first
        reasons: dict[int, str] = {}
        start = 0
        for item in items:
            check_alike(first, item)
            reasons |= {start + row: reason for row, reason in item.reasons.items()}
            start += len(item)
        keys = [item._keys for item in items if item._keys is not None]
        labels = [item.labels for item in items if item.labels is not None]
        return first.replace(
            logits=torch.cat([item.logits for item in items]),
            features={block: torch.cat([item.features[block] for item in items]) for block in first.features},
            labels=torch.cat(labels) if labels else None,
            reasons=reasons,
            _keys=np.concatenate(keys) if len(keys) == len(items) else None,
            _predicted=torch.cat([item.predicted for item in items]),
        )

    def __len__(self) -> int:
        return len(self.logits)

    def __repr__(self) -> str:
        blocks = f", layers {', '.join(self.features)}" if self.features else ""
        labels = "" if self.labels is None else ", labels"
        return f"Outputs({len(self)} samples, {self.n_classes} classes{blocks}{labels})"

    def __getitem__(self, rows: slice | Tensor) -> "Outputs":
        part = self._mapped(lambda value: value[rows])
        part._keys = None if self._keys is None else self._keys[rows if isinstance(rows, slice) else rows.cpu().numpy()]
        if self.reasons:
            places = torch.arange(len(self))[rows if isinstance(rows, slice) else rows.cpu()].tolist()
            part.reasons = {new: self.reasons[old] for new, old in enumerate(places) if old in self.reasons}
        return part

    def replace(self, **attributes: Any) -> "Outputs":
        """The same samples with other attributes, which are not checked; keys of rows follow their new content."""
        other = copy.copy(self)
        vars(other).pop("keys", None)
        vars(other).update(attributes)
        return other

    def only(self, blocks: Iterable[str]) -> "Outputs":
        """The same samples with these blocks of features, in this order."""
        features: dict[str, Tensor] = {}
        for block in blocks:
            if block not in self.features:
                have = ", ".join(map(repr, self.features)) or "none"
                raise InputError(f"no features of layer {block!r}, only {have}", argument="outputs", cure="add them")
            features[block] = self.features[block]
        return self.replace(features=features)

    def detached(self) -> "Outputs":
        """The same outputs without their gradients."""
        return self._mapped(Tensor.detach)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "Outputs":
        return self.replace(
            logits=change(self.logits),
            features={block: change(value) for block, value in self.features.items()},
            labels=None if self.labels is None else change(self.labels),
            _predicted=None if self._predicted is None else change(self._predicted),
        )

    def from_probabilities(self, on_error: OnError = "raise", first: int = 0) -> "Outputs":
        """The same samples, whose logits are probabilities, with the logarithm of these.

        The sum of a row may be off by what rounding to half precision leaves.
        """
        other = self.replace(reasons=dict(self.reasons))
        is_bad = is_no_distribution(self.logits) & self.valid
        problem = "a negative entry, or a sum that is not 1"
        cure = "renormalise rounded ones; for logits, leave {probabilities} out"
        note_bad_rows(is_bad, "probabilities", problem, cure, other.reasons, on_error, first)
        fine = self.logits.masked_fill(~other.valid[:, None], 1.0 / self.n_classes) if other.reasons else self.logits
        return other.replace(logits=log_probabilities(fine))

    @property
    def valid(self) -> Tensor:
        """(N,) bool, which rows could be read."""
        valid = torch.ones(len(self), dtype=torch.bool, device=self.logits.device)
        if self.reasons:
            valid[list(self.reasons)] = False
        return valid

    def check_valid(self, first: int = 0) -> None:
        """Raise if a row is not valid; `first` is the number of the first row."""
        if self.reasons:
            row = min(self.reasons)
            problem = f"row {first + row}: {self.reasons[row]}"
            raise InputError(problem, cure="remove that row; predict and score can refuse it")

    @property
    def predicted(self) -> Tensor:
        """(N,) the classifier's answer: the largest logit of the clean input."""
        return self.logits.argmax(dim=1) if self._predicted is None else self._predicted

    @cached_property
    def keys(self) -> Keys:
        """(N,) uint64: a hash of each sample's input or id, else of its row of logits and features."""
        return row_keys(self.logits, *self.features.values()) if self._keys is None else self._keys

    @property
    def identified(self) -> bool:
        """Whether keys are of ids or inputs."""
        return self._keys is not None

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


def label_names(labels: Any) -> list[str] | None:
    """Sorted unique names, where labels are names of classes; else None."""
    names = {label for label in _texts(labels) if isinstance(label, str)} - {""}
    return None if all(map(NUMERAL.fullmatch, names)) else sorted(names)


def _texts(labels: Any) -> list[Any]:
    """Labels of which one at least is a text; of others none."""
    if not isinstance(labels, (list, tuple)):
        labels = labels.tolist() if getattr(getattr(labels, "dtype", None), "kind", "?") in "OUT" else []
    return list(labels) if any(isinstance(label, str) for label in labels) else []


def class_numbers(labels: Any, classes: Sequence[str] | None, width: int | None = None, first: int = 0) -> Any:
    """The place of each label in `classes`, which are as many as columns of the logits, where labels are names.

    Texts that are whole numbers, and no classes' names, become these; labels that are no texts come back as they are.
    `first` is the number of the first row, for errors.
    """
    values = _texts(labels)
    if not values:
        return labels
    if all(NUMERAL.fullmatch(str(value)) for value in values) and not {*values} <= {*(classes or ())}:
        return torch.tensor([int(value) for value in values])
    return class_places(values, classes, width, first)


def class_places(labels: list[Any], classes: Sequence[str] | None, width: int | None, first: int) -> Tensor:
    """The place of each name in `classes`; arguments are those of `class_numbers`."""
    cure = "name all classes, in the order of the columns of the logits: {classes}"
    if classes is None:
        raise InputError("texts, and no names of classes are given", argument="labels", cure=cure)
    places = {name: place for place, name in enumerate(classes)}
    if len(places) != len(classes) or width not in (None, len(classes)):
        problem = f"{len(classes)} names, {len(places)} of them different, for {width or len(places)} columns"
        raise InputError(problem, argument="classes", cure=cure)
    for row, name in enumerate(labels):
        if not isinstance(name, str) or name not in places:
            problem = f"row {first + row} has {name!r}, which is none of the {len(classes)} classes"
            raise InputError(problem, argument="labels", cure=f"correct it, or {cure}")
    return torch.tensor([places[name] for name in labels])


def note_bad_rows(
    bad: Tensor, name: str, problem: str, cure: str, reasons: dict[int, str], on_error: OnError, first: int = 0
) -> None:
    """Add the rows that are bad, (N,) bool, to the reasons; or raise for the first of them."""
    rows = [row for row in bad.nonzero()[:, 0].tolist() if row not in reasons]
    if rows and on_error == "raise":
        problem = f"row {first + rows[0]} has {problem} ({len(rows)} of {len(bad)} rows here do)"
        raise InputError(problem, argument=name, cure=f"remove those rows, or {cure}")
    reasons |= dict.fromkeys(rows, f"{name}: {problem}")


def check_alike(one: Outputs, other: Outputs) -> None:
    """Raise unless two `Outputs` have as many classes, the same blocks of the same widths, and both labels or none."""
    widths = [{"logits": each.n_classes} | {b: v.shape[1] for b, v in each.features.items()} for each in (one, other)]
    if list(widths[0].items()) != list(widths[1].items()):
        raise InputError(f"batches have widths {widths[0]} and {widths[1]}", argument="outputs", cure="use one model")
    if (one.labels is None) != (other.labels is None):
        raise InputError("some batches have them and some have none", argument="labels", cure="give all or none")


def as_kind(result: Tensor, is_numpy: bool) -> Array:
    """A tensor as NumPy array if `is_numpy`, else as it is."""
    return result.detach().cpu().numpy() if is_numpy else result


def as_tensor(value: ArrayLike, name: str) -> tuple[Tensor, bool]:
    """Tensor of float32 or float64 from an array of numbers, and whether it came as NumPy array or list.

    float16 and bfloat16 become float32; integers become float64. Memory is shared where it can be.
    """
    is_numpy = not isinstance(value, Tensor)
    array: Any = np.asarray(value) if is_numpy else value
    dtype = str(getattr(array.dtype, "name", array.dtype))  # NumPy's name says nothing of the order of bytes
    if "float" not in dtype and "int" not in dtype:
        raise InputError(f"expected real numbers, got {dtype}", argument=name, cure="convert them to float32")
    narrow = "float" in dtype and array.dtype.itemsize <= 4
    if is_numpy:  # torch has no negative strides, no big-endian and no read-only arrays
        array = torch.from_numpy(np.require(array, np.float32 if narrow else np.float64, ["C", "W"]))
    return array.to(torch.float32 if narrow else torch.float64), is_numpy


def as_vector(value: ArrayLike, name: str) -> tuple[Tensor, bool]:
    """A 1-D float64 tensor without NaN from an array of numbers, and whether it came as NumPy."""
    tensor, is_numpy = as_tensor(value, name)
    if tensor.ndim != 1:
        raise InputError(f"expected shape (N,); got {tuple(tensor.shape)}", argument=name, cure="flatten it: .ravel()")
    bad = tensor.isnan().nonzero()
    if len(bad):
        raise InputError(f"NaN at {int(bad[0])} ({len(bad)} of {len(tensor)})", argument=name, cure="remove it")
    return tensor.detach().to("cpu", torch.float64), is_numpy


def is_no_distribution(rows: Tensor) -> Tensor:
    """Which rows (N, C) have a negative entry or do not sum to 1 within 0.001, (N,) bool."""
    return (rows < 0).any(dim=1) | ((rows.sum(dim=1) - 1.0).abs() > 1e-3)


def log_probabilities(probabilities: Tensor) -> Tensor:
    """Logarithm of probabilities (N, C) in float64; a 0 becomes a very small one, so that it has a gradient."""
    return torch.log(probabilities.double().clamp(min=1e-300))


def _checked_features(
    value: ArrayLike, name: str, n: int, reasons: dict[int, str], on_error: OnError, first: int
) -> Tensor:
    tensor, _ = as_tensor(value, name)
    if tensor.ndim != 2 or len(tensor) != n or not tensor.shape[1]:
        raise InputError(f"expected ({n}, k), got {tuple(tensor.shape)}", argument=name, cure="give one row a sample")
    if not float(torch.linalg.vector_norm(tensor.detach())) <= LARGEST:  # else no value is larger, and none is NaN
        is_fine = ((tensor.detach().abs() <= LARGEST) & tensor.isfinite()).all(dim=1)  # LARGEST is inf in float32
        problem = f"NaN, infinity or a value beyond {LARGEST:g}"
        note_bad_rows(~is_fine, name, problem, "look for an overflow in that layer", reasons, on_error, first)
    return tensor


def checked_labels(value: ArrayLike, logits: Tensor, first: int) -> Tensor:
    """Numbers of classes as a tensor, once there is one for each row of logits; `first` is as in `Outputs`."""
    n, n_classes = logits.shape
    array: Any = value if isinstance(value, Tensor) else np.asarray(value)
    if array.shape != (n,) or (n and "int" not in str(getattr(array.dtype, "name", array.dtype))):
        problem = f"expected {n} integers, one for each row of logits; got {array.dtype} of shape {tuple(array.shape)}"
        raise InputError(problem, argument="labels", cure="give columns' numbers: of one-hot rows labels.argmax(1)")
    tensor = array if isinstance(array, Tensor) else torch.from_numpy(array.astype(np.int64))
    tensor = tensor.to(logits.device, torch.int64)
    outside = ((tensor < 0) | (tensor >= n_classes)).nonzero()
    if len(outside):
        problem = f"row {first + int(outside[0])} has a class outside 0…{n_classes - 1}"
        raise InputError(problem, argument="labels", cure="number the classes as the columns of logits")
    return tensor


def _checked_keys(keys: Keys | None, ids: Any, n: int) -> Keys | None:
    if ids is not None:
        keys = id_keys(ids)
    if keys is not None and (keys.shape != (n,) or keys.dtype != np.uint64):
        name = "keys" if ids is None else "ids"
        raise InputError(f"{len(keys)} of them for {n} rows", argument=name, cure="give one for each")
    return keys
