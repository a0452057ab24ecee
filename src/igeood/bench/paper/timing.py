"""The paper's table of times, measured anew on this machine from the kept outputs of a benchmark."""

import time
from collections.abc import Callable
from statistics import median

import torch

from igeood.benchmark.network import Network
from igeood.benchmark.summary import Summary
from igeood.detectors import detector
from igeood.networks.training import normalised
from igeood.outputs import Outputs
from igeood.paper import reported
from igeood.paper.plots import kept
from igeood.paper.tables import MISSING, Table, rows_of

RUNS = 5  # as in the paper


def timing(ours: Summary, networks: list[Network]) -> list[Table]:
    """Seconds of the network, the centroids and the scores; the network's own only if it was given."""
    label, rows = "tab:time_analysis", []
    mine = dict(zip(ours.classifiers(), ours.networks, strict=True))
    for key in rows_of(ours, label):
        line = mine.get(key, {"weights": "", "data": {}})
        train, test = (kept(ours, line, part) if key.weights else None for part in ("train", "test"))
        model = next((n for n in networks if n.weights == line["weights"]), None)
        theirs = {"label": label, **key.paper}
        inference = None if model is None else _inference(model)
        scores: list[tuple[float | None, float | None]] = [(None, None)] * 2
        if train is not None and test is not None:
            scores = [_score(method, train, test) for method in ("msp", "igeood-logits")]
        whole = None if inference is None or train is None else inference * len(train)
        row = [
            str(key),
            _cell(whole, theirs, "train_logits_seconds", ""),
            _cell(scores[1][0], theirs, "centroid_seconds", "igeood-logits"),
            _cell(inference, theirs, "inference_seconds", ""),
            _cell(scores[0][1], theirs, "score_seconds", "msp"),
            _cell(scores[1][1], theirs, "score_seconds", "igeood-logits"),
        ]
        rows.append([*row, MISSING if train is None else f"{len(train):,}"])
    columns = ["logits of the training set", "centroids", "network, an image", "MSP, an image", "IGEOOD, an image"]
    header = ["network, in-distribution", *columns, "training images"]
    note = (
        f"Median of {RUNS} runs on this machine's CPU, in batches; the paper's on one GPU, 50,000 training images. "
        "The logits' time is the network's for one image times their number."
    )
    return [Table(label, "times", header, rows, [note])]


def _score(method: str, train: Outputs, test: Outputs) -> tuple[float, float]:
    """Seconds of fitting, and of scoring an image."""
    made = detector(method).fit(train)
    return _seconds(lambda: detector(method).fit(train)), _seconds(lambda: made.score(test)) / len(test)


def _inference(network: Network) -> float:
    """Seconds of the network for an image, in a batch of 100."""
    x = normalised(torch.zeros(100, 3, 32, 32), network.mean, network.std)
    with torch.inference_mode():
        return _seconds(lambda: network.model(x)) / len(x)


def _seconds(work: Callable[[], object]) -> float:
    def once() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return median(once() for _ in range(RUNS))


def _cell(seconds: float | None, theirs: dict[str, str], metric: str, method: str) -> str:
    ours, paper = _text(seconds), reported.first(**theirs, metric=metric, method=method)
    return ours if paper is None else f"{ours} ({_text(paper)})"


def _text(seconds: float | None) -> str:
    if seconds is None:
        return MISSING
    factor, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    return f"{seconds * factor:.3g} {unit}"
