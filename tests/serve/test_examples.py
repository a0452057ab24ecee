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


def test_the_dockerfile_names_real_options_and_addresses():
    text = re.sub(r"^#.*\n", "", (FOLDER / "Dockerfile").read_text(encoding="utf-8"), flags=re.M).replace("\\\n", " ")
    lines = dict(line.split(maxsplit=1) for line in text.splitlines() if line)
    options = serve.make_context("serve", [*json.loads(lines["ENTRYPOINT"]), *json.loads(lines["CMD"])][2:]).params
    assert (str(options["port"]), options["key_file"].startswith(lines["WORKDIR"])) == (lines["EXPOSE"], True)
    assert all(options[kept].startswith(lines["VOLUME"]) for kept in ("state", "keep_flagged"))
    checked = json.loads(lines["HEALTHCHECK"].partition(" CMD ")[2])
    assert re.search(r"127\.0\.0\.1:8080(/[\w/]+)", checked[-1])[1] in App.ROUTES


def test_the_unit_names_real_options_and_its_own_folders():
    text = (FOLDER / "igeood.service").read_text(encoding="utf-8")
    lines = dict(re.findall(r"^([A-Z]\w+)=(.*)$", text.replace("\\\n", " "), re.M))
    options = serve.make_context("serve", shlex.split(lines["ExecStart"])[2:]).params
    assert options["key_file"] == "${CREDENTIALS_DIRECTORY}/" + lines["LoadCredential"].partition(":")[0]
    assert all(options[kept].startswith("${STATE_DIRECTORY}/") for kept in ("state", "keep_flagged"))
    assert (lines["SuccessExitStatus"], lines["Restart"]) == ("143", "on-failure")


def test_curl_gets_what_the_page_asks_for(guards, copied, serving):
    help_text = subprocess.run(["curl", "--help", "all"], capture_output=True, text=True, check=False).stdout  # noqa: S607
    if "--json" not in help_text:
        pytest.skip("curl has no --json")
    blocks = re.findall(
        r"^```sh\n(.*?)^```", (ROOT / "docs" / "production.md").read_text(encoding="utf-8"), re.S | re.M
    )
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("curl ")]
    with serving(copied(guards.named)) as running:
        for line in lines:
            words = shlex.split(line.replace("127.0.0.1:8080", f"127.0.0.1:{running.port}"))
            done = subprocess.run([*words, "--silent", "--fail"], capture_output=True, text=True, check=False)
            assert done.returncode == 0, (line, done.stderr)
            assert {*json.loads(done.stdout)} & {"verdicts", "name", "acknowledged"}
    assert lines
