"""The files that run the service, and the page on it, name real options, files and addresses."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from igeood.cli.serve import serve
from igeood.serve.app import App

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "service"
PAGE = (ROOT / "docs" / "production.md").read_text(encoding="utf-8")
UNIT = (FOLDER / "igeood.service").read_text(encoding="utf-8")


def options(words):
    """What `igeood serve` understands of the words after it."""
    return serve.make_context("serve", [*words]).params


def test_the_dockerfile_names_real_options_files_and_addresses():
    text = re.sub(r"^#.*\n", "", (FOLDER / "Dockerfile").read_text(encoding="utf-8"), flags=re.M).replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line]
    last = dict(lines)
    program, name, *words = [*json.loads(last["ENTRYPOINT"]), *json.loads(last["CMD"])]
    given = options(words)
    assert (Path(program).name, name, given["host"]) == ("igeood", "serve", "0.0.0.0")  # noqa: S104 (in a container)
    assert str(given["port"]) == last["EXPOSE"]
    assert given["key_file"].startswith(last["WORKDIR"])
    for kept in ("state", "keep_flagged"):
        assert given[kept].startswith(last["VOLUME"])
    checked = json.loads(last["HEALTHCHECK"].partition(" CMD ")[2])
    assert re.search(r"127\.0\.0\.1:8080(/[\w/]+)", checked[-1])[1] in App.ROUTES
    copied = [words for key, line in lines if key == "COPY" and "--from" not in line for words in line.split()[:-1]]
    assert [file for file in copied if not (ROOT / file).exists()] == []


def unit_lines():
    joined = UNIT.replace("\\\n", " ")
    return dict(line.split("=", 1) for line in joined.splitlines() if re.match(r"[A-Z]\w+=", line))


def test_the_unit_names_real_options_and_its_own_folders():
    lines = unit_lines()
    program, name, *words = shlex.split(lines["ExecStart"])
    given = options(words)
    assert (Path(program).name, name, given["host"]) == ("igeood", "serve", "127.0.0.1")
    assert given["key_file"] == "${CREDENTIALS_DIRECTORY}/" + lines["LoadCredential"].partition(":")[0]
    assert all(given[kept].startswith("${STATE_DIRECTORY}/") for kept in ("state", "keep_flagged"))
    assert (lines["SuccessExitStatus"], lines["Restart"]) == ("143", "on-failure")


def test_systemd_takes_the_unit(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "igeood.service"
    unit.write_text(UNIT.replace("/opt/igeood/bin/igeood", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)  # noqa: S607
    assert (done.returncode, done.stderr) == (0, "")


def shell_lines(program):
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, re.S | re.M)
    return [line for block in blocks for line in block.splitlines() if line.startswith(f"{program} ")]


def test_curl_gets_what_the_page_asks_for(guards, copied, serving):
    help_text = subprocess.run(["curl", "--help", "all"], capture_output=True, text=True, check=False).stdout  # noqa: S607
    if "--json" not in help_text:
        pytest.skip("curl has no --json")
    lines = shell_lines("curl")
    with serving(copied(guards.named)) as running:
        for line in lines:
            words = shlex.split(line.replace("127.0.0.1:8080", running.address))
            done = subprocess.run([*words, "--silent", "--fail"], capture_output=True, text=True, check=False)
            assert done.returncode == 0, (line, done.stderr)
            answer = json.loads(done.stdout)
            assert {*answer} & {"verdicts", "name", "acknowledged"}, answer
    assert lines


def test_the_dashboard_has_panels_that_do_not_overlap():
    dashboard = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert all('instance=~"$instance"' in expression for expression in expressions)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in dashboard["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23
