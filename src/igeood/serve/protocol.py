"""Bodies of requests and responses: the Open Inference Protocol v2, with binary tensors, and plain JSON rows."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from starlette.responses import Response

from igeood.errors import InputError

DTYPES = {"BOOL": "?"}
for name, code, sizes in (("UINT", "u", (1, 2, 4, 8)), ("INT", "i", (1, 2, 4, 8)), ("FP", "f", (2, 4, 8))):
    DTYPES |= {f"{name}{8 * size}": f"<{code}{size}" for size in sizes}
OUTPUTS = {"is_ood": "BOOL", "score": "FP64", "p_value": "FP64", "label": "INT64"}
LENGTH = "inference-header-content-length"
JSON = {"content-type": "application/json"}
Columns = Mapping[str, list[Any]]  # values of a verdict by the names of outputs


@dataclass(frozen=True)
class Query:
    """What a client asks: arrays by name, and how to answer."""

    inputs: dict[str, NDArray[Any]]
    refuses: bool = False  # on_error="refuse": a bad row is refused; else it is an error
    identity: Any = None
    outputs: Mapping[str, bool] | None = None  # those wanted, and whether each is binary; None for all
    is_binary: bool = False
    is_typed: bool = True  # plain JSON has no types


@contextmanager
def _checked(expected: str) -> Iterator[None]:
    """Turn whatever a malformed body leads to into an error of the request."""
    try:
        yield
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"expected {expected} ({type(error).__name__}: {error})"
        raise InputError(what, argument="body", cure="send such a body, with null for NaN") from None


def read_rows(body: bytes | bytearray, default: str) -> Query:
    """A query of plain JSON: rows of the `default` input, or an object of inputs by name, perhaps with `on_error`."""
    with _checked("a list of rows, or an object of such lists by name"):
        content = orjson.loads(body)
        if isinstance(content, list):
            content = {default: content}
        refuses = _refuses(content)
        return Query({name: _numbers(content[name]) for name in content if name != "on_error"}, refuses, is_typed=False)


def read_infer(body: bytes | bytearray, length: str | None) -> Query:
    """A query of the Open Inference Protocol; `length` is that of the JSON before binary tensors."""
    inputs: dict[str, NDArray[Any]] = {}
    with _checked("a request of the Open Inference Protocol"):
        size = len(body) if length is None else int(length)
        if not 0 < size <= len(body):
            raise InputError(f"{size} is not a length within the body", argument=LENGTH, cure="correct it")
        content = orjson.loads(memoryview(body)[:size])
        tail = memoryview(body)[size:]
        for tensor in content["inputs"]:
            inputs[str(tensor["name"])], tail = _read_tensor(tensor, tail)
        if len(inputs) < len(content["inputs"]) or len(tail):
            what = f"{len(content['inputs'])} tensors of {len(inputs)} names, {len(tail)} bytes after the last one"
            raise InputError(what, argument="inputs", cure="send each input once, with its binary_data_size")
        parameters = content.get("parameters", {})
        is_binary = bool(parameters.get("binary_data_output"))
        wanted = content.get("outputs") or ()
        outputs = {one["name"]: bool(one.get("parameters", {}).get("binary_data", is_binary)) for one in wanted}
        return Query(inputs, _refuses(parameters), content.get("id"), outputs or None, is_binary)


def _refuses(parameters: Mapping[str, Any]) -> bool:
    on_error = parameters.get("on_error", "raise")
    if on_error not in ("raise", "refuse"):
        raise InputError.unknown("on_error", on_error, ["raise", "refuse"])
    return bool(on_error == "refuse")


def _read_tensor(tensor: Mapping[str, Any], tail: memoryview) -> tuple[NDArray[Any], memoryview]:
    """A tensor, and the binary data after its own."""
    datatype = tensor["datatype"]
    shape = tensor["shape"]
    size = tensor.get("parameters", {}).get("binary_data_size")
    if size is None:
        array = _cast(_numbers(tensor["data"]), datatype).reshape(shape)
    else:
        array = np.frombuffer(tail[:size], DTYPES[datatype]).reshape(shape)
    if not shape or list(array.shape) != shape or size not in (None, array.nbytes):
        what = f"the data are not {datatype} of shape {shape}"
        raise InputError(what, argument=str(tensor["name"]), cure="correct shape or data")
    return array, tail[size or 0 :]


def _cast(array: NDArray[Any], datatype: str) -> NDArray[Any]:
    """Numbers of JSON in the type of their tensor."""
    with np.errstate(all="ignore"):  # infinity is found later, with its row
        cast = array.astype(DTYPES[datatype])
    if cast.dtype.kind != "f" and not np.array_equal(cast, array):
        raise InputError(f"not all values are {datatype}", argument="data", cure="send another datatype")
    return cast


def _numbers(values: Any) -> NDArray[Any]:
    """An array from nested lists of numbers; null is NaN."""
    array = np.array(values)
    if array.dtype == object:
        array = array.astype(np.float64)
    if array.ndim == 0 or array.dtype.kind not in "biuf":
        raise InputError("expected lists of numbers, all of one length", argument="data", cure="send such rows")
    return array


def write_rows(columns: Columns) -> Response:
    """Verdicts as a JSON object for each row; an infinite score is null."""
    verdicts = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return Response(orjson.dumps({"verdicts": verdicts}), headers=JSON)


def write_infer(model: str, query: Query, columns: Columns) -> Response:
    """Verdicts as a response of the Open Inference Protocol; an infinite score is null in JSON."""
    wanted = query.outputs or dict.fromkeys(columns, query.is_binary)
    answer: dict[str, Any] = {"model_name": model, "model_version": "1", "outputs": []}
    if query.identity is not None:
        answer["id"] = query.identity
    tail = b""
    for name, is_binary in wanted.items():
        output: dict[str, Any] = {"name": name, "datatype": OUTPUTS.get(name, "BYTES"), "shape": [len(columns[name])]}
        if is_binary:
            raw = _in_bytes(name, columns[name])
            output["parameters"] = {"binary_data_size": len(raw)}
            tail += raw
        else:
            output["data"] = columns[name]
        answer["outputs"].append(output)
    head = orjson.dumps(answer)
    if not any(wanted.values()):
        return Response(head, headers=JSON)
    return Response(head + tail, headers={"content-type": "application/octet-stream", LENGTH: str(len(head))})


def _in_bytes(name: str, values: list[Any]) -> bytes:
    if name in OUTPUTS:
        return np.array(values, DTYPES[OUTPUTS[name]]).tobytes()
    texts = [("" if text is None else str(text)).encode() for text in values]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
