"""Who is let in: addresses, keys, bodies that are too long or end early."""

import json
import socket

import pytest
import tritonclient.http as triton

import igeood

INFER = "/v2/models/guard/infer"
PATIENCE = 30
GOOD = {"name": "logits", "datatype": "FP32", "shape": [1, 10], "data": [0.0] * 9 + [5]}


def infer_json():
    return json.dumps({"inputs": [GOOD]}).encode()


def test_addresses_that_are_not_there(plain):
    client = plain.client()
    assert client.get("/nothing")[0] == client.get("/%ff%0a")[0] == 404
    assert (client.get("/predict")[0], client.headers["allow"]) == (405, "POST")
    for path in ("/v2/models/cats/infer", "/v2/models/guard/versions/2/infer"):
        assert client.post(path, infer_json())[0] == 404
    assert plain.count("requests", path="other", status="404") == 4
    assert client.ask("HEAD", "/v2/health/live")[0] == 200


def test_a_body_in_parts_is_cut_off_at_the_limit(plain):
    with socket.create_connection(("127.0.0.1", plain.port), timeout=PATIENCE) as link:
        link.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(8):  # it answers before the body ends
            link.sendall(b"2710\r\n" + b" " * 10_000 + b"\r\n")
        answer = link.recv(10_000)
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_client_that_breaks_off_is_counted_and_harms_nobody(plain):
    with socket.create_connection(("127.0.0.1", plain.port), timeout=PATIENCE) as link:
        link.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n[[1, 2")
    plain.until(lambda: plain.count("requests", path="predict", status="499") == 1)
    assert plain.client().post(INFER, infer_json())[0] == 200


def test_keys_are_needed_for_all_but_health(guards, copied, serving):
    with serving(copied(guards.logits), keys=["first", "zweiter-schlüssel"]) as running:
        client = running.client()
        for path in ("/", "/status", "/metrics", "/openapi.json", "/v2", "/v2/models/guard", "/nothing"):
            assert client.get(path)[0] == 401
            assert client.headers["www-authenticate"].startswith("Basic")
        assert (client.get("/v2/health/live")[0], client.get("/v2/health/ready")[0]) == (200, 200)
        for sent, status in {
            "Bearer first": 200,
            "bearer first": 200,
            "Bearer zweiter-schlüssel": 200,
            "Basic OmZpcnN0": 200,
            "Basic bWU6Zmlyc3Q=": 200,
            "Basic Zmlyc3Q=": 401,
            "Basic ?": 401,
            "Bearer firs": 401,
            "Bearer firsta": 401,
            "Bearer": 401,
            "first": 401,
            "Bearer first,second": 401,
            "": 401,
        }.items():
            assert client.post(INFER, infer_json(), authorization=sent.encode())[0] == status, sent
        assert running.count("requests", path="other", status="401") == 7 + 8


def test_calls_about_server_and_model_answer(guards, copied, serving):
    with serving(copied(guards.features), name="pets") as running:
        client = triton.InferenceServerClient(running.address)
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("pets")
        assert client.is_model_ready("pets", "1")
        assert not client.is_model_ready("guard")
        about = client.get_server_metadata()
        assert (about["name"], about["version"]) == ("igeood", igeood.__version__)
        assert about["extensions"] == ["binary_tensor_data"]
        model = client.get_model_metadata("pets")
        assert client.get_model_metadata("pets", "1") == model
        assert (model["name"], model["versions"]) == ("pets", ["1"])
        assert {one["name"]: one["shape"] for one in model["inputs"]} == {
            "logits": [-1, 10],
            "feature.early": [-1, 6],
            "feature.block.late": [-1, 9],
        }
        assert [one["name"] for one in model["outputs"]] == ["is_ood", "score", "p_value", "label"]
        with pytest.raises(triton.InferenceServerException):
            client.get_model_metadata("pets", "2")
        client.close()
