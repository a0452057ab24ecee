"""The OpenAPI document is valid, names every address, and says how the service answers: its examples are sent."""

import asyncio
import json
import re
import time
from functools import reduce
from importlib.resources import files
from operator import getitem

import jsonschema
import numpy as np
import pytest
from openapi_spec_validator import validate
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

import igeood
from igeood.serve.app import App
from igeood.serve.protocol import DTYPES, OUTPUTS, TEXTS
from igeood.serve.served import Served
from igeood.serve.service import Options, Service

DOCUMENT = json.loads((files("igeood.serve") / "openapi.json").read_text(encoding="utf-8"))
OPERATIONS = {(path, method): about for path, item in DOCUMENT["paths"].items() for method, about in item.items()}
REGISTRY = Registry().with_resource("urn:api", Resource.from_contents(DOCUMENT, default_specification=DRAFT202012))
PLACES = {"{model}": "guard", "{version}": "1"}
LENGTH = "inference-header-content-length"


def test_it_is_valid():
    validate(DOCUMENT)


def test_it_has_every_address_with_its_method_and_no_other():
    assert set(OPERATIONS) == {(path, method.lower()) for path, (method, _) in App.ROUTES.items()}
    for (path, _), about in OPERATIONS.items():
        parameters = [resolved(parameter) for parameter in about.get("parameters", [])]
        assert re.findall(r"{(\w+)}", path) == [one["name"] for one in parameters if one["in"] == "path"]


def test_types_and_outputs_are_those_of_the_code():
    schemas = DOCUMENT["components"]["schemas"]
    assert schemas["InputTensor"]["properties"]["datatype"]["enum"] == list(DTYPES)
    assert (
        schemas["WantedOutput"]["properties"]["name"]["enum"]
        == [*OUTPUTS, *TEXTS]
        == list(schemas["Verdict"]["properties"])
    )


def resolved(part):
    """A part of the document, or what it refers to."""
    return reduce(getitem, part["$ref"].split("/")[1:], DOCUMENT) if "$ref" in part else part


def check(instance, schema):
    """An instance is as a schema of the document says."""
    moved = json.loads(json.dumps(schema).replace('"#/', '"urn:api#/'))
    jsonschema.Draft202012Validator(moved, registry=REGISTRY).validate(instance)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("service"), np.random.default_rng(0)
    labels = np.arange(1200) % 4
    logits = draw.normal(size=(1200, 4)) + 7 * np.eye(4)[labels]
    guard = igeood.black_box().fit(logits[:200], labels[:200], classes=["ant", "bee", "cat", "dog"])
    guard.calibrate(logits[200:]).save(folder / "guard.safetensors")
    service = Service(folder / "guard.safetensors", options=Options(keep_flagged=folder / "flagged"))
    ask(service, "post", "/predict", b"[[0.1, 0, 0, 0], [9, 0, 0, 0]]")
    end = time.monotonic() + 30
    while not service.flagged.record()["latest"] and time.monotonic() < end:  # a thread writes the refused one
        time.sleep(0.02)
    yield service
    service.close()


def ask(service, method, path, body=b"", *, keys=(), **headers):
    """An answer of the application: status, headers, body."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": body}

    async def send(message):
        sent.append(message)

    names = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method.upper(), "path": path, "headers": names, "query_string": b""}
    asyncio.run(App(service, keys=keys, quiet=True)(scope, receive, send))
    answered = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], answered, b"".join(message.get("body", b"") for message in sent)


def checked(answer, responses):
    """An answer is one of those that the document has; its JSON."""
    status, headers, body = answer
    about = resolved(responses[str(status)])
    kind = headers["content-type"].partition(";")[0]
    needed = {"Connection", "Allow", "WWW-Authenticate", "Retry-After"} & set(about.get("headers", {}))
    assert needed <= {name.title().replace("Www", "WWW") for name in headers}
    if kind == "application/octet-stream":
        body, kind = body[: int(headers[LENGTH])], "application/json"
    content = json.loads(body) if kind == "application/json" else body.decode()
    check(content, about["content"][kind]["schema"])
    return content


def requests():
    for (path, method), about in OPERATIONS.items():
        content = resolved(about.get("requestBody", {})).get("content", {}).get("application/json", {})
        for name, example in content.get("examples", {}).items():
            yield pytest.param(path, method, name, example["value"], id=f"{path}-{name}")


@pytest.mark.parametrize(("path", "method", "name", "example"), list(requests()))
def test_the_examples_are_answered_as_it_says(service, path, method, name, example):
    about = OPERATIONS[path, method]
    check(example, resolved(about["requestBody"])["content"]["application/json"]["schema"])
    answer = ask(service, method, re.sub("{.*?}", lambda place: PLACES[place[0]], path), json.dumps(example).encode())
    content = checked(answer, about["responses"])
    assert answer[0] == 200
    rows = content["verdicts"] if path == "/predict" else content["outputs"]
    names = {*rows[0]} if path == "/predict" else {row["name"] for row in rows}
    wanted = {row["name"] for row in example["outputs"]} if "outputs" in example else {*OUTPUTS, "name"}
    assert names == wanted | ({"reason"} if name == "refuse" else set())
    assert (LENGTH in answer[1]) == (name == "binary")


def test_binary_tensors_are_sent_and_answered_as_it_says(service):
    logits = 5 * np.eye(4, dtype="<f4")
    tensor = {"name": "logits", "datatype": "FP32", "shape": [4, 4], "parameters": {"binary_data_size": 64}}
    asked = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    check(asked, DOCUMENT["components"]["schemas"]["InferRequest"])
    head = json.dumps(asked).encode()
    more = {"content_type": "application/octet-stream", LENGTH.replace("-", "_"): str(len(head))}
    answer = ask(service, "post", "/v2/models/guard/infer", head + logits.tobytes(), **more)
    content = checked(answer, OPERATIONS["/v2/models/{model}/infer", "post"]["responses"])
    sizes = [output["parameters"]["binary_data_size"] for output in content["outputs"]]
    assert int(answer[1][LENGTH]) + sum(sizes) == len(answer[2])


@pytest.mark.parametrize("path", [path for path, method in OPERATIONS if method == "get"])
def test_what_is_read_is_as_it_says(service, path):
    address = re.sub("{.*?}", lambda place: PLACES[place[0]], path)
    answer = ask(service, "get", address, keys=["k"], authorization="Bearer k")
    content = checked(answer, OPERATIONS[path, "get"]["responses"])
    needs_key = ask(service, "get", address, keys=["k"])[0] == 401
    assert answer[0] == 200
    assert needs_key == (OPERATIONS[path, "get"].get("security") != [])
    if path == "/openapi.json":
        assert content["info"].pop("version") == igeood.__version__
        assert content["paths"] == DOCUMENT["paths"]
    if path == "/status":
        assert content["flagged"]["latest"][0]["explanation"].startswith("score ")


@pytest.mark.parametrize("name", [name for name in DOCUMENT["components"]["responses"] if name != "Verdicts"])
def test_errors_are_those_of_the_examples(service, monkeypatch, name):
    def fail(*_):
        raise RuntimeError("of a model")

    if name == "Fault":
        monkeypatch.setattr(Served, "predict", fail)
    if name == "Busy":
        monkeypatch.setattr(service.batcher, "max_waiting", 0)
    status, path, more = {
        "BadRequest": (400, "/predict", {"body": b"[[1, 2, 3]]"}),
        "Unauthorized": (401, "/predict", {"keys": ["k"], "authorization": "Bearer l"}),
        "NotFound": (404, "/v2/models/other/infer", {"body": b"{}"}),
        "MethodNotAllowed": (405, "/status", {}),
        "TooLarge": (413, "/predict", {"content_length": "16000001"}),
        "UnsupportedType": (415, "/predict", {"content_type": "text/plain"}),
        "Fault": (500, "/predict", {"body": b"[[1, 2, 3, 4]]"}),
        "Busy": (503, "/predict", {"body": b"[[1, 2, 3, 4]]"}),
    }[name]
    about = DOCUMENT["components"]["responses"][name]
    answer = ask(service, "post", path, **more)
    checked(answer, {str(status): about})
    assert answer[0] == status
