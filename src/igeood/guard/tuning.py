"""Choose temperature, input step and weights on validation data: those that refuse most OOD at a true-positive rate."""

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from inspect import signature
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from igeood.detectors import Detector
from igeood.detectors.base import Samples
from igeood.detectors.weighted import FEWEST as FEWEST_OOD
from igeood.errors import InputError, MissingExtraError
from igeood.guard.inputs import ArrayInputs, ModelInputs
from igeood.guard.known import Known, chosen, mark, occurrences
from igeood.metrics import evaluate
from igeood.model.batches import LABELS
from igeood.model.layers import bare
from igeood.model.step import Attack
from igeood.outputs import NO_KEYS, Keys, Outputs
from igeood.summary import BUDGET

log = logging.getLogger("igeood")

Search = Literal["sweep", "bayes"]
Progress = Callable[[int, int], None]  # done, of how many
Trial = dict[str, float]  # what was tried, with the TNR that it reached on the validation data
Seen = tuple[list[Outputs], list[Outputs], Attack | None]

SWEEP_RANGE = (0.1, 1000.0)
SWEEP_POINTS = 33  # eight a decade
REFINEMENTS = 2
REFINED_POINTS = 8  # an even number: none of them is the best point itself
BAYES_RANGE = (1.0, 1000.0)  # this and the next two are the paper's
BAYES_TRIALS = 500
BAYES_SEEDS = 5
NAMED = "or give ids, or distinct=True if they are others"
FEWEST = {"id_data": 20, "ood": FEWEST_OOD}  # 95% of fewer than 20 is all of them


@dataclass(frozen=True)
class Tuning:
    """What `Guard.tune` has chosen, on how many validation samples.

    Where a method is tuned on in-distribution samples alone, `before`, `after` and `tnr` are minus their mean score.

    Attributes
    ----------
    temperature : float or None
        None for a method without temperature, and for a white box tuned on adversarial samples, which keeps its own.
    epsilon : float
        Size of the input step.
    strength : float or None
        Inverse regularisation strength of the weights; None where none were learnt.
    n_id, n_ood : int
        Validation samples used.
    before, after : float
        TNR on the validation samples before tuning, and now: of weights, in folds that had not learnt from them.
    auroc : float or None
        AUROC on the validation samples: now, or before tuning where weights were learnt, which may turn a score round.
    attack : dict or None
        What the adversarial samples did, where those were used: `samples`, `linf`, `accuracy`.
    trials : list of dict
        Temperatures that were tried, in order, each with its `temperature`, `tnr` and `auroc`.
    steps : list of dict
        Sizes of the input step that were tried, each with its `epsilon`, `tnr` and `auroc`; twice, where two
        temperatures were.
    left_out : dict of dict
        For each named kind of OOD sample the `tnr` and `auroc` on it of weights that were learnt from the other kinds
        alone, and the TNR `before` tuning: what to expect of a kind that nobody has shown the guard. Empty unless
        weights were learnt.
    """

    temperature: float | None
    epsilon: float
    strength: float | None
    n_id: int
    n_ood: int
    before: float
    after: float
    auroc: float | None
    attack: dict[str, float] | None
    trials: list[Trial]
    steps: list[Trial]
    left_out: dict[str, Trial] = field(default_factory=dict)

    def __repr__(self) -> str:
        temperature = "" if self.temperature is None else f"temperature {self.temperature:g}, "
        weights = "" if self.strength is None else "weights learnt, "
        result = f"mean score {-self.after:.4g}, {-self.before:.4g} before"
        if self.n_ood:
            result = f"{100 * self.after:.1f}% of {self.n_ood} OOD samples refused, {100 * self.before:.1f}% before"
        result += f"; {self.n_id} in-distribution samples"
        for kind, rates in self.left_out.items():
            result += f"; of {kind} unseen {100 * rates['tnr']:.1f}%, before {100 * rates['before']:.1f}%"
        return f"Tuning({temperature}{weights}epsilon {self.epsilon:g}: {result})"


class Validation:
    """Samples to tune on: a share of the in-distribution ones, with OOD ones or with attacks on that share.

    Parameters
    ----------
    inputs : ArrayInputs or ModelInputs
        How they are read.
    id_data, ood
        As in `Guard.tune`; they may be read more than once.
    share, seed
        Of the in-distribution samples.
    attack : float
        Size of the adversarial step.
    distinct : bool
        Take the OOD samples for others than the in-distribution ones, however equal.
    budget : int
        Bytes of clean outputs to hold; of more samples a seeded part is used: a half, a quarter and so on of each set.
    """

    def __init__(
        self, inputs: ArrayInputs | ModelInputs, id_data: Any, ood: Any, share: float, seed: int, attack: float,
        distinct: bool = False, budget: int = BUDGET,
    ) -> None:  # fmt: skip
        kinds = named_kinds(ood, inputs.model)
        self.names = {name: "ood" if kinds.keys() == {"ood"} else f"ood[{name!r}]" for name in kinds}  # in errors
        self.sources = {"id_data": id_data, **{self.names[name]: source for name, source in kinds.items()}}
        for name, source in self.sources.items():
            if isinstance(source, Iterator):
                raise InputError(f"{name}: is read more than once; give a loader or a list, not a generator")
            if isinstance(source, str) and (source, name) != ("fgsm", "ood"):
                raise InputError(f"{name}: expected samples, got {source!r}; give an array or a loader, or ood='fgsm'")
        self.kinds: dict[str, int] = {}  # samples of each named kind of OOD samples, in order, once they are read
        self.inputs, self.ood, self.share, self.seed, self.attack = inputs, ood, share, seed, attack
        if budget < 1:
            raise InputError("budget: too small; give at least a byte for each size of the input step")
        self.distinct, self.limit = distinct, budget / max(2, len(self.sources))
        self.used = Known()  # the in-distribution samples that `see` has read

    def see(self, detector: Detector, epsilons: Sequence[float]) -> Seen:
        """Outputs of both kinds for each size of the input step, and what the attack did, if there was one."""
        reports: list[Attack] = []

        def step(batch: Any) -> list[Outputs]:
            return self.inputs.stepped(batch, detector, epsilons)[1]

        def attack(batch: Any) -> list[Outputs]:
            outputs, report = self.inputs.attacked(batch, detector, self.attack, epsilons)
            reports.append(report)
            return outputs

        known, inside = self._read("id_data", step)
        if self.used.rows and not np.array_equal(known.keys, self.used.keys):
            raise InputError("id_data: has other samples each time it is read; leave random augmentation out of it")
        self.used = known
        if isinstance(self.ood, str):
            _, outside = self._read("id_data", attack)
            return inside, outside, _total(reports) if reports else None
        parts: list[list[Outputs]] = []
        for kind, name in self.names.items():
            foreign, outside = self._read(name, step)
            shared = None if self.distinct else self.used.shared(foreign)
            if shared is not None:
                cure = "remove them" if shared.chance is None else f"remove them, {NAMED}"
                raise InputError(f"{name}: {shared.with_('in-distribution ones')}; {cure}")
            if not foreign.rows and len(self.names) > 1:
                raise InputError(f"{name}: no sample; give some of this kind, or leave it out")
            self.kinds[kind] = foreign.rows
            parts += [[outputs.replace(labels=None) for outputs in outside]] * bool(outside)  # labels mean nothing here
        return inside, [Outputs.concat(column) for column in zip(*parts, strict=True)], None

    def _read(self, name: str, run: Callable[[Any], list[Outputs]]) -> tuple[Known, list[Outputs]]:
        """The samples to use, and their outputs for each size of the step.

        A sample is used if its own uniform number is below the share, which is halved when they are too many.
        """
        share = self.share if name == "id_data" else 1.0
        seen, held, parts, identified = NO_KEYS, list[tuple[Keys, Any]](), list[list[Outputs]](), True

        def narrowed(share: float) -> None:
            for at, (keys, copies) in enumerate(held):
                rows = chosen(keys, share, self.seed, copies)
                held[at] = keys[rows.numpy()], copies[rows.numpy()]
                parts[at] = [outputs[rows] for outputs in parts[at]]

        for number, batch in enumerate(self.inputs.batches(self.sources[name], name)):
            keys, identified = self.inputs.keys(batch), identified and batch.identified
            copies = np.zeros(len(keys), np.int64) if batch.identified else occurrences(keys, seen)
            seen = NO_KEYS if batch.identified else np.sort(np.concatenate([seen, keys]), kind="stable")
            rows = chosen(keys, share, self.seed, copies)
            if rows.any():
                with self.inputs.at(name, number):
                    parts.append(run(batch[rows]))
                held.append((keys[rows.numpy()], copies[rows.numpy()]))
            while sum(part[0].nbytes for part in parts) > self.limit:  # the same however many sizes of the step
                share /= 2.0
                narrowed(share)
        used = np.concatenate([NO_KEYS, *(keys for keys, _ in held)])
        if parts and share < (self.share if name == "id_data" else 1.0):
            log.warning("tune: the budget holds %d of the samples of %s, drawn by their content", len(used), name)
        draws = ((*mark(seen), share, self.seed),) if len(seen) else ()
        return Known.of(used, identified, draws), [Outputs.concat(column) for column in zip(*parts, strict=True)]


def named_kinds(ood: Any, model: nn.Module | None) -> dict[str, Any]:
    """OOD samples by name: several kinds, or one, "ood". A mapping that the model's forward pass takes is one batch."""
    if ood is None:
        return {}
    if not isinstance(ood, Mapping) or (model is not None and _takes(model, ood)):
        return {"ood": ood}
    kinds = {str(name): source for name, source in ood.items()}
    if len(kinds) < len(ood):
        raise InputError("ood: two kinds have the same name; give each a name of its own")
    return kinds


def _takes(model: nn.Module, batch: Mapping[Any, Any]) -> bool:
    """Whether a mapping has arrays that the model takes by keyword, at least one by a name of its own."""
    inputs = {name: value for name, value in batch.items() if name not in LABELS}
    try:
        accepted = signature(bare(model).forward)
        accepted.bind(**inputs)
    except (TypeError, ValueError):
        return False
    arrays = [name for name, value in inputs.items() if isinstance(value, (Tensor, np.ndarray))]
    return any(name in accepted.parameters for name in arrays)


def _total(reports: list[Attack]) -> Attack:
    counts, *means = zip(*((report.samples, report.linf, report.accuracy) for report in reports), strict=True)
    return Attack(sum(counts), *(float(np.average(mean, weights=counts)) for mean in means))


def tune_detector(
    detector: Detector, samples: Samples, see: Callable[[Detector, Sequence[float]], Seen],
    epsilons: Sequence[float] = (0.0,), *, epsilon: float = 0.0, tpr: float = 0.95, search: Search = "sweep",
    seed: int = 0, progress: Progress | None = None, kinds: Mapping[str, int] | None = None,
) -> tuple[Detector, Tuning]:  # fmt: skip
    """Choose temperature, then input step and weights together, on validation samples.

    Weights are learnt at the temperature that was found for the output, and at the one before: it may be the better
    one for all columns together. Where everything is worse than before, it stays as it was.

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
    tpr, search, seed, progress
        As in `tune_temperature`; the seed is that of the regression's folds too.
    kinds : mapping of str to int, optional
        Numbers of the OOD samples of each kind, in order, once `see` was called: each is left out in turn.

    Returns
    -------
    Detector
        Tuned.
    Tuning
        What was found.
    """
    inside, outside, attack = see(detector, (0.0, epsilon) if epsilon else (0.0,))
    _check_enough(inside, "id_data")
    _check_enough(outside, "ood")
    clean, part = (inside[0], outside[0]), detector.softmax_part
    first = _rates(detector, inside[-1], outside[-1], tpr)
    before, trials, candidates = first["tnr"], list[Trial](), [detector]
    # adversarial samples are made to fool the output: they say nothing of a part's temperature
    if part is not None and (part is detector or attack is None):
        trials = tune_temperature(part, samples, *clean, tpr=tpr, search=search, seed=seed, progress=progress)
        least = before if part is detector and not epsilon else 0.0
        found = detector.at_temperature(best(trials, len(clean[1]), least)["temperature"], samples)
        candidates = [found] if part is detector else [found, detector]
    steps, tried = list[Trial](), list[tuple[Detector, float | None, tuple[Outputs, Outputs]]]()
    for candidate in candidates:
        pairs = zip(*see(candidate, epsilons)[:2], strict=True) if any(epsilons) else [clean] * len(epsilons)
        for size, pair in zip(epsilons, pairs, strict=True):
            ready = copy.copy(candidate)
            weights = ready.learn_weights(*pair, tpr=tpr, seed=seed)
            rates = _rates(candidate, *pair, tpr) if weights is None else {"tnr": weights.tnr, "auroc": weights.auroc}
            steps.append({"epsilon": float(size), **rates})
            tried.append((ready, None if weights is None else weights.strength, pair))
    chosen = best(steps, len(clean[1]), before)
    tuned, strength, pair = tried[steps.index(chosen)]
    if before > chosen["tnr"] + 1e-9:  # the mean over folds may be rounded
        tuned, strength, chosen = detector, None, {"epsilon": epsilon, **first}
    left_out = {} if strength is None else _left_out(detector, tuned, pair, kinds or {}, strength, tpr, seed)
    return tuned, Tuning(
        temperature=tuned.params()["temperature"] if trials else None, epsilon=chosen["epsilon"], strength=strength,
        n_id=len(clean[0]), n_ood=len(clean[1]), before=before, after=chosen["tnr"],
        auroc=(chosen if strength is None else first)["auroc"],
        attack=None if attack is None else asdict(attack), trials=trials, steps=steps, left_out=left_out,
    )  # fmt: skip


def tune_on_id(
    detector: Detector, see: Callable[[Detector, Sequence[float]], Seen], epsilons: Sequence[float], epsilon: float
) -> Tuning:
    """Choose the input step after which the mean score of in-distribution samples is lowest; of equals, the smallest.

    Parameters
    ----------
    detector, see, epsilons, epsilon
        As in `tune_detector`; OOD samples are not looked at.
    """
    inside = see(detector, (*epsilons, epsilon))[0]
    _check_enough(inside, "id_data")
    *means, before = (-float(torch.as_tensor(detector.score(outputs)).mean()) for outputs in inside)
    steps = [{"epsilon": float(size), "tnr": mean} for size, mean in zip(epsilons, means, strict=True)]
    lowest = max(steps, key=lambda step: (step["tnr"], -step["epsilon"]))
    return Tuning(None, lowest["epsilon"], None, len(inside[0]), 0, before, lowest["tnr"], None, None, [], steps)


def _check_enough(outputs: list[Outputs], name: str) -> None:
    """Raise unless there are enough samples to tune on."""
    n, needed = len(outputs[0]) if outputs else 0, FEWEST[name]
    if n < needed:
        share = " in the share that tune uses" if name == "id_data" else ""
        raise InputError(f"{name}: {n} samples{share}; tuning needs at least {needed}")


def _left_out(
    before: Detector, tuned: Detector, pair: tuple[Outputs, Outputs], kinds: Mapping[str, int], strength: float,
    tpr: float, seed: int,
) -> dict[str, Trial]:  # fmt: skip
    """TNR and AUROC on each kind of OOD samples of weights that were learnt without it, and the TNR before.

    They are learnt with one half of the in-distribution samples and judged on the other, then the other way round.
    """
    inside, outside = pair
    of_row = np.repeat(np.arange(len(kinds)), list(kinds.values()))
    first = torch.from_numpy(np.random.RandomState(seed).permutation(len(inside)) < len(inside) // 2)
    rates: dict[str, Trial] = {}
    for number, name in enumerate(kinds):
        own = torch.from_numpy(of_row == number)
        if min(int(own.sum()), int((~own).sum())) < FEWEST_OOD:
            continue
        results = []
        for half in (first, ~first):
            other = copy.copy(tuned)
            other.learn_weights(inside[half], outside[~own], tpr=tpr, seed=seed, strength=strength)
            result = evaluate(other.score(inside[~half]), other.score(outside[own]), tpr)
            results.append((result.tnr_at_tpr, result.auroc))
        tnr, auroc = np.mean(results, axis=0).tolist()
        rates[name] = {"tnr": tnr, "auroc": auroc, "before": _rates(before, inside, outside[own], tpr)["tnr"]}
    return rates


def _rates(detector: Detector, inside: Outputs, outside: Outputs, tpr: float) -> Trial:
    rates = evaluate(detector.score(inside), detector.score(outside), tpr)
    return {"tnr": rates.tnr_at_tpr, "auroc": rates.auroc}


def best(trials: Sequence[Trial], n_ood: int, least: float = 0.0) -> Trial:
    """The trial to prefer: of those whose TNR is the highest but for one OOD sample, the one with the highest AUROC.

    A single sample tells nothing of others, AUROC is of them all. Of equals, the higher TNR; then the smallest input
    step, or the temperature nearest to 1; then the first.

    Parameters
    ----------
    trials : sequence of dict
        Each with `tnr`, `auroc`, and `epsilon` or `temperature`.
    n_ood : int
        OOD samples that TNR was measured on.
    least : float
        Prefer none with a lower TNR to one that reaches it.
    """
    highest = max(trial["tnr"] for trial in trials)
    enough = max(highest - 1.0 / n_ood, min(least, highest)) - 1e-9  # the mean over folds may be rounded

    def preference(trial: Trial) -> tuple[float, float, float]:
        size = trial["epsilon"] if "epsilon" in trial else abs(math.log(trial["temperature"]))
        return (trial["auroc"], trial["tnr"], -size)

    return max((trial for trial in trials if trial["tnr"] >= enough), key=preference)


def tune_temperature(
    detector: Detector, samples: Samples, id_validation: Outputs, ood_validation: Outputs, *, tpr: float = 0.95,
    search: Search = "sweep", seed: int = 0, progress: Progress | None = None,
) -> list[Trial]:  # fmt: skip
    """Seek the temperature with the highest TNR at `tpr` on validation samples.

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
        optimisation over [1, 1000], 500 trials of each of 5 seeds (needs the extra `tune`).
    seed : int
        First seed of the Bayesian search; the sweep has no randomness.
    progress : callable, optional
        Called with the number of trials done and their total.

    Returns
    -------
    list of dict
        `temperature`, `tnr` and `auroc` of each trial, by temperature; `best` says which to take.
    """
    if search not in ("sweep", "bayes"):
        raise InputError(f"search: expected 'sweep' or 'bayes', got {search!r}")
    total = SWEEP_POINTS + REFINEMENTS * REFINED_POINTS if search == "sweep" else BAYES_SEEDS * BAYES_TRIALS
    trials: list[Trial] = []
    latest = detector

    def attempt(temperature: float) -> float:
        nonlocal latest
        latest = detector.at_temperature(temperature, samples, latest)  # each fit starts at its neighbour's solution
        trials.append({"temperature": temperature, **_rates(latest, id_validation, ood_validation, tpr)})
        if progress:
            progress(len(trials), total)
        return trials[-1]["tnr"]

    if search == "sweep":
        _sweep(attempt, trials, len(ood_validation))
    else:
        _bayes(attempt, seed)
    return sorted(trials, key=lambda trial: trial["temperature"])


def _sweep(attempt: Callable[[float], float], trials: list[Trial], n_ood: int) -> None:
    """A logarithmic grid, then twice a finer one between the best point's neighbours."""
    grid = np.geomspace(*SWEEP_RANGE, SWEEP_POINTS)[::-1]  # downwards: a fit at 1000 can start anywhere
    for _ in range(REFINEMENTS + 1):
        for point in grid:
            attempt(float(f"{point:.6g}"))  # a number that can be read and typed again
        known = sorted(trial["temperature"] for trial in trials)
        at = known.index(best(trials, n_ood)["temperature"])
        low, high = known[max(at - 1, 0)], known[min(at + 1, len(known) - 1)]
        grid = np.geomspace(low, high, REFINED_POINTS + 2)[1:-1]


def _bayes(attempt: Callable[[float], float], seed: int) -> None:
    """The paper's search: tree-structured Parzen estimators in log T, once for each seed."""
    try:
        import optuna  # noqa: PLC0415 (an extra, and slow to import)
    except ImportError as error:
        raise MissingExtraError("search: 'bayes' needs optuna; pip install 'igeood[tune]'") from error
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        for number in range(BAYES_SEEDS):
            study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed + number))
            study.optimize(
                lambda trial: attempt(trial.suggest_float("temperature", *BAYES_RANGE, log=True)), BAYES_TRIALS
            )
    finally:
        optuna.logging.set_verbosity(level)
