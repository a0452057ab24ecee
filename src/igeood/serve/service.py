"""The service itself: a guard that is reloaded when its file changes, the thread that judges, and what it remembers."""

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from igeood.errors import IgeoodError, InputError, NotReadyError
from igeood.files import only_one, record_head
from igeood.guard import load
from igeood.monitor import Kind, Monitor
from igeood.serve.batching import Batcher, Job
from igeood.serve.flagged import Flagged
from igeood.serve.log import say
from igeood.serve.metrics import Watch
from igeood.serve.served import Served, join

LOOKED_EVERY = 0.5  # seconds between two states of the monitor, and between two looks at the guard's file


@dataclass(frozen=True)
class Options:
    """How a service works; see `igeood serve --help`."""

    name: str = "guard"
    max_waiting: int = 256
    max_batch: int = 64
    max_delay: float = 0.002
    state: Path | None = None
    run_length: float = 1_000_000
    kind: Kind = "p-values"
    keep_flagged: Path | None = None
    keep: int = 100
    seed: int = 0


class Service:
    """A guard's file, served. Call `close` at the end.

    Parameters
    ----------
    path : Path
        The guard's file; the guard must be calibrated.
    model : Module, optional
        The guard's model, if it has one.
    options : Options
        How it works.
    """

    def __init__(self, path: Path, model: nn.Module | None = None, options: Options | None = None) -> None:
        self.options = options = options or Options()
        self.name = options.name
        self.is_stopping = False
        self._path = path
        self._model = model
        self._seen = _stamp(path)
        state = options.state or path.with_name(f"{path.name}.monitor.json")
        self.served = self._load()
        with ExitStack() as stack:
            stack.enter_context(only_one(state.with_name(f".{state.name}.lock"), "state"))
            if state.exists():
                self.served.monitor = self._saved_monitor(state)
            self._lock = stack.pop_all()
        self.batcher = Batcher(self._judge, options.max_waiting, options.max_batch, options.max_delay)
        self.watch = Watch(self.served, state, self.batcher)
        folder = options.keep_flagged
        self.flagged = None if folder is None else Flagged(folder, options.keep, options.seed)
        self._wanted = threading.Event()  # a reload, or the end
        self._is_closed = False
        self._keeper: threading.Thread | None = None

    def _load(self) -> Served:
        guard = load(self._path, self._model)
        if guard.calibration is None:
            cure = f"run `igeood calibrate {self._path} held-out.parquet` first"
            raise NotReadyError(f"{self._path} is not calibrated, so it has no threshold", argument="guard", cure=cure)
        monitor = Monitor(guard, self.options.run_length, self.options.kind, seed=self.options.seed)
        return Served(guard, guard.calibration, monitor, str(record_head(self._path).get("sha256")))

    def _saved_monitor(self, state: Path) -> Monitor:
        monitor = Monitor.load(state, self.served.guard)
        for name in ("run_length", "kind"):
            saved, wanted = getattr(monitor, name), getattr(self.options, name)
            if saved != wanted:
                cure = f"give {{{name}={saved!r}}}, or another file as {{state}}"
                raise InputError(f"the monitor in {state} has {saved}, not {wanted}", argument=name, cure=cure)
        return monitor

    def _judge(self, jobs: list[Job]) -> None:
        """Answer jobs of one guard, then count their inputs."""
        served: Served = jobs[0].key[0]  # type: ignore[index]
        tensors = join([job.data for job in jobs])
        verdict = served.predict(tensors)
        columns = verdict.to_dict()
        start = 0
        for job in jobs:
            job.future.set_result({name: values[start : start + job.rows] for name, values in columns.items()})
            start += job.rows
        alarmed = self.watch.judged(served, verdict, columns)
        if self.flagged is not None:
            self.flagged.offer(served, tensors, verdict)
            self.flagged.alarmed = time.time() if alarmed else self.flagged.alarmed

    def record(self) -> dict[str, Any]:
        """What the page shows."""
        queue = {"waiting": len(self.batcher), "limit": self.batcher.max_waiting}
        flagged = None if self.flagged is None else self.flagged.record()
        return {"name": self.name, **self.watch.record(), "queue": queue, "flagged": flagged}

    def start(self) -> None:
        """Save the monitor's state and look at the guard's file from now on."""
        self._keeper = threading.Thread(target=self._keep, name="igeood-keeper", daemon=True)
        self._keeper.start()

    def _keep(self) -> None:
        while True:
            is_wanted = self._wanted.wait(LOOKED_EVERY)
            if self._is_closed:
                return
            self._wanted.clear()
            self._save()
            if is_wanted or _stamp(self._path) != self._seen:
                self._reload()

    def _save(self) -> None:
        try:
            self.watch.save()
        except (OSError, IgeoodError) as error:
            say("state not saved", error=str(error))

    def reload(self) -> None:
        """Load the guard's file again, soon."""
        self._wanted.set()

    def _reload(self) -> None:
        """Load the guard's file; a broken one leaves the old guard in its place."""
        self._seen = _stamp(self._path)
        try:
            served = self._load()
        except Exception as error:  # noqa: BLE001 (whatever is wrong with it, the old guard goes on)
            self.watch.counts["reload_failures"].inc()
            self.watch.reload_error = " ".join(str(error).split())
            say("reload failed", guard=str(self._path), error=self.watch.reload_error)
            return
        goes_on = self.served.monitor.is_like(served.monitor)  # the same calibration
        if goes_on:
            served.monitor = self.served.monitor
        self.served = served
        self.watch.use(served)
        self.watch.reload_error = None
        self.watch.counts["reloads"].inc()
        say("reloaded", guard=str(self._path), promise=served.calibration.promise, monitor_goes_on=goes_on)

    def close(self) -> None:
        """Finish what waits, save the state, and let go of it."""
        self.batcher.close()  # the state is saved meanwhile
        if self._keeper is not None:
            self._is_closed = True
            self._wanted.set()
            self._keeper.join()
        self._save()
        if self.flagged is not None:
            self.flagged.close()
        self._lock.close()


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes when a file is replaced or written; empty if it is not there."""
    try:
        about = path.stat()
    except OSError:
        return ()
    return about.st_ino, about.st_mtime_ns, about.st_size
