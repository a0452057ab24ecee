"""Choose temperature, input step and weights on validation data: those that refuse most OOD at a true-positive rate."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from igeood.detectors import Detector, Ensemble
from igeood.detectors.ensemble import FEWEST as FEWEST_OOD
from igeood.detectors.ensemble import WeightSearch
from igeood.errors import InputError, MissingExtraError
from igeood.metrics import evaluate
from igeood.outputs import Outputs
from igeood.perturbation import Attack

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
    """What `Guard.tune` found, on how many validation samples.

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


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A detector ready to score at a size of the step, and the TNR that it reaches."""

    detector: Detector
    epsilon: float
    tnr: float
    weights: WeightSearch | None
    steps: tuple[StepTrial, ...]


def tune_guard(
    detector: Detector,
    train: Outputs,
    see: See,
    epsilons: Sequence[float],
    *,
    epsilon: float,
    tpr: float,
    search: Search,
    seed: int,
    trials: int,
    progress: Progress | None,
) -> tuple[Detector, Tuning]:
    """Choose temperature, then input step and weights together, on validation samples.

    Weights are learnt at the temperature that was found for the output, and at the one before: it may be the better
    one for all columns together. Where nothing is better than before, it stays as it was.

    Parameters
    ----------
    detector : Detector
        Fitted; it is not changed.
    train : Outputs
        Training logits, to refit centroids with.
    see : callable
        Gives validation outputs of both kinds for each size of the input step, and what an attack did.
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
    pair, start = (inside[0], outside[0]), (inside[-1], outside[-1])  # clean, and as they are judged before tuning
    before = evaluate(detector.score(start[0]), detector.score(start[1]), tpr).tnr_at_tpr
    temperature, tried = None, [detector]
    softmax_part = detector.output_ if isinstance(detector, Ensemble) else detector
    if isinstance(detector, Ensemble) and attack is not None:
        softmax_part = None  # adversarial samples are made to fool the output: they tell nothing of its temperature
    if softmax_part is not None:
        options: dict[str, Any] = {"tpr": tpr, "search": search, "seed": seed, "trials": trials, "progress": progress}
        temperature = tune_temperature(softmax_part, train, *pair, **options)
        tried = [detector.at_temperature(temperature.best.temperature, train)]
        tried += [detector] if isinstance(detector, Ensemble) else []
    made = [_candidate(each, see, pair, epsilons, tpr, seed) for each in tried]
    best = max(made, key=lambda c: c.tnr)  # of equals, the temperature that was found
    if before > best.tnr:
        best = _Candidate(detector, epsilon, before, None, best.steps)
    if temperature is not None and softmax_part is not None:
        temperature = _as_chosen(temperature, best.detector, softmax_part, pair, tpr)
    n_id, n_ood = map(len, pair)
    return best.detector, Tuning(
        temperature, best.epsilon, best.steps, best.weights, attack, n_id, n_ood, before, best.tnr
    )


def _candidate(
    detector: Detector, see: See, pair: tuple[Outputs, Outputs], epsilons: Sequence[float], tpr: float, seed: int
) -> _Candidate:
    """The detector at the best size of its step, its weights learnt there where it has any."""
    inside, outside = ([part] for part in pair)
    if any(epsilons):
        inside, outside, _ = see(detector, epsilons)
    found = [_finish(detector, *both, tpr, seed) for both in zip(inside, outside, strict=True)]
    steps = tuple(StepTrial(epsilon, tnr) for epsilon, (_, tnr, _) in zip(epsilons, found, strict=True))
    best = max(range(len(steps)), key=lambda i: (steps[i].tnr, -epsilons[i]))  # of equals, the smallest step
    made, tnr, weights = found[best]
    return _Candidate(made, float(epsilons[best]), tnr, weights, steps)


def _as_chosen(
    search: TemperatureSearch, chosen: Detector, first: Detector, pair: tuple[Outputs, Outputs], tpr: float
) -> TemperatureSearch:
    """The search with the temperature that was taken as its best, be it the one before."""
    temperature = float(chosen.params().get("temperature", search.best.temperature))
    if temperature == search.best.temperature:
        return search
    found = evaluate(first.score(pair[0]), first.score(pair[1]), tpr)
    return TemperatureSearch(Trial(temperature, found.tnr_at_tpr, found.auroc), search.trials)


def _finish(
    detector: Detector, inside: Outputs, outside: Outputs, tpr: float, seed: int
) -> tuple[Detector, float, WeightSearch | None]:
    """The detector with its weights learnt, where it has any, and the TNR that it reaches."""
    if not isinstance(detector, Ensemble):
        return detector, evaluate(detector.score(inside), detector.score(outside), tpr).tnr_at_tpr, None
    weighted = copy.copy(detector)
    weights = weighted.fit_weights(inside, outside, tpr=tpr, seed=seed)
    return weighted, weights.tnr, weights


def _check_enough(inside: list[Outputs], outside: list[Outputs]) -> None:
    for name, parts, needed in (("id_data", inside, FEWEST_ID), ("ood", outside, FEWEST_OOD)):
        n = len(parts[0]) if parts else 0
        if n < needed:
            share = " in the share that tune uses" if name == "id_data" else ""
            raise InputError(f"{name}: {n} samples{share}; tuning needs at least {needed}")


def tune_temperature(
    detector: Detector,
    train: Outputs,
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
    train : Outputs
        What to fit at each temperature.
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
    made = detector.over_temperatures(train)

    def attempt(temperature: float) -> Trial:
        tried = made(temperature)
        found = evaluate(tried.score(id_validation), tried.score(ood_validation), tpr)
        return Trial(temperature, found.tnr_at_tpr, found.auroc)

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
    grid = np.geomspace(*SWEEP_RANGE, SWEEP_POINTS)
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
