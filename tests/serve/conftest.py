"""Guards of every kind in files, and services of them: in this process, or in one of their own."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import uvicorn
from torch import nn

import igeood
from igeood.serve.app import App
from igeood.serve.service import Options, Service

PATIENCE = 60  # seconds, on a busy machine
SOURCE = Path(igeood.__file__).parents[1]
NAMES = ["ant", "bee", "cat", "dog"]


def wait_until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class Words(nn.Module):
    """A classifier of token ids: the mean of their embeddings where the mask is 1."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 8), nn.Linear(8, 4)

    def forward(self, input_ids, attention_mask=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        weights = mask[..., None].to(self.embedding.weight.dtype)
        return self.head((self.embedding(input_ids) * weights).sum(dim=1) / weights.sum(dim=1))


def sentences(n, seed):
    """Token ids of four classes, which use ten words each, with a mask."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 4, n)
    ids = draw.integers(0, 10, (n, 6)) + 10 * labels[:, None]
    return {"input_ids": ids, "attention_mask": (np.arange(6) < draw.integers(3, 7, (n, 1))).astype(np.int64)}, labels


def words_model():
    """Knows the words of each class, without any training."""
    torch.manual_seed(0)
    net = Words()
    with torch.no_grad():
        net.embedding.weight.mul_(0.3)
        net.embedding.weight[:, :4] += 3 * torch.eye(4).repeat_interleave(10, dim=0)
        net.head.weight[:, :4] += 2 * torch.eye(4)
    return net.eval()


@pytest.fixture(scope="session")
def guards(tmp_path_factory, make, make_known_, model, data):
    """For each kind: the guard, its model, its file, and inputs by name."""
    folder, made = tmp_path_factory.mktemp("guards"), {}

    def add(name, guard, inputs, net=None):
        guard.save(folder / f"{name}.safetensors")
        made[name] = SimpleNamespace(guard=guard, model=net, path=folder / f"{name}.safetensors", inputs=inputs)

    c, k, few = make(n=1000), make_known_(n=1000), make(n_classes=4, n=1000, margin=6.0)
    mixed = torch.cat([c.test[:30], c.ood[:10]]).numpy()
    add("logits", igeood.black_box().fit(c.train, c.labels).calibrate(c.held_out), {"logits": mixed})
    white = igeood.white_box().fit(k.train).calibrate(k.held_out)
    both = igeood.Outputs.concat([k.test[:30].replace(labels=None), k.ood[:10]])
    blocks = {f"feature.{layer}": value.numpy() for layer, value in both.features.items()}
    add("features", white, {"logits": both.logits.numpy(), **blocks})
    named = igeood.black_box(method="energy").fit(few.train, few.labels, classes=NAMES).calibrate(few.held_out)
    add("named", named, {"logits": torch.cat([few.test[:30], few.ood[:10]]).numpy()})
    shares = igeood.black_box(method="msp", probabilities=True).fit(few.train.softmax(1), few.labels)
    mixed = torch.cat([few.test[:30], few.ood[:10]]).softmax(1).numpy()
    add("probabilities", shares.calibrate(few.held_out.softmax(1)), {"logits": mixed})
    x = {"x": torch.cat([data.test[:20], data.foreign[:10]]).numpy()}
    add("images", igeood.white_box(model).fit(data.train).calibrate(data.held_out), x, model)
    grey = igeood.grey_box(model, epsilon=0.01).fit(data.train)
    add("grey", grey.calibrate(data.held_out), x, model)
    net, (train, labels), (held, _) = words_model(), sentences(600, 0), sentences(400, 1)
    batch = {name: torch.from_numpy(value) for name, value in train.items()}
    tokens = igeood.black_box(net).fit([{**batch, "labels": torch.from_numpy(labels)}])
    tokens.calibrate([{name: torch.from_numpy(value) for name, value in held.items()}])
    inputs, draw = sentences(30, 2)[0], np.random.default_rng(3)
    inputs["input_ids"][20:] = draw.integers(0, 40, (10, 6))  # words of all classes
    add("tokens", tokens, inputs, net)
    return SimpleNamespace(**made, names=[*made])


@pytest.fixture
def copied(tmp_path):
    """A guard's file in a folder of its own: a service leaves its state beside it."""

    def copy(kind):
        path = tmp_path / "guard.safetensors"
        path.write_bytes(kind.path.read_bytes())
        return path

    return copy


class Client:
    """A connection to a service."""

    def __init__(self, port, key=None):
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        self._always = {} if key is None else {"authorization": f"Bearer {key}"}
        self.headers = {}

    def ask(self, method, path, body=None, **headers):
        """Status and body, of JSON where it is that."""
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request(method, path, body, {**self._always, **headers})
        response = self._connection.getresponse()
        content, self.headers = response.read(), response.headers
        is_json = content and self.headers.get("content-type") == "application/json"
        return response.status, json.loads(content) if is_json else content

    def get(self, path, **headers):
        return self.ask("GET", path, **headers)

    def post(self, path, body, **headers):
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", path, text, **{"content_type": "application/json", **headers})

    def close(self):
        self._connection.close()


@pytest.fixture(scope="session")
def serving():
    """A context with a service in threads of this process, on a port of its own."""

    @contextmanager
    def run(path, model=None, *, keys=(), max_body=16_000_000, **options):
        service = Service(path, model, Options(**options))
        app = App(service, keys=keys, max_body=max_body, quiet=True)
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        thread = Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        port, clients = listener.getsockname()[1], []

        def client(key=None):
            clients.append(Client(port, key))
            return clients[-1]

        def count(name, **labels):
            return service.watch.value(f"igeood_{name}_total", **labels)

        def judged(inputs):
            """Wait until so many inputs have been counted, which is after the answers."""
            wait_until(lambda: count("inputs") >= inputs)
            assert count("inputs") == inputs

        about = {
            "port": port,
            "client": client,
            "judged": judged,
            "count": count,
            "until": wait_until,
            "address": f"127.0.0.1:{port}",
        }
        try:
            yield SimpleNamespace(service=service, **about)
        finally:
            for one in clients:
                one.close()
            server.should_exit = True
            thread.join(PATIENCE)
            listener.close()
            service.close()

    return run


@pytest.fixture
def plain(guards, copied, serving):
    """A service of a guard of logits."""
    with serving(copied(guards.logits), max_body=70_000) as running:
        yield running


class Process:
    """`igeood serve` in a process of its own, whose log is a file."""

    until = staticmethod(wait_until)

    def __init__(self, folder, words):
        self._log = folder / f"log-{time.monotonic_ns()}"
        command = [sys.executable, "-m", "igeood.cli", "serve", *map(str, words), "--port", "0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}{os.pathsep}{SOURCE}"}
        with self._log.open("wb") as file:
            self._process = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file)
        self.pid = self._process.pid

    def wait_for(self, event, **fields):
        """The first line of the log of this event, with these fields; waits for it."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for line in self.log:
                if line["event"] == event and fields.items() <= line.items():
                    return line
            assert self._process.poll() is None, self.text
            time.sleep(0.02)
        raise AssertionError(f"no {event} in {self.text}")

    @property
    def text(self):
        return self._log.read_text()

    @property
    def log(self):
        """The whole lines of JSON so far."""
        lines = self.text.splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]

    def send(self, number):
        self._process.send_signal(number)

    def end(self, number=signal.SIGTERM):
        """Send a signal, and wait for the end; returns the exit code."""
        if self._process.poll() is None:
            self.send(number)
        return self._process.wait(PATIENCE)

    def kill(self):
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait(PATIENCE)


@pytest.fixture
def start(tmp_path):
    """Starts `igeood serve` with options; what still runs at the end is killed."""
    processes, clients = [], []

    def run(*words, key=None):
        process = Process(tmp_path, words)
        processes.append(process)
        port = int(process.wait_for("serving")["address"].rpartition(":")[2])

        def client():
            clients.append(Client(port, key))
            return clients[-1]

        process.client = client
        assert process.client().get("/v2/health/ready") == (200, {"ready": True})  # signals are handled from here on
        return process

    yield run
    for client in clients:
        client.close()
    for process in processes:
        process.kill()
