"""Arrays as users have them: the same numbers in every form, numbers that are none, and contents that are hard.

Each entry of a catalogue makes a `Case` of a clean float64 array: what to give, and what must come of it. The clean
arrays need at least 8 rows. Beside it a case has what an independent computation may start from: `clean`, the same
numbers as a contiguous float64 array.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

Matrix = np.ndarray[Any, np.dtype[np.float64]]
Verdict = Literal["same", "refused", "own"]

ROW = 3  # where a fault is put


@dataclass(frozen=True)
class Case:
    """An array and what must happen to it.

    "same": it is taken, and the result is that of `clean`, to a relative `tolerance`. "refused": an error names the
    argument, the place (`at`) and a cure. "own": it depends on who is asked, so the test knows.
    """

    array: Any
    verdict: Verdict
    clean: Any = None
    place: str = ""  # a regular expression, for what has no row
    row: int | None = None
    tolerance: float = 1e-9

    def at(self, first: int = 0) -> str:
        """Regular expression for the place of the fault, where `first` rows came before this array."""
        return self.place if self.row is None else rf"\b(row|sample|position) {self.row + first}\b"


Make = Callable[[Matrix], Case]


class Frame:
    """Something that is no array but can become one, as tables of other libraries."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.values, dtype=dtype)


def same(array: Any, clean: Any) -> Case:
    return Case(array, "same", np.array(clean, dtype=np.float64))


def own(array: Any, clean: Any = None) -> Case:
    return Case(array, "own", None if clean is None else np.array(clean, dtype=np.float64))


def taken(array: Any) -> Case:
    """To be taken as it is; who is asked may know more of the result."""
    return own(array, array)


def refused(array: Any, place: str = "", row: int | None = None) -> Case:
    return Case(array, "refused", None, place, row)


def rounded(dtype: Any) -> Make:
    """The numbers as this NumPy type has them."""
    return lambda clean: same(clean.astype(dtype), clean.astype(dtype))


def tensor(dtype: torch.dtype) -> Make:
    def made(clean: Matrix) -> Case:
        value = torch.tensor(clean).to(dtype)
        return same(value, value.double().numpy())

    return made


def spread(clean: Matrix) -> Matrix:
    """A view of the same numbers, each some way from the next."""
    held = np.full([2 * n for n in clean.shape], np.nan)
    view = held[tuple(slice(None, None, 2) for _ in clean.shape)]
    view[...] = clean
    return view


def turned(clean: Matrix) -> Matrix:
    """A view of the same numbers that runs backwards through memory."""
    backwards = (slice(None, None, -1),) * clean.ndim
    return clean[backwards].copy()[backwards]


def read_only(clean: Matrix) -> Matrix:
    array = clean.copy()
    array.setflags(write=False)
    return array


def mapped(clean: Matrix) -> Matrix:
    with tempfile.TemporaryFile() as file:
        file.write(clean.tobytes())
        file.flush()
        return np.memmap(file, dtype=clean.dtype, mode="r", shape=clean.shape)


def negated(clean: Matrix) -> torch.Tensor:
    """A view that torch negates when it is read."""
    return torch.complex(torch.zeros(clean.shape, dtype=torch.float64), torch.tensor(-clean)).conj().imag


def inference(clean: Matrix) -> torch.Tensor:
    with torch.inference_mode():
        return torch.tensor(clean)


def with_value(clean: Matrix, value: float) -> Matrix:
    array = clean.copy()
    array[(ROW,) + (-1,) * (clean.ndim - 1)] = value
    array[(-1,) + (0,) * (clean.ndim - 1)] = value
    return array


def filled(clean: Matrix, value: float) -> Matrix:
    array = clean.copy()
    array[ROW] = value
    return array


def large_unsigned(clean: Matrix) -> Case:
    """Whole numbers above those of int64; differences between them are kept."""
    whole = np.uint64(2**63) + np.round((clean - clean.min()) * 2**20).astype(np.uint64) * np.uint64(2048)
    return taken(whole)


# the same numbers: every one of them is to be taken, and changes nothing
FORMS: dict[str, Make] = {
    "float64": lambda clean: same(clean.copy(), clean),
    "float32": rounded(np.float32),
    "float16": rounded(np.float16),
    "longdouble": rounded(np.longdouble),
    "integers": lambda clean: same(np.round(clean).astype(np.int64), np.round(clean)),
    "int8": lambda clean: same(np.round(clean).astype(np.int8), np.round(clean)),
    "int32 big-endian": lambda clean: same(np.round(clean).astype(">i4"), np.round(clean)),
    "big-endian": lambda clean: same(clean.astype(">f8"), clean),
    "float16 big-endian": rounded(">f2"),
    "fortran order": lambda clean: same(np.asfortranarray(clean), clean),
    "non-contiguous": lambda clean: same(spread(clean), clean),
    "negative strides": lambda clean: same(turned(clean), clean),
    "read-only": lambda clean: same(read_only(clean), clean),
    "read-only memory map": lambda clean: same(mapped(clean), clean),
    "list": lambda clean: same(clean.tolist(), clean),
    "tuple": lambda clean: same(tuple(map(tuple, clean)) if clean.ndim > 1 else tuple(clean), clean),
    "list of rows": lambda clean: same(list(clean), clean),
    "array-like": lambda clean: same(Frame(clean), clean),
    "masked, nothing hidden": lambda clean: same(np.ma.masked_array(clean, mask=False), clean),
    "denormals": lambda clean: taken(clean * 1e-310),
    "list of tensors": lambda clean: same(list(torch.tensor(clean)), clean),
    "list with gradients": lambda clean: same(list(torch.tensor(clean, requires_grad=True)), clean),
    "tensor": tensor(torch.float64),
    "tensor float32": tensor(torch.float32),
    "tensor float16": tensor(torch.float16),
    "tensor bfloat16": tensor(torch.bfloat16),
    "tensor float8": tensor(torch.float8_e5m2),
    "tensor int16": lambda clean: same(torch.tensor(clean).round().to(torch.int16), np.round(clean)),
    "tensor transposed": lambda clean: same(torch.tensor(clean.T.copy()).T if clean.ndim == 2 else clean, clean),
    "tensor non-contiguous": lambda clean: same(torch.from_numpy(spread(clean)), clean),
    "tensor with gradient": lambda clean: same(torch.tensor(clean, requires_grad=True), clean),
    "tensor of inference": lambda clean: same(inference(clean), clean),
    "tensor negated": lambda clean: same(negated(clean), clean),
}

# no real numbers: every one of them is refused, with what it is as the place
NO_NUMBERS: dict[str, Make] = {
    "bool": lambda clean: refused(clean > 0, r"\bbool\b"),
    "object": lambda clean: refused(clean.astype(object), r"\bobject\b"),
    "complex": lambda clean: refused(clean.astype(complex), r"\bcomplex128\b"),
    "strings": lambda clean: refused(clean.astype(str), r"<U\d+"),
    "bytes": lambda clean: refused(clean.astype(bytes), r"\|S\d+"),
    "dates": lambda clean: refused(clean.astype("datetime64[s]"), "datetime64"),
    "durations": lambda clean: refused(clean.astype("timedelta64[s]"), "timedelta64"),
    "structured": lambda clean: refused(np.zeros(clean.shape, dtype=[("a", float)]), r"'a', '<f8'"),
    "masked": lambda clean: refused(np.ma.masked_greater(clean, np.median(clean)), r"\bmasked\b"),
    "ragged": lambda _: refused([[1.0, 2.0], [1.0]], "inhomogeneous"),
    "list of bfloat16": lambda clean: refused(list(torch.tensor(clean).bfloat16()), r"\bBFloat16\b"),
    "none": lambda _: refused(None, r"\bNone(Type)?\b"),
    "text": lambda _: refused("logits.npz", r"\bstr\b|'logits.npz'"),
    "mapping": lambda clean: refused({"logits": clean}, r"\bdict\b"),
    "number": lambda _: refused(np.float64(1.0), r"\(\)"),
    "tensor bool": lambda clean: refused(torch.tensor(clean) > 0, r"\bbool\b"),
    "tensor complex": lambda clean: refused(torch.tensor(clean).to(torch.complex64), r"\bcomplex64\b"),
    "tensor sparse": lambda clean: refused(torch.tensor(clean).to_sparse(), r"\bsparse_coo\b"),
    "tensor without values": lambda clean: refused(torch.tensor(clean).to("meta"), r"\bmeta\b"),
    "tensor of no axes": lambda _: refused(torch.tensor(1.0), r"\(\)"),
}

# shapes and contents of (N, k)
MATRIX: dict[str, Make] = {
    "NaN": lambda clean: refused(with_value(clean, np.nan), row=ROW),
    "+inf": lambda clean: refused(with_value(clean, np.inf), row=ROW),
    "row of -inf": lambda clean: refused(filled(clean, -np.inf), row=ROW),
    "NaN in float16": lambda clean: refused(with_value(clean, np.nan).astype(np.float16), row=ROW),
    "NaN in a tensor": lambda clean: refused(torch.tensor(with_value(clean, np.nan)), row=ROW),
    "longdouble beyond float64": lambda clean: refused(with_value(clean.astype(np.longdouble), "1e400"), row=ROW),
    "1-D": lambda clean: refused(clean[:, 0].copy(), rf"\({len(clean)},\)"),
    "3-D": lambda clean: refused(clean[None].copy(), rf"\(1, {len(clean)}, {clean.shape[1]}\)"),
    "narrower": lambda clean: own(clean[:, :-1].copy()),
    "wider": lambda clean: own(np.concatenate([clean, clean[:, :1]], axis=1)),
    "no column": lambda clean: own(clean[:, :0].copy()),
    "empty": lambda clean: taken(clean[:0].copy()),
    "empty list": lambda _: refused([], r"\(0,\)"),
    "one sample": lambda clean: taken(clean[:1].copy()),
    "fewer samples": lambda clean: taken(clean[:-1].copy()),
    "identical rows": lambda clean: taken(np.repeat(clean[:1], len(clean), axis=0)),
    "of 1e38": lambda clean: taken((clean / np.abs(clean).max() * 1e38).astype(np.float32)),
    "of 1e300": lambda clean: taken(clean / np.abs(clean).max() * 1e300),
    "uint64 beyond int64": large_unsigned,
}

# what logits alone may be, or may not
LOGITS: dict[str, Make] = {
    "one column": lambda clean: refused(clean[:, :1].copy(), rf"\({len(clean)}, 1\)"),
    "masked class": lambda clean: taken(with_value(clean, -np.inf)),
    "all equal": lambda clean: taken(np.full_like(clean, 2.5)),
    "all zero": lambda clean: taken(np.zeros_like(clean)),
    "float32's greatest": lambda clean: taken((np.sign(clean) * np.finfo(np.float32).max).astype(np.float32)),
}


def channel(value: Callable[[Matrix], Any]) -> Make:
    """The first channel replaced by `value` of it."""

    def made(clean: Matrix) -> Case:
        array = clean.copy()
        array[:, 0] = value(clean[:, 0])
        return taken(array)

    return made


# what features alone may be, or may not
FEATURES: dict[str, Make] = {
    "-inf": lambda clean: refused(with_value(clean, -np.inf), row=ROW),
    "one channel": lambda clean: own(clean[:, :1].copy()),
    "constant channel": channel(lambda _: 0.7),
    "channel of zeros": channel(lambda _: 0.0),
    "tiny channel": channel(lambda x: 1e-30 * x),
    "tiny channel about 1": channel(lambda x: 1 + 1e-30 * x),
    "channel of denormals": channel(lambda x: 1e-310 * x),
    "huge channel": channel(lambda x: 1e90 * x),
    "all constant": lambda clean: taken(np.full_like(clean, 0.7)),
    "all tiny": lambda clean: taken(1e-30 * clean),
}

ARRAYS: dict[str, Make] = {**FORMS, **NO_NUMBERS, **MATRIX, **LOGITS}
FEATURE_ARRAYS: dict[str, Make] = {**FORMS, **NO_NUMBERS, **MATRIX, **FEATURES}


def moved(labels: Any, value: Any, at: int = ROW) -> Any:
    array = np.array(labels)
    array[at] = value
    return array


def whole(array: Any, clean: Any, verdict: Verdict = "same") -> Case:
    return Case(array, verdict, np.array(clean, dtype=np.int64))


def few(y: Any, keep: int) -> Any:
    """Labels whose class 7 has become 0, but for its first `keep` samples."""
    return np.where(np.isin(np.arange(len(y)), np.flatnonzero(y == 7)[keep:]), 0, y)


# of labels (N,) that are int64, 0…C−1, every class several times; `ROW` and the last have classes of their own
LABELS: dict[str, Make] = {
    "int64": lambda y: whole(y.copy(), y),
    "int8": lambda y: whole(y.astype(np.int8), y),
    "uint8": lambda y: whole(y.astype(np.uint8), y),
    "uint64": lambda y: whole(y.astype(np.uint64), y),
    "big-endian": lambda y: whole(y.astype(">i4"), y),
    "non-contiguous": lambda y: whole(np.repeat(y, 2)[::2], y),
    "negative strides": lambda y: whole(turned(y), y),
    "read-only": lambda y: whole(read_only(y), y),
    "read-only memory map": lambda y: whole(mapped(y), y),
    "list": lambda y: whole(y.tolist(), y),
    "tuple": lambda y: whole(tuple(y.tolist()), y),
    "array-like": lambda y: whole(Frame(y), y),
    "masked, nothing hidden": lambda y: whole(np.ma.masked_array(y, mask=False), y),
    "tensor": lambda y: whole(torch.tensor(y), y),
    "tensor uint8": lambda y: whole(torch.tensor(y).to(torch.uint8), y),
    "tensor int32": lambda y: whole(torch.tensor(y).to(torch.int32), y),
    "tensor uint16": lambda y: whole(torch.tensor(y).to(torch.uint16), y),
    "tensor non-contiguous": lambda y: whole(torch.tensor(np.repeat(y, 2))[::2], y),
    "tensor of inference": lambda y: whole(inference(y), y),
    "whole floats": lambda y: refused(y.astype(float), r"\bfloat64\b"),
    "floats": lambda y: refused(y + 0.5, r"\bfloat64\b"),
    "floats with NaN": lambda y: refused(moved(y.astype(float), np.nan), r"\bfloat64\b"),
    "bool": lambda y: refused(y > 0, r"\bbool\b"),
    "object": lambda y: refused(y.astype(object), r"\bobject\b"),
    "complex": lambda y: refused(y.astype(complex), r"\bcomplex128\b"),
    "strings": lambda y: refused(y.astype(str), r"<U\d+"),
    "dates": lambda y: refused(y.astype("datetime64[s]"), "datetime64"),
    "structured": lambda y: refused(np.zeros(len(y), dtype=[("a", int)]), r"'a', '<i8'"),
    "masked": lambda y: refused(np.ma.masked_equal(y, 0), r"\bmasked\b"),
    "ragged": lambda _: refused([[1, 2], [1]], "inhomogeneous"),
    "one-hot": lambda y: refused(np.eye(int(y.max()) + 1)[y], r"\bfloat64\b"),
    "one-hot of integers": lambda y: refused(
        np.eye(int(y.max()) + 1, dtype=int)[y], rf"\({len(y)}, {int(y.max()) + 1}\)"
    ),
    "column": lambda y: refused(y[:, None].copy(), rf"\({len(y)}, 1\)"),
    "number": lambda _: refused(np.int64(1), r"\(\)"),
    "negative": lambda y: refused(moved(y, -1), row=ROW),
    "too large": lambda y: refused(moved(y, int(y.max()) + 1), row=ROW),
    "beyond int64": lambda y: refused(moved(y.astype(np.uint64), 2**64 - 1), row=ROW),
    "too few": lambda y: refused(y[:-1].copy(), rf"\({len(y) - 1},\)"),
    "too many": lambda y: refused(np.append(y, 0), rf"\({len(y) + 1},\)"),
    "empty": lambda y: refused(y[:0].copy(), r"\(0,\)"),
    "text": lambda _: refused("0123", r"<U4"),
    "mapping": lambda y: refused({"labels": y}, r"\bobject\b"),
    "tensor float": lambda y: refused(torch.tensor(y).float(), r"\bfloat32\b"),
    "tensor bool": lambda y: refused(torch.tensor(y) > 0, r"\bbool\b"),
    "tensor sparse": lambda y: refused(torch.tensor(y).to_sparse(), r"\bsparse_coo\b"),
    "tensor without values": lambda y: refused(torch.tensor(y).to("meta"), r"\bmeta\b"),
    "none": lambda _: own(None),
    "one class": lambda y: whole(np.zeros_like(y), np.zeros_like(y), "own"),
    "missing class": lambda y: whole(few(y, 0), few(y, 0), "own"),
    "one-sample class": lambda y: whole(few(y, 1), few(y, 1), "own"),
}

# of scores (N,)
VECTORS: dict[str, Make] = {
    **{name: make for name, make in {**FORMS, **NO_NUMBERS}.items() if name not in ("fortran order", "ragged")},
    "NaN": lambda x: refused(with_value(x, np.nan), row=ROW),
    "NaN in a tensor": lambda x: refused(torch.tensor(with_value(x, np.nan)), row=ROW),
    "2-D": lambda x: refused(x[:, None].copy(), rf"\({len(x)}, 1\)"),
    "3-D": lambda x: refused(x[None, None].copy(), rf"\(1, 1, {len(x)}\)"),
    "empty": lambda x: taken(x[:0].copy()),
    "one score": lambda x: taken(x[:1].copy()),
    "with +inf": lambda x: taken(with_value(x, np.inf)),
    "with -inf": lambda x: taken(with_value(x, -np.inf)),
    "all tied": lambda x: taken(np.full_like(x, 0.25)),
    "many ties": lambda x: taken(np.round(x, 1)),
    "signed zeros": lambda x: own(np.where(x > np.median(x), 0.0, -0.0), np.zeros_like(x)),
}
