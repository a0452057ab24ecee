"""Bodies of requests and responses: the Open Inference Protocol v2, with binary tensors, and plain JSON rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from igeood.errors import InputError

DTYPES = {"BOOL": "?"}
for name, code, sizes in (("UINT", "u", (1, 2, 4, 8)), ("INT", "i", (1, 2, 4, 8)), ("FP", "f", (2, 4, 8))):
    DTYPES |= {f"{name}{8 * size}": f"<{code}{size}" for size in sizes}
OUTPUTS = {"is_ood": "BOOL", "score": "FP64", "p_value": "FP64", "label": "INT64"}
TEXTS = ("name", "reason")  # outputs where the guard knows class names, and where inputs may be refused
LENGTH = "inference-header-content-length"
JSON = {"content-type": "application/json"}
Arrays = dict[str, NDArray[Any]]
Columns = Mapping[str, list[Any]]  # values of a verdict by the names of outputs
Written = tuple[bytes, dict[str, str]]  # a body and its headers


@dataclass(frozen=True)
class Query:
    """What a client asks: arrays by name, and how to answer."""

    inputs: Arrays
    refuses: bool = False  # on_error="refuse": a bad row is refused; else it is an error
    identity: str | None = None
    outputs: Mapping[str, bool] | None = None  # those wanted, and whether each is binary; None for all
    is_binary: bool = False
    is_typed: bool = True  # plain JSON has no types


def read_json(body: bytes | bytearray | memoryview) -> Any:
    """The JSON of a body."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InputError(f"not JSON ({error})", argument="body", cure="send JSON, with null for NaN") from None


def read_rows(body: bytes | bytearray, default: str) -> Query:
    """A query of plain JSON: rows of the `default` input, or an object of inputs by name, perhaps with `on_error`."""
    content = read_json(body)
    if isinstance(content, list):
        content = {default: content}
    if not isinstance(content, dict):
        raise InputError("expected a list of rows, or an object of lists by name", argument="body", cure="send one")
    inputs = {name: _numbers(values, name) for name, values in content.items() if name != "on_error"}
    return Query(inputs, _refuses(content), is_typed=False)


def read_infer(body: bytes | bytearray, length: str | None) -> Query:
    """A query of the Open Inference Protocol; `length` is that of the JSON before binary tensors."""
    head, tail = memoryview(body), memoryview(b"")
    if length is not None:
        if not (length.isdecimal() and len(length) <= 20 and 0 < int(length) <= len(body)):
            raise InputError(f"{length!r} is not a length within the body", argument=LENGTH, cure="correct it")
        head, tail = head[: int(length)], head[int(length) :]
    content = read_json(head)
    inputs: Arrays = {}
    for tensor in _objects(content if isinstance(content, dict) else {}, "inputs"):
        name, array, tail = _read_tensor(tensor, tail)
        if name in inputs:
            raise InputError(f"{name!r} is there twice", argument="inputs", cure="send it once")
        inputs[name] = array
    if len(tail):
        raise InputError(f"{len(tail)} bytes after the last tensor", argument="body", cure="correct binary_data_size")
    parameters = _parameters(content)
    is_binary = parameters.get("binary_data_output") is True
    wanted = _objects(content, "outputs") if content.get("outputs") else []
    outputs = {str(one.get("name")): _parameters(one).get("binary_data", is_binary) is True for one in wanted}
    identity = content.get("id")
    return Query(inputs, _refuses(parameters), None if identity is None else str(identity), outputs or None, is_binary)


def _objects(content: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    objects = content.get(name)
    if not isinstance(objects, list) or not all(isinstance(one, dict) for one in objects):
        raise InputError("expected a list of objects", argument=name, cure="send it as the protocol has it")
    return objects


def _refuses(parameters: Mapping[str, Any]) -> bool:
    on_error = parameters.get("on_error", "raise")
    if on_error not in ("raise", "refuse"):
        raise InputError.unknown("on_error", on_error, ["raise", "refuse"])
    return bool(on_error == "refuse")


def _parameters(content: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = content.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise InputError(f"expected an object, got {type(parameters).__name__}", argument="parameters", cure="send one")
    return parameters


def _read_tensor(tensor: Mapping[str, Any], tail: memoryview) -> tuple[str, NDArray[Any], memoryview]:
    """A tensor with its name, and the binary data after its own."""
    name, datatype, shape = tensor.get("name"), str(tensor.get("datatype")), tensor.get("shape")
    if not isinstance(name, str):
        raise InputError(f"{name!r} is not a name", argument="inputs", cure="send text")
    if datatype not in DTYPES:
        raise InputError.unknown("datatype", datatype, DTYPES).within(name)
    size = _parameters(tensor).get("binary_data_size")
    try:
        if size is None:
            array = _cast(_numbers(tensor.get("data"), name), datatype, name)
        else:
            array = np.frombuffer(tail[:size], DTYPES[datatype])
        shaped = array.reshape(shape)
    except InputError:
        raise
    except (TypeError, ValueError, OverflowError):
        shaped = np.array(0)
    if not shaped.ndim or list(shaped.shape) != shape or size not in (None, shaped.nbytes):
        found = f"{size!r} bytes of {len(tail)}" if size is not None else "other values"
        raise InputError(f"{found} for {datatype} of shape {shape!r}", argument=name, cure="correct shape or data")
    return name, shaped, tail[size or 0 :]


def _cast(array: NDArray[Any], datatype: str, name: str) -> NDArray[Any]:
    """Numbers of JSON in the type of their tensor."""
    with np.errstate(all="ignore"):  # infinity is found later, with its row
        cast = array.astype(DTYPES[datatype])
    if cast.dtype.kind != "f" and not np.array_equal(cast, array):
        raise InputError(f"not all values are {datatype}", argument=name, cure="send another datatype")
    return cast


def _numbers(values: Any, name: str) -> NDArray[Any]:
    """An array from nested lists of numbers; null is NaN."""
    try:
        array = np.array(values)
        if array.dtype == object and not any(isinstance(value, str) for value in array.flat):
            array = array.astype(np.float64)
    except (ValueError, TypeError, OverflowError):
        array = np.array("ragged")
    if array.ndim == 0 or array.dtype.kind not in "biuf":
        raise InputError("expected lists of numbers, all of one length", argument=name, cure="send such rows")
    return array


def check_read(reasons: Mapping[int, str]) -> None:
    """Raise the reason of the first row that could not be read."""
    for row, reason in sorted(reasons.items()):
        raise InputError(reason, cure="correct that row, or send on_error 'refuse'", place=f"row {row}")


def _answered(query: Query, columns: Columns) -> Columns:
    """The columns of an answer; a row that could not be read is an error, unless the query refuses such rows."""
    reasons = columns.get("reason", [None] * len(columns["is_ood"]))
    if query.refuses:
        return {**columns, "reason": reasons}
    check_read({row: reason for row, reason in enumerate(reasons) if reason is not None})
    return {name: values for name, values in columns.items() if name != "reason"}


def write_rows(query: Query, columns: Columns) -> Written:
    """Verdicts as a JSON object for each row, and headers; an infinite score is null."""
    columns = _answered(query, columns)
    verdicts = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return orjson.dumps({"verdicts": verdicts}), JSON


def write_infer(model: str, query: Query, columns: Columns) -> Written:
    """Verdicts as a response of the Open Inference Protocol, and headers; an infinite score is null in JSON."""
    columns = _answered(query, columns)
    wanted = query.outputs or dict.fromkeys(columns, query.is_binary)
    outputs: list[dict[str, Any]] = []
    tail = b""
    for name, is_binary in wanted.items():
        values = columns[name]
        about = {"name": name, "datatype": OUTPUTS.get(name, "BYTES"), "shape": [len(values)]}
        raw = _in_bytes(name, values) if is_binary else b""
        outputs.append({**about, **({"parameters": {"binary_data_size": len(raw)}} if is_binary else {"data": values})})
        tail += raw
    answer = {"model_name": model, "model_version": "1", "outputs": outputs}
    head = orjson.dumps(answer if query.identity is None else {**answer, "id": query.identity})
    if not any(wanted.values()):
        return head, JSON
    return head + tail, {"content-type": "application/octet-stream", LENGTH: str(len(head))}


def _in_bytes(name: str, values: list[Any]) -> bytes:
    if name in OUTPUTS:
        return np.array(values, DTYPES[OUTPUTS[name]]).tobytes()
    texts = [("" if text is None else str(text)).encode() for text in values]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
