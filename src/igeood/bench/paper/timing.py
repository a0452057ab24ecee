"""The paper's table of times, measured anew on this machine from the kept outputs of a benchmark."""

import time
from collections.abc import Callable
from statistics import median

import torch

from igeood.bench.networks.tasks import normalised
from igeood.bench.paper import reported
from igeood.bench.paper.plots import kept
from igeood.bench.paper.tables import MISSING, NETWORK, Table, rows_of
from igeood.bench.runs.averages import Averages, Key
from igeood.bench.runs.network import Network
from igeood.detectors import detector
from igeood.outputs import Outputs

LABEL = "tab:time_analysis"
RUNS = 5  # as in the paper
COLUMNS = {  # of the paper's table: metric and method
    "logits of the training set": ("train_logits_seconds", ""),
    "centroids": ("centroid_seconds", "igeood-logits"),
    "network, an image": ("inference_seconds", ""),
    "MSP, an image": ("score_seconds", "msp"),
    "IGEOOD, an image": ("score_seconds", "igeood-logits"),
}


def timing(ours: Averages, networks: list[Network]) -> list[Table]:
    """Seconds of the network, the centroids and the scores; the network's own only if it was given."""
    lines = dict(zip(ours.classifiers(), ours.networks, strict=True))
    rows = []
    for key in rows_of(ours, LABEL):
        train, test = (kept(ours, lines[key], part) if key in lines else None for part in ("train", "test"))
        model = next((network for network in networks if network.weights == key.weights), None)
        seconds = _seconds_of(model, train, test)
        cells = [_cell(seconds.get(column), key, *names) for column, names in COLUMNS.items()]
        rows.append([str(key), *cells, MISSING if train is None else f"{len(train):,}"])
    note = (
        f"Median of {RUNS} runs on this machine's CPU, in batches; the paper's on one GPU, 50,000 training images. "
        "The logits' time is the network's for one image times their number."
    )
    return [Table(LABEL, "times", [NETWORK, *COLUMNS, "training images"], rows, [note])]


def _seconds_of(network: Network | None, train: Outputs | None, test: Outputs | None) -> dict[str, float]:
    """Seconds by column, as far as there is something to measure."""
    whole, centroids, inference, *each = COLUMNS
    seconds: dict[str, float] = {}
    if network is not None:
        x = normalised(torch.zeros(100, 3, 32, 32), network.mean, network.std)
        with torch.inference_mode():
            seconds[inference] = _seconds(lambda: network.model(x)) / len(x)
        seconds |= {} if train is None else {whole: seconds[inference] * len(train)}
    if train is not None and test is not None:
        for column in each:
            scorer = detector(COLUMNS[column][1]).fit(train)
            seconds[column] = _seconds(lambda scorer=scorer: scorer.score(test)) / len(test)  # type: ignore[misc]
        seconds[centroids] = _seconds(lambda: detector(COLUMNS[centroids][1]).fit(train))
    return seconds


def _seconds(work: Callable[[], object]) -> float:
    def once() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return median(once() for _ in range(RUNS))


def _cell(seconds: float | None, key: Key, metric: str, method: str) -> str:
    ours, paper = _text(seconds), reported.first(label=LABEL, metric=metric, method=method, **key.paper)
    return ours if paper is None else f"{ours} ({_text(paper)})"


def _text(seconds: float | None) -> str:
    if seconds is None:
        return MISSING
    factor, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    return f"{seconds * factor:.3g} {unit}"
