"""Bodies of requests and responses: the Open Inference Protocol v2, with binary tensors, and plain JSON rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeGuard

import numpy as np
import orjson
from numpy.typing import NDArray

DTYPES = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2",
    "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
OUTPUTS = {"is_ood": "BOOL", "score": "FP64", "p_value": "FP64", "label": "INT64"}
TEXTS = ("name", "reason")  # outputs of text: where the guard has names of classes; where inputs may be refused
LENGTH = "inference-header-content-length"
LONGEST = 500  # characters of a message: it may quote what was sent
MOST_AXES, MOST_VALUES = 32, 1 << 48  # of a shape that NumPy can have
Arrays = dict[str, NDArray[Any]]


class Problem(Exception):  # noqa: N818 (an answer, not a fault of ours)
    """An answer other than 200: its status, one sentence for the client, and headers."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        if len(message) > LONGEST:
            message = f"{message[: LONGEST // 2]} … {message[-LONGEST // 2 :]}"  # the place, and the cure
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers or {})


@dataclass(frozen=True)
class Request:
    """What a client asks for: arrays by name, and how to answer."""

    inputs: Arrays
    refuses: bool = False  # on_error="refuse": a bad row is refused, not an error
    identity: str | None = None
    outputs: Mapping[str, bool] | None = None  # those wanted, and whether they are binary; all by default
    is_binary: bool = False
    is_typed: bool = True  # plain JSON says nothing of types


def read_json(body: bytes | memoryview) -> Any:
    """The JSON of a body."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Problem(400, f"body: is no JSON ({error}); send JSON, with null in place of NaN") from None


def read_rows(body: bytes, default: str) -> Request:
    """A request of plain JSON: rows of the `default` input, or an object of inputs by name, perhaps with `on_error`."""
    content = read_json(body)
    if isinstance(content, list):
        content = {default: content}
    if not isinstance(content, dict):
        raise Problem(400, f'body: expected a list of rows, or an object {{"{default}": [[...], ...]}}; send one')
    refuses = _refuses(content)
    inputs = {name: _numbers(data, name) for name, data in content.items() if name != "on_error"}
    return Request(inputs, refuses, is_typed=False)


def read_infer(body: bytes, length: str | None) -> Request:
    """A request of the Open Inference Protocol; `length` is that of the JSON before binary tensors."""
    view, tail = memoryview(body), memoryview(b"")
    if length is not None:
        if not length.isdecimal() or len(length) > 20 or not 0 < int(length) <= len(view):
            raise Problem(400, f"{LENGTH}: {length!r} is no length within the body of {len(view)} bytes; correct it")
        view, tail = view[: int(length)], view[int(length) :]
    content = read_json(view)
    given = content.get("inputs") if isinstance(content, dict) else None
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise Problem(400, "body: expected an object with a list `inputs`; send one as the protocol has it")
    inputs: Arrays = {}
    for one in given:
        name, array, tail = _tensor(one, tail)
        if name in inputs:
            raise Problem(400, f"inputs: {name!r} is there twice; send it once")
        inputs[name] = array
    if len(tail):
        raise Problem(400, f"body: {len(tail)} bytes are left after the last tensor; correct binary_data_size")
    parameters, wanted = _parameters(content), content.get("outputs")
    is_binary = parameters.get("binary_data_output") is True
    identity = content.get("id")
    return Request(
        inputs, _refuses(parameters), None if identity is None else str(identity), _wanted(wanted, is_binary), is_binary
    )


def _refuses(parameters: Mapping[str, Any]) -> bool:
    if (given := parameters.get("on_error", "raise")) not in ("raise", "refuse"):
        raise Problem(400, f"on_error: expected 'raise' or 'refuse', got {given!r}; send one of them")
    return bool(given == "refuse")


def _parameters(content: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = content.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise Problem(400, f"parameters: expected an object, got {type(parameters).__name__}; send one")
    return parameters


def _wanted(wanted: Any, is_binary: bool) -> dict[str, bool] | None:
    """The outputs that a request names, and whether each is to be binary."""
    if not wanted:
        return None
    if not isinstance(wanted, list) or not all(isinstance(one, dict) for one in wanted):
        raise Problem(400, "outputs: expected a list of objects with a name; send one, or none for all outputs")
    names = {str(one.get("name")): _parameters(one).get("binary_data", is_binary) is True for one in wanted}
    for name in names:
        if name not in (*OUTPUTS, *TEXTS):
            raise Problem(400, f"outputs: no {name!r}; there are {', '.join((*OUTPUTS, *TEXTS))}")
    return names


def _tensor(one: Mapping[str, Any], tail: memoryview) -> tuple[str, NDArray[Any], memoryview]:
    """A tensor of a request, by name, and the binary data after its own."""
    name, kind, shape = (one.get(part) for part in ("name", "datatype", "shape"))
    if not isinstance(name, str) or not isinstance(kind, str) or kind not in DTYPES:
        raise Problem(400, f"inputs: {name!r} has datatype {kind!r}; expected one of {', '.join(DTYPES)}")
    if not _is_shape(shape):
        raise Problem(400, f"{name}: shape {shape!r}; expected a list of sizes, the first that of the rows")
    dtype, values = np.dtype(DTYPES[kind]), prod(shape)
    size = _parameters(one).get("binary_data_size")
    if size is None:
        array = _cast(_numbers(one.get("data"), name).ravel(), kind, name)
    else:
        if type(size) is not int or size != values * dtype.itemsize or size > len(tail):
            problem = f"binary_data_size {size!r}, with {len(tail)} bytes in the body"
            raise Problem(400, f"{name}: {problem}; {kind} of shape {shape} has {values * dtype.itemsize} bytes")
        array, tail = np.frombuffer(tail[:size], dtype), tail[size:]
    if len(array) != values:
        raise Problem(400, f"{name}: {len(array)} values for shape {shape}; send {values}")
    return name, array.reshape(shape), tail


def _is_shape(shape: Any) -> TypeGuard[list[int]]:
    if not isinstance(shape, list) or not 0 < len(shape) <= MOST_AXES:
        return False
    return all(type(size) is int and size >= 0 for size in shape) and prod(size or 1 for size in shape) < MOST_VALUES


def _cast(array: NDArray[Any], kind: str, name: str) -> NDArray[Any]:
    """Numbers of JSON in the type that their tensor has."""
    dtype = np.dtype(DTYPES[kind])
    if array.dtype.kind == "f" and dtype.kind != "f" and len(array):
        raise Problem(400, f"{name}: numbers with a fraction, but datatype {kind}; send FP32 or FP64")
    with np.errstate(over="ignore"):  # infinity is found later, with its row
        cast = array.astype(dtype)
    if dtype.kind != "f" and (wrong := np.flatnonzero(cast != array)).size:
        raise Problem(400, f"{name}: {array[wrong[0]]} is no {kind}; send another datatype")
    return cast


def _numbers(data: Any, name: str) -> NDArray[Any]:
    """An array from nested lists of numbers; null is NaN."""
    try:
        array = np.array(data)
        if array.dtype == object and isinstance(data, list) and not any(isinstance(one, str) for one in array.flat):
            array = array.astype(np.float64)
    except (ValueError, TypeError, OverflowError):
        raise Problem(400, f"{name}: expected lists of numbers, all of one length; send such rows") from None
    if array.ndim == 0 or array.dtype.kind not in "biuf":
        given = "text" if array.dtype.kind in "OU" and isinstance(data, list) else type(data).__name__
        raise Problem(400, f"{name}: expected lists of numbers, got {given}; send numbers")
    return array


def check_wanted(request: Request, *, has_names: bool) -> None:
    """Raise if a request names an output that its answer would not have."""
    missing = {} if has_names else {"name": "this guard knows no names"}
    missing |= {} if request.refuses else {"reason": "send on_error 'refuse' for it"}
    for name in request.outputs or ():
        if name in missing:
            raise Problem(400, f"outputs: no {name!r} here; {missing[name]}, or leave it out")


def write_rows(columns: Mapping[str, Any]) -> bytes:
    """Verdicts as a JSON object for each row; an infinite score is null."""
    lists = {name: value if isinstance(value, list) else value.tolist() for name, value in columns.items()}
    verdicts = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
    return orjson.dumps({"verdicts": verdicts})


def write_infer(request: Request, model: str, columns: Mapping[str, Any]) -> tuple[bytes, dict[str, str]]:
    """Verdicts as a response of the Open Inference Protocol, and its headers; an infinite score is null in JSON."""
    wanted = request.outputs or dict.fromkeys(columns, request.is_binary)
    outputs: list[dict[str, Any]] = []
    tail: list[bytes] = []
    for name, is_binary in wanted.items():
        values = columns[name]
        about: dict[str, Any] = {"name": name, "datatype": OUTPUTS.get(name, "BYTES"), "shape": [len(values)]}
        if is_binary:
            tail.append(_bytes(values))
            about["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            about["data"] = values if isinstance(values, list) else np.ascontiguousarray(values)
        outputs.append(about)
    answer = {"model_name": model, "model_version": "1", "outputs": outputs}
    if request.identity is not None:
        answer["id"] = request.identity
    head = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
    if not tail:
        return head, {"content-type": "application/json"}
    return b"".join([head, *tail]), {"content-type": "application/octet-stream", LENGTH: str(len(head))}


def _bytes(values: Any) -> bytes:
    if not isinstance(values, list):
        return bytes(np.ascontiguousarray(values).tobytes())
    texts = [("" if text is None else str(text)).encode() for text in values]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
