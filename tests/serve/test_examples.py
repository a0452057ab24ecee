"""The files that run the service, and the page on it, name real options, files and addresses."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from igeood.cli.serve import serve
from igeood.serve.app import App

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "service"


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
