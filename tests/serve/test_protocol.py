"""Bodies of requests and responses: what is written is read again, and whatever is wrong with a body is a 400."""

import json
import re

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from igeood.serve.protocol import (
    DTYPES,
    LENGTH,
    OUTPUTS,
    Problem,
    Request,
    read_infer,
    read_rows,
    write_infer,
    write_rows,
)

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


def problem_of(read, *given):
    with pytest.raises(Problem) as caught:
        read(*given)
    assert caught.value.status == 400
    return caught.value.message


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
        assert (request.refuses, request.identity, request.outputs, request.is_binary) == (False, None, None, False)


@settings(max_examples=50)
@given(arrays.arrays(np.float64, arrays.array_shapes(min_dims=2, max_dims=2)))
def test_binary_tensors_keep_nan_and_infinity_and_plain_rows_keep_numbers(rows):
    read = read_infer(*in_binary({"logits": rows})).inputs["logits"]
    assert read.tobytes() == rows.tobytes()
    bare = np.where(np.isfinite(rows), rows, np.nan)  # which JSON has as null
    for body in (bare.tolist(), {"logits": bare.tolist()}):
        request = read_rows(orjson.dumps(body), "logits")
        assert not request.is_typed
        np.testing.assert_array_equal(request.inputs["logits"], bare)


VERDICTS = {"is_ood": [True, False], "score": [0.5, -3.25e-7], "p_value": [0.25, 1.0], "label": [3, -1]}
COLUMNS = {name: np.array(values) for name, values in VERDICTS.items()}
TEXTS = {**COLUMNS, "name": ["größe", None], "reason": [None, "logits: NaN"]}


def outputs_of(body, headers):
    """What a client makes of a response: values by name."""
    size = int(headers.get(LENGTH, len(body)))
    answer, tail, values = json.loads(body[:size]), body[size:], {}
    for one in answer["outputs"]:
        assert one["shape"] == [2]
        length = one.get("parameters", {}).get("binary_data_size", 0)
        raw, tail = tail[:length], tail[length:]
        if length and one["datatype"] != "BYTES":
            raw = np.frombuffer(raw, DTYPES[one["datatype"]]).tolist()
        values[one["name"]] = raw if length else one["data"]
    assert tail == b""
    return answer, values


@pytest.mark.parametrize("is_binary", [False, True])
def test_a_response_has_all_outputs_or_those_asked_for(is_binary):
    answer, values = outputs_of(*write_infer(Request({}, identity="7", is_binary=is_binary), "pets", COLUMNS))
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("pets", "1", "7")
    assert values == VERDICTS
    assert {one["name"]: one["datatype"] for one in answer["outputs"]} == OUTPUTS
    wanted = {"label": True, "score": False, "name": is_binary}
    answer, values = outputs_of(*write_infer(Request({}, outputs=wanted), "pets", TEXTS))
    assert list(values) == ["label", "score", "name"]
    assert (values["label"], values["score"], "id" in answer) == ([3, -1], VERDICTS["score"], False)
    as_bytes = b"\x07\0\0\0" + "größe".encode() + b"\0\0\0\0"  # lengths in bytes; no name is an empty one
    assert values["name"] == (as_bytes if is_binary else ["größe", None])


def test_what_json_cannot_say_is_null():
    columns = {**TEXTS, "score": np.array([np.inf, -np.inf])}
    assert json.loads(write_rows(columns)) == {
        "verdicts": [
            {"is_ood": True, "score": None, "p_value": 0.25, "label": 3, "name": "größe", "reason": None},
            {"is_ood": False, "score": None, "p_value": 1.0, "label": -1, "name": None, "reason": "logits: NaN"},
        ]
    }
    assert outputs_of(*write_infer(Request({}), "g", columns))[1]["score"] == [None, None]
    binary = outputs_of(*write_infer(Request({}, is_binary=True), "g", columns))[1]
    assert binary["score"] == [np.inf, -np.inf]


def test_parameters_say_how_to_answer():
    more = {"id": "a", "parameters": {"on_error": "refuse", "binary_data_output": True}}
    wanted = [{"name": "score"}, {"name": "label", "parameters": {"binary_data": False}}]
    request = read_infer(in_json({"logits": np.zeros((1, 2))}, **more, outputs=wanted), None)
    assert (request.refuses, request.identity, request.is_binary) == (True, "a", True)
    assert request.outputs == {"score": True, "label": False}
    assert read_rows(b'{"x": [[0]], "on_error": "refuse"}', "x").refuses
    assert not read_rows(b'{"x": [[0]], "on_error": "raise"}', "x").refuses


TENSOR = {"name": "logits", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
BAD_TENSORS = [
    ({"datatype": "BYTES"}, r"'logits' has datatype 'BYTES'; expected one of BOOL, UINT8"),
    ({"datatype": ["FP32"]}, r"'logits' has datatype \['FP32'\]"),
    ({"name": 3}, r"3 has datatype 'FP32'"),
    ({"shape": []}, r"logits: shape \[\]; expected a list of sizes"),
    ({"shape": [1, -2]}, r"expected a list of sizes"),
    ({"shape": [1, 2.0]}, r"expected a list of sizes"),
    ({"shape": [True, 2]}, r"expected a list of sizes"),
    ({"shape": [1] * 100, "data": [1]}, r"expected a list of sizes"),
    ({"shape": [0, *[2**31 - 1] * 3], "data": []}, r"expected a list of sizes"),
    ({"shape": [1, 3]}, r"logits: 2 values for shape \[1, 3\]; send 3"),
    ({"data": [1, "2"]}, r"logits: expected lists of numbers"),
    ({"data": [None, "2"]}, r"logits: expected lists of numbers"),
    ({"data": [[1], [2, 3]]}, r"all of one length"),
    ({"data": 5}, r"logits: expected lists of numbers, got int"),
    ({"data": {"a": 1}}, r"got dict"),
    ({"data": [{}, {}]}, r"logits: expected lists of numbers"),
    ({"data": None}, r"logits: expected lists of numbers, got NoneType"),
    ({"datatype": "INT64", "data": [1.5, 2]}, r"numbers with a fraction, but datatype INT64; send FP32 or FP64"),
    ({"datatype": "UINT8", "data": [1, 300]}, r"logits: 300 is no UINT8; send "),
    ({"datatype": "UINT8", "data": [-1, 3]}, r"logits: -1 is no UINT8; send "),
    ({"datatype": "BOOL", "data": [2, 1]}, r"logits: 2 is no BOOL; send "),
    ({"parameters": {"binary_data_size": 8}}, r"binary_data_size 8, with 0 bytes in the body; .* has 8 bytes"),
    ({"parameters": {"binary_data_size": 8.0}}, r"binary_data_size 8.0"),
    ({"parameters": {"binary_data_size": "8"}}, r"binary_data_size '8'"),
    ({"parameters": [1]}, r"parameters: expected an object, got list"),
]


@pytest.mark.parametrize(("change", "said"), BAD_TENSORS)
def test_a_bad_tensor_is_named(change, said):
    message = problem_of(read_infer, json.dumps({"inputs": [{**TENSOR, **change}]}).encode(), None)
    assert re.search(said, message), message


def with_tensor(**more):
    return json.dumps({"inputs": [TENSOR], **more}).encode()


BODY, SIZE = in_binary({"logits": np.ones((2, 3), np.float32)})


@pytest.mark.parametrize(
    ("body", "length", "said"),
    [
        (b"", None, r"body: is no JSON"),
        (b'{"inputs": [NaN]}', None, r"null in place of NaN"),
        (b"\xff\xfe", None, r"body: is no JSON"),
        (b"[" * 100_000, None, r"body: is no JSON"),
        (b"[]", None, r"expected an object with a list `inputs`"),
        (b'{"inputs": {}}', None, r"expected an object with a list `inputs`"),
        (b'{"inputs": [1]}', None, r"expected an object with a list `inputs`"),
        (json.dumps({"inputs": [TENSOR, TENSOR]}).encode(), None, r"'logits' is there twice; send it once"),
        (with_tensor(outputs=[{"name": "logit"}]), None, r"no 'logit'; there are is_ood"),
        (with_tensor(outputs=["score"]), None, r"outputs: expected a list of objects"),
        (with_tensor(parameters={"on_error": "skip"}), None, r"on_error: expected 'raise'"),
        (with_tensor(parameters={"on_error": []}), None, r"on_error: expected 'raise'"),
        (BODY, None, r"body: is no JSON"),
        (BODY, "0", rf"{LENGTH}: '0' is no length"),
        (BODY, "-1", rf"{LENGTH}: '-1' is no length"),
        (BODY, "²", r"is no length"),
        (BODY, "9" * 5000, r"is no length within the body"),
        (BODY, str(len(BODY) + 1), r"is no length within the body"),
        (BODY[:-1], SIZE, r"logits: binary_data_size 24, with 23 bytes in the body; FP32 of shape .* has 24"),
        (BODY + b"\0", SIZE, r"1 bytes are left after the last tensor; correct binary_data_size"),
    ],
)  # fmt: skip
def test_a_bad_body_is_told(body, length, said):
    message = problem_of(read_infer, body, length)
    assert re.search(said, message), message
    assert len(message) < 1000


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"1", r'expected a list of rows, or an object \{"logits": \[\[\.\.\.\], \.\.\.\]\}; send one'),
        (b'"abc"', r"expected a list of rows"),
        (b'{"logits": "abc"}', r"logits: expected lists of numbers, got str; send numbers"),
        (b"[[1, 2], [3]]", r"logits: expected lists of numbers, all of one length"),
        (b'[[1, 2], [3, "x"]]', r"logits: expected lists of numbers"),
        (b'[[1, 2], [null, "1"]]', r"logits: expected lists of numbers"),
        (b'{"logits": [[1, 2]], "on_error": "ignore"}', r"on_error: expected 'raise' or 'refuse', got 'ignore'"),
    ],
)
def test_bad_rows_are_told(body, said):
    message = problem_of(read_rows, body, "logits")
    assert re.search(said, message), message


def reads(read, *given_):
    """Whether a body is read; another exception than a Problem of 400 is an error."""
    try:
        request = read(*given_)
    except Problem as problem:
        assert (problem.status, bool(problem.message)) == (400, True)  # noqa: PT017
        return False
    assert all(array.ndim and array.dtype.kind in "biuf" for array in request.inputs.values())
    return True


PLAIN = in_json({"logits": np.arange(6.0).reshape(2, 3)}, id="1", outputs=[{"name": "score"}])
BODIES = [(BODY, SIZE), (PLAIN, None), (b'{"logits": [[1, 2.5], [null, 4]], "on_error": "refuse"}', None)]


@settings(max_examples=250)
@given(st.sampled_from(BODIES), st.lists(st.tuples(st.integers(0, 300), st.binary(max_size=3)), max_size=3), st.data())
def test_a_changed_body_is_read_or_a_problem(pair, changes, draw):
    body, length = pair
    for place, new in changes:
        at = place % (len(body) + 1)
        body = body[:at] + new + body[at + draw.draw(st.integers(0, 2)) :]
    length = draw.draw(st.sampled_from([length, None, SIZE, str(len(body)), "1"]) | st.text(max_size=3))
    reads(read_infer, body, length)
    reads(read_rows, body, "logits")


LEAVES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=3)
TEXT = st.text(max_size=3)
ANY = st.recursive(LEAVES, lambda part: st.lists(part, max_size=3) | st.dictionaries(TEXT, part, max_size=2))
ODD = st.fixed_dictionaries(
    {},
    optional={
        "name": st.just("logits") | ANY,
        "datatype": st.sampled_from([*DTYPES]) | ANY,
        "shape": st.lists(st.integers(-1, 3) | st.just(2**31 - 1), max_size=4) | ANY,
        "data": st.lists(st.integers(-3, 300) | st.floats() | st.none(), max_size=6) | ANY,
        "parameters": st.fixed_dictionaries({"binary_data_size": st.integers(-1, 24) | ANY}) | ANY,
    },
)


@settings(max_examples=200)
@given(
    st.lists(ODD, max_size=2) | ANY,
    st.fixed_dictionaries({}, optional=dict.fromkeys(("id", "parameters", "outputs"), ANY)),
    st.binary(max_size=24),
)
def test_json_of_any_shape_is_read_or_a_problem(inputs, more, tail):
    head = json.dumps({"inputs": inputs, **more}).encode()
    for body, length in ((head, None), (head + tail, str(len(head)))):
        reads(read_infer, body, length)
    reads(read_rows, json.dumps(inputs).encode(), "logits")
    reads(read_rows, json.dumps({"x": inputs, **more}).encode(), "logits")


def test_a_body_that_is_right_is_read():
    assert all(reads(read_infer, *pair) for pair in BODIES[:2])
    assert reads(read_rows, BODIES[2][0], "logits")
