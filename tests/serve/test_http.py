"""The service over HTTP: a real client of the protocol, every bad request its own status, and none spoils another."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event

import frozen_cases as frozen
import numpy as np
import pytest
import torch
import tritonclient.http as triton
from tritonclient.utils import np_to_triton_dtype

import igeood
from igeood.serve.served import Served

INFER = "/v2/models/guard/infer"
LENGTH = "inference-header-content-length"
COLUMNS = ("is_ood", "score", "p_value", "label")
KINDS = ["logits", "classes", "features", "named", "images", "grey", "tokens"]
PATIENCE = 30
ANSWERS = json.loads((frozen.FROZEN / "answers.json").read_text())  # of 0.2: a later version has to give the same


def expected_of(kind, rows=slice(None), dtype=None):
    """What the guard of the file says of a request's inputs: columns by name."""
    inputs, guard = {name: value[rows] for name, value in kind.inputs.items()}, igeood.load(kind.path, kind.model)
    if kind.model is None:
        arrays = {name.removeprefix("feature."): np.asarray(value, dtype) for name, value in inputs.items()}
        verdict = guard.predict(igeood.Outputs(arrays.pop("logits"), arrays))
    else:
        tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
        verdict = guard.predict(tensors["x"] if set(tensors) == {"x"} else tensors)
    columns = {name: np.asarray(getattr(verdict, name)) for name in COLUMNS}
    return {**columns, "score": columns["score"].astype(np.float64)}


def check(columns, expected, tolerance=0.0):
    for name in COLUMNS:
        np.testing.assert_allclose(columns[name], expected[name], rtol=tolerance, atol=tolerance)


def infer_body(inputs):
    """A request with binary tensors, and its headers."""
    tensors = [{"name": n, "datatype": np_to_triton_dtype(a.dtype), "shape": a.shape} for n, a in inputs.items()]
    for tensor, array in zip(tensors, inputs.values(), strict=True):
        tensor["parameters"] = {"binary_data_size": array.nbytes}
    head = json.dumps({"inputs": tensors}).encode()
    return b"".join([head, *(array.tobytes() for array in inputs.values())]), {LENGTH: str(len(head))}


def infer_json(more=None, **change):
    tensor = {"name": "logits", "datatype": "FP32", "shape": [1, 10], "data": [0.0] * 9 + [5], **change}
    return json.dumps({"inputs": [tensor], **(more or {})}).encode()


def columns_of(answer):
    """Columns of an answer in JSON, of either protocol."""
    if "outputs" in answer:
        return {one["name"]: one["data"] for one in answer["outputs"]}
    return {name: [row[name] for row in answer["verdicts"]] for name in answer["verdicts"][0]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_of_the_protocol_gets_what_the_guard_says_to_the_bit(guards, copied, serving, kind):
    kind = getattr(guards, kind)
    expected = expected_of(kind)
    assert 0 < expected["is_ood"].sum() < len(expected["is_ood"])
    with serving(copied(kind), kind.model) as running:
        client = triton.InferenceServerClient(f"127.0.0.1:{running.port}")
        for is_binary in (True, False):
            inputs = [triton.InferInput(n, a.shape, np_to_triton_dtype(a.dtype)) for n, a in kind.inputs.items()]
            for one, array in zip(inputs, kind.inputs.values(), strict=True):
                one.set_data_from_numpy(array, binary_data=is_binary)
            outputs = [triton.InferRequestedOutput(name, binary_data=is_binary) for name in COLUMNS]
            for wanted in (outputs, None):
                answer = client.infer("guard", inputs, outputs=wanted, request_id="17")
                check({name: answer.as_numpy(name) for name in COLUMNS}, expected)
                assert answer.get_response()["id"] == "17"
            if kind.guard.classes:
                names = [name if isinstance(name, str) else name.decode() for name in answer.as_numpy("name")]
                assert names == [kind.guard.classes[label] for label in expected["label"]]
        client.close()
        rows = {name: value.tolist() for name, value in kind.inputs.items()}
        status, answer = running.client().post("/predict", rows)
        assert status == 200
        check(columns_of(answer), expected_of(kind, dtype=np.float64))  # plain numbers of arrays are float64


def test_keys_are_needed_for_all_but_health(guards, copied, serving):
    with serving(copied(guards.logits), keys=["first", "zweiter-schlüssel"]) as running:
        client = running.client()
        for path in ("/", "/status", "/metrics", "/openapi.json", "/v2", "/v2/models/guard", "/nothing"):
            assert client.get(path)[0] == 401
            assert client.headers["www-authenticate"].startswith("Basic")
        assert (client.get("/v2/health/live")[0], client.get("/v2/health/ready")[0]) == (200, 200)
        good = ["Bearer first", "bearer first", "Bearer zweiter-schlüssel", "Basic OmZpcnN0", "Basic bWU6Zmlyc3Q="]
        bad = ["Basic Zmlyc3Q=", "Basic ?", "Bearer firs", "Bearer firsta", "Bearer", "first", ""]
        for key in [*good, *bad]:
            status = client.post(INFER, infer_json(), authorization=key.encode())[0]
            assert status == (200 if key in good else 401), key


BAD = [  # beside those of the frozen answers
    (infer_json(shape=[10]), {}, 400),
    (infer_json(shape=[0, 10], data=[]), {}, 400),
    (b'{"inputs": []}', {}, 400),
    (infer_json(data=[1e39, *[1] * 9]), {}, 400),  # too large for float32
    (infer_json(more={"outputs": [{"name": "reason"}]}), {}, 400),  # only where rows may be refused
    (infer_json(more={"outputs": [{"name": "name"}]}), {}, 400),  # the guard knows none
    (infer_json() + b" " * 70_000, {}, 413),
    (infer_json(), {"sec_fetch_site": "cross-site"}, 403),
]


def test_each_bad_request_has_its_status_and_the_same_client_goes_on(plain):
    client = plain.client()
    for number, (body, headers, expected) in enumerate(BAD):
        status, answer = client.post(INFER, body, **headers)
        assert (status, list(answer)) == (expected, ["error"]), answer
        assert client.post(INFER, infer_json())[0] == 200
        plain.counted(number + 1)
    assert client.get("/nothing")[0] == client.get("/%ff%0a")[0] == 404
    assert client.post("/v2/models/guard/versions/2/infer", infer_json())[0] == 404
    assert (client.get("/predict")[0], client.headers["allow"]) == (405, "POST")
    assert client.ask("HEAD", "/v2/health/live")[0] == 200
    assert plain.count("requests", path="other", status="404") == 3


def test_a_body_in_parts_is_cut_off_at_the_limit_and_a_client_that_breaks_off_is_counted(plain):
    with socket.create_connection(("127.0.0.1", plain.port), timeout=PATIENCE) as link:
        link.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(8):  # it answers before the body ends
            link.sendall(b"2710\r\n" + b" " * 10_000 + b"\r\n")
        assert link.recv(10_000).startswith(b"HTTP/1.1 413 ")
    with socket.create_connection(("127.0.0.1", plain.port), timeout=PATIENCE) as link:
        link.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n[[1, 2")
    plain.until(lambda: plain.count("requests", path="predict", status="499"))
    assert plain.client().post(INFER, infer_json())[0] == 200


class Gate:
    """Holds up a service's thread, so that requests are joined."""

    def __init__(self, running):
        self._until, self._open, self.batches = running.until, Event(), []
        self._batcher = running.service.batcher
        self._answer, self._batcher.answer = self._batcher.answer, self

    def __call__(self, jobs):
        self.batches.append([job.rows for job in jobs])
        assert self._open.wait(PATIENCE)
        self._answer(jobs)

    def joined(self, posts, meanwhile=lambda: None):
        """Answers to requests that are joined, after a first one; what is done while they wait."""
        with ThreadPoolExecutor(len(posts)) as pool:
            answers = [pool.submit(posts[0])]
            self._until(lambda: self.batches)
            for number, post in enumerate(posts[1:], 1):
                answers.append(pool.submit(post))
                self._until(lambda number=number: len(self._batcher) >= number)
            meanwhile()
            self._open.set()
            return [answer.result(PATIENCE) for answer in answers]


def posts_of(running, *inputs):
    bodies = [infer_body(one) for one in inputs]
    return [partial(running.client().post, INFER, body, **headers) for body, headers in bodies]


CUTS = [slice(0, 1), slice(0, 5), slice(5, 6), slice(6, 16), slice(3, 9)]


def parts(kind, cuts=CUTS):
    return [{name: array[cut] for name, array in kind.inputs.items()} for cut in cuts]


def check_parts(kind, answers):
    for cut, (status, answer) in zip(CUTS, answers, strict=False):
        assert status == 200, answer
        check(columns_of(answer), expected_of(kind, cut), 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_joined_requests_get_the_same_to_rounding(guards, copied, serving, kind):
    kind = getattr(guards, kind)
    with serving(copied(kind), kind.model) as running:
        gate = Gate(running)
        check_parts(kind, gate.joined(posts_of(running, *parts(kind))))
        assert gate.batches == [[1], [5, 1, 10, 6]]


def test_a_request_that_the_model_fails_on_spoils_no_other(guards, copied, serving):
    kind = guards.tokens
    bad = parts(kind, [slice(0, 3)])[0]
    bad["input_ids"] = np.full_like(bad["input_ids"], 40)  # of 0…39
    with serving(copied(kind), kind.model) as running:
        gate = Gate(running)
        *others, (status, problem) = gate.joined(posts_of(running, *parts(kind, CUTS[:4]), bad))
        assert gate.batches[:2] == [[1], [5, 1, 10, 3]]
        assert (status, "IndexError" in problem["error"], running.count("rejected")) == (400, True, 3)
        check_parts(kind, others)


def test_what_the_model_does_not_take_is_a_400(guards, copied, serving):
    kind = guards.images
    images = kind.inputs["x"]
    sent = [
        ({"x": images[:1]}, 200),
        ({"x": images[:2, :1]}, 400),  # one channel
        ({"x": np.zeros((2, 3, 12, 12), np.float32)}, 200),
        ({"x": images[:1].astype(np.int64)}, 400),
        ({"pixels": images[:1]}, 400),
        ({"x": images[:1], "y": images[:2]}, 400),
        ({"x": np.zeros((1 << 20, 0, 8), np.float32)}, 400),
        ({"x": np.full((1, 3, 8, 8), np.inf, np.float32)}, 400),
    ]
    with serving(copied(kind), kind.model) as running:
        answers = [post() for post in posts_of(running, *(inputs for inputs, _ in sent))]
    assert [status for status, _ in answers] == [expected for _, expected in sent]


def test_a_full_queue_is_a_503(guards, copied, serving):
    with serving(copied(guards.logits), max_waiting=3) as running:
        late = running.client()

        def turned_away():
            status, _ = late.post(INFER, infer_json())
            assert (status, late.headers["retry-after"]) == (503, "1")
            assert late.get("/v2/health/ready")[0] == 200
            assert b"igeood_queue_length 3.0" in late.get("/metrics")[1]

        posts = posts_of(running, *parts(guards.logits, CUTS[:4]))
        check_parts(guards.logits, Gate(running).joined(posts, turned_away))


def test_a_changed_file_is_served_and_a_broken_one_leaves_the_old_guard(guards, copied, serving):
    path = copied(guards.logits)
    named = guards.named.path.read_bytes()
    narrow = infer_json(shape=[1, 4], data=[0, 0, 0, 9])
    with serving(path) as running:
        service, client = running.service, running.client()
        for content in (b"", path.read_bytes()[:-1], b"{}" * 100, named[:1000], guards.images.path.read_bytes()):
            path.write_bytes(content)
            service._reload()
            assert (client.post(INFER, infer_json())[0], client.post(INFER, narrow)[0]) == (200, 400)
        path.unlink()
        service._reload()
        assert client.get("/status")[1]["guard"]["reload_error"]
        assert (running.count("reloads"), running.count("reload_failures")) == (0, 6)
        path.write_bytes(named)
        service._reload()
        assert columns_of(client.post(INFER, narrow)[1])["name"] == ["dog"]
        assert client.post(INFER, infer_json())[0] == 400
        assert client.get("/status")[1]["guard"]["reload_error"] is None
        assert (running.count("reloads"), running.count("reload_failures")) == (1, 6)


def test_requests_that_wait_during_a_reload_are_answered_by_the_old_guard(guards, copied, serving):
    path = copied(guards.logits)
    with serving(path) as running:

        def reload():
            path.write_bytes(guards.named.path.read_bytes())
            running.service._reload()

        check_parts(guards.logits, Gate(running).joined(posts_of(running, *parts(guards.logits)), reload))
        running.counted(23)
        assert running.service.served.monitor.inputs == 0  # the new guard's monitor knows none of them


def test_a_fault_of_the_service_is_a_500_and_the_next_is_answered(plain, monkeypatch, caplog):
    client = plain.client()
    with monkeypatch.context() as patch:
        patch.setattr(Served, "predict", lambda *_: 1 / 0)
        assert client.post(INFER, infer_json())[0] == 500
    assert client.post(INFER, infer_json())[0] == 200
    assert {record.exc_info[0] for record in caplog.records if record.exc_info} == {ZeroDivisionError}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "tolerance"), [("logits", 1e-9), ("images", 1e-4)])  # the images' model is of float32
def test_answers_to_kept_requests(serving, tmp_path, name, tolerance):
    guard, model = frozen.served_guard(name)
    guard.save(tmp_path / "guard.safetensors")
    with serving(tmp_path / "guard.safetensors", model) as running:
        client = running.client()
        answers = {key: frozen.answer(client, *request) for key, request in frozen.requests(name).items()}
    frozen.assert_same(answers, ANSWERS[name], tolerance)
