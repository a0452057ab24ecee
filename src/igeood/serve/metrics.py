"""What the service counts: metrics for Prometheus, and the last hour for the page."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import prometheus_client as prometheus
from numpy.typing import NDArray

from igeood.calibration import Calibration

SECONDS = 10  # of a bucket
BUCKETS = 360  # the last hour
BINS = 40
LATEST = 10_000  # scores that the page shows
P_VALUES = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
LATENCIES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
COUNTS = {
    "inputs": "Inputs answered with a verdict.",
    "ood": "Inputs that were read and are out-of-distribution.",
    "unread": "Inputs that could not be read, and were refused.",
    "rejected": "Inputs of requests that were answered with an error (400).",
    "monitor_alarms": "Alarms of the monitor.",
    "reloads": "Guard files that were loaded in place of another.",
    "reload_failures": "Guard files that could not be loaded; the old guard stays.",
}
prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]  # (no series for the times when counters began)


class Metrics:
    """Counters and histograms; `gauges` are read when Prometheus asks: descriptions and values by name."""

    def __init__(self, gauges: Mapping[str, tuple[str, Callable[[], float]]], edges: Sequence[float]) -> None:
        self.registry = registry = prometheus.CollectorRegistry()
        counter, histogram = prometheus.Counter, prometheus.Histogram
        self.counts = {name: counter(f"igeood_{name}", what, registry=registry) for name, what in COUNTS.items()}
        self.requests = counter("igeood_requests", "Requests answered.", ["path", "status"], registry=registry)
        self.seconds = histogram("igeood_request_seconds", "Latency.", ["path"], buckets=LATENCIES, registry=registry)
        self.batches = histogram("igeood_batch_inputs", "Inputs of a batch.", buckets=SIZES, registry=registry)
        self.p_values = histogram("igeood_p_value", "p-values of inputs.", buckets=P_VALUES, registry=registry)
        self.scores = histogram("igeood_score", "Higher is more OOD.", buckets=edges[4:-1:4], registry=registry)
        self.info = prometheus.Info("igeood", "What is served.", registry=registry)
        for name, (what, read) in gauges.items():
            prometheus.Gauge(f"igeood_{name}", what, registry=registry).set_function(read)


class Recent:
    """Inputs of the last hour, in buckets of ten seconds, and the latest scores; of one calibration."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration.scores.numpy()
        threshold = calibration.threshold
        reach = max(2 * (threshold - float(np.median(self._calibration))), 1e-6 * max(1.0, abs(threshold)))
        low = min(float(self._calibration[0]), threshold - reach)
        self.edges: list[float] = np.linspace(low, threshold + reach, BINS + 1).tolist()
        self._buckets: deque[list[Any]] = deque(maxlen=BUCKETS)  # number, inputs, refused, unread, evidence
        self._scores: deque[float] = deque(maxlen=LATEST)

    def add(self, counts: Sequence[int], evidence: float, scores: Sequence[float]) -> None:
        """Count inputs, refused and unread ones in the bucket of this moment."""
        number = int(time.time()) // SECONDS
        if not self._buckets or self._buckets[-1][0] != number:
            self._buckets.append([number, 0, 0, 0, 0.0])
        bucket = self._buckets[-1]
        sums = [old + new for old, new in zip(bucket[1:4], counts, strict=True)]
        bucket[1:] = [*sums, max(bucket[4], evidence)]
        self._scores.extend(scores)

    def record(self) -> dict[str, Any]:
        """What the page shows: lists, the oldest bucket first."""
        start = int(time.time()) // SECONDS - BUCKETS + 1
        buckets = {bucket[0]: bucket[1:] for bucket in self._buckets}
        table = [buckets.get(number, (0, 0, 0, None)) for number in range(start, start + BUCKETS)]
        hour = dict(zip(("inputs", "ood", "unread", "evidence"), zip(*table, strict=True), strict=True))
        calibration = self._histogram(self._calibration) / len(self._calibration)
        latest = self._histogram([*self._scores])
        scores = {"edges": self.edges, "calibration": calibration.tolist(), "latest": latest.tolist()}
        return {"hour": {"seconds": SECONDS, "start": start * SECONDS, **hour}, "scores": scores}

    def _histogram(self, scores: Any) -> NDArray[np.int64]:
        """Counts of scores in the bins; the outer bins have what lies beyond."""
        return np.histogram(np.clip(scores, self.edges[0], self.edges[-1]), self.edges)[0]
