"""Commands that run in forks of one warm process, and are killed, stalled or refused at a chosen call to the disk.

Run as a program this is that process: it reads an order a line, forks, and answers when the fork has ended. Calls are
counted below the order's folder only: opening a file to write, each write, truncate, fsync, rename, chmod, remove, and
making and removing folders.
"""

import builtins
import errno
import functools
import hashlib
import http.server
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

PATIENCE = 300.0  # seconds that a command may take at most
WARM = (  # what a fork would otherwise import anew
    "igeood.cli", "igeood.demo", "igeood.report", "igeood.paper.catalog", "igeood.tables", "matplotlib.figure",
    "numba", "pyarrow.parquet", "scipy.io", "sklearn.linear_model", "torch._dynamo",
)  # fmt: skip
TAKES_SPACE = ("open", "write", "fsync", "mkdir")  # calls that fail on a full disk


@dataclass(frozen=True)
class Fault:
    """What happens at the call of this number: `kill`, `stall` (until killed), or `full` (from there on).

    With `half`, half of a write is on disk by then; with `after`, the call has been done. With `name`, only such calls
    are counted.
    """

    kind: str
    at: int
    when: str = "before"
    name: str = ""


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (-9 if it was killed), what it said, and what it did to the disk."""

    code: int
    out: str
    err: str
    seconds: float
    calls: list
    units: Counter

    def __str__(self):
        return f"exit code {self.code}\n{self.err}\n{self.out}"


# The child: it counts its calls.


class Counting:
    """Counts calls to the disk below a folder, notes them in a log that survives a kill, and lets the fault happen."""

    def __init__(self, folder, log, fault):
        self.folder, self.log, self.fault, self.calls = f"{os.path.realpath(folder)}{os.sep}", log, fault, 0

    def note(self, **what):
        os.write(self.log, json.dumps(what).encode() + b"\n")

    def below(self, path):
        if isinstance(path, int):
            return False
        return os.path.join(os.path.realpath(os.path.dirname(path) or "."), "").startswith(self.folder)  # noqa: PTH118,PTH120

    def __call__(self, name, path, do, half=None):
        fault = self.fault
        self.note(call=name, path=os.fspath(path))
        if fault.name not in ("", name):
            return do()
        self.calls += 1
        if fault.kind == "full" and self.calls >= fault.at and name in TAKES_SPACE:
            if half is not None and self.calls == fault.at:
                half()
            named = (os.fspath(path),) if name in ("open", "mkdir") else ()  # as the system's own errors are
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *named)
        if fault.kind == "full" or self.calls != fault.at:
            return do()
        try:
            if fault.when == "half" and half is not None:
                half()
            elif fault.when == "after":
                do()
        finally:  # also where the call has failed, as making a folder that is there does
            self.end()

    def end(self):
        if self.fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        self.note(stalled=True)
        time.sleep(PATIENCE)
        os._exit(99)

    def install(self):
        """Put the counter between the library and the system."""
        for name in ("replace", "rename", "unlink", "remove", "mkdir", "rmdir", "chmod"):
            setattr(os, name, self._counted(name, getattr(os, name)))
        fsync = os.fsync
        os.fsync = lambda descriptor: self("fsync", f"/proc/self/fd/{descriptor}", lambda: fsync(descriptor))
        plain, counting = io.open, self

        class Raw(io.FileIO):
            def write(self, data):
                view = memoryview(data).cast("B")
                half = functools.partial(super().write, view[: len(view) // 2])
                return counting("write", self.name, functools.partial(super().write, view), half)

            def truncate(self, size=None):
                return counting("truncate", self.name, functools.partial(super().truncate, size))

        @functools.wraps(plain)
        def opened(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **others):
            if not (set(mode) & set("wax+") and self.below(file)):
                return plain(file, mode, buffering, encoding, errors, newline, **others)
            raw = self("open", file, lambda: Raw(file, mode.replace("b", "").replace("t", "")))
            if buffering == 0:
                return raw
            buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffer if "b" in mode else io.TextIOWrapper(buffer, encoding, errors, newline)

        io.open = builtins.open = opened

    def _counted(self, name, function):
        @functools.wraps(function)
        def counted(path, *args, **kwargs):
            if kwargs.get("dir_fd") is None and not self.below(path):
                return function(path, *args, **kwargs)
            return self(name, args[0] if name == "replace" else path, lambda: function(path, *args, **kwargs))

        return counted


def count_units(note):
    """Note the work itself, so that what is done twice is seen: cells, searches, images, steps and bytes."""
    from igeood.benchmark import cells, network  # noqa: PLC0415
    from igeood.datasets import download  # noqa: PLC0415
    from igeood.networks import training  # noqa: PLC0415

    def noted(owner, name, unit, amount=lambda _: 1):
        function = getattr(owner, name)

        @functools.wraps(function)
        def counted(*args, **kwargs):
            found = function(*args, **kwargs)
            note(unit=unit, amount=amount(found))
            return found

        setattr(owner, name, counted)

    noted(cells._Bench, "_kept_scores", "cells")
    noted(cells, "tune_temperature", "searches")
    noted(training.Run, "advance", "steps")
    noted(download, "_receive", "bytes", len)
    batches = network.Network.batches

    def counted(self, images, size):
        for batch in batches(self, images, size):
            note(unit="images", amount=len(batch[0]))
            yield batch

    network.Network.batches = counted


def hurry():
    """Search coarsely, and keep outputs in small files: what is tested is how work stops, not how good it is."""
    from igeood import tuning  # noqa: PLC0415
    from igeood.benchmark import cells, observing  # noqa: PLC0415
    from igeood.detectors import ensemble  # noqa: PLC0415

    observing.SHARD = 20
    tuning.SWEEP_POINTS, tuning.REFINEMENTS = 4, 0
    ensemble.STRENGTHS, cells.EPSILONS = (1.0,), (0.0, 0.001)


def serve_here(url, size):
    """Let `data get cifar-10` find a small set on this machine."""
    from igeood.datasets import DATASETS, Download, download  # noqa: PLC0415

    download._receive = lambda response: response.read(
        1 << 15
    )  # the same pieces each time, so that calls are countable
    layouts = {split: ((f"cifar-10-batches-bin/{split}.bin",),) for split in ("train", "test")}
    DATASETS["cifar-10"] = replace(
        DATASETS["cifar-10"], counts={"train": 300, "test": 100}, layouts=layouts, downloads=(Download(url, size),)
    )


def save_again_and_again():
    """Two guards' files, one read and saved over the other in turn."""
    import igeood  # noqa: PLC0415

    guards = [igeood.load("one.safetensors"), igeood.load("two.safetensors")]
    for i in range(20):
        guards[i % 2].save("saved.safetensors")


def child(order):
    """Run the order's command; the process ends with it."""
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.chdir(order["folder"])
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{order['log']}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), stream)
    counting = Counting(order["folder"], log, Fault(**order["fault"]))
    code = 1
    try:
        hurry()
        if order.get("web"):
            serve_here(*order["web"])
        count_units(counting.note)
        counting.install()
        if order["command"] == ["save"]:
            save_again_and_again()
            code = 0
        else:
            from igeood.cli import main  # noqa: PLC0415

            main.main(order["command"], prog_name="igeood")
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001 (shown to the test)
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# The warm process, which forks.


def serve():
    """Read orders from standard input, and answer each with the child's exit code and time."""
    for name in WARM:
        with suppress(ImportError):  # an extra that is not there
            import_module(name)
    print("ready", flush=True)  # noqa: T201
    stalled = []
    for line in sys.stdin:
        order = json.loads(line)
        if order.get("end"):
            pid = order["end"]
            os.kill(pid, signal.SIGKILL)
            stalled.remove(pid)
            os.waitpid(pid, 0)
            print(json.dumps({}), flush=True)  # noqa: T201
            continue
        pid = os.fork()
        if pid == 0:
            child(order)
        answer = wait(pid, order)
        if answer["code"] is None:
            stalled.append(pid)
        print(json.dumps({**answer, "pid": pid}), flush=True)  # noqa: T201
    for pid in stalled:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def wait(pid, order):
    """Until the child ends, or stalls; it is killed when its time is up."""
    start, log = time.monotonic(), Path(order["log"])
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        seconds = time.monotonic() - start
        if ended:
            return {"code": os.waitstatus_to_exitcode(status), "seconds": seconds}
        if order["fault"]["kind"] == "stall" and log.exists() and b'"stalled"' in log.read_bytes():
            return {"code": None, "seconds": seconds}
        if seconds > order["seconds"]:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


# The tests' end.


@dataclass
class Warm:
    """The warm process, as the tests see it."""

    process: subprocess.Popen
    logs: Path
    count: int = 0

    def run(self, command, folder, *, fault=None, seconds=PATIENCE, web=None):
        """Run `igeood COMMAND` in a folder, and tell how it ended; `seconds` later it is killed."""
        self.count += 1
        log = self.logs / f"{self.count}.log"
        fault = fault or Fault("none", 0)
        order = {"command": [str(c) for c in command], "folder": str(folder), "log": str(log), "seconds": seconds}
        self.process.stdin.write(json.dumps({**order, "fault": vars(fault), "web": web}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        notes = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        units = Counter()
        for note in notes:
            if "unit" in note:
                units[note["unit"]] += note["amount"]
        calls = [(note["call"], note["path"]) for note in notes if "call" in note]
        said = (Path(f"{log}.{name}") for name in ("out", "err"))
        out, err = (path.read_text() if path.exists() else "" for path in said)
        self.pid = answer["pid"]
        return Ended(answer["code"], out, err, answer["seconds"], calls, units)

    @contextmanager
    def stalled(self, command, folder, at, **options):
        """While the command has stopped at a call, for as long as the block lasts; then it is killed."""
        ended = self.run(command, folder, fault=Fault("stall", at, "after"), **options)
        assert ended.code is None, ended
        pid = self.pid
        try:
            yield
        finally:
            self.process.stdin.write(json.dumps({"end": pid}) + "\n")
            self.process.stdin.flush()
            self.process.stdout.readline()


@contextmanager
def warm(logs):
    """Start the warm process."""
    here = Path(__file__)
    with subprocess.Popen(
        [sys.executable, str(here)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield Warm(process, logs)
        finally:
            process.stdin.close()
            process.wait()


@dataclass
class Served:
    """A file on a server of this machine that can be fetched from any byte on; it comes in small pieces."""

    content: bytes
    url: str = ""


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        served = self.server.served
        tag = f'"{hashlib.sha256(served.content).hexdigest()[:16]}"'
        asked = self.headers.get("Range") if self.headers.get("If-Range") == tag else None
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(served.content) - 1}/{len(served.content)}")
        self.send_header("Content-Length", str(len(served.content) - start))
        self.send_header("ETag", tag)
        self.end_headers()
        try:
            for at in range(start, len(served.content), 1 << 15):
                self.wfile.write(served.content[at : at + (1 << 15)])
                time.sleep(0.002)
        except OSError:  # who asked was killed
            pass
        self.close_connection = True

    def log_message(self, *_):
        pass


@contextmanager
def serving(content):
    """A server with one file."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.served = Served(content, f"http://127.0.0.1:{server.server_port}/small.tar.gz")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server.served
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    serve()
