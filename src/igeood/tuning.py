"""Choose a detector's temperature on validation data: the one that refuses most OOD at a given true-positive rate."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from igeood.detectors import Detector
from igeood.errors import InputError, MissingExtraError
from igeood.metrics import evaluate
from igeood.outputs import Outputs

Search = Literal["sweep", "bayes"]
Progress = Callable[[int, int], None]  # done, of how many

SWEEP_RANGE = (0.1, 1000.0)
SWEEP_POINTS = 33  # eight a decade
REFINEMENTS = 2
BAYES_RANGE = (1.0, 1000.0)  # this and the next two are the paper's
BAYES_TRIALS = 500
BAYES_SEEDS = 5


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
class Tuning:
    """Outcome of a search: the best trial, and all of them by temperature."""

    best: Trial
    trials: tuple[Trial, ...]


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
) -> Tuning:
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
    Tuning
        The best trial and all others.
    """
    for name, outputs in (("id_validation", id_validation), ("ood_validation", ood_validation)):
        if len(outputs) == 0:
            raise InputError(f"{name}: empty; tuning needs validation samples of both kinds")
    latest = detector

    def attempt(temperature: float) -> Trial:
        nonlocal latest
        latest = latest.at_temperature(
            temperature, train, warm=True
        )  # each fit starts from its predecessor's centroids
        found = evaluate(latest.score(id_validation), latest.score(ood_validation), tpr)
        return Trial(temperature, found.tnr_at_tpr, found.auroc)

    if search == "sweep":
        tried = _sweep(attempt, progress)
    elif search == "bayes":
        tried = _bayes(attempt, seed, trials, progress)
    else:
        raise InputError(f"search: expected 'sweep' or 'bayes', got {search!r}")
    return Tuning(max(tried, key=Trial.rank), tuple(sorted(tried, key=lambda t: t.temperature)))


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
