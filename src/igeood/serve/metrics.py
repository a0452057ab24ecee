"""What the service remembers: counts for Prometheus, the last hour for the page, the monitor's state."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import prometheus_client as prometheus
from numpy.typing import NDArray
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from igeood.calibration import Calibration
from igeood.files import write_whole
from igeood.guard import Verdict
from igeood.serve.log import say
from igeood.serve.protocol import Columns
from igeood.serve.served import Served
from igeood.version import __version__

SECONDS = 10  # of a bucket
BUCKETS = 360  # the last hour
BINS = 40
P_VALUES = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
LATENCIES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
COUNTS = {
    "inputs": "Inputs judged.",
    "ood": "Inputs that were read and are out-of-distribution.",
    "unread": "Inputs that could not be read, of those judged.",
    "rejected": "Inputs of requests that were answered with an error (400).",
    "monitor_alarms": "Alarms of the monitor.",
    "reloads": "Guard files that were loaded in place of another.",
    "reload_failures": "Guard files that could not be loaded; the old guard stays.",
}
prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]  # (no series for the times when counters began)


class Bins:
    """Counts of values up to and with each bound, added in bulk: `Histogram.observe` would double a batch's time."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._sum = 0.0

    def add(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        """Count values; return their counts alone."""
        counts = np.bincount(np.searchsorted(self._bounds, values), minlength=len(self._counts))
        self._counts += counts
        self._sum += float(values.sum())
        return counts

    def family(self, name: str, what: str) -> HistogramMetricFamily:
        """The counts as Prometheus wants them."""
        ends = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(ends, np.cumsum(self._counts).tolist(), strict=True))
        return HistogramMetricFamily(name, what, buckets=buckets, sum_value=self._sum)


class Recent:
    """Scores and alarms of one calibration; its last hour in buckets of ten seconds."""

    def __init__(self, calibration: Calibration) -> None:
        scores = calibration.scores.numpy()
        self.edges = _edges(scores, calibration.threshold)
        self.scores = Bins(self.edges[1:-1].tolist())
        self.alarm_times: dict[int, float] = {}
        self._calibration = Bins(self.edges[1:-1].tolist()).add(scores) / len(scores)
        self._buckets: dict[int, NDArray[np.float64]] = {}  # inputs, refused, unread, evidence, counts of scores

    def add(self, counts: Sequence[int], evidence: float, scores: NDArray[np.float64]) -> None:
        """Count inputs in the bucket of this moment."""
        now = int(time.time()) // SECONDS
        self._buckets = {number: bucket for number, bucket in self._buckets.items() if number > now - BUCKETS}
        bucket = self._buckets.setdefault(now, np.zeros(4 + BINS))
        bucket[:3] += counts
        bucket[3] = max(bucket[3], evidence)
        bucket[4:] += self.scores.add(scores)

    def record(self) -> dict[str, Any]:
        """What the page shows: lists, the oldest bucket first."""
        start = int(time.time()) // SECONDS - BUCKETS + 1
        numbers = range(start, start + BUCKETS)
        table = np.array([self._buckets.get(number, np.zeros(4 + BINS)) for number in numbers])
        inputs, ood, unread = table[:, :3].T.astype(int).tolist()
        evidence = [float(self._buckets[number][3]) if number in self._buckets else None for number in numbers]
        hour = {"inputs": inputs, "ood": ood, "unread": unread, "evidence": evidence}
        scores = {"calibration": self._calibration.tolist(), "hour": table[:, 4:].sum(axis=0).astype(int).tolist()}
        return {
            "hour": {"seconds": SECONDS, "start": start * SECONDS, **hour},
            "scores": {"edges": self.edges.tolist(), **scores},
        }


def _edges(calibration: NDArray[Any], threshold: float) -> NDArray[np.float64]:
    """Bounds of bins for scores: from the smallest calibration score to well above the threshold."""
    high = threshold + 2 * max(threshold - float(np.median(calibration)), 0.0)
    with np.errstate(invalid="ignore"):
        edges = np.linspace(calibration[0], high, BINS + 1)
    if np.isfinite(edges).all() and (np.diff(edges) > 0).all():
        return edges
    half = max(1.0, abs(threshold))  # all scores are about equal
    return np.linspace(threshold - half, threshold + half, BINS + 1)


class Watch:
    """Counts what is judged, and runs the monitor. One thread judges; others read."""

    def __init__(self, served: Served, state: Path, queue: Sized) -> None:
        self.started = time.time()
        self.reload_error: str | None = None
        self._state = state
        self._saved = -1  # inputs of the state on disk
        self._lock = threading.Lock()
        self._registry = registry = prometheus.CollectorRegistry()
        counter, histogram = prometheus.Counter, prometheus.Histogram
        self.counts = {name: counter(f"igeood_{name}", what, registry=registry) for name, what in COUNTS.items()}
        self.requests = counter("igeood_requests", "Requests answered.", ["path", "status"], registry=registry)
        timed = "Time until the answer."
        self.seconds = histogram("igeood_request_seconds", timed, ["path"], buckets=LATENCIES, registry=registry)
        self._batches = histogram("igeood_batch_inputs", "Inputs judged together.", buckets=SIZES, registry=registry)
        self._p_values = Bins(P_VALUES)
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "queue_length": ("Requests that wait.", lambda: len(queue)),
            "monitor_evidence": ("Evidence that the inputs have changed.", lambda: self.served.monitor.evidence),
            "monitor_run_length": ("Evidence at which there is an alarm.", lambda: self.served.monitor.run_length),
            "monitor_alarm": ("1 after an alarm, until it is acknowledged.", lambda: self.served.monitor.alarm),
            "reload_failed": ("1 while the guard's file cannot be loaded.", lambda: self.reload_error is not None),
            "guard_loaded_timestamp_seconds": ("When the guard was loaded.", lambda: self.served.loaded),
            "threshold": ("Scores above it are out-of-distribution.", lambda: self.served.calibration.threshold),
            "expected_ood_share": ("Of in-distribution inputs, at most.", lambda: 1 - self.served.calibration.tpr),
        }
        for name, (what, read) in gauges.items():
            prometheus.Gauge(f"igeood_{name}", what, registry=registry).set_function(read)
        self._info = prometheus.Info("igeood", "What is served.", registry=registry)
        registry.register(self)
        self.counts["monitor_alarms"].inc(served.monitor.alarm_count)
        self.recent = Recent(served.calibration)
        self.served = served
        self.use(served)

    def use(self, served: Served) -> None:
        """Count for this guard from now on; what is known of one with another calibration is forgotten."""
        about = {"version": __version__, "method": served.method, "access": served.guard.access}
        with self._lock:
            if served.monitor is not self.served.monitor:
                self.recent = Recent(served.calibration)
            self.served = served
            self._saved = -1
            self._info.info({**about, "guard": served.fingerprint, "promise": served.calibration.promise})

    def judged(self, served: Served, verdict: Verdict, columns: Columns) -> bool:
        """Count inputs, and take them for evidence; return whether there was an alarm."""
        is_read = verdict.is_read
        scores = np.array(columns["score"])[is_read]
        unread = len(is_read) - len(scores)
        counts = (len(is_read), sum(columns["is_ood"]) - unread, unread)
        with self._lock:
            for name, count in zip(("inputs", "ood", "unread"), counts, strict=True):
                self.counts[name].inc(count)
            self._batches.observe(len(is_read))
            self._p_values.add(np.array(columns["p_value"])[is_read])
            monitor = served.monitor
            if monitor is not self.served.monitor:  # a guard of another calibration has come meanwhile
                return False
            earlier, had_alarm = monitor.alarm_count, monitor.alarm
            evidence = monitor.update(verdict)
            self.recent.add(counts, float(evidence.max()), scores)
            alarms = monitor.alarm_count - earlier
            self.counts["monitor_alarms"].inc(alarms)
            times = self.recent.alarm_times
            self.recent.alarm_times = {alarm.at: times.get(alarm.at, time.time()) for alarm in monitor.alarms}
        if alarms and not had_alarm:
            say("alarm", inputs=monitor.inputs, since=monitor.since, alarms=monitor.alarm_count)
        return alarms > 0

    def acknowledge(self) -> int:
        """Forget the monitor's alarms; return how many there were."""
        with self._lock:
            alarms = len(self.served.monitor.alarms)
            self.served.monitor.acknowledge()
            self._saved = -1
        say("acknowledged", alarms=alarms)
        return alarms

    def save(self) -> None:
        """Write the monitor's state, if there is anything new."""
        with self._lock:
            inputs = self.served.monitor.inputs
            content = None if inputs == self._saved else self.served.monitor.state()
            self._saved = -1  # until it is written
        if content is not None:
            write_whole(self._state, content)
        self._saved = inputs

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The figures that are counted in bulk."""
        yield self.recent.scores.family("igeood_score", "Scores of inputs; a higher one is more out-of-distribution.")
        yield self._p_values.family("igeood_p_value", "p-values of inputs.")

    def value(self, name: str, **labels: str) -> int:
        """A count by its name in Prometheus."""
        return int(self._registry.get_sample_value(name, labels) or 0)

    def text(self) -> bytes:
        """All figures of one moment, in Prometheus' format."""
        with self._lock:
            return prometheus.generate_latest(self._registry)

    def record(self) -> dict[str, Any]:
        """What the page shows of guard, inputs and monitor."""
        names = ("kind", "run_length", "evidence", "alarm", "since", "alarm_count", "inputs", "unread", "promise")
        with self._lock:
            served = self.served
            recent = self.recent.record()
            times = self.recent.alarm_times
            monitor = {name: getattr(served.monitor, name) for name in names}
            monitor["alarms"] = [{**alarm._asdict(), "time": times.get(alarm.at)} for alarm in served.monitor.alarms]
            reloads = {name: self.value(f"igeood_{name}_total") for name in ("reloads", "reload_failures")}
        guard = {**served.record(), **reloads, "reload_error": self.reload_error}
        now = {"version": __version__, "now": time.time(), "started": self.started}
        return {**now, "guard": guard, "monitor": monitor, **recent}
