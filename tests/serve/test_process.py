"""`igeood serve` as a process: signals, keys, log, reload, restart; and what it cannot start with."""

import importlib
import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import igeood
from igeood.cli import main
from igeood.serve.service import Service

PATIENCE = 60
SLOW = """
import time, torch

class Slow(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.25)
        return super().forward(x)

def make():
    model = Slow(4, 4, bias=False)
    model.weight.data = 8 * torch.eye(4)
    return model
"""


def state_of(path):
    return json.loads(path.with_name(f"{path.name}.monitor.json").read_text())


def test_keys_log_reload_a_kill_and_a_restart(guards, copied, start, tmp_path):
    path, rows = copied(guards.logits), guards.logits.inputs["logits"].tolist()
    (tmp_path / "keys").write_text("# ours\n\nfirst\n second \n")
    (tmp_path / "keys").chmod(0o644)
    options = [path, "--key-file", "keys", "--name", "pets"]
    process = start(*options, key="second")
    assert len([line for line in process.log if line["event"] == "warning"]) == 1  # others can read the keys
    client = process.client()
    assert client.post("/predict", rows)[0] == 200
    assert client.post("/v2/models/pets/infer", {"inputs": []})[0] == 400
    assert client.post("/predict", rows, authorization="Bearer third")[0] == 401
    process.wait_for("request", path="/predict", status=401)
    lines = [line for line in process.log if line["event"] == "request"]
    assert [line["status"] for line in lines] == [200, 200, 400, 401]  # that of health came first
    ood = int(guards.logits.guard.predict(np.array(rows)).is_ood.sum())
    expected = {"client": "127.0.0.1", "method": "POST", "path": "/predict", "inputs": 40, "ood": ood}
    assert lines[1].items() >= expected.items()
    good = path.read_bytes()
    path.write_bytes(good[:1000])
    error = process.wait_for("reload failed")["error"]
    assert client.get("/status")[1]["guard"]["reload_error"] == error
    path.write_bytes(good)
    assert process.wait_for("reloaded")["monitor_goes_on"] is True
    before = len(process.log)
    process.send(signal.SIGHUP)
    process.until(lambda: any(line["event"] == "reloaded" for line in process.log[before:]))
    inputs = killed(process, client, path, rows[:1])
    again = start(*options, "--quiet", key="first")
    client = again.client()
    assert client.get("/status")[1]["monitor"]["inputs"] == inputs
    assert client.post("/predict", rows)[0] == 200
    assert again.end() == -signal.SIGTERM
    events = [line["event"] for line in again.log if line["event"] != "alarm"]  # how many came before is chance
    assert events == ["warning", "serving", "stopped"]
    assert "Traceback" not in process.text + again.text
    assert state_of(path)["inputs"] == inputs + 40


def killed(process, client, path, row):
    """Kill a service under load: the state is about a second old at most. Returns the inputs that it knows."""
    answered = []
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        assert client.post("/predict", row)[0] == 200
        answered.append(time.monotonic())
        time.sleep(0.005)
    process.end(signal.SIGKILL)
    now, inputs = time.monotonic(), state_of(path)["inputs"]
    older = sum(moment < now - 1.5 for moment in answered)  # half a second for a busy machine
    assert 40 + older <= inputs <= 40 + len(answered)
    return inputs


def test_what_is_in_flight_is_answered_after_the_signal_to_stop(start, tmp_path, monkeypatch):
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    draw, labels = torch.Generator().manual_seed(0), torch.arange(1400) % 4
    x = torch.eye(4)[labels] + 0.3 * torch.randn(1400, 4, generator=draw)
    guard = igeood.black_box(importlib.import_module("slow").make()).fit([(x[:400], labels[:400])]).calibrate(x[400:])
    guard.save(tmp_path / "guard")
    process = start("guard", "--model", "slow:make", "--max-batch", "2", "--max-delay", "0s", "--quiet")
    done = []

    def ask(row):
        client = process.client()
        status, answer = client.post("/predict", x[row : row + 1].tolist())
        done.append(client.headers.get("connection"))
        return status, answer["verdicts"][0]["score"]

    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(ask, row) for row in range(16)]
        process.until(lambda: len(done) >= 2)
        process.send(signal.SIGTERM)
        in_flight = 16 - len(done)
        statuses, scores = zip(*(answer.result(PATIENCE) for answer in answers), strict=True)
    assert (in_flight >= 8, statuses) == (True, (200,) * 16)
    assert done.count("close") >= 8  # so that no client sends more on its connection
    np.testing.assert_allclose(scores, guard.predict(x[:16]).score, rtol=1e-5)
    assert process.end() == -signal.SIGTERM
    assert state_of(tmp_path / "guard")["inputs"] == 16


@pytest.fixture
def folder(guards, tmp_path, monkeypatch):
    """Guards, keys and states as the current folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("logits", "named", "images"):
        (tmp_path / name).write_bytes(getattr(guards, name).path.read_bytes())
    c = np.random.default_rng(0).normal(size=(100, 4)) + 5 * np.eye(4)[np.arange(100) % 4]
    igeood.black_box().fit(c, np.arange(100) % 4).save("bare")
    Service(tmp_path / "named").close()
    (tmp_path / "empty").write_text("# nothing\n\n")
    (tmp_path / "broken.json").write_text("[]")
    return tmp_path


def problem_of(*words):
    """The one line with which a command ends, and its log before that; the exit code is 2."""
    result = CliRunner().invoke(main, ["serve", *map(str, words)], prog_name="igeood")
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    *log, line = result.stderr.splitlines()
    assert line.startswith("igeood: ")
    return line, [json.loads(text) for text in log]


BAD = {
    "bare": "calibrate",
    "empty": "empty",
    "logits --key-file empty": "--key-file",
    "images": "model",
    "logits --state named.monitor.json": "named.monitor.json",
    "logits --state broken.json": "broken.json",
    "named --run-length 5": "--run-length",
    "logits --run-length 0": "--run-length",
    "logits --kind flags": "--kind",
    "logits --max-delay fast": "fast",
}


@pytest.mark.parametrize("words", BAD)
def test_what_it_cannot_start_with_is_one_line_that_names_it(folder, words):
    line, log = problem_of(*words.split(), "--port", "0")
    assert (BAD[words] in line, log) == (True, [])


def test_a_port_that_is_taken_is_one_line(folder):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert str(port) in problem_of("logits", "--port", port)[0]


def test_an_open_address_without_keys_is_warned_of(folder):
    _, log = problem_of("bare", "--port", 0, "--host", "0.0.0.0")  # noqa: S104
    assert [line["event"] for line in log] == ["warning"]
