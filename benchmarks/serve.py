"""The service under load, as Markdown: speed, bad requests among good ones, memory, and what signals lose.

*Speed*: requests a second of one row each at 32 connections, with requests joined up to 64 inputs and with none joined;
and the median latency at one connection beside a bare `guard.predict` of the same row in this process. Rounds take
turns; medians are shown. wrk sends the requests if it is there, else this process. *Bad requests*: one in ten has NaN,
another width, another type, too long a body, a body that ends early, no key, or an input on which the model fails; each
has to get its own status, and every good one what `guard.predict` says. *Memory* is the resident set after such ones.
*Signals*: requests that wait when SIGTERM comes, of a slow model; and inputs that the monitor's state lacks after
SIGKILL, as seconds since the first of them was answered.

python benchmarks/serve.py
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import igeood

JOINED, ADDED, GROWTH, AGE = 2.5, 5.0, 32.0, 1.0  # the bars: times, times, MB, seconds
KEY, LARGEST, PATIENCE = "a-key", 100_000, 120
INFER = "/v2/models/guard/infer"
NETS = """
import time, torch
from torch import nn

def images():
    torch.manual_seed(0)
    widths = [(3, 16), (16, 32), (32, 64)]
    stages = [nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in widths]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).eval()

class Words(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        torch.manual_seed(0)
        self.seconds, self.embedding, self.head = seconds, nn.Embedding(1000, 32), nn.Linear(32, 10)

    def forward(self, input_ids):
        time.sleep(self.seconds)
        return self.head(self.embedding(input_ids).mean(dim=1))

def words(seconds=0):
    return Words(seconds).eval()

def slow():
    return words(0.05)
"""


@dataclass(frozen=True)
class Case:
    """A guard in a file, how it is served, and rows for it."""

    title: str
    guard: igeood.Guard
    words: tuple[str, ...]
    name: str  # of the input
    rows: np.ndarray

    def predict(self, rows: np.ndarray) -> Any:
        if self.guard.source.model is None:
            return self.guard.predict(rows)
        x = torch.from_numpy(rows)
        return self.guard.predict({self.name: x} if self.name != "x" else x)


def made(folder: Path, sizes: Sequence[int] = (10, 1000)) -> dict[str, Case]:
    """Guards of 10 and of 1,000 logits, of images, and of token ids."""
    draw, cases = np.random.default_rng(0), {}

    def logits(n: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(n) % classes
        rows = draw.standard_normal((n, classes), dtype=np.float32)
        rows[np.arange(n), labels] += draw.uniform(5, 8, n)
        return rows, labels

    def add(key: str, title: str, guard: igeood.Guard, held: Any, name: str, rows: np.ndarray, *words: str) -> None:
        guard.calibrate(held).save(folder / f"{key}.safetensors")
        cases[key] = Case(title, guard, (f"{key}.safetensors", *words), name, rows)

    for classes in sizes:
        guard, (held, _) = igeood.black_box().fit(*logits(1500 + 4 * classes, classes)), logits(1000, classes)
        rows, _ = logits(64, classes)
        rows[::8] = draw.standard_normal(rows[::8].shape)
        add(str(classes), f"{classes:,} logits", guard, held, "logits", rows)
    (folder / "service_nets.py").write_text(NETS)
    sys.path.insert(0, str(folder))
    import service_nets as nets  # noqa: PLC0415 (of that folder)

    def labels_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The model's own, but that each class has some."""
        numbers = torch.arange(len(x))
        return torch.where(numbers < 20, numbers % 10, model(x).argmax(dim=1))

    model, x = nets.images(), torch.from_numpy(draw.standard_normal((1600, 3, 32, 32), dtype=np.float32))
    guard = igeood.black_box(model).fit([(x[:536], labels_of(model, x[:536]))])
    rows = x[-64:].numpy()
    add("images", "small convolutional network", guard, x[536:-64], "x", rows, "--model", "service_nets:images")
    model, x = nets.words(), torch.from_numpy(draw.integers(0, 1000, (1600, 8)))
    guard = igeood.black_box(model).fit([{"input_ids": x[:500], "labels": labels_of(model, x[:500])}])
    held, rows = [{"input_ids": x[500:1500]}], x[1500:].numpy()
    add("words", "token ids", guard, held, "input_ids", rows, "--model", "service_nets:words")
    return cases


class Server:
    """`igeood serve` in a process of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._log = folder / "log"
        command = [sys.executable, "-m", "igeood.cli", "serve", *words, "--port", "0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, cwd=folder, env=environment, stderr=log)  # noqa: S603
        self.pid, end, found = self._process.pid, time.monotonic() + PATIENCE, None
        while found is None and time.monotonic() < end and self._process.poll() is None:
            time.sleep(0.05)
            found = re.search(r'"address":"http://127.0.0.1:(\d+)"', self._log.read_text())
        if found is None:
            self.stop(signal.SIGKILL)
            raise SystemExit(f"igeood serve {' '.join(words)}: {self._log.read_text()}")
        self.port = int(found[1])
        asyncio.run(drive(self.port, [message("GET", "/v2/health/ready")]))  # signals are taken from here on

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(signal.SIGTERM)

    def stop(self, by: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(by)
        try:
            self._process.wait(PATIENCE)
        finally:
            self._process.kill()

    @property
    def megabytes(self) -> float:
        """The resident set."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024 / 1e6  # type: ignore[index]


# -- requests


def message(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """A whole request."""
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def infer_body(name: str, rows: np.ndarray) -> tuple[bytes, str]:
    """Rows as a binary tensor, and the length of the JSON before it."""
    kind = {"float32": "FP32", "int64": "INT64"}[rows.dtype.name]
    about = {"name": name, "datatype": kind, "shape": rows.shape, "parameters": {"binary_data_size": rows.nbytes}}
    head = json.dumps({"inputs": [about]}).encode()
    return head + rows.tobytes(), str(len(head))


def infer(name: str, rows: np.ndarray, *, key: str = KEY, cut: int = 0, more: int = 0) -> bytes:
    """A request to judge rows, whose body is too short or too long by some bytes."""
    body, length = infer_body(name, rows)
    body = body[: len(body) - cut] + b"\0" * more
    given = {"inference_header_content_length": length, "content_type": "application/octet-stream"}
    return message("POST", INFER, body, authorization=f"Bearer {key}", **given)


Answer = tuple[int, bytes, float]  # status (0 without an answer), body, and when it came


async def answer(reader: asyncio.StreamReader) -> Answer:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(re.search(rb"content-length: (\d+)", head.lower())[1])  # type: ignore[index]
    return int(head.split(b" ", 2)[1]), await reader.readexactly(length), time.monotonic()


async def drive(port: int, requests: Sequence[bytes], connections: int = 1, pause: float = 0.0) -> list[Answer]:
    """Send all requests over some connections, each as soon as it is free; their answers."""
    answers: list[Answer] = [(0, b"", 0.0)] * len(requests)
    numbers = iter(range(len(requests)))

    async def work() -> None:
        links: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        for number in numbers:
            links = links or await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionError):  # it may answer and close before it has read everything
                links[1].write(requests[number])
                await links[1].drain()
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                answers[number] = await answer(links[0])
            if answers[number][0] in (0, 413):
                links[1].close()
                links = None
            await asyncio.sleep(pause)
        if links is not None:
            links[1].close()

    await asyncio.wait_for(asyncio.gather(*(work() for _ in range(connections))), 10 * PATIENCE)
    return answers


def load(port: int, case: Case, connections: int, seconds: float, folder: Path) -> tuple[float, float]:
    """Requests a second, and the median latency in ms, of single rows sent as fast as they are answered."""
    if (wrk := shutil.which("wrk")) is None:
        return _own_load(port, case, connections, seconds)
    pairs = [infer_body(case.name, case.rows[i : i + 1]) for i in range(len(case.rows))]
    for i, (body, _) in enumerate(pairs):
        (folder / f"body-{i}").write_bytes(body)
    (folder / "post.lua").write_text(f"""
        local requests, next = {{}}, 0
        function init()
          for i = 0, {len(pairs) - 1} do
            local file = io.open("{folder}/body-" .. i, "rb")
            local body = file:read("*a")
            file:close()
            local headers = {{["content-type"] = "application/octet-stream",
                              ["inference-header-content-length"] = "{pairs[0][1]}"}}
            requests[i] = wrk.format("POST", "{INFER}", headers, body)
          end
        end
        function request() next = (next + 1) % {len(pairs)}; return requests[next] end
    """)
    words = f"{wrk} -t1 -c{connections} -d{max(1, round(seconds))}s --latency -s {folder / 'post.lua'}".split()
    done = subprocess.run([*words, f"http://127.0.0.1:{port}"], capture_output=True, text=True, check=True)  # noqa: S603
    assert not re.search("Non-2xx|Socket errors", done.stdout), done.stdout
    p50, unit, rate = re.search(r" 50% +([\d.]+)(us|ms|s).*Requests/sec: +([\d.]+)", done.stdout, re.DOTALL).groups()  # type: ignore[union-attr]
    return float(rate), float(p50) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit]


def _own_load(port: int, case: Case, connections: int, seconds: float) -> tuple[float, float]:
    requests, ended, latencies = [infer(case.name, row[None]) for row in case.rows], time.monotonic() + seconds, []

    async def work() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (start := time.monotonic()) < ended:
            writer.write(requests[len(latencies) % len(requests)])
            status, _, now = await answer(reader)
            assert status == 200
            latencies.append(now - start)
        writer.close()

    async def all_of_them() -> None:
        await asyncio.gather(*(work() for _ in range(connections)))

    asyncio.run(all_of_them())
    return len(latencies) / seconds, 1e3 * statistics.median(latencies)


# -- the tables


def speed(cases: Sequence[Case], folder: Path, rounds: int, seconds: float) -> Iterator[str]:
    yield "| guard | joined, requests/s | not joined | ratio | bar | one connection, p50 ms | predict | ratio | bar |"
    yield "|---|---:|---:|---:|---|---:|---:|---:|---|"
    for case in cases:
        results: list[tuple[float, ...]] = []
        words, states = [*case.words, "--quiet", "--state"], [f"{case.words[0]}.{n}.json" for n in (64, 1)]
        with Server(folder, *words, states[0]) as many, Server(folder, *words, states[1], "--max-batch", "1") as single:
            for number in range(rounds + 1):  # the first warms up
                joined, alone = (load(one.port, case, 32, seconds, folder)[0] for one in (many, single))
                bare = _bare(case)
                p50 = load(many.port, case, 1, seconds, folder)[1]
                bare = (bare + _bare(case)) / 2
                results += [(joined, alone, joined / alone, p50, bare, p50 / bare)] * (number > 0 or not rounds)
        joined, alone, ratio, p50, bare, added = (statistics.median(column) for column in zip(*results, strict=True))
        bars = f"≥ {JOINED:g}×{missed(ratio >= JOINED)}", f"≤ {ADDED:g}×{missed(added <= ADDED)}"
        yield (f"| {case.title} | {joined:,.0f} | {alone:,.0f} | {ratio:.2f}× | {bars[0]} | {p50:.2f} | {bare:.2f} "
               f"| {added:.2f}× | {bars[1]} |")  # fmt: skip


def _bare(case: Case) -> float:
    """Median milliseconds of predictions of one row."""
    taken = []
    for i in range(200):
        row = case.rows[i % len(case.rows)][None]
        start = time.perf_counter()
        case.predict(row)
        taken.append(time.perf_counter() - start)
    return 1e3 * statistics.median(taken)


def missed(is_met: bool) -> str:
    return "" if is_met else " **NO**"


KINDS = ("NaN", "another width", "another type", "too long", "ends early", "wrong key", "unreadable by the model")


def mixed(case: Case, n: int) -> Iterator[tuple[str, slice, int, bytes]]:
    """Requests, one in ten bad: what is wrong, rows, the status that it should get, and the request."""
    draw, name = random.Random(0), case.name  # noqa: S311
    kinds = KINDS[:-1] if name == "logits" else KINDS[2:]
    for number in range(n):
        at = draw.randrange(len(case.rows) - 3)
        part = slice(at, at + draw.randint(1, 3))
        rows, kind = case.rows[part], kinds[number // 10 % len(kinds)] if number % 10 == 3 else ""
        size = {"too long": {"more": LARGEST}, "ends early": {"cut": 5}, "wrong key": {"key": "another"}}.get(kind, {})
        request = infer(name, _spoilt(rows, kind), **size)  # type: ignore[arg-type]
        yield kind, part, {"": 200, "too long": 413, "wrong key": 401}.get(kind, 400), request


def _spoilt(rows: np.ndarray, kind: str) -> np.ndarray:
    if kind == "NaN":
        return np.full_like(rows, np.nan)
    if kind == "another width":
        return rows[:, :-1]
    if kind == "another type":
        return rows.astype(np.int64 if rows.dtype == np.float32 else np.float32)
    return np.concatenate([rows, np.full_like(rows[:1], 5000)]) if kind == KINDS[-1] else rows  # 5000: no word's id


def bad_ones(cases: Sequence[tuple[Case, int]], n: int) -> Iterator[str]:
    yield "| guard | requests | good, all right | bad, each with its own status | wrong |"
    yield "|---|---:|---:|---:|---:|"
    for case, port in cases:
        verdict = case.predict(case.rows)
        scores, labels = np.asarray(verdict.score, np.float64), np.asarray(verdict.label)
        requests = [*mixed(case, n)]
        answers = asyncio.run(drive(port, [request for *_, request in requests], 16))
        good = bad = wrong = 0
        for (kind, part, expected, _), (status, body, _) in zip(requests, answers, strict=True):
            fine = status == expected
            if status == 200:
                columns = {one["name"]: one["data"] for one in json.loads(body)["outputs"]}
                fine &= np.allclose(columns["score"], scores[part], rtol=1e-5, atol=1e-5)
                fine &= columns["label"] == labels[part].tolist()
            good, bad, wrong = good + (fine and not kind), bad + (fine and bool(kind)), wrong + (not fine)
        yield f"| {case.title} | {n:,} | {good:,} | {bad:,} | {wrong}{missed(not wrong)} |"


def memory(case: Case, server: Server, first: int, total: int) -> Iterator[str]:
    _, _, expected, requests = zip(*mixed(case, 100), strict=True)
    sizes, done = [], 0
    for until in (first, total):
        while done < until:
            answers = asyncio.run(drive(server.port, requests, 16))
            assert [status for status, *_ in answers] == list(expected)
            done += len(requests)
        sizes.append(server.megabytes)
    grown = sizes[1] - sizes[0]
    yield f"| memory after {first:,} requests, MB | after {total:,} | more | bar |"
    yield "|---:|---:|---:|---|"
    yield f"| {sizes[0]:.1f} | {sizes[1]:.1f} | {grown:+.1f} | ≤ {GROWTH:g} MB{missed(grown <= GROWTH)} |"


async def _in_flight(server: Server, requests: Sequence[bytes]) -> list[Answer]:
    """Send all requests at once; tell the service to stop while they wait; their answers."""
    links = [await asyncio.open_connection("127.0.0.1", server.port) for _ in requests]
    for (_, writer), request in zip(links, requests, strict=True):
        writer.write(request)
        await writer.drain()
    await answer(links[0][0])  # the others wait, or come in before the next
    os.kill(server.pid, signal.SIGTERM)
    results = await asyncio.gather(*(answer(reader) for reader, _ in links[1:]), return_exceptions=True)
    for _, writer in links:
        writer.close()
    return [(0, b"", 0.0) if isinstance(one, BaseException) else one for one in results]


def stopped(case: Case, folder: Path, rounds: int) -> tuple[int, int]:
    """Requests in flight at SIGTERM, and how many of them got no answer."""
    flying = lost = 0
    for number in range(rounds):
        words = [
            case.words[0],
            "--model",
            "service_nets:slow",
            "--max-batch",
            "8",
            "--quiet",
            "--state",
            f"t{number}.json",
        ]
        with Server(folder, *words) as server:
            requests = [infer(case.name, case.rows[i : i + 1]) for i in range(64)]
            answers = asyncio.run(_in_flight(server, requests))
        flying, lost = flying + len(answers), lost + sum(status != 200 for status, *_ in answers)
    return flying, lost


def killed(case: Case, folder: Path, rounds: int) -> float:
    """The greatest age of the monitor's state after a kill, in seconds, in runs that go on from each other."""
    draw, ages, before = random.Random(0), [], 0  # noqa: S311
    for _ in range(rounds):
        with Server(folder, *case.words, "--quiet", "--state", "k.json") as server:
            requests = [infer(case.name, case.rows[:1])] * round(300 + 200 * draw.random())
            answers = asyncio.run(drive(server.port, requests, 4, pause=0.01))
            server.stop(signal.SIGKILL)
            now, moments = time.monotonic(), sorted(moment for *_, moment in answers)
        known = json.loads((folder / "k.json").read_text())["inputs"] - before
        before += known
        ages.append(now - moments[known] if known < len(moments) else 0.0)
    return max(ages)


def signals(slow: Case, case: Case, folder: Path, rounds: int) -> Iterator[str]:
    flying, lost = stopped(slow, folder, rounds)
    age = killed(case, folder, rounds)
    yield "| in flight at SIGTERM | lost | state after SIGKILL, at most | bar |"
    yield "|---:|---:|---:|---|"
    yield f"| {flying} | {lost}{missed(not lost)} | {age:.2f} s old | ≤ {AGE:g} s{missed(age <= AGE)} |"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The service under load.")
    parser.add_argument("--quick", action="store_true", help="seconds in place of minutes: a test of this script")
    is_quick = parser.parse_args(words).quick
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        cases = made(folder, (10,) if is_quick else (10, 1000))
        first, words_case = cases["10"], cases["words"]
        (folder / "keys").write_text(KEY)
        (folder / "keys").chmod(0o600)
        shown = [first] if is_quick else [cases[name] for name in ("10", "1000", "images")]
        show(speed(shown, folder, *((0, 1) if is_quick else (3, 4))))
        options = ["--key-file", "keys", "--max-body", str(LARGEST), "--keep-flagged", "flagged"]
        with Server(folder, *first.words, *options, "--state", "m.json") as server, contextlib.ExitStack() as stack:
            pairs = [(first, server.port)]
            if not is_quick:
                other = stack.enter_context(Server(folder, *words_case.words, *options, "--state", "w.json"))
                pairs.append((words_case, other.port))
            show(memory(first, server, *((100, 500) if is_quick else (1000, 100_000))))
            show(bad_ones(pairs, 300 if is_quick else 10_000))
        show(signals(words_case, first, folder, 1 if is_quick else 5))


def show(lines: Iterator[str]) -> None:
    for line in lines:
        print(line, flush=True)
    print(flush=True)


if __name__ == "__main__":
    main()
