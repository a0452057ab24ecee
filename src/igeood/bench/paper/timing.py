"""The paper's table of times, measured anew on this machine from the kept outputs of a benchmark."""

import timeit
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from igeood.bench.paper import reported
from igeood.bench.paper.layers import kept
from igeood.bench.paper.table import Table, by_network, pair
from igeood.bench.runs.averages import Averages, Key
from igeood.bench.runs.network import Network
from igeood.detectors import detector
from igeood.images import normalised

LABEL = "tab:time_analysis"
RUNS = 5  # of what takes seconds, as in the paper
CALLS = 300  # of one sample
TRAIN = 50_000  # images of the paper's training sets
COLUMNS = {  # of the paper's table: metric and method
    "logits of the training set": ("train_logits_seconds", ""),
    "centroids": ("centroid_seconds", "igeood-logits"),
    "network, one image": ("inference_seconds", ""),
    "MSP, one image": ("score_seconds", "msp"),
    "IGEOOD, one image": ("score_seconds", "igeood-logits"),
}


def timing(ours: Averages, networks: Sequence[Network]) -> list[Table]:
    """Seconds of the network, the centroids and the scores; the network's own only if it was given."""
    seconds = {key: _seconds_of(ours, key, networks) for key in ours.classifiers()}
    note = f"On this machine's CPU: one image at a time, the median of {CALLS} calls; centroids, of {RUNS} runs. The "
    note += f"training set's logits are timed on a batch of 100 images, for {TRAIN:,} as in the paper; centroids are "
    note += (
        "of the training images of the results. The paper's are on one GPU. Ours need `--results`, with kept outputs, "
    )
    note += "and `--network`."

    def cell(metric: str, method: str, key: Key) -> str:
        mine = seconds.get(key, {}).get(metric + method)
        paper = reported.number(label=LABEL, metric=metric, method=method, **key.paper)
        return pair(None if mine is None else (mine, None), paper, _text)

    return [by_network(ours, LABEL, "times", {name: partial(cell, *column) for name, column in COLUMNS.items()}, note)]


def _seconds_of(ours: Averages, key: Key, networks: Sequence[Network]) -> dict[str, float]:
    """Seconds by metric and method, as far as there is something to measure."""
    line = next(line for line in ours.networks if line["weights"] == key.weights)
    train, test = (kept(ours, line, part) for part in ("train", "test"))
    seconds: dict[str, float] = {}
    for network in [each for each in networks if each.weights == key.weights]:
        x = normalised(torch.zeros(100, 3, network.size, network.size), network.mean, network.std)
        with torch.inference_mode():
            seconds["inference_seconds"] = _seconds(partial(network.model, x[:1]), CALLS)
            seconds["train_logits_seconds"] = _seconds(partial(network.model, x)) / len(x) * TRAIN
    if train is not None and test is not None:
        for method in ("msp", "igeood-logits"):
            scorer = detector(method).fit(train)
            seconds[f"centroid_seconds{method}"] = _seconds(partial(detector(method).fit, train))
            seconds[f"score_seconds{method}"] = _seconds(partial(scorer.score, test[:1]), CALLS)
    return seconds


def _seconds(work: Callable[[], object], runs: int = RUNS) -> float:
    return median(timeit.repeat(work, number=1, repeat=runs))


def _text(seconds: float) -> str:
    factor, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    return f"{seconds * factor:.3g} {unit}"
