"""What is written of the service is so: the OpenAPI document with its examples, the page on it, the files to run it."""

import json
import re
import shlex
import subprocess
from functools import reduce
from importlib.resources import files
from operator import getitem
from pathlib import Path

import jsonschema
import pytest
from openapi_spec_validator import validate
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from igeood.cli.serve import serve
from igeood.serve.app import App
from igeood.serve.protocol import DTYPES, OUTPUTS

DOCUMENT = json.loads((files("igeood.serve") / "openapi.json").read_text(encoding="utf-8"))
OPERATIONS = {(path, method): about for path, item in DOCUMENT["paths"].items() for method, about in item.items()}
REGISTRY = Registry().with_resource("urn:api", Resource.from_contents(DOCUMENT, default_specification=DRAFT202012))
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "service"
LENGTH = "inference-header-content-length"


def test_it_is_valid_and_has_every_address_with_its_method_types_and_outputs():
    validate(DOCUMENT)
    addresses = {(path.replace("/versions/{version}", ""), method) for path, method in OPERATIONS}
    assert addresses == {(path, method.lower()) for path, (method, _) in App.ROUTES.items()}
    schemas = DOCUMENT["components"]["schemas"]
    assert schemas["InputTensor"]["properties"]["datatype"]["enum"] == list(DTYPES)
    assert schemas["WantedOutput"]["properties"]["name"]["enum"] == [*OUTPUTS, "name", "reason"]
    assert list(schemas["Verdict"]["properties"]) == [*OUTPUTS, "name", "reason"]


@pytest.fixture(scope="module")
def running(guards, serving, tmp_path_factory):
    """A service with class names and a refused input that was kept."""
    folder = tmp_path_factory.mktemp("openapi")
    (folder / "guard").write_bytes(guards.named.path.read_bytes())
    with serving(folder / "guard", keys=["k"], keep_flagged=folder / "flagged") as running:
        assert running.client("k").post("/predict", [[0.1, 0, 0, 0], [9, 0, 0, 0]])[0] == 200
        running.counted(2)
        running.until(lambda: running.service.flagged.record()["latest"])  # a thread writes it
        yield running


def resolved(part):
    """A part of the document, or what it refers to."""
    return reduce(getitem, part["$ref"].split("/")[1:], DOCUMENT) if "$ref" in part else part


def check(instance, schema):
    """An instance is as a schema of the document says."""
    moved = json.loads(json.dumps(schema).replace('"#/', '"urn:api#/'))
    jsonschema.Draft202012Validator(moved, registry=REGISTRY).validate(instance)


def checked(client, answer, responses):
    """An answer of this status is as the document says; its content."""
    status, content = answer
    about = resolved(responses[str(status)])
    media_type = client.headers["content-type"].partition(";")[0]
    if media_type == "application/octet-stream":
        content, media_type = json.loads(content[: int(client.headers[LENGTH])]), "application/json"
    check(content.decode() if isinstance(content, bytes) else content, about["content"][media_type]["schema"])
    return content


def address(path):
    return path.format(model="guard", version=1)


def examples():
    for (path, method), about in OPERATIONS.items():
        content = resolved(about.get("requestBody", {})).get("content", {}).get("application/json", {})
        for name, example in content.get("examples", {}).items():
            yield pytest.param(path, OPERATIONS[path, method], name, example["value"], id=f"{path}-{name}")


@pytest.mark.parametrize(("path", "about", "name", "example"), list(examples()))
def test_the_examples_are_answered_as_it_says(running, path, about, name, example):
    check(example, resolved(about["requestBody"])["content"]["application/json"]["schema"])
    client = running.client("k")
    answer = client.post(address(path), example)
    content = checked(client, answer, about["responses"])
    assert answer[0] == 200
    names = {*content["verdicts"][0]} if path == "/predict" else {row["name"] for row in content["outputs"]}
    wanted = {row["name"] for row in example["outputs"]} if "outputs" in example else {*OUTPUTS, "name"}
    assert names == wanted | ({"reason"} if name == "refuse" else set())
    assert (LENGTH in client.headers) == (name == "binary")


@pytest.mark.parametrize("path", [path for path, method in OPERATIONS if method == "get"])
def test_what_is_read_is_as_it_says(running, path):
    client, about = running.client("k"), OPERATIONS[path, "get"]
    answer = client.get(address(path))
    checked(client, answer, about["responses"])
    assert answer[0] == 200
    assert (running.client().get(address(path))[0] == 401) == (about.get("security") != [])


def test_the_dockerfile_and_the_unit_name_real_options_and_addresses():
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    entry, words = (json.loads(found) for found in re.findall(r"^(?:ENTRYPOINT|CMD) (.*)", text, re.M))
    serve.make_context("serve", [*entry, *words][2:])  # raises for an option that is none
    assert re.search(r"127\.0\.0\.1:8080(/[\w/]+)", text)[1] in App.ROUTES
    unit = (FOLDER / "igeood.service").read_text(encoding="utf-8").replace("\\\n", " ")
    options = serve.make_context("serve", shlex.split(re.search("^ExecStart=(.*)", unit, re.M)[1])[2:]).params
    assert options["key_file"] == "${CREDENTIALS_DIRECTORY}/" + re.search("^LoadCredential=(.*?):", unit, re.M)[1]


def test_curl_gets_what_the_page_asks_for(guards, copied, serving):
    help_text = subprocess.run(["curl", "--help", "all"], capture_output=True, text=True, check=False).stdout  # noqa: S607
    if "--json" not in help_text:
        pytest.skip("curl has no --json")
    lines = re.findall("^curl .*", (ROOT / "docs" / "production.md").read_text(encoding="utf-8"), re.M)
    with serving(copied(guards.named)) as running:
        for line in lines:
            words = shlex.split(line.replace("127.0.0.1:8080", f"127.0.0.1:{running.port}"))
            done = subprocess.run([*words, "--silent", "--fail"], capture_output=True, text=True, check=False)
            assert done.returncode == 0, (line, done.stderr)
            assert {*json.loads(done.stdout)} & {"verdicts", "name", "acknowledged"}
    assert lines
