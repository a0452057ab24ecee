"""The service itself: a guard that is reloaded when its file changes, the thread that judges, and what it remembers."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from igeood.errors import IgeoodError, InputError, NotReadyError, is_of_disk
from igeood.files import only_one, record_head
from igeood.guard import load
from igeood.monitor import Kind, Monitor
from igeood.serve.batching import Batcher, Job
from igeood.serve.flagged import Flagged
from igeood.serve.judging import Served, columns_of
from igeood.serve.log import say
from igeood.serve.protocol import Problem
from igeood.serve.watch import Metrics, Watch

SAVED_EVERY = 0.5  # seconds between two states of the monitor
SAID_EVERY = 1.0  # seconds between two lines on inputs that the model fails on
LOOKED_EVERY = 1.0  # seconds between two looks at the guard's file


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
        self.name, self._path, self._model = options.name, path, model
        self._seen, self.is_stopping, self.held = _stamp(path), False, 0  # `held`: bytes of bodies
        self.served = self._load()
        state = options.state or path.with_name(f"{path.name}.monitor.json")
        with ExitStack() as stack:
            try:
                stack.enter_context(only_one(state.with_name(f".{state.name}.lock"), "state"))
            except InputError as error:
                raise InputError(f"{error}, or name another file with --state") from None
            self.watch = Watch(self.served, self._first_monitor(state), state)
            self.flagged = Flagged(options.keep_flagged, options.keep, options.seed) if options.keep_flagged else None
            limits = {name: getattr(options, name) for name in ("max_waiting", "max_batch", "max_delay")}
            self.batcher = Batcher(self._judge, **limits)
            self.metrics = Metrics(self.watch, self.batcher)
            self._held = stack.pop_all()
        self._said = 0.0
        self._wanted, self._tasks = asyncio.Event(), list[asyncio.Task[None]]()

    def _first_monitor(self, state: Path) -> Monitor:
        """The monitor of this state, which goes on; or a new one."""
        if not state.exists():
            return self._new_monitor(self.served)
        try:
            monitor = Monitor.load(state, self.served.guard)
        except IgeoodError as error:
            raise type(error)(f"{error}, with --state") from None
        for name in ("run_length", "kind"):
            known, given = getattr(monitor, name), getattr(self.options, name)
            if known != given:
                problem = f"the monitor in {state} has {known}, not {given}"
                raise InputError(f"{name}: {problem}; give {name}={known!r}, or another file with --state")
        return monitor

    def _new_monitor(self, served: Served) -> Monitor:
        return Monitor(served.guard, self.options.run_length, self.options.kind, seed=self.options.seed)

    def _load(self) -> Served:
        guard = load(self._path, self._model)
        if guard.calibration is None:
            cure = f"run `igeood calibrate {self._path} held-out.parquet` first"
            raise NotReadyError(f"guard: {self._path} is not calibrated, so it has no threshold; {cure}")
        return Served(guard, guard.calibration, str(record_head(self._path).get("sha256")))

    def _judge(self, jobs: Sequence[Job]) -> tuple[list[Any], Callable[[], None]]:
        """Answers for jobs that are judged together, and what is to be noted once they are sent."""
        served: Served = jobs[0].key[0]  # type: ignore[index]
        try:
            data, verdict = served.judge(jobs)
        except Exception as error:  # noqa: BLE001 (a model may raise anything)
            if len(jobs) == 1:
                return [_answerable(error, served)], lambda: None
            alone = [self._judge([job]) for job in jobs]  # so that one does not spoil the others
            return [answer for (answer,), _ in alone], lambda: _call_all([note for _, note in alone])
        answers: list[Any] = []
        start = 0
        for job in jobs:
            try:
                answers.append(columns_of(verdict, slice(start, start + job.rows), refuses=job.refuses))
            except Problem as problem:
                answers.append(problem)
            start += job.rows
        return answers, partial(self._note, served, data, verdict)

    def _note(self, served: Served, data: Any, verdict: Any) -> None:
        failed = [] if verdict.reason is None else [why for why in verdict.reason if (why or "").startswith("model: ")]
        if failed and time.monotonic() - self._said > SAID_EVERY:  # or is it the model that is broken?
            self._said = time.monotonic()
            say("model failed", reason=failed[0], inputs=len(failed))
        alarmed = self.watch.judged(served, verdict)
        if self.flagged is not None:
            self.flagged.offer(served.guard, data, verdict)
            self.flagged.changed = time.time() if alarmed else self.flagged.changed

    def record(self) -> dict[str, Any]:
        """What the page shows."""
        queue = {"waiting": len(self.batcher), "limit": self.batcher.max_waiting}
        flagged = None if self.flagged is None else self.flagged.record()
        return {"name": self.name, **self.watch.record(), "queue": queue, "flagged": flagged}

    def start(self) -> None:
        """Save the monitor's state and look at the guard's file from now on, in the running loop."""
        self._tasks = [asyncio.create_task(task) for task in (self._keep_saving(), self._keep_looking())]

    def reload(self) -> None:
        """Load the guard's file again, soon."""
        self._wanted.set()

    async def _keep_saving(self) -> None:
        while True:
            await asyncio.sleep(SAVED_EVERY)
            await asyncio.to_thread(self._save)

    def _save(self) -> None:
        try:
            self.watch.save()
        except (OSError, IgeoodError) as error:
            say("state not saved", error=str(error))

    async def _keep_looking(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._wanted.wait(), LOOKED_EVERY)
            except asyncio.TimeoutError:
                if _stamp(self._path) == self._seen:
                    continue
            self._wanted.clear()
            await asyncio.to_thread(self._reload)

    def _reload(self) -> None:
        """Load the guard's file; a broken one leaves the old guard in its place."""
        seen = _stamp(self._path)
        try:
            served = self._load()
            fresh = self._new_monitor(served)
        except Exception as error:  # noqa: BLE001 (whatever is wrong with it, the old guard goes on)
            self.watch.reload_failures += 1
            self.watch.reload_error = " ".join(str(error).split())
            say("reload failed", guard=str(self._path), error=self.watch.reload_error)
        else:
            goes_on = self.watch.monitor.is_like(fresh)  # the same calibration
            self.watch.use(served, self.watch.monitor if goes_on else fresh)
            self.served, self.watch.reload_error = served, None
            self.watch.reloads += 1
            say("reloaded", guard=str(self._path), promise=served.calibration.promise, monitor_goes_on=goes_on)
        self._seen = seen

    async def stop(self) -> None:
        """Finish what waits, and save the state."""
        await asyncio.to_thread(self.batcher.close)  # the state is saved meanwhile
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Finish what waits, save the state, and let go of it."""
        self.batcher.close()
        self._save()
        if self.flagged is not None:
            self.flagged.close()
        self._held.close()


def _call_all(notes: Sequence[Callable[[], None]]) -> None:
    for note in notes:
        note()


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes when a file is replaced or written; empty if it is not there."""
    try:
        about = path.stat()
    except OSError:
        return ()
    return about.st_ino, about.st_mtime_ns, about.st_size


def _answerable(error: Exception, served: Served) -> Exception:
    """An error of what was sent, as an answer; others, of memory or disk or our own, are faults of the service."""
    if isinstance(error, IgeoodError):
        return Problem(400, str(error))
    is_fault = is_of_disk(error) or isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if is_fault or served.guard.inputs.model is None:
        return error
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return Problem(400, f"inputs: the model fails on these rows together ({reason[:300]}); send shapes that it takes")
