"""Guards of every kind in files, and services of them: in this process, or in one of their own."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import uvicorn
from torch import nn

import igeood
from igeood.serve import Options
from igeood.serve import service as module
from igeood.serve.app import App
from igeood.serve.service import Service

PATIENCE = 60  # seconds, on a busy machine
module.LOOKED_EVERY = 3600.0  # in this process tests say when to save and to reload
SOURCE = Path(igeood.__file__).parents[1]
NAMES = ["ant", "bee", "cat", "dog"]


def wait_until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class Words(nn.Module):
    """A classifier of token ids, by the mean of their embeddings; it knows the words of each class untrained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(40, 8), nn.Linear(8, 4)
        self.embedding.weight.data *= 0.3
        self.embedding.weight.data[:, :4] += 3 * torch.eye(4).repeat_interleave(10, dim=0)
        self.head.weight.data[:, :4] += 2 * torch.eye(4)

    def forward(self, input_ids, attention_mask):
        weights = attention_mask[..., None].to(self.embedding.weight.dtype)
        return self.head((self.embedding(input_ids) * weights).sum(dim=1) / weights.sum(dim=1))


def sentences(n, seed):
    """Token ids of four classes, which use ten words each, with a mask."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 4, n)
    ids = draw.integers(0, 10, (n, 6)) + 10 * labels[:, None]
    return {"input_ids": ids, "attention_mask": (np.arange(6) < draw.integers(3, 7, (n, 1))).astype(np.int64)}, labels


@pytest.fixture(scope="session")
def guards(tmp_path_factory, make, make_known_, model, data):
    """For each kind: the guard, its model, its file, and inputs by name."""
    folder, kinds = tmp_path_factory.mktemp("guards"), {}

    def add(name, guard, inputs, net=None):
        guard.save(folder / f"{name}.safetensors")
        kinds[name] = SimpleNamespace(guard=guard, model=net, path=folder / f"{name}.safetensors", inputs=inputs)

    c, k, few = make(n=1000), make_known_(n=1000), make(n_classes=4, n=1000, margin=6.0)
    mixed = torch.cat([c.test[:30], c.ood[:10]]).numpy()
    add("logits", igeood.black_box().fit(c.train, c.labels).calibrate(c.held_out), {"logits": mixed})
    each = igeood.black_box().fit(c.train, c.labels).calibrate(c.held_out, 0.9, per_class=True)
    add("classes", each, {"logits": mixed})
    both = igeood.Outputs.concat([k.test[:30].replace(labels=None), k.ood[:10]])
    blocks = {f"feature.{layer}": value.numpy() for layer, value in both.features.items()}
    white = igeood.white_box().fit(k.train).calibrate(k.held_out)
    add("features", white, {"logits": both.logits.numpy(), **blocks})
    mixed = torch.cat([few.test[:30], few.ood[:10]])
    named = igeood.black_box(method="energy").fit(few.train, few.labels, classes=NAMES).calibrate(few.held_out)
    add("named", named, {"logits": mixed.numpy()})
    x = {"x": torch.cat([data.test[:20], data.foreign[:10]]).numpy()}
    add("images", igeood.white_box(model).fit(data.train).calibrate(data.held_out), x, model)
    grey = igeood.grey_box(model, epsilon=0.01).fit(data.train)
    add("grey", grey.calibrate(data.held_out), x, model)
    net, (train, labels), (held, _) = Words().eval(), sentences(600, 0), sentences(400, 1)
    batch = {name: torch.from_numpy(value) for name, value in train.items()}
    tokens = igeood.black_box(net).fit([{**batch, "labels": torch.from_numpy(labels)}])
    tokens.calibrate([{name: torch.from_numpy(value) for name, value in held.items()}])
    inputs = sentences(30, 2)[0]
    inputs["input_ids"][20:] = np.random.default_rng(3).integers(0, 40, (10, 6))  # words of all classes
    add("tokens", tokens, inputs, net)
    return SimpleNamespace(**kinds)


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
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", log_level="error"))
        thread = Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        port, clients = listener.getsockname()[1], []

        def client(key=None):
            clients.append(Client(port, key))
            return clients[-1]

        def count(name, **labels):
            return int(service.metrics.registry.get_sample_value(f"igeood_{name}_total", labels) or 0)

        def counted(inputs):
            """Wait until so many inputs have been counted, which is after the answers."""
            wait_until(lambda: count("inputs") >= inputs)
            assert count("inputs") == inputs

        try:
            about = {"service": service, "port": port, "client": client, "until": wait_until}
            yield SimpleNamespace(**about, count=count, counted=counted)
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

    def __init__(self, folder, words, key):
        self._log = folder / f"log-{time.monotonic_ns()}"
        command = [sys.executable, "-m", "igeood.cli", "serve", *map(str, words), "--port", "0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}{os.pathsep}{SOURCE}"}
        with self._log.open("wb") as file:
            self._process = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file)
        self.send, self._key, self._clients = self._process.send_signal, key, []

    def wait_for(self, event, **fields):
        """The first line of the log of this event, with these fields; waits for it."""
        wanted = {"event": event, **fields}.items()
        self.until(lambda: self._process.poll() is not None or any(wanted <= line.items() for line in self.log))
        return next(line for line in self.log if wanted <= line.items())

    @property
    def text(self):
        return self._log.read_text()

    @property
    def log(self):
        """The whole lines of JSON so far."""
        lines = self.text.splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]

    def client(self):
        port = int(self.wait_for("serving")["address"].rpartition(":")[2])
        self._clients.append(Client(port, self._key))
        return self._clients[-1]

    def end(self, number=signal.SIGTERM):
        """Send a signal, and wait for the end; returns the exit code."""
        if self._process.poll() is None:
            self.send(number)
        for client in self._clients:
            client.close()
        return self._process.wait(PATIENCE)


@pytest.fixture
def start(tmp_path):
    """Starts `igeood serve` with options; what still runs at the end is killed."""
    processes = []

    def run(*words, key=None):
        processes.append(Process(tmp_path, words, key))
        assert processes[-1].client().get("/v2/health/ready")[0] == 200  # signals are handled from here on
        return processes[-1]

    yield run
    for process in processes:
        process.end(signal.SIGKILL)
