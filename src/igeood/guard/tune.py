"""Choose temperature, input step and weights on validation data: those that refuse most OOD at a true-positive rate."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from igeood.detectors import Detector
from igeood.detectors.weighted import FEWEST as FEWEST_OOD
from igeood.errors import InputError
from igeood.geometry.precision import precise
from igeood.guard.identity import Seen, draw, fingerprint, occurrences
from igeood.guard.source import Source
from igeood.keys import Keys
from igeood.metrics import evaluate
from igeood.outputs import Outputs
from igeood.summary import Summary

Attempt = Callable[[float], float]  # a temperature to the TNR that it reaches
Search = Callable[[Attempt, "Trials", int], None]  # tries temperatures; gets the trials so far, and the OOD samples
Progress = Callable[[int, int], None]  # done, of how many
Trial = dict[str, float]  # what was tried, with the TNR and AUROC that it reached on the validation data
Trials = list[Trial]
Read = Callable[[Detector, Sequence[float]], tuple[list[Outputs], list[Outputs]]]

SWEEP_RANGE = (0.1, 1000.0)
SWEEP_POINTS = 33  # eight a decade
REFINEMENTS = 2
REFINED_POINTS = 8  # an even number: none of them is the best point itself
FEWEST = {"id_data": 20, "ood": FEWEST_OOD}  # 95% of fewer than 20 is all of them


@dataclass(frozen=True)
class Tuning:
    """What `Guard.tune` has chosen, on how many validation samples.

    Attributes
    ----------
    temperature : float or None
        None for a method without temperature, and where none was sought.
    epsilon : float
        Size of the input step.
    strength : float or None
        Inverse regularisation strength of the weights; None where none were learnt.
    n_id, n_ood : int
        Validation samples used.
    before, after : float
        TNR on the validation samples before tuning, and now: of weights, in folds that had not learnt from them.
    auroc : float
        AUROC on the validation samples: now, or before tuning where weights were learnt, which may turn a score round.
    trials : list of dict
        Temperatures that were tried, in order, each with its `temperature`, `tnr` and `auroc`.
    steps : list of dict
        Sizes of the input step that were tried, each with its `epsilon`, `tnr` and `auroc`; twice, where two
        temperatures were.
    """

    temperature: float | None
    epsilon: float
    strength: float | None
    n_id: int
    n_ood: int
    before: float
    after: float
    auroc: float
    trials: Trials = field(repr=False)
    steps: Trials = field(repr=False)


class Validation:
    """Samples to tune on: a share of the in-distribution ones, and OOD ones. They are read once for each detector.

    Parameters
    ----------
    source : Source
        Reads them.
    id_data, ood, ids
        As in `Guard.tune`; they may be read more than once.
    share, seed
        Of the in-distribution samples.
    budget : int
        Bytes of clean outputs to hold; of more samples a seeded part is used: a half, a quarter and so on of each set.
    """

    def __init__(
        self, source: Source, id_data: Any, ood: Any, ids: Any, *, share: float, seed: int, budget: int
    ) -> None:
        for name, data in (("id_data", id_data), ("ood", ood)):
            if data is None or isinstance(data, (str, Iterator)):
                raise InputError(f"got {type(data).__name__}", argument=name, cure="give an array, a loader or a list")
        if not 0.0 < share <= 1.0:
            raise InputError(f"must lie in (0, 1], got {share!r}", argument="share")
        self.source = source
        self.data = {"id_data": (id_data, ids, share), "ood": (ood, None, 1.0)}
        self.seed = seed
        self.limit = max(1, budget // 2)
        self.used = Seen()  # the in-distribution samples that `read` has used
        self.halved: list[str] = []  # the sets of which the budget holds a part

    def read(self, detector: Detector, epsilons: Sequence[float]) -> tuple[list[Outputs], list[Outputs]]:
        """In-distribution and OOD outputs for each size of the input step."""
        id_seen, id_outputs = self._read("id_data", detector, epsilons)
        if len(self.used.keys) and not np.array_equal(id_seen.keys, self.used.keys):
            raise InputError("other samples at each reading", argument="id_data", cure="leave random augmentation out")
        self.used = id_seen
        ood_seen, ood_outputs = self._read("ood", detector, epsilons)
        shared = int(id_seen.among(ood_seen.keys, ood_seen.identified).sum())
        by_chance = 0 if ood_seen.identified else len(ood_seen.keys) // 10  # rows without ids may be equal
        if shared > by_chance:
            raise InputError(f"{shared} of them are in-distribution samples", argument="ood", cure="remove them")
        for name, outputs in (("id_data", id_outputs), ("ood", ood_outputs)):
            n = len(outputs[0]) if outputs else 0
            if n < FEWEST[name]:
                where = " in the share that tune uses" if name == "id_data" else ""
                raise InputError(f"{n} samples{where}; tuning needs {FEWEST[name]} at least", argument=name)
        return id_outputs, [outputs.replace(labels=None) for outputs in ood_outputs]  # their labels mean nothing here

    def _read(self, name: str, detector: Detector, epsilons: Sequence[float]) -> tuple[Seen, list[Outputs]]:
        """The samples to use, and their outputs for each size of the step.

        A sample is used if its own uniform number is below the share, which is halved when they are too many.
        """
        data, ids, share = self.data[name]
        whole = np.empty(0, dtype=np.uint64)  # all keys of rows without ids, which may be equal
        identified = True
        parts: list[tuple[Keys, NDArray[np.float64], list[Outputs]]] = []
        for number, item in enumerate(self.source.items(data, None, ids, name, keys=True)):
            with self.source.naming(name, number):
                keys = self.source.read(item).keys if isinstance(item, Outputs) else item.keys
                copies = np.zeros(len(keys), dtype=np.int64)
                if isinstance(item, Outputs) and not item.identified:
                    identified = False
                    copies = occurrences(keys, whole)
                    whole = np.append(whole, keys)
                numbers = draw(keys, copies, self.seed)
                rows = numbers < share
                if rows.any():
                    outputs = self.source.step(item[torch.from_numpy(rows)], detector, epsilons)
                    parts.append((keys[rows], numbers[rows], outputs))
            while sum(outputs[0].nbytes for _, _, outputs in parts) > self.limit:  # however many sizes of the step
                share /= 2.0
                parts = [_below(share, *part) for part in parts]
                self.halved = [*dict.fromkeys([*self.halved, name])]
        used = np.sort(np.concatenate([np.empty(0, np.uint64), *(keys for keys, _, _ in parts)]))
        columns = zip(*(outputs for _, _, outputs in parts), strict=True)
        return Seen(used, identified, None if identified else fingerprint(whole)), [*map(Outputs.concat, columns)]


def _below(
    share: float, keys: Keys, numbers: NDArray[np.float64], outputs: list[Outputs]
) -> tuple[Keys, NDArray[np.float64], list[Outputs]]:
    """The samples whose numbers are below the share."""
    rows = numbers < share
    return keys[rows], numbers[rows], [each[torch.from_numpy(rows)] for each in outputs]


def tune_detector(
    detector: Detector,
    summary: Summary | None,
    read: Read,
    epsilons: Sequence[float],
    *,
    epsilon: float,
    tpr: float,
    search: Search | None,
    seed: int,
    progress: Progress | None,
) -> tuple[Detector, Tuning]:
    """Choose temperature, then input step and weights together, on validation samples.

    Weights are learnt at the temperature that was found for the output, and at the one before: it may be the better
    one for all terms together. Where everything is worse than before, it stays as it was.

    Parameters
    ----------
    detector : Detector
        Fitted; it is not changed.
    summary : Summary, optional
        Of the training data, to learn centroids at other temperatures.
    read : callable
        Gives in-distribution and OOD outputs for each size of the step, such as `Validation.read`.
    epsilons : sequence of float
        Sizes of the step to try; `epsilon` is its size before.
    tpr, search, seed, progress
        As in `Guard.tune`.
    """
    id_outputs, ood_outputs = read(detector, (0.0, epsilon) if epsilon else (0.0,))
    clean = (id_outputs[0], ood_outputs[0])
    n_ood = len(clean[1])
    trials: Trials = []
    candidates = [detector]
    with precise():
        first = _rates(detector, id_outputs[-1], ood_outputs[-1], tpr)
        if detector.softmax is not None and search is not None:
            is_whole = detector.softmax is detector
            trials = search_temperature(detector.softmax, summary, clean, search, tpr=tpr, progress=progress)
            least = first["tnr"] if is_whole and not epsilon else 0.0
            tempered = detector.at_temperature(best(trials, n_ood, least)["temperature"], summary)
            candidates = [tempered] if is_whole else [tempered, detector]
    tried = []
    for candidate in candidates:
        pairs = zip(*read(candidate, epsilons), strict=True) if any(epsilons) else [clean] * len(epsilons)
        with precise():
            for size, pair in zip(epsilons, pairs, strict=True):
                tried.append(_attempt(candidate, pair, float(size), tpr, seed))
    steps = [step for _, _, step in tried]
    chosen = best(steps, n_ood, first["tnr"])
    tuned, strength, _ = tried[steps.index(chosen)]
    if first["tnr"] > chosen["tnr"] + 1e-9:  # the mean over folds may be rounded
        tuned = detector
        strength = None
        chosen = {"epsilon": epsilon, **first}
    return tuned, Tuning(
        temperature=tuned.params()["temperature"] if trials else None,
        epsilon=chosen["epsilon"],
        strength=strength,
        n_id=len(clean[0]),
        n_ood=n_ood,
        before=first["tnr"],
        after=chosen["tnr"],
        auroc=(chosen if strength is None else first)["auroc"],
        trials=trials,
        steps=steps,
    )


def _attempt(
    candidate: Detector, pair: tuple[Outputs, Outputs], epsilon: float, tpr: float, seed: int
) -> tuple[Detector, float | None, Trial]:
    """A copy with weights for one size of the step, where it has any; their strength; and its rates."""
    ready = copy.copy(candidate)
    weights = ready.learn_weights(*pair, tpr=tpr, seed=seed)
    if weights is None:
        return ready, None, {"epsilon": epsilon, **_rates(candidate, *pair, tpr)}
    return ready, weights.strength, {"epsilon": epsilon, "tnr": weights.tnr, "auroc": weights.auroc}


def _rates(detector: Detector, id_outputs: Outputs, ood_outputs: Outputs, tpr: float) -> Trial:
    rates = evaluate(detector.score(id_outputs), detector.score(ood_outputs), tpr)
    return {"tnr": rates.tnr_at_tpr, "auroc": rates.auroc}


def best(trials: Sequence[Trial], n_ood: int, least: float = 0.0) -> Trial:
    """The trial to prefer: of those whose TNR is the highest but for one OOD sample, the one with the highest AUROC.

    A single sample tells nothing of others, AUROC is of them all. Of equals, the higher TNR; then the smallest input
    step, or the temperature nearest to 1; then the first. None with a lower TNR than `least` is preferred to one that
    reaches it.
    """
    highest = max(trial["tnr"] for trial in trials)
    enough = max(highest - 1.0 / n_ood, min(least, highest)) - 1e-9  # the mean over folds may be rounded

    def preference(trial: Trial) -> tuple[float, float, float]:
        size = trial["epsilon"] if "epsilon" in trial else abs(math.log(trial["temperature"]))
        return (trial["auroc"], trial["tnr"], -size)

    return max((trial for trial in trials if trial["tnr"] >= enough), key=preference)


def search_temperature(
    detector: Detector,
    summary: Summary | None,
    validation: tuple[Outputs, Outputs],
    search: Search,
    *,
    tpr: float = 0.95,
    progress: Progress | None = None,
) -> Trials:
    """TNR and AUROC at the temperatures that a search tries, by temperature; `best` says which to take.

    Parameters
    ----------
    detector : Detector
        Fitted; tells the method and its other options, and is not changed.
    summary : Summary
        Of the training data: a part of its sample is learnt from at each temperature.
    validation : pair of Outputs
        In-distribution and OOD samples. Report results on others.
    search : callable
        Such as `sweep`.
    tpr, progress
        As in `Guard.tune`.
    """
    trials: Trials = []
    latest = detector

    def attempt(temperature: float) -> float:
        nonlocal latest
        latest = detector.at_temperature(temperature, summary, latest)  # each fit starts at its neighbour's solution
        trials.append({"temperature": temperature, **_rates(latest, *validation, tpr)})
        if progress:
            progress(len(trials), max(len(trials), SWEEP_POINTS + REFINEMENTS * REFINED_POINTS))
        return trials[-1]["tnr"]

    search(attempt, trials, len(validation[1]))
    return sorted(trials, key=lambda trial: trial["temperature"])


def sweep(attempt: Attempt, trials: Trials, n_ood: int) -> None:
    """Try a logarithmic grid over [0.1, 1000], then twice a finer one between the best point's neighbours."""
    grid = np.geomspace(*SWEEP_RANGE, SWEEP_POINTS)[::-1]  # downwards: a fit at 1000 can start anywhere
    for _ in range(REFINEMENTS + 1):
        for point in grid:
            attempt(float(f"{point:.6g}"))  # a number that can be read and typed again
        tried = sorted(trial["temperature"] for trial in trials)
        at = tried.index(best(trials, n_ood)["temperature"])
        low = tried[max(at - 1, 0)]
        high = tried[min(at + 1, len(tried) - 1)]
        grid = np.geomspace(low, high, REFINED_POINTS + 2)[1:-1]
