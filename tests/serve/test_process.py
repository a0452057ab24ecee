"""`igeood serve` as a process: signals, keys, log, reload, restart; and what it cannot start with."""

import json
import re
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import igeood
from igeood.cli import main
from igeood.serve.run import read_keys
from igeood.serve.service import Service

PATIENCE = 60
SLOW = """
import time
import torch
from torch import nn

class Slow(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.layer = seconds, nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(8 * torch.eye(4))

    def forward(self, x):
        time.sleep(self.seconds)
        return self.layer(x)

def make(seconds=0.25):
    return Slow(seconds)
"""


def state_of(path):
    return json.loads(path.with_name(f"{path.name}.monitor.json").read_text())


def test_keys_log_reload_a_kill_and_a_restart(guards, copied, start, tmp_path):
    path, rows = copied(guards.logits), guards.logits.inputs["logits"].tolist()
    (tmp_path / "keys").write_text("# ours\n\nfirst\n second \n")
    (tmp_path / "keys").chmod(0o644)
    words = [path, "--key-file", "keys", "--name", "pets", "--max-body", "50kB"]
    process = start(*words, key="second")
    warned = [one["message"] for one in process.log if one["event"] == "warning"]
    assert len(warned) == 1
    client = process.client()
    assert client.post("/predict", rows)[0] == 200
    assert client.post("/v2/models/pets/infer", {"inputs": []})[0] == 400
    assert client.post("/predict", rows, authorization="Bearer third")[0] == 401
    process.wait_for("request", path="/predict", status=401)
    lines = [one for one in process.log if one["event"] == "request"]
    assert [one["status"] for one in lines] == [200, 200, 400, 401]  # that of health came first
    ood = int(guards.logits.guard.predict(np.array(rows)).is_ood.sum())
    line = lines[1]
    expected = {"client": "127.0.0.1", "method": "POST", "path": "/predict", "inputs": 40, "ood": ood}
    assert line.items() >= expected.items()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    assert 0 < line["ms"] < 1e3 * PATIENCE
    check_reloads(process, client, path)
    inputs = killed(process, client, path, rows[:1])
    again = start(*words, "--quiet", key="first")
    client = again.client()
    assert client.get("/status")[1]["monitor"]["inputs"] == inputs
    assert client.post("/predict", rows)[0] == 200
    assert again.end() == -signal.SIGTERM
    events = [line["event"] for line in again.log if line["event"] != "alarm"]  # how many came before is chance
    assert events == ["warning", "serving", "stopped"]
    assert "Traceback" not in process.text + again.text
    assert state_of(path)["inputs"] == inputs + 40


def check_reloads(process, client, path):
    """A file that is broken, and one that is whole again: by itself, and at a signal."""
    good = path.read_bytes()
    path.write_bytes(good[:1000])
    error = process.wait_for("reload failed")["error"]
    about = client.get("/status")[1]["guard"]
    assert (about["reload_failures"] >= 1, about["reload_error"]) == (True, error)
    path.write_bytes(good)
    assert process.wait_for("reloaded")["monitor_goes_on"] is True
    before = client.get("/status")[1]["guard"]["reloads"]
    process.send(signal.SIGHUP)
    process.until(lambda: client.get("/status")[1]["guard"]["reloads"] > before)


def killed(process, client, path, row):
    """Kill a service under load: the state is about a second old at most. Returns the inputs that it knows."""
    answered = []
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        assert client.post("/predict", row)[0] == 200
        answered.append(time.monotonic())
        time.sleep(0.005)
    process.kill()
    now, inputs = time.monotonic(), state_of(path)["inputs"]
    older = sum(moment < now - 1.5 for moment in answered)  # half a second for a busy machine
    assert older > 10
    assert 40 + older <= inputs <= 40 + len(answered)
    return inputs


@pytest.fixture
def slow(tmp_path, monkeypatch):
    """A guard's file, whose model takes its time; and what it says of inputs."""
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "slow", raising=False)
    import slow  # noqa: PLC0415 (of that folder)

    draw, labels = torch.Generator().manual_seed(0), torch.arange(1400) % 4
    x = torch.eye(4)[labels] + 0.3 * torch.randn(1400, 4, generator=draw)
    guard = igeood.black_box(slow.make(0)).fit([(x[:400], labels[:400])]).calibrate(x[400:])
    guard.save(tmp_path / "guard.safetensors")
    return tmp_path / "guard.safetensors", guard


def test_what_is_in_flight_is_answered_after_the_signal_to_stop(slow, start):
    path, guard = slow
    process = start(path, "--model", "slow:make", "--max-batch", "2", "--max-delay", "0s", "--quiet")
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    expected, done = guard.predict(x), []

    def ask(row):
        client = process.client()
        answer = client.post("/predict", x[row : row + 1].tolist())
        done.append(client.headers.get("connection"))
        return answer

    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(ask, row) for row in range(16)]
        process.until(lambda: len(done) >= 2)
        process.send(signal.SIGTERM)
        in_flight = 16 - len(done)
        results = [answer.result(PATIENCE) for answer in answers]
    assert in_flight >= 8
    assert done.count("close") >= 8  # so that no client sends more on its connection
    assert [status for status, _ in results] == [200] * 16
    scores = [answer["verdicts"][0]["score"] for _, answer in results]
    np.testing.assert_allclose(scores, expected.score, rtol=1e-5)
    assert process.end() == -signal.SIGTERM
    assert state_of(path)["inputs"] == 16
    with pytest.raises(OSError):  # noqa: PT011 (refused or reset)
        process.client().get("/v2/health/live")


def run(*words):
    """A command that has to end with one line, and 2."""
    result = CliRunner().invoke(main, ["serve", *map(str, words)], prog_name="igeood")
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[-1].startswith("igeood: "), lines
    return [json.loads(line) for line in lines[:-1]] + lines[-1:]


@pytest.fixture
def files(guards, tmp_path, monkeypatch):
    """Guards, keys and states as the current folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("logits", "named", "images"):
        (tmp_path / name).write_bytes(getattr(guards, name).path.read_bytes())
    c = np.random.default_rng(0).normal(size=(100, 4)) + 5 * np.eye(4)[np.arange(100) % 4]
    igeood.black_box().fit(c, np.arange(100) % 4).save("bare")
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "slow", raising=False)
    Service(tmp_path / "named").close()
    (tmp_path / "empty").write_text("# nothing\n\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "broken.json").write_text("[]")
    return tmp_path


BAD = {
    "bare": "calibrate",
    "nothing": "nothing",
    "empty": "empty",
    "logits --key-file empty": "key_file",
    "logits --key-file bytes": "key_file",
    "logits --key-file missing": "missing",
    "logits --host no.such.host.invalid": "port",
    "images": "model",
    "images --model slow:make": "fingerprint",
    "images --model nothing:make": "nothing",
    "logits --model slow:make": "model",
    "logits --weights w.pt": "weights",
    "logits --state named.monitor.json": "named.monitor.json",
    "logits --state broken.json": "broken.json",
    "named --run-length 5": "run_length",
    "logits --run-length 0": "run_length",
    "logits --kind flags": "kind",
    "logits --name a/b": "--name",
    "logits --max-delay fast": "fast",
    "logits --max-delay nan": "--max-delay",
    "logits --max-body big": "big",
    "logits --max-batch 0": "--max-batch",
    "logits --keep-flagged named": "--keep-flagged",
    "": "GUARD",
}


@pytest.mark.parametrize("words", BAD)
def test_what_it_cannot_start_with_is_one_line_that_names_it(files, words):
    (line,) = run(*words.split(), *(["--port", "0"] if words else []))
    assert BAD[words] in line


def test_a_port_or_a_state_that_is_taken_is_one_line(files):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (line,) = run("logits", "--port", port)
    assert str(port) in line
    service = Service(files / "named")
    try:
        (line,) = run("named", "--port", 0)
    finally:
        service.close()
    assert "named.monitor.json" in line


def test_a_missing_extra_is_told(files, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("igeood.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    (line,) = run("logits", "--port", 0)
    assert "igeood[serve]" in line


def test_keys_that_others_can_read_and_open_addresses_are_warned_of(files):
    (files / "keys").write_text("a\n# no\n\n b \n")
    (files / "keys").chmod(0o640)
    with pytest.warns(igeood.errors.IgeoodWarning, match="chmod 600"):
        assert read_keys(files / "keys") == ["a", "b"]
    (files / "keys").chmod(0o600)
    assert read_keys(files / "keys") == ["a", "b"]
    warning, _ = run("bare", "--port", 0, "--host", "0.0.0.0")  # noqa: S104
    assert warning["event"] == "warning"
    assert "0.0.0.0" in warning["message"]  # noqa: S104
