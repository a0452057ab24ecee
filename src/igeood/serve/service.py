"""The service itself: a guard that is reloaded when its file changes, its monitor, and what it counts."""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from igeood.errors import IgeoodError
from igeood.files import only_one, record_head, write_whole
from igeood.guard import Guard, Verdict, load
from igeood.monitor import Monitor, open_monitor
from igeood.serve import Options
from igeood.serve.batching import Batcher, Job
from igeood.serve.flagged import Flagged
from igeood.serve.log import say
from igeood.serve.metrics import Metrics, Recent
from igeood.serve.served import Served
from igeood.version import __version__

LOOKED_EVERY = 0.5  # seconds between two states of the monitor, and between two looks at the guard's file
MONITOR = ("kind", "run_length", "evidence", "alarm", "since", "alarm_count", "inputs", "unread", "promise")


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
        self.is_stopping = False
        self._path = path
        self._model = model
        self._state = options.state or path.with_name(f"{path.name}.monitor.json")
        self._saved = b""
        self._seen: object = _stamp(path)
        self.served = self._load()
        with ExitStack() as stack:
            stack.enter_context(only_one(self._state.with_name(f".{self._state.name}.lock"), "state"))
            self.served.monitor = self._monitor(self.served.guard, self._state)
            self._claim = stack.pop_all()
        self.batcher = Batcher(self._answer, options.max_waiting, options.max_batch, options.max_delay)
        self.flagged = Flagged(options.keep_flagged, options.keep, options.seed) if options.keep_flagged else None
        self._started = time.time()
        self._reload_error: str | None = None
        self._acknowledged: float | None = None  # when alarms were, the last time
        self._lock = threading.Lock()  # of the monitor, and of what is counted
        self._recent = Recent(self.served.calibration)
        self.metrics = Metrics(self._gauges(), self._recent.edges)
        self.metrics.counts["monitor_alarms"].inc(self.served.monitor.alarm_count)
        self._describe()
        self._closed = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="igeood-keeper", daemon=True)
        self._keeper.start()

    def _gauges(self) -> dict[str, tuple[str, Callable[[], float]]]:
        return {
            "queue_length": ("Requests that wait.", lambda: len(self.batcher)),
            "monitor_evidence": ("Evidence that the inputs have changed.", lambda: self.served.monitor.evidence),
            "monitor_run_length": ("Evidence at which there is an alarm.", lambda: self.served.monitor.run_length),
            "monitor_alarm": ("1 after an alarm, until it is acknowledged.", lambda: self.served.monitor.alarm),
            "reload_failed": ("1 while the guard's file cannot be loaded.", lambda: self._reload_error is not None),
            "guard_loaded_timestamp_seconds": ("When the guard was loaded.", lambda: self.served.loaded),
            "threshold": ("Scores above it are out-of-distribution.", lambda: self.served.calibration.threshold),
            "expected_ood_share": ("Of in-distribution inputs, at most.", lambda: 1 - self.served.calibration.tpr),
        }

    def _describe(self) -> None:
        """Name the guard in the metrics."""
        served = self.served
        about = {"version": __version__, "method": served.method, "access": served.guard.access}
        self.metrics.info.info({**about, "guard": served.fingerprint, "promise": served.calibration.promise})

    def _load(self) -> Served:
        guard = load(self._path, self._model)
        return Served(guard, self._monitor(guard), str(record_head(self._path).get("sha256")))

    def _monitor(self, guard: Guard, state: Path | None = None) -> Monitor:
        options = {name: getattr(self.options, name) for name in ("run_length", "kind", "seed")}
        return open_monitor(guard, state, options)

    def _answer(self, jobs: list[Job]) -> None:
        """Answer jobs of one guard, then count their inputs."""
        served, refuses = jobs[0].key[:2]
        tensors = {name: torch.cat([job.data[name] for job in jobs]) for name in jobs[0].data}
        verdict = served.predict(tensors, "refuse" if refuses else "raise")
        columns = verdict.to_dict()
        if refuses:
            columns.setdefault("reason", [None] * len(verdict))
        start = 0
        for job in jobs:
            job.future.set_result({name: values[start : start + job.rows] for name, values in columns.items()})
            start += job.rows
        self._count(served, verdict)
        if self.flagged is not None:
            self.flagged.offer(served, tensors, verdict)

    def _count(self, served: Served, verdict: Verdict) -> None:
        """Count inputs, and take them for evidence."""
        read = verdict[verdict.is_read].to_dict()
        counts = {"inputs": len(verdict), "ood": sum(read["is_ood"]), "unread": len(verdict) - len(read["is_ood"])}
        with self._lock:
            for name, count in counts.items():
                self.metrics.counts[name].inc(count)
            self.metrics.batches.observe(len(verdict))
            for p_value, score in zip(read["p_value"], read["score"], strict=True):
                self.metrics.p_values.observe(p_value)
                self.metrics.scores.observe(score)
            monitor = served.monitor
            if monitor is not self.served.monitor:  # a guard of another calibration has come meanwhile
                return
            earlier, had_alarm = monitor.alarm_count, monitor.alarm
            evidence = monitor.update(verdict)
            self._recent.add([*counts.values()], float(evidence.max()), read["score"])
            self.metrics.counts["monitor_alarms"].inc(monitor.alarm_count - earlier)
        if monitor.alarm and not had_alarm:
            say("alarm", inputs=monitor.inputs, since=monitor.since, alarms=monitor.alarm_count)

    def acknowledge(self) -> int:
        """Forget the monitor's alarms; return how many there were."""
        with self._lock:
            alarms = len(self.served.monitor.alarms)
            self.served.monitor.acknowledge()
            self._acknowledged = time.time() if alarms else self._acknowledged
        say("acknowledged", alarms=alarms)
        return alarms

    def record(self) -> dict[str, Any]:
        """What the page shows."""
        about = {"name": self.options.name, "version": __version__, "now": time.time(), "started": self._started}
        queue = {"waiting": len(self.batcher), "limit": self.batcher.max_waiting}
        with self._lock:
            monitor = {name: getattr(self.served.monitor, name) for name in MONITOR}
            monitor["alarms"] = [alarm._asdict() for alarm in self.served.monitor.alarms]
            monitor["acknowledged"] = self._acknowledged
            recent = self._recent.record()
            guard = {**self.served.record(), "reload_error": self._reload_error}
        flagged = None if self.flagged is None else self.flagged.record()
        return {**about, "guard": guard, "monitor": monitor, **recent, "queue": queue, "flagged": flagged}

    def _keep(self) -> None:
        """Save the monitor's state, and load the guard's file when it has changed."""
        while not self._closed.wait(LOOKED_EVERY):
            self._save()
            if self._seen != _stamp(self._path):
                self._reload()

    def _save(self) -> None:
        with self._lock:
            state = self.served.monitor.state()
        try:
            if state != self._saved:
                write_whole(self._state, state)
                self._saved = state
        except (OSError, IgeoodError) as error:
            say("state not saved", error=str(error))

    def reload(self) -> None:
        """Load the guard's file again, soon."""
        self._seen = None

    def _reload(self) -> None:
        """Load the guard's file; a broken one leaves the old guard in its place."""
        self._seen = _stamp(self._path)
        try:
            served = self._load()
        except Exception as error:  # noqa: BLE001 (whatever is wrong with it, the old guard goes on)
            self.metrics.counts["reload_failures"].inc()
            self._reload_error = " ".join(str(error).split())
            say("reload failed", guard=str(self._path), error=self._reload_error)
            return
        goes_on = self.served.monitor.is_like(served.monitor)  # the same calibration
        with self._lock:
            if goes_on:
                served.monitor = self.served.monitor
            else:
                self._recent = Recent(served.calibration)
            self.served = served
            self._reload_error = None
            self._describe()
        self.metrics.counts["reloads"].inc()
        say("reloaded", guard=str(self._path), promise=served.calibration.promise, monitor_goes_on=goes_on)

    def close(self) -> None:
        """Finish what waits, save the state, and let go of it."""
        self.batcher.close()  # the state is saved meanwhile
        self._closed.set()
        self._keeper.join()
        self._save()
        if self.flagged is not None:
            self.flagged.close()
        self._claim.close()


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes when a file is replaced or written; empty if it is not there."""
    try:
        about = path.stat()
    except OSError:
        return ()
    return about.st_ino, about.st_mtime_ns, about.st_size
