"""Bodies of requests and responses: what is written is read again, and whatever is wrong with a body is a 400."""

import json

import numpy as np
import orjson
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
TEXTS = {**VERDICTS, "name": ["größe", None], "reason": [None, "logits: NaN"]}


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
    answer, values = outputs_of(*write_infer("pets", Query({}, identity="7", is_binary=is_binary), VERDICTS))
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("pets", "1", "7")
    assert values == VERDICTS
    assert {one["name"]: one["datatype"] for one in answer["outputs"]} == OUTPUTS
    wanted = {"label": True, "score": False, "name": is_binary}
    answer, values = outputs_of(*write_infer("pets", Query({}, refuses=True, outputs=wanted), TEXTS))
    assert list(values) == ["label", "score", "name"]
    assert (values["label"], values["score"], "id" in answer) == ([3, -1], VERDICTS["score"], False)
    as_bytes = b"\x07\0\0\0" + "größe".encode() + b"\0\0\0\0"  # lengths in bytes; no name is an empty one
    assert values["name"] == (as_bytes if is_binary else ["größe", None])


def test_what_json_cannot_say_is_null():
    columns, query = {**TEXTS, "score": [np.inf, -np.inf]}, Query({}, refuses=True)
    first, second = json.loads(write_rows(query, columns)[0])["verdicts"]
    assert first == {"is_ood": True, "score": None, "p_value": 0.25, "label": 3, "name": "größe", "reason": None}
    assert (second["score"], second["reason"]) == (None, "logits: NaN")
    assert outputs_of(*write_infer("g", query, columns))[1]["score"] == [None, None]
    binary = outputs_of(*write_infer("g", Query({}, refuses=True, is_binary=True), columns))[1]
    assert binary["score"] == [np.inf, -np.inf]


def test_a_row_that_could_not_be_read_is_an_error_unless_it_may_be_refused():
    for write in (lambda query: write_rows(query, TEXTS), lambda query: write_infer("g", query, TEXTS)):
        write(Query({}, refuses=True))
        with pytest.raises(InputError) as caught:
            write(Query({}))
        assert caught.value.place == "row 1"


def test_parameters_say_how_to_answer():
    more = {"id": "a", "parameters": {"on_error": "refuse", "binary_data_output": True}}
    wanted = [{"name": "score"}, {"name": "label", "parameters": {"binary_data": False}}]
    request = read_infer(in_json({"logits": np.zeros((1, 2))}, **more, outputs=wanted), None)
    assert (request.refuses, request.identity, request.is_binary) == (True, "a", True)
    assert request.outputs == {"score": True, "label": False}
    assert read_rows(b'{"x": [[0]], "on_error": "refuse"}', "x").refuses
    assert not read_rows(b'{"x": [[0]], "on_error": "raise"}', "x").refuses


TENSOR = {"name": "logits", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
SIZES = [{"binary_data_size": size} for size in (8, 8.0, "8")]
BAD_PARTS = {
    "name": [3],
    "datatype": ["BYTES", ["FP32"]],
    "shape": [[], 2, [1, -1], [1, 2.0], [1, 3], [1] * 100],
    "data": [[1, "2"], [None, "2"], [[1], [2, 3]], 5, {"a": 1}, [{}, {}], None],
    "parameters": [*SIZES, [1]],
}
BAD_VALUES = [("INT64", [1.5, 2]), ("INT64", [None, 2]), ("UINT8", [1, 300]), ("UINT8", [-1, 3]), ("BOOL", [2, 1])]
BAD_TENSORS = [{**TENSOR, name: value} for name, values in BAD_PARTS.items() for value in values]
BAD_TENSORS += [{**TENSOR, "datatype": datatype, "data": values} for datatype, values in BAD_VALUES]


def with_tensor(**more):
    return json.dumps({"inputs": [TENSOR], **more}).encode()


BODY, SIZE = in_binary({"logits": np.ones((2, 3), np.float32)})
BAD_BODIES = [
    *((json.dumps({"inputs": [tensor]}).encode(), None) for tensor in BAD_TENSORS),
    *((body, None) for body in (b"", b'{"inputs": [NaN]}', b"\xff\xfe", b"[" * 100_000, b"[]", b'{"inputs": {}}')),
    (b'{"inputs": [1]}', None),
    (json.dumps({"inputs": [TENSOR, TENSOR]}).encode(), None),
    (with_tensor(outputs=["score"]), None),
    (with_tensor(parameters={"on_error": "skip"}), None),
    (with_tensor(parameters={"on_error": []}), None),
    *((BODY, length) for length in (None, "0", "-1", "²", "9" * 5000, str(len(BODY) + 1))),
    (BODY[:-1], SIZE),
    (BODY + b"\0", SIZE),
]
BAD_ROWS = [
    b"1",
    b'"abc"',
    b'{"logits": "abc"}',
    b"[[1, 2], [3]]",
    b'[[1, 2], [3, "x"]]',
    b'[[1, 2], [null, "1"]]',
    b'{"logits": [[1, 2]], "on_error": "ignore"}',
]


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
