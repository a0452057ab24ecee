"""Bodies of requests and responses: what is written is read again, and whatever is wrong with a body is a 400."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from igeood.errors import InputError
from igeood.serve.protocol import DTYPES, LENGTH, OUTPUTS, Query, read_infer, read_rows, write_infer, write_rows

KINDS = {np.dtype(code): name for name, code in DTYPES.items()}
SHAPES = arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)


def described(name, array, **more):
    return {"name": name, "datatype": KINDS[array.dtype], "shape": list(array.shape), **more}


def in_json(inputs, *, flat=True, **more):
    """A request whose tensors are JSON."""
    tensors = [described(n, a, data=(a.ravel() if flat else a).tolist()) for n, a in inputs.items()]
    return json.dumps({"inputs": tensors, **more}).encode()


def in_binary(inputs, **more):
    """A request whose tensors follow the JSON, and the length of that."""
    parts = {name: array.tobytes() for name, array in inputs.items()}
    tensors = [described(n, a, parameters={"binary_data_size": len(parts[n])}) for n, a in inputs.items()]
    head = json.dumps({"inputs": tensors, **more}).encode()
    return b"".join([head, *parts.values()]), str(len(head))


@pytest.mark.parametrize("kind", DTYPES)
@settings(max_examples=20)
@given(st.data())
def test_a_tensor_comes_back_to_the_bit_in_both_forms(kind, draw):
    dtype = np.dtype(DTYPES[kind])
    finite = {"allow_nan": False, "allow_infinity": False} if dtype.kind == "f" else {}
    finite |= {"max_value": 2**63 - 1} if kind == "UINT64" else {}  # larger ones beside smaller ones are read as floats
    values = arrays.arrays(dtype, SHAPES, elements=arrays.from_dtype(dtype, **finite))
    inputs = draw.draw(st.dictionaries(st.text(max_size=5), values, min_size=1, max_size=3))
    flat = {name: array for name, array in inputs.items() if array.size}  # empty lists have lost their shape
    bodies = [(inputs, *in_binary(inputs)), (inputs, in_json(inputs), None), (flat, in_json(flat, flat=False), None)]
    for given_, body, length in bodies:
        request = read_infer(body, length)
        assert list(request.inputs) == list(given_)
        for name, array in request.inputs.items():
            assert (array.dtype, array.shape, array.tobytes()) == (dtype, given_[name].shape, given_[name].tobytes())


COLUMNS = {"is_ood": [True, False], "score": [np.inf, -np.inf], "p_value": [0.25, 1.0], "label": [3, -1]}
COLUMNS |= {"name": ["größe", None], "reason": [None, "logits: NaN"]}


def outputs_of(response):
    """What a client makes of a response: values by name."""
    size = int(response.headers.get(LENGTH, len(response.body)))
    answer, tail, values = json.loads(response.body[:size]), response.body[size:], {}
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("pets", "1", "7")
    for one in answer["outputs"]:
        assert one["shape"] == [2]
        length = one.get("parameters", {}).get("binary_data_size", 0)
        raw, tail = tail[:length], tail[length:]
        if length and one["datatype"] != "BYTES":
            raw = np.frombuffer(raw, DTYPES[one["datatype"]]).tolist()
        values[one["name"]] = raw if length else one["data"]
    assert tail == b""
    return values


def test_what_json_cannot_say_is_null_and_what_bytes_cannot_is_empty():
    rows = json.loads(write_rows(COLUMNS).body)["verdicts"]
    assert rows[0] == {"is_ood": True, "score": None, "p_value": 0.25, "label": 3, "name": "größe", "reason": None}
    assert (rows[1]["score"], rows[1]["reason"]) == (None, "logits: NaN")
    assert outputs_of(write_infer("pets", Query({}, identity="7"), COLUMNS)) == {**COLUMNS, "score": [None, None]}
    values = outputs_of(write_infer("pets", Query({}, identity="7", is_binary=True), COLUMNS))
    assert values["name"] == b"\x07\0\0\0" + "größe".encode() + b"\0\0\0\0"  # lengths in bytes
    assert {name: values[name] for name in OUTPUTS} == {name: COLUMNS[name] for name in OUTPUTS}
    mixed = outputs_of(write_infer("pets", Query({}, identity="7", outputs={"label": True, "score": False}), COLUMNS))
    assert list(mixed.items()) == [("label", [3, -1]), ("score", [None, None])]


TENSOR = {"name": "logits", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
BAD_PARTS = {
    "datatype": ["BYTES", ["FP32"]],
    "shape": [[], 2, [1, -1], [1, 2.0], [1, 3], [1] * 100],
    "data": [[1, "2"], [[1], [2, 3]], 5, {"a": 1}, [{}, {}], None],
    "parameters": [*({"binary_data_size": size} for size in (8, 8.0, "8")), [1]],
}
BAD_VALUES = [("INT64", [1.5, 2]), ("INT64", [None, 2]), ("UINT8", [1, 300]), ("UINT8", [-1, 3]), ("BOOL", [2, 1])]
BAD_TENSORS = [{**TENSOR, name: value} for name, values in BAD_PARTS.items() for value in values]
BAD_TENSORS += [{**TENSOR, "datatype": datatype, "data": values} for datatype, values in BAD_VALUES]
BODY, SIZE = in_binary({"logits": np.ones((2, 3), np.float32)})
BAD_REQUESTS = [
    {"inputs": [1]},
    {"inputs": [TENSOR, TENSOR]},
    {"inputs": [TENSOR], "outputs": ["score"]},
    {"inputs": [TENSOR], "parameters": {"on_error": "skip"}},
    *({"inputs": [tensor]} for tensor in BAD_TENSORS),
]
BAD_BODIES = [
    *((json.dumps(request).encode(), None) for request in BAD_REQUESTS),
    *((body, None) for body in (b"", b'{"inputs": [NaN]}', b"\xff\xfe", b"[" * 100_000, b"[]")),
    *((BODY, length) for length in (None, "0", "-1", "²", "9" * 5000, str(len(BODY) + 1))),
    (BODY[:-1], SIZE),
    (BODY + b"\0", SIZE),
]
BAD_ROWS = [b"1", b'"abc"', b'{"a": "abc"}', b"[[1, 2], [3]]", b'[[1, 2], [3, "x"]]', b'{"a": [[1]], "on_error": "no"}']


def test_a_bad_body_is_an_error():
    for body, length in BAD_BODIES:
        assert not reads(read_infer, body, length), body
    for body in BAD_ROWS:
        assert not reads(read_rows, body, "logits"), body


def reads(read, *given_):
    """Whether a body is read; any other exception than an InputError, which is a 400, fails the test."""
    try:
        request = read(*given_)
    except InputError:
        return False
    assert all(array.ndim and array.dtype.kind in "biuf" for array in request.inputs.values())
    return True


LEAVES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=3)
TEXT = st.text(max_size=3)
ANY = st.recursive(LEAVES, lambda part: st.lists(part, max_size=3) | st.dictionaries(TEXT, part, max_size=2))
PARTS = {
    "name": st.just("logits") | ANY,
    "datatype": st.sampled_from([*DTYPES]) | ANY,
    "shape": st.lists(st.integers(-1, 3) | st.just(2**31 - 1), max_size=4) | ANY,
    "data": st.lists(st.integers(-3, 300) | st.floats() | st.none(), max_size=6) | ANY,
    "parameters": st.fixed_dictionaries({"binary_data_size": st.integers(-1, 24) | ANY}) | ANY,
}
ODD = st.lists(st.fixed_dictionaries({}, optional=PARTS), max_size=2) | ANY
MORE = st.fixed_dictionaries({}, optional=dict.fromkeys(("id", "parameters", "outputs"), ANY))


@settings(max_examples=200)
@given(ODD, MORE, st.binary(max_size=24))
def test_json_of_any_shape_is_read_or_a_problem(inputs, more, tail):
    head = json.dumps({"inputs": inputs, **more}).encode()
    for body, length in ((head, None), (head + tail, str(len(head)))):
        reads(read_infer, body, length)
    reads(read_rows, json.dumps(inputs).encode(), "logits")
    reads(read_rows, json.dumps({"x": inputs, **more}).encode(), "logits")
