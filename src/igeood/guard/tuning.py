"""Choose temperature, input step and weights on validation data: those that refuse most OOD at a true-positive rate."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import Tensor

from igeood.detectors import Detector
from igeood.detectors.base import Samples
from igeood.detectors.weighted import FEWEST as FEWEST_OOD
from igeood.detectors.weighted import WeightSearch
from igeood.errors import InputError, MissingExtraError
from igeood.guard.inputs import ArrayInputs, ModelInputs
from igeood.metrics import evaluate
from igeood.model.step import Attack
from igeood.outputs import NO_KEYS, Keys, Outputs

Search = Literal["sweep", "bayes"]
Progress = Callable[[int, int], None]  # done, of how many

SWEEP_RANGE = (0.1, 1000.0)
SWEEP_POINTS = 33  # eight a decade
REFINEMENTS = 2
BAYES_RANGE = (1.0, 1000.0)  # this and the next two are the paper's
BAYES_TRIALS = 500
BAYES_SEEDS = 5
FEWEST_ID = 20  # 95% of fewer is all of them


@dataclass(frozen=True)
class Trial:
    """A temperature tried, with what it reached on the validation data."""

    temperature: float
    tnr: float
    auroc: float

    def rank(self) -> tuple[float, float, float]:
        """Order of preference: TNR, then AUROC, then nearness to 1."""
        return (self.tnr, self.auroc, -abs(math.log(self.temperature)))


@dataclass(frozen=True)
class TemperatureSearch:
    """Outcome of a search: the best trial, and all of them by temperature."""

    best: Trial
    trials: tuple[Trial, ...] = field(repr=False)


@dataclass(frozen=True)
class StepTrial:
    """A size of the input step tried, with the TNR it reached on the validation data."""

    epsilon: float
    tnr: float


@dataclass(frozen=True)
class Tuning:
    """What `Guard.tune` has chosen, on how many validation samples.

    Attributes
    ----------
    temperature : TemperatureSearch or None
        None for a method without temperature, and for a white box tuned on adversarial samples, which keeps its own.
    epsilon : float
        Size of the input step.
    steps : tuple of StepTrial
        All sizes that were tried.
    weights : WeightSearch or None
        None for a method without weights.
    attack : Attack or None
        What the adversarial samples did, where those were used.
    n_id, n_ood : int
        Validation samples used.
    before, after : float
        TNR on the validation samples before tuning, and now: of weights, in folds that had not learnt from them.
    """

    temperature: TemperatureSearch | None
    epsilon: float
    steps: tuple[StepTrial, ...]
    weights: WeightSearch | None
    attack: Attack | None
    n_id: int
    n_ood: int
    before: float
    after: float

    def __repr__(self) -> str:
        found = f"temperature {self.temperature.best.temperature:g}, " if self.temperature else ""
        learnt = "weights learnt, " if self.weights else ""
        return (
            f"Tuning({found}{learnt}epsilon {self.epsilon:g}: {100 * self.after:.1f}% of {self.n_ood} OOD samples "
            f"refused, {100 * self.before:.1f}% before; {self.n_id} in-distribution samples)"
        )


See = Callable[[Detector, Sequence[float]], tuple[list[Outputs], list[Outputs], Attack | None]]
Select = Callable[[Keys], Tensor]  # keys → which rows, (N,) bool


class Validation:
    """Samples to tune on: a share of the in-distribution ones, with OOD ones or with attacks on that share.

    Parameters
    ----------
    inputs : ArrayInputs or ModelInputs
        How they are read.
    id_data, ood
        As in `Guard.tune`; they may be read more than once.
    select : callable
        Which of the in-distribution samples to use, by their keys.
    attack : float
        Size of the adversarial step.
    """

    def __init__(
        self, inputs: ArrayInputs | ModelInputs, id_data: Any, ood: Any, select: Select, attack: float
    ) -> None:
        for name, source in (("id_data", id_data), ("ood", ood)):
            if isinstance(source, Iterator):
                raise InputError(f"{name}: is read more than once; give a loader or a list, not a generator")
        if isinstance(ood, str) and ood != "fgsm":
            raise InputError(f"ood: expected OOD samples, got {ood!r}; give an array or a loader, or 'fgsm'")
        self.inputs, self.id_data, self.ood, self.select, self.attack = inputs, id_data, ood, select, attack
        self.used: Keys = NO_KEYS  # keys of the in-distribution samples that `see` has read

    def see(self, detector: Detector, epsilons: Sequence[float]) -> tuple[list[Outputs], list[Outputs], Attack | None]:
        """Outputs of both kinds for each size of the input step, and what the attack did, if there was one."""
        keys, inside = self._read(self.id_data, "id_data", detector, epsilons, self.select)
        if len(self.used) and not np.array_equal(np.sort(keys), np.sort(self.used)):
            raise InputError("id_data: has other samples each time it is read; leave random augmentation out of it")
        self.used = keys
        if isinstance(self.ood, str):
            return inside, *self._attacked(detector, epsilons)
        keys, outside = self._read(self.ood, "ood", detector, epsilons, None)
        shared = int(np.isin(keys, self.used).sum())
        if shared:
            raise InputError(
                f"ood: {shared} of {len(keys)} samples are among the in-distribution ones too; remove them"
            )
        return inside, outside, None

    def _chosen(self, source: Any, name: str, select: Select | None) -> Iterator[tuple[int, Any, Keys]]:
        batches: Iterator[Any] = self.inputs.batches(source, name)
        for number, batch in enumerate(batches):
            keys = self.inputs.keys(batch)
            rows = None if select is None else select(keys)
            chosen = batch if rows is None else batch[rows]
            if len(chosen):
                yield number, chosen, keys if rows is None else keys[rows.numpy()]

    def _read(
        self, source: Any, name: str, detector: Detector, epsilons: Sequence[float], select: Select | None
    ) -> tuple[Keys, list[Outputs]]:
        keys, parts = [NO_KEYS], []
        for number, batch, batch_keys in self._chosen(source, name, select):
            with self.inputs.at(name, number):
                parts.append(self.inputs.stepped(batch, detector, epsilons)[1])
            keys.append(batch_keys)
        return np.concatenate(keys), [Outputs.concat(column) for column in zip(*parts, strict=True)]

    def _attacked(self, detector: Detector, epsilons: Sequence[float]) -> tuple[list[Outputs], Attack]:
        parts, reports = [], []
        for _, batch, _ in self._chosen(self.id_data, "id_data", self.select):
            outputs, report = self.inputs.attacked(batch, detector, self.attack, epsilons)
            parts.append(outputs)
            reports.append(report)
        if not parts:
            raise InputError("id_data: no sample to attack; give more, or a larger share")
        n = sum(report.samples for report in reports)
        linf, accuracy = (sum(r.samples * getattr(r, name) for r in reports) / n for name in ("linf", "accuracy"))
        return [Outputs.concat(column) for column in zip(*parts, strict=True)], Attack(n, linf, accuracy)


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A detector ready to score at a size of the step, and the TNR that it reaches."""

    detector: Detector
    epsilon: float
    tnr: float
    weights: WeightSearch | None
    steps: tuple[StepTrial, ...]


def tune_detector(
    detector: Detector,
    samples: Samples,
    see: See,
    epsilons: Sequence[float] = (0.0,),
    *,
    epsilon: float = 0.0,
    tpr: float = 0.95,
    search: Search = "sweep",
    seed: int = 0,
    trials: int = BAYES_TRIALS,
    progress: Progress | None = None,
) -> tuple[Detector, Tuning]:
    """Choose temperature, then input step and weights together, on validation samples.

    Weights are learnt at the temperature that was found for the output, and at the one before: it may be the better
    one for all columns together. Where nothing is better than before, it stays as it was.

    Parameters
    ----------
    detector : Detector
        Fitted; it is not changed.
    samples : mapping of str to Sample
        `Summary.samples` of the training data, to learn centroids at other temperatures.
    see : callable
        Returns validation outputs of both kinds for each size of the input step, and what an attack did.
    epsilons : sequence of float
        Sizes of the step to try.
    epsilon : float
        Its size before.
    tpr, search, seed, trials, progress
        As in `tune_temperature`; the seed is that of the regression's folds too.

    Returns
    -------
    Detector
        Tuned.
    Tuning
        What was found.
    """
    inside, outside, attack = see(detector, (0.0, epsilon) if epsilon else (0.0,))
    _check_enough(inside, outside)
    clean, start = (inside[0], outside[0]), (inside[-1], outside[-1])  # start: as they are judged before tuning
    before = _rate(detector, start, tpr)
    temperature, candidates, part = None, [detector], detector.softmax_part
    if part is not detector and attack is not None:
        part = None  # adversarial samples are made to fool the output: they say nothing of its temperature
    if part is not None:
        temperature = tune_temperature(
            part, samples, *clean, tpr=tpr, search=search, seed=seed, trials=trials, progress=progress
        )
        candidates = [detector.at_temperature(temperature.best.temperature, samples)]
        candidates += [detector] if part is not detector else []
    tried = [_candidate(each, see, clean, epsilons, tpr, seed) for each in candidates]
    best = max(tried, key=lambda candidate: candidate.tnr)  # of equals, the temperature that was found
    if before > best.tnr + 1e-9:  # the mean over folds may be rounded
        best = _Candidate(detector, epsilon, before, None, best.steps)
    if temperature is not None and part is not None:
        temperature = _as_chosen(temperature, best.detector, part, clean, tpr)
    n_id, n_ood = map(len, clean)
    return best.detector, Tuning(
        temperature, best.epsilon, best.steps, best.weights, attack, n_id, n_ood, before, best.tnr
    )


def _rate(detector: Detector, pair: tuple[Outputs, Outputs], tpr: float) -> float:
    return evaluate(detector.score(pair[0]), detector.score(pair[1]), tpr).tnr_at_tpr


def _candidate(
    detector: Detector, see: See, clean: tuple[Outputs, Outputs], epsilons: Sequence[float], tpr: float, seed: int
) -> _Candidate:
    """The detector at the best size of its step, its weights learnt there where it has any."""
    inside, outside = ([part] for part in clean)
    if any(epsilons):
        inside, outside, _ = see(detector, epsilons)
    finished = [_finish(detector, pair, tpr, seed) for pair in zip(inside, outside, strict=True)]
    steps = tuple(StepTrial(epsilon, tnr) for epsilon, (_, tnr, _) in zip(epsilons, finished, strict=True))
    best = max(range(len(steps)), key=lambda i: (steps[i].tnr, -epsilons[i]))  # of equals, the smallest step
    ready, tnr, weights = finished[best]
    return _Candidate(ready, float(epsilons[best]), tnr, weights, steps)


def _as_chosen(
    search: TemperatureSearch, chosen: Detector, first: Detector, clean: tuple[Outputs, Outputs], tpr: float
) -> TemperatureSearch:
    """The search with the temperature that was taken as its best, be it the one before."""
    temperature = float(chosen.params().get("temperature", search.best.temperature))
    if temperature == search.best.temperature:
        return search
    rates = evaluate(first.score(clean[0]), first.score(clean[1]), tpr)
    return TemperatureSearch(Trial(temperature, rates.tnr_at_tpr, rates.auroc), search.trials)


def _finish(
    detector: Detector, pair: tuple[Outputs, Outputs], tpr: float, seed: int
) -> tuple[Detector, float, WeightSearch | None]:
    """The detector with its weights learnt, where it has any, and the TNR that it reaches."""
    ready = copy.copy(detector)
    weights: WeightSearch | None = ready.learn_weights(*pair, tpr=tpr, seed=seed)
    return ready, _rate(detector, pair, tpr) if weights is None else weights.tnr, weights


def _check_enough(inside: list[Outputs], outside: list[Outputs]) -> None:
    for name, parts, needed in (("id_data", inside, FEWEST_ID), ("ood", outside, FEWEST_OOD)):
        n = len(parts[0]) if parts else 0
        if n < needed:
            share = " in the share that tune uses" if name == "id_data" else ""
            raise InputError(f"{name}: {n} samples{share}; tuning needs at least {needed}")


def tune_temperature(
    detector: Detector,
    samples: Samples,
    id_validation: Outputs,
    ood_validation: Outputs,
    *,
    tpr: float = 0.95,
    search: Search = "sweep",
    seed: int = 0,
    trials: int = BAYES_TRIALS,
    progress: Progress | None = None,
) -> TemperatureSearch:
    """Find the temperature with the highest TNR at `tpr` on validation samples.

    Parameters
    ----------
    detector : Detector
        Fitted; tells the method and its other options, and is not changed.
    samples : mapping of str to Sample
        `Summary.samples` of the training data: a part of it is learnt from at each temperature.
    id_validation, ood_validation : Outputs
        Validation samples. Report results on others.
    tpr : float
        The operating point.
    search : {"sweep", "bayes"}
        A logarithmic sweep over [0.1, 1000] refined around its best, the same every time; or the paper's Bayesian
        optimisation over [1, 1000], best of 5 seeds (needs the extra `tune`).
    seed : int
        First seed of the Bayesian search; the sweep has no randomness.
    trials : int
        For each seed of the Bayesian search.
    progress : callable, optional
        Called with the number of trials done and their total.

    Returns
    -------
    TemperatureSearch
        The best trial and all others.
    """
    for name, outputs in (("id_validation", id_validation), ("ood_validation", ood_validation)):
        if len(outputs) == 0:
            raise InputError(f"{name}: empty; give validation samples of both kinds")
    detector.check_fitted()
    latest = detector

    def attempt(temperature: float) -> Trial:
        nonlocal latest
        latest = detector.at_temperature(temperature, samples, latest)  # each fit starts at its neighbour's solution
        rates = evaluate(latest.score(id_validation), latest.score(ood_validation), tpr)
        return Trial(temperature, rates.tnr_at_tpr, rates.auroc)

    if search == "sweep":
        tried = _sweep(attempt, progress)
    elif search == "bayes":
        tried = _bayes(attempt, seed, trials, progress)
    else:
        raise InputError(f"search: expected 'sweep' or 'bayes', got {search!r}")
    return TemperatureSearch(max(tried, key=Trial.rank), tuple(sorted(tried, key=lambda t: t.temperature)))


def _sweep(attempt: Callable[[float], Trial], progress: Progress | None) -> list[Trial]:
    """A logarithmic grid, then twice a finer one between the best point's neighbours."""
    total = SWEEP_POINTS + 8 * REFINEMENTS
    grid = np.geomspace(*reversed(SWEEP_RANGE), SWEEP_POINTS)  # downwards: a fit at 1000 can start anywhere
    tried: dict[float, Trial] = {}
    for _ in range(REFINEMENTS + 1):
        for point in grid:
            temperature = float(f"{point:.6g}")  # a number that can be read and typed again
            if temperature not in tried:
                tried[temperature] = attempt(temperature)
            if progress:
                progress(min(len(tried), total), total)
        known = sorted(tried)
        at = known.index(max(tried.values(), key=Trial.rank).temperature)
        grid = np.geomspace(known[max(at - 1, 0)], known[min(at + 1, len(known) - 1)], 11)[1:-1]
    if progress:
        progress(total, total)
    return list(tried.values())


def _bayes(attempt: Callable[[float], Trial], seed: int, trials: int, progress: Progress | None) -> list[Trial]:
    """The paper's search: tree-structured Parzen estimators in log T, once for each seed."""
    if trials < 1:
        raise InputError(f"trials: must be at least 1, got {trials}")
    try:
        import optuna  # noqa: PLC0415 (an extra, and slow to import)
    except ImportError as error:
        raise MissingExtraError("search: 'bayes' needs optuna; pip install 'igeood[tune]'") from error
    tried: list[Trial] = []

    def objective(trial: Any) -> float:
        tried.append(attempt(trial.suggest_float("temperature", *BAYES_RANGE, log=True)))
        if progress:
            progress(len(tried), trials * BAYES_SEEDS)
        return tried[-1].tnr

    with _quiet(optuna):
        for number in range(BAYES_SEEDS):
            study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed + number))
            study.optimize(objective, n_trials=trials)
    return tried


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)
