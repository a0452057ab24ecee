"""The service over HTTP: a real client of the protocol, every bad request its own status, and none spoils another."""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from threading import Event

import numpy as np
import pytest
import torch
import tritonclient.http as triton
from tritonclient.utils import np_to_triton_dtype

import igeood
from igeood.serve.served import Served

INFER = "/v2/models/guard/infer"
LENGTH = "inference-header-content-length"
TYPES = {"f": {4: "FP32", 8: "FP64"}, "i": {4: "INT32", 8: "INT64"}}
COLUMNS = ("is_ood", "score", "p_value", "label")
PATIENCE = 30


def expected_of(kind, rows=slice(None)):
    """What the guard of the file says of a request's inputs: columns by name."""
    inputs, guard = {name: value[rows] for name, value in kind.inputs.items()}, igeood.load(kind.path, kind.model)
    if kind.model is None:
        features = {n.removeprefix("feature."): value for n, value in inputs.items() if n != "logits"}
        verdict = guard.predict(igeood.Outputs(inputs["logits"], features))
    else:
        tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
        verdict = guard.predict(tensors["x"] if set(tensors) == {"x"} else tensors)
    columns = {name: np.asarray(getattr(verdict, name)) for name in COLUMNS}
    return {**columns, "score": columns["score"].astype(np.float64)}


def check(columns, expected, *, exactly=True):
    for name in ("is_ood", "label"):
        np.testing.assert_array_equal(columns[name], expected[name])
    for name in ("score", "p_value"):
        compare = np.testing.assert_array_equal if exactly else np.testing.assert_allclose
        compare(columns[name], expected[name], **({} if exactly else {"rtol": 1e-5, "atol": 1e-5}))


def infer_body(inputs, **more):
    """A request with binary tensors, and its headers."""
    tensors = [
        {
            "name": name,
            "datatype": TYPES[a.dtype.kind][a.itemsize],
            "shape": list(a.shape),
            "parameters": {"binary_data_size": a.nbytes},
        }
        for name, a in inputs.items()
    ]
    head = json.dumps({"inputs": tensors, **more}).encode()
    body = b"".join([head, *(array.tobytes() for array in inputs.values())])
    return body, {"content_type": "application/octet-stream", LENGTH: str(len(head))}


def columns_of(answer):
    """Outputs of an answer in JSON, by name."""
    return {one["name"]: one["data"] for one in answer["outputs"]}


def rows_of(answer):
    """The same of an answer of /predict."""
    return {name: [row[name] for row in answer["verdicts"]] for name in answer["verdicts"][0]}


@pytest.fixture
def logits(guards):
    return guards.logits


KINDS = ["logits", "features", "named", "probabilities", "images", "grey", "tokens"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_of_the_protocol_gets_what_the_guard_says_to_the_bit(guards, copied, serving, kind):
    kind = getattr(guards, kind)
    expected = expected_of(kind)
    assert 0 < expected["is_ood"].sum() < len(expected["is_ood"])
    with serving(copied(kind), kind.model) as running:
        client = triton.InferenceServerClient(running.address)
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
                said = [name if isinstance(name, str) else name.decode() for name in answer.as_numpy("name")]
                assert said == [kind.guard.classes[label] for label in expected["label"]]
        rows = {name: value.tolist() for name, value in kind.inputs.items()}
        status, answer = running.client().post("/predict", rows)
        assert status == 200
        check(rows_of(answer), expected_of_json(kind, expected))
        client.close()


def expected_of_json(kind, expected):
    """Plain numbers of arrays are float64; those for a model are float32, as here."""
    if kind.model is not None:
        return expected
    arrays = {name: value.astype(np.float64) for name, value in kind.inputs.items()}
    return expected_of(type(kind)(**{**vars(kind), "inputs": arrays}))


@pytest.mark.parametrize("address", ["/predict", INFER, "/v2/models/guard/versions/1/infer"])
def test_refused_rows_are_answered_with_a_reason(plain, logits, address):
    rows = logits.inputs["logits"][:4].copy()
    good = expected_of(logits, slice(0, 4))
    rows[2, 3] = np.nan
    if address == "/predict":
        body, headers = json.dumps({"logits": rows.tolist(), "on_error": "refuse"}).replace("NaN", "null").encode(), {}
    else:
        body, headers = infer_body({"logits": rows}, parameters={"on_error": "refuse"})
    status, answer = plain.client().post(address, body, **headers)
    assert status == 200, answer
    columns = rows_of(answer) if address == "/predict" else columns_of(answer)
    assert [reason is None for reason in columns["reason"]] == [True, True, False, True]
    assert (columns["is_ood"][2], columns["score"][2], columns["label"][2]) == (True, None, -1)
    assert columns["p_value"][2] == 1 / 1001
    for name in COLUMNS:
        np.testing.assert_allclose(np.delete(columns[name], 2).astype(float), np.delete(good[name], 2), rtol=1e-5)
    plain.judged(4)
    assert plain.count("unread") == 1
    bad = body.replace(b'"refuse"', b'"raise"')
    if address != "/predict":
        headers = {**headers, LENGTH: str(int(headers[LENGTH]) - 1)}
    status, answer = plain.client().post(address, bad, **headers)
    assert (status, "row 2" in answer["error"]) == (400, True)


def infer_json(more=None, **change):
    tensor = {"name": "logits", "datatype": "FP32", "shape": [1, 10], "data": [0.0] * 9 + [5], **change}
    return json.dumps({"inputs": [tensor], **(more or {})}).encode()


BAD = [
    (b"{", {}, 400),
    (infer_json(shape=[1, 9], data=[0] * 9), {}, 400),
    (infer_json(shape=[10]), {}, 400),
    (infer_json(shape=[0, 10], data=[]), {}, 400),
    (infer_json(datatype="INT64", data=[1] * 10), {}, 400),
    (infer_json(name="x"), {}, 400),
    (b'{"inputs": []}', {}, 400),
    (infer_json(data=[0.0, None, *[1] * 8]), {}, 400),
    (infer_json(data=[1e39, *[1] * 9]), {}, 400),  # too large for float32
    (infer_json(more={"outputs": [{"name": "reason"}]}), {}, 400),  # only where rows may be refused
    (infer_json(more={"outputs": [{"name": "name"}]}), {}, 400),  # the guard knows none
    (infer_json() + b" " * 70_000, {}, 413),
    (infer_json(), {"content_type": "text/csv"}, 415),
    (infer_json(), {"content_encoding": "gzip"}, 415),
    (infer_json(), {LENGTH: "7"}, 400),
    (infer_json(), {"sec_fetch_site": "cross-site"}, 403),
]


def test_each_bad_request_has_its_status_and_the_same_client_goes_on(plain):
    client = plain.client()
    for number, (body, headers, expected) in enumerate(BAD):
        status, answer = client.post(INFER, body, **headers)
        assert (status, list(answer)) == (expected, ["error"]), answer
        assert client.post(INFER, infer_json())[0] == 200
        plain.judged(number + 1)
    assert plain.count("requests", path="infer", status="415") == 2


class Gate:
    """Holds up a service's worker, so that requests are joined."""

    def __init__(self, service):
        self._judge, self._open, self.batches = service.batcher.judge, Event(), []
        self._service, service.batcher.judge = service, self

    def __call__(self, jobs):
        self.batches.append([job.rows for job in jobs])
        assert self._open.wait(PATIENCE)
        self._judge(jobs)

    def joined(self, posts, meanwhile=lambda: None):
        """Answers to requests that are judged together, after a first one; what is done while they wait."""
        with ThreadPoolExecutor(len(posts)) as pool:
            answers = [pool.submit(posts[0])]
            end = time.monotonic() + PATIENCE
            while not self.batches and time.monotonic() < end:
                time.sleep(0.001)
            for number, post in enumerate(posts[1:], 1):
                answers.append(pool.submit(post))
                while len(self._service.batcher) < number and time.monotonic() < end:
                    time.sleep(0.001)
            try:
                meanwhile()
            finally:
                self._open.set()
            return [answer.result(PATIENCE) for answer in answers]


def posts_of(running, kind, cuts, **change):
    """Requests for parts of a guard's inputs."""
    bodies = [infer_body({**{n: a[cut] for n, a in kind.inputs.items()}, **change}) for cut in cuts]
    return [partial(running.client().post, INFER, body, **headers) for body, headers in bodies]


CUTS = [slice(0, 1), slice(0, 5), slice(5, 6), slice(6, 16), slice(3, 9)]


@pytest.mark.parametrize("kind", KINDS)
def test_joined_requests_get_the_same_to_rounding(guards, copied, serving, kind):
    kind = getattr(guards, kind)
    with serving(copied(kind), kind.model) as running:
        gate = Gate(running.service)
        answers = gate.joined(posts_of(running, kind, CUTS))
        assert gate.batches == [[1], [5, 1, 10, 6]]
        for cut, (status, answer) in zip(CUTS, answers, strict=True):
            assert status == 200
            check(columns_of(answer), expected_of(kind, cut), exactly=False)


def test_a_request_that_the_model_fails_on_spoils_no_other(guards, copied, serving):
    kind, cuts = guards.tokens, CUTS[:4]
    ids = kind.inputs["input_ids"][:3].copy()
    ids[1, 2] = 40  # of 0…39
    with serving(copied(kind), kind.model) as running:
        gate = Gate(running.service)
        good, bad = posts_of(running, kind, cuts), posts_of(running, kind, [slice(0, 3)], input_ids=ids)
        *others, (status, problem) = gate.joined([*good[:2], *good[2:], *bad])
        assert gate.batches[:2] == [[1], [5, 1, 10, 3]]
        assert (status, "IndexError" in problem["error"]) == (400, True)
        for cut, (status, answer) in zip(cuts, others, strict=True):
            assert status == 200
            check(columns_of(answer), expected_of(kind, cut), exactly=False)
        assert running.count("rejected") == 3


def test_what_the_model_does_not_take_is_a_400(guards, copied, serving):
    kind = guards.images
    images, larger = kind.inputs["x"], np.zeros((2, 3, 12, 12), np.float32)
    sent = [
        ({"x": images[:1]}, 200),
        ({"x": images[:2, :1]}, 400),  # one channel
        ({"x": larger}, 200),
        ({"x": images[:1].astype(np.int64)}, 400),
        ({"pixels": images[:1]}, 400),
        ({"x": images[:1], "y": images[:2]}, 400),
        ({"x": np.zeros((1 << 20, 0, 8), np.float32)}, 400),
        ({"x": np.full((1, 3, 8, 8), np.inf, np.float32)}, 400),
        ({"x": images[1:3]}, 200),
    ]
    with serving(copied(kind), kind.model) as running:
        gate, posts = Gate(running.service), []
        for inputs, _ in sent[:4]:
            body, headers = infer_body(inputs)
            posts.append(partial(running.client().post, INFER, body, **headers))
        answers = gate.joined(posts)  # of different shapes or types: none are joined
        client = running.client()
        for inputs, _ in sent[4:]:
            body, headers = infer_body(inputs)
            answers.append(client.post(INFER, body, **headers))
    assert [status for status, _ in answers] == [expected for _, expected in sent]
    check(columns_of(answers[-1][1]), expected_of(kind, slice(1, 3)), exactly=False)


def test_a_fault_of_the_service_is_a_500_and_the_next_is_answered(guards, copied, serving, monkeypatch, caplog):
    def fails(*_):
        raise MemoryError("no more")

    with serving(copied(guards.logits)) as running, monkeypatch.context() as patch:
        client = running.client()
        patch.setattr(Served, "predict", fails)
        assert client.post(INFER, infer_json())[0] == 500
        patch.undo()
        patch.setattr(running.service.watch, "judged", fails)  # what cannot be counted is answered
        assert [client.post(INFER, infer_json())[0] for _ in range(2)] == [200, 200]
    assert {record.exc_info[0] for record in caplog.records if record.exc_info} == {MemoryError}


def test_a_full_queue_is_a_503(guards, copied, serving):
    with serving(copied(guards.logits), max_waiting=3) as running:
        gate = Gate(running.service)
        late = running.client()

        def turned_away():
            status, _ = late.post(INFER, infer_json())
            assert (status, late.headers["retry-after"]) == (503, "1")
            assert late.get("/v2/health/ready")[0] == 200
            assert b"igeood_queue_length 3.0" in late.get("/metrics")[1]

        answers = gate.joined(posts_of(running, guards.logits, CUTS[:4]), turned_away)
        assert [status for status, _ in answers] == [200] * 4


def mixed(rows, seed, n):
    """Requests as (body, headers, key, status), one in ten bad."""
    draw, key = random.Random(seed), "key"
    for number in range(n):
        at = draw.randrange(len(rows) - 3)
        good = rows[at : at + draw.randint(1, 3)]
        kind = draw.randrange(6) if number % 10 == 3 else None
        spoilt = {0: np.full_like(good, np.nan), 1: good[:, :7], 2: good.astype(np.int64)}
        body, headers = infer_body({"logits": spoilt.get(kind, good)})
        if kind == 3:
            body += b"\0" * 70_000
        if kind == 4:
            body = body[:-5]
        status = {None: 200, 3: 413, 5: 401}.get(kind, 400)
        yield slice(at, at + len(good)), body, headers, "wrong" if kind == 5 else key, status


def test_bad_requests_among_good_ones(guards, copied, serving):
    kind = guards.logits
    expected, requests = expected_of(kind), [*mixed(kind.inputs["logits"], 0, 1000)]
    with serving(copied(kind), keys=["key"], max_body=70_000) as running:

        def work(part):
            client, answers = running.client(), []
            for _, body, headers, key, _ in part:
                answers.append(client.post(INFER, body, authorization=f"Bearer {key}", **headers))
            return answers

        with ThreadPoolExecutor(8) as pool:
            parts = [requests[i::8] for i in range(8)]
            answers = [*chain.from_iterable(pool.map(work, parts))]
        for (rows, _, _, _, wanted), (status, answer) in zip(chain.from_iterable(parts), answers, strict=True):
            assert status == wanted, answer
            if status == 200:
                check(columns_of(answer), {name: value[rows] for name, value in expected.items()}, exactly=False)
        good = [request for request in requests if request[-1] == 200]
        running.judged(sum(rows.stop - rows.start for rows, *_ in good))
        assert len(good) == 900


def test_a_changed_file_is_served_and_a_broken_one_is_told(guards, copied, serving):
    path = copied(guards.logits)
    with serving(path) as running:
        service, client = running.service, running.client()
        wide = {"inputs": [{"name": "logits", "datatype": "FP32", "shape": [1, 4], "data": [0, 0, 0, 9]}]}
        assert client.post(INFER, wide)[0] == 400
        good = path.read_bytes()
        for content in (b"", good[:-1], b"{}" * 100, guards.named.path.read_bytes()[:1000]):
            path.write_bytes(content)
            service._reload()
            assert client.post(INFER, infer_json())[0] == 200
        path.unlink()
        service._reload()
        status = client.get("/status")[1]["guard"]
        assert (status["reloads"], status["reload_failures"]) == (0, 5)
        assert status["reload_error"]
        assert b"igeood_reload_failures_total 5.0" in client.get("/metrics")[1]
        path.write_bytes(guards.named.path.read_bytes())
        service._reload()
        assert client.post(INFER, wide)[0] == 200
        assert columns_of(client.post(INFER, wide)[1])["name"] == ["dog"]
        assert client.post(INFER, infer_json())[0] == 400
        status = client.get("/status")[1]["guard"]
        assert (status["reloads"], status["reload_failures"], status["reload_error"]) == (1, 5, None)
        path.write_bytes((guards.logits.path.parent / "images.safetensors").read_bytes())
        service._reload()
        assert client.get("/status")[1]["guard"]["reload_error"]
        assert client.post(INFER, wide)[0] == 200


def test_requests_that_wait_during_a_reload_are_judged_by_the_guard_that_they_were_checked_for(guards, copied, serving):
    path = copied(guards.logits)
    with serving(path) as running:
        gate = Gate(running.service)

        def reload():
            path.write_bytes(guards.named.path.read_bytes())
            running.service._reload()

        for cut, (status, answer) in zip(
            CUTS, gate.joined(posts_of(running, guards.logits, CUTS), reload), strict=True
        ):
            assert status == 200
            check(columns_of(answer), expected_of(guards.logits, cut), exactly=False)
        running.judged(23)
        assert running.service.served.monitor.inputs == 0  # the new guard's monitor knows none of them
