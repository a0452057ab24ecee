"""Gives damaged files to the readers, in processes of their own, and tells what went wrong.

    python tests/faults/fuzzer.py --inputs 100000 --jobs 2

An input passes if the reader takes it or raises an error of the library's, of one line: within a second of processor
time and the memory that the file's size allows, with nothing executed, left open, or written elsewhere. A process
that dies, or stands still, fails the input that it was given. Inputs that fail are kept.
"""

import argparse
import faulthandler
import json
import mmap
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MPLBACKEND": "agg",
}
sys.path.insert(0, str(Path(__file__).parent))

STANDSTILL = 120.0  # by the clock, which other processes' work makes run
SPARE = 64 << 20  # bytes of memory for any file,
TIMES, TIMES_COMPRESSED = 16, 1100  # and so many times its size
CHUNK = 500  # inputs of one process
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.symlink",
    "os.link",
    "os.chmod",
    "os.truncate",
    "os.chown",
}
EXECUTIONS = {
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "pickle.find_class",
    "socket.connect", "ctypes.dlopen",
}  # fmt: skip


class Watch:
    """Sees what the interpreter is about to do, while a file is read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.on, self.seen = str(folder), False, []
        self.code = tuple(
            {sys.prefix, sys.base_prefix, "<frozen", "<template>", str(Path(__file__).parents[2] / "src")}
        )
        sys.addaudithook(self._see)
        sys.unraisablehook = lambda found: self.seen.append(f"left open: {found.exc_value}")

    def _see(self, event: str, args: tuple) -> None:
        if not self.on:
            return
        if event == "open":
            if (args[2] or 0) & WRITES and not str(args[0]).startswith((self.folder, "/dev/null")):
                self.seen.append(f"{args[0]} was opened for writing")
        elif event in CHANGES:
            if not all(str(a).startswith(self.folder) for a in args if isinstance(a, str | os.PathLike)):
                self.seen.append(f"{event} {args}")
        elif (event == "pickle.find_class" and _within("numba/core/caching.py")) or (
            event == "exec" and _within("<frozen importlib._bootstrap>")
        ):
            return  # numba's own cache of compiled functions; a module, which may make its tuples so
        elif event in EXECUTIONS or (event == "exec" and not args[0].co_filename.startswith(self.code)):
            self.seen.append(f"{event} {args}")


def _within(file: str) -> bool:
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.endswith(file):
        frame = frame.f_back
    return frame is not None


def memory() -> int:
    """Bytes of address space in use."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def try_one(reader, path: Path, content: bytes, watch: Watch) -> tuple[str, str]:
    """What became of one input: "taken" or "refused", or "failed" and why."""
    from igeood.errors import IgeoodError  # noqa: PLC0415

    path.write_bytes(content)
    files = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    times = TIMES_COMPRESSED if reader.compressed else TIMES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (memory() + SPARE + times * len(content), hard))
    watch.seen.clear()
    start, watch.on = time.process_time(), True
    outcome, why = "taken", ""
    try:
        reader.read(path)
    except IgeoodError as error:
        outcome, said = "refused", str(error)
        starved = [e for e in chain(error) if isinstance(e, MemoryError) or "alloc" in str(e)]
        if starved:
            outcome, why = "failed", f"too much memory was asked for: {starved[0]!r}"
        elif "\n" in said or not said:
            outcome, why = "failed", f"an error of several lines, or of none: {said!r}"
        del error, starved
    except BaseException:  # noqa: BLE001 (that is what is looked for)
        outcome, why = "failed", traceback.format_exc()
    watch.on = False
    took = time.process_time() - start
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    if watch.seen:
        outcome, why = "failed", "; ".join(map(str, watch.seen))
    elif set(os.listdir("/proc/self/fd")) - files:  # noqa: PTH208
        outcome, why = "failed", "a file was left open"
    elif took > reader.seconds:
        outcome, why = "failed", f"{took:.1f} s"
    return outcome, why


@dataclass
class Task:
    """Inputs `first` to `last` of a reader, and a process that tries them."""

    reader: object
    seeds: list[bytes]
    first: int
    last: int
    run: int
    folder: Path
    pid: int = 0

    def start(self) -> None:
        self.board = mmap.mmap(-1, 8)
        self.moved = (self.first, time.monotonic())
        self.told = self.folder / f"told-{self.reader.name.replace('/', '-')}-{self.first}"
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._work()
                os._exit(0)
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            os._exit(3)

    def _work(self) -> None:
        faulthandler.enable()
        warnings.simplefilter("error")
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        from readers import damaged  # noqa: PLC0415

        here = self.folder / str(os.getpid())
        path = here / self.reader.place
        path.parent.mkdir(parents=True)
        for name, content in self.reader.beside.items():
            (here / name).parent.mkdir(parents=True, exist_ok=True)
            (here / name).write_bytes(content)
        for content in (*self.seeds, b"nothing of the kind"):  # right ones must do; and modules are loaded
            path.write_bytes(content)
            try:
                self.reader.read(path)
            except Exception:
                if content in self.seeds and not self.reader.foreign:
                    raise
        watch = Watch(here)
        with self.told.open("w") as told:
            for number in range(self.first, self.last):
                self.board[:] = struct.pack("q", number)
                signal.setitimer(
                    signal.ITIMER_PROF, 10 * self.reader.seconds
                )  # its signal ends the process, in any code
                outcome, why = try_one(self.reader, path, damaged(self.reader, self.seeds, number, self.run), watch)
                signal.setitimer(signal.ITIMER_PROF, 0)
                told.write(json.dumps([number, outcome, why]) + "\n")
                told.flush()
        shutil.rmtree(here)

    def look(self) -> str | None:
        """None while the process runs; else how it ended, in words that are empty if it ended well."""
        pid, code = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            return "" if code == 0 else f"the process died ({code})"
        number = struct.unpack("q", self.board[:])[0]
        if number != self.moved[0]:
            self.moved = (number, time.monotonic())
        elif time.monotonic() - self.moved[1] > STANDSTILL:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            return "it stood still"
        return None


class Fuzzer:
    """All inputs of some readers.

    Parameters
    ----------
    names : list of str
        Of readers; all if empty.
    inputs : int
        How many, of all of them together.
    jobs : int
        Processes at a time.
    run : int
        Another number gives other inputs.
    kept : Path
        Where inputs that failed are put.
    """

    def __init__(self, names: list[str], inputs: int, jobs: int, run: int, kept: Path) -> None:
        from readers import readers  # noqa: PLC0415

        self.readers = [reader for reader in readers() if not names or reader.name in names]
        whole = sum(reader.share for reader in self.readers)
        self.counts = {reader.name: max(2, round(inputs * reader.share / whole)) for reader in self.readers}
        self.jobs, self.run, self.kept = jobs, run, kept
        self.outcomes: dict[str, Counter] = {reader.name: Counter() for reader in self.readers}
        self.failures: list[dict] = []
        self.each: dict[tuple[str, int], str] = {}

    def go(self) -> dict:
        """Try them all; what was found."""
        began = time.monotonic()
        shm = Path("/dev/shm")  # noqa: S108 (a disk in memory is quick; the folder below it is our own)
        with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
            waiting, running = self._tasks(Path(folder)), []
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    running.append(waiting.pop(0))
                    running[-1].start()
                time.sleep(0.01)
                for task in list(running):
                    ended = task.look()
                    if ended is not None:
                        running.remove(task)
                        waiting[:0] = self._end(task, ended)
        counts = {name: dict(outcomes) for name, outcomes in self.outcomes.items()}
        return {"seconds": time.monotonic() - began, "counts": counts, "failures": self.failures}

    def _tasks(self, folder: Path) -> list[Task]:
        found = []
        for reader in self.readers:
            seeds, n = reader.seeds(), self.counts[reader.name]
            found += [Task(reader, seeds, i, min(i + CHUNK, n), self.run, folder) for i in range(0, n, CHUNK)]
        return found

    def _end(self, task: Task, ended: str) -> list[Task]:
        """Count what a process did; what is left of its inputs if it died."""
        name = task.reader.name
        lines = task.told.read_text().splitlines() if task.told.exists() else []
        for number, outcome, why in map(json.loads, lines):
            self.outcomes[name][outcome] += 1
            self.each[name, number] = outcome
            if outcome == "failed":
                self._fail(task, number, why)
        if not ended:
            return []
        number = task.first + len(lines)
        self.outcomes[name]["failed"] += 1
        self.each[name, number] = "failed"
        self._fail(task, number, ended if task.told.exists() else f"a right file was not read: {ended}")
        again = number + 1 < task.last and task.told.exists()
        return [Task(task.reader, task.seeds, number + 1, task.last, task.run, task.folder)] if again else []

    def _fail(self, task: Task, number: int, why: str) -> None:
        from readers import damaged  # noqa: PLC0415

        self.kept.mkdir(parents=True, exist_ok=True)
        file = self.kept / f"{task.reader.name.replace('/', '-').replace(' ', '-')}-{task.run}-{number}"
        file.write_bytes(damaged(task.reader, task.seeds, number, task.run))
        self.failures.append({"reader": task.reader.name, "number": number, "file": str(file), "why": why})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--run", type=int, default=0)
    parser.add_argument("--kept", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = Fuzzer(given.names, given.inputs, given.jobs, given.run, given.kept).go()
    if given.json:
        given.json.write_text(json.dumps(found))
    told = [f"{name:24} {sum(counts.values()):>8,}  {counts}" for name, counts in found["counts"].items()]
    told += [f"{f['reader']} {f['number']} {f['why'].strip().splitlines()[-1][:200]}" for f in found["failures"][:50]]
    total = sum(sum(counts.values()) for counts in found["counts"].values())
    told.append(f"{total:,} inputs, {len(found['failures'])} failed, {found['seconds']:.0f} s")
    sys.stdout.write("\n".join(told) + "\n")
    sys.exit(bool(found["failures"]))


if __name__ == "__main__":
    main()
