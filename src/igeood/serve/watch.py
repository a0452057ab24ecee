"""What the service knows of its past: counts, the last hour, the monitor. For metrics, page and state."""

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily as CounterFamily
from prometheus_client.core import GaugeMetricFamily as GaugeFamily
from prometheus_client.core import HistogramMetricFamily as HistogramFamily
from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

from igeood.detectors import method_name
from igeood.files import write_whole
from igeood.guard import Verdict
from igeood.monitor import Monitor
from igeood.serve.judging import Served
from igeood.serve.log import say
from igeood.version import __version__

SECONDS, BUCKETS = 10, 360  # the last hour
BINS = 40
SAID_EVERY = 1.0  # seconds between two lines on alarms
P_VALUES = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
LATENCIES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Counts = NDArray[np.int64]
_OF_MONITOR = ("kind", "run_length", "evidence", "alarm", "since", "alarm_count", "inputs", "unread", "promise")


class Tally:
    """Counts of values between bounds, and their sum; values above the last bound have a count of their own."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add_all(self, values: NDArray[np.float64]) -> Counts:
        """Count values; return their counts alone."""
        counts = np.bincount(np.searchsorted(self.bounds, values), minlength=len(self.counts))
        self.counts = [old + new for old, new in zip(self.counts, counts.tolist(), strict=True)]
        self.sum += float(values.sum())
        return counts

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts, as Prometheus wants them."""
        ends = [*map(floatToGoString, self.bounds), "+Inf"]
        return [*zip(ends, np.cumsum(self.counts).tolist(), strict=True)]


class Hour:
    """Inputs of the last hour in buckets of ten seconds."""

    def __init__(self) -> None:
        self.last = int(time.time()) // SECONDS
        self.counts = np.zeros((BUCKETS, 3), dtype=np.int64)  # inputs, refused, not read
        self.evidence = np.full(BUCKETS, np.nan)
        self.scores = np.zeros((BUCKETS, BINS), dtype=np.int64)

    def place(self) -> int:
        """The bucket of this moment; buckets of an earlier hour are emptied."""
        now = int(time.time()) // SECONDS
        for bucket in range(max(self.last + 1, now - BUCKETS + 1), now + 1):
            at = bucket % BUCKETS
            self.counts[at], self.evidence[at], self.scores[at] = 0, np.nan, 0
        self.last = max(self.last, now)
        return self.last % BUCKETS

    def record(self) -> dict[str, Any]:
        """Its lists, the oldest bucket first."""
        order = (np.arange(BUCKETS) + self.place() + 1) % BUCKETS
        inputs, ood, unread = self.counts[order].T.tolist()
        evidence = [None if np.isnan(value) else value for value in self.evidence[order].tolist()]
        start = (self.last - BUCKETS + 1) * SECONDS
        lists = {"inputs": inputs, "ood": ood, "unread": unread, "evidence": evidence}
        return {"seconds": SECONDS, "start": start, **lists}


class Watch:
    """Counts what is judged, and runs the monitor. One thread judges; others read."""

    def __init__(self, served: Served, monitor: Monitor, state: Path) -> None:
        self.started, self._state = time.time(), state
        self.lock, self._saving = threading.Lock(), threading.Lock()
        self.requests: Counter[tuple[str, int]] = Counter()
        self.latencies: dict[str, Tally] = {}
        self.inputs = self.ood = self.unread = self.rejected = self.reloads = self.reload_failures = 0
        self.reload_error: str | None = None
        self.batches, self.p_values = Tally(SIZES), Tally(P_VALUES)
        self._saved, self._said = -1, 0.0
        self.use(served, monitor)

    def use(self, served: Served, monitor: Monitor) -> None:
        """Count for this guard from now on; scores of one with another calibration are forgotten."""
        calibration = served.calibration.scores.numpy()
        with self.lock:
            goes_on = vars(self).get("monitor") is monitor
            self.served, self.monitor, self._saved = served, monitor, -1
            if goes_on:
                return
            self.edges = _edges(calibration, served.calibration.threshold)
            self.scores, self.hour, self._alarm_times = Tally(self.edges[1:-1].tolist()), Hour(), dict[int, float]()
            counts = np.bincount(np.searchsorted(self.edges[1:-1], calibration), minlength=BINS)
            self._calibration_shares = (counts / len(calibration)).tolist()

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count a request."""
        self.requests[path, status] += 1
        self.latencies.setdefault(path, Tally(LATENCIES)).add(seconds)

    def judged(self, served: Served, verdict: Verdict) -> bool:
        """Count inputs, and take them for evidence; return whether there was an alarm."""
        flags, is_read = np.asarray(verdict.is_ood), verdict.is_read
        scores, p_values = np.asarray(verdict.score, np.float64)[is_read], np.asarray(verdict.p_value)[is_read]
        with self.lock:
            unread = len(verdict) - len(scores)
            refused = int(flags.sum()) - unread
            self.inputs, self.ood, self.unread = self.inputs + len(verdict), self.ood + refused, self.unread + unread
            self.batches.add(len(verdict))
            self.p_values.add_all(p_values)
            is_known = served is self.served or torch.equal(served.calibration.scores, self.served.calibration.scores)
            if not is_known:  # another one has come while they were judged
                return False
            before = self.monitor.alarm_count
            evidence = self.monitor.update(verdict)
            alarmed = self.monitor.alarm_count > before
            if alarmed:
                now = time.time()
                self._alarm_times = {a.at: self._alarm_times.get(a.at, now) for a in self.monitor.alarms}
                if before == 0 or now - self._said > SAID_EVERY:  # a drift brings many
                    self._said = now
                    say("alarm", inputs=self.monitor.inputs, since=self.monitor.since, alarms=self.monitor.alarm_count)
            at = self.hour.place()
            self.hour.counts[at] += (len(verdict), refused, unread)
            self.hour.evidence[at] = np.fmax(self.hour.evidence[at], evidence.max())
            self.hour.scores[at] += self.scores.add_all(scores)
        return alarmed

    def acknowledge(self) -> int:
        """Forget the monitor's alarms; return how many there were."""
        with self.lock:
            known, self._saved = len(self.monitor.alarms), -1
            self.monitor.acknowledge()
            self._alarm_times.clear()
        say("acknowledged", alarms=known)
        return known

    def save(self) -> None:
        """Write the monitor's state, if there is anything new."""
        with self._saving:  # an older state never replaces a newer one
            with self.lock:
                if self.monitor.inputs == self._saved:
                    return
                content, self._saved = self.monitor.state(), self.monitor.inputs
            try:
                write_whole(self._state, content)
            except Exception:
                self._saved = -1  # it is tried again
                raise

    def record(self) -> dict[str, Any]:
        """All that the page shows of guard, inputs and monitor."""
        with self.lock:
            served, guard, calibration = self.served, self.served.guard, self.served.calibration
            hour, scores = self.hour.record(), self.hour.scores.sum(axis=0).tolist()
            monitor = {name: getattr(self.monitor, name) for name in _OF_MONITOR}
            monitor["alarms"] = [{**a._asdict(), "time": self._alarm_times.get(a.at)} for a in self.monitor.alarms]
            shares = {"edges": self.edges.tolist(), "calibration": self._calibration_shares, "hour": scores}
        about = {name: getattr(calibration, name) for name in ("promise", "threshold", "tpr", "guarantee")}
        about |= {"method": method_name(guard.detector), "title": served.title, "access": guard.access}
        about |= {"n": len(calibration.scores), "n_classes": guard.detector.n_classes_, "classes": guard.classes}
        about |= {name: getattr(self, name) for name in ("reloads", "reload_failures", "reload_error")}
        about |= {"health": [vars(finding) for finding in guard.health], "loaded": served.loaded}
        times = {"version": __version__, "now": time.time(), "started": self.started}
        return {**times, "guard": about, "hour": hour, "scores": shares, "monitor": monitor}


def _edges(calibration: NDArray[Any], threshold: float) -> NDArray[np.float64]:
    """Bounds of bins for scores: from the smallest calibration score to well above the threshold."""
    high = threshold + 2 * max(threshold - float(np.median(calibration)), 0.0)
    with np.errstate(invalid="ignore"):
        edges = np.linspace(calibration[0], high, BINS + 1)
    if np.isfinite(edges).all() and (np.diff(edges) > 0).all():
        return edges
    half = max(1.0, abs(threshold))  # all scores are about equal
    return np.linspace(threshold - half, threshold + half, BINS + 1)


class Metrics:
    """What Prometheus reads of a watch, and of the queue's length."""

    def __init__(self, watch: Watch, queue: Sequence[Any] | Any) -> None:
        self._watch, self._queue = watch, queue
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """In Prometheus' format; all figures are of one moment."""
        with self._watch.lock:
            return bytes(generate_latest(self._registry))

    def collect(self) -> Iterator[Metric]:
        """The families of metrics."""
        watch = self._watch
        served, monitor = watch.served, watch.monitor
        requests = CounterFamily("igeood_requests", "Requests answered.", labels=("path", "status"))
        for (path, status), count in sorted(watch.requests.items()):
            requests.add_metric((path, str(status)), count)
        yield requests
        seconds = HistogramFamily("igeood_request_seconds", "Time until the answer.", labels=("path",))
        for path, tally in sorted(watch.latencies.items()):
            seconds.add_metric((path,), tally.buckets(), tally.sum)
        yield seconds
        counts = {
            "inputs": (watch.inputs, "Inputs judged."),
            "ood": (watch.ood, "Inputs that were read and are out-of-distribution."),
            "unread": (watch.unread, "Inputs that could not be read, of those judged."),
            "rejected": (watch.rejected, "Inputs of requests that were answered with an error (400)."),
            "monitor_alarms": (monitor.alarm_count, "Alarms of the monitor."),
            "reloads": (watch.reloads, "Guard files that were loaded in place of another."),
            "reload_failures": (watch.reload_failures, "Guard files that could not be loaded; the old guard stays."),
        }
        for name, (count, what) in counts.items():
            yield CounterFamily(f"igeood_{name}", what, value=count)
        tallies = {
            "score": (watch.scores, "Scores of inputs; a higher one is more out-of-distribution."),
            "p_value": (watch.p_values, "p-values of inputs."),
            "batch_inputs": (watch.batches, "Inputs judged together."),
        }
        for name, (tally, what) in tallies.items():
            yield HistogramFamily(f"igeood_{name}", what, buckets=tally.buckets(), sum_value=tally.sum)
        gauges = {
            "queue_length": (len(self._queue), "Requests that wait."),
            "monitor_evidence": (monitor.evidence, "Evidence that the inputs have changed."),
            "monitor_run_length": (monitor.run_length, "Evidence at which there is an alarm."),
            "monitor_alarm": (monitor.alarm, "1 after an alarm, until it is acknowledged."),
            "reload_failed": (watch.reload_error is not None, "1 while the guard's file cannot be loaded."),
            "guard_loaded_timestamp_seconds": (served.loaded, "When the guard was loaded."),
            "threshold": (served.calibration.threshold, "Scores above it are out-of-distribution."),
            "expected_ood_share": (1.0 - served.calibration.tpr, "Share of in-distribution inputs refused, at most."),
        }
        for name, (value, what) in gauges.items():
            yield GaugeFamily(f"igeood_{name}", what, value=float(value))
        about = {"version": __version__, "method": method_name(served.guard.detector), "access": served.guard.access}
        about |= {"guard": served.fingerprint, "promise": served.calibration.promise}
        info = GaugeFamily("igeood_info", "What is served.", labels=tuple(about))
        info.add_metric(tuple(about.values()), 1.0)
        yield info
