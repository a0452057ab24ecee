"""Every untuned method on one classifier, side by side."""

import copy
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import chain
from operator import length_hint
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from igeood.detectors import METHODS, Detector
from igeood.detectors import detector as make_detector
from igeood.errors import InputError, UnsuitedError
from igeood.geometry.precision import precise
from igeood.guard.source import Source
from igeood.metrics import evaluate, exact_fraction
from igeood.model.batch import Batch
from igeood.model.layers import Layers, bare
from igeood.model.reader import random_state_kept
from igeood.outputs import Outputs
from igeood.summary import Needs, Summary
from igeood.summary.needs import merge_needs, unserved
from igeood.terminal import Progress, aligned, progress_bars

LABORATORY = "igeood.bench"  # whose methods are compared only if they are named
DEFAULT = "evidence"
RESAMPLES = 200  # of the samples, for standard errors
Scores = dict[str, NDArray[np.float64]]  # of each method, (N,)
Batches = Iterator[Batch | Outputs]


@dataclass(frozen=True)
class Comparison:
    """Methods × OOD sets: how many OOD samples each refuses, how sure that is, and what it costs.

    Attributes
    ----------
    tnr, auroc : dict
        For each method a dict from OOD set to the share of its samples that are refused at `tpr`, and to the AUROC.
    errors : dict of float
        For each method the standard error of its mean TNR, from 200 resamples of the held-out and OOD samples.
    leaders : list of str
        The methods whose mean TNR is within two standard errors of the best one's, the best first. The errors are those
        of the difference, with the same samples for both.
    cost : dict of float
        For each method its time to score a sample, in microseconds, in batches as they came.
    seconds : dict of float
        For each method the time it took here, to learn and to score all samples; reading the data serves all of them.
    forward : float or None
        Microseconds of the model's forward pass for a sample; None for arrays.
    tpr : float
        The share of in-distribution samples that are kept.
    left_out : dict of str
        Methods that do not suit the classifier or the data, and why.
    """

    tnr: dict[str, dict[str, float]]
    auroc: dict[str, dict[str, float]]
    errors: dict[str, float]
    leaders: list[str]
    cost: dict[str, float]
    seconds: dict[str, float]
    forward: float | None
    tpr: float
    left_out: dict[str, str]

    @property
    def methods(self) -> list[str]:
        """The methods, by their mean TNR, the best first."""
        return sorted(self.tnr, key=lambda method: -fmean(self.tnr[method].values()))

    @property
    def advice(self) -> str:
        """Which method to take, in a sentence or two."""
        best, *others = self.leaders
        rate = f"{100 * fmean(self.tnr[best].values()):.1f} ± {100 * self.errors[best]:.1f}%"
        if not others:
            lead = ", and others fewer, by more than chance explains" if len(self.tnr) > 1 else ""
            return f"{best} refuses {rate} of the OOD samples on average{lead}."
        cheapest = min(self.leaders, key=self.cost.__getitem__)
        chosen = DEFAULT if DEFAULT in self.leaders else cheapest
        reason = "the default" if chosen == DEFAULT else "the cheapest"
        also = "" if chosen == cheapest else f"; {cheapest} is the cheapest"
        names = f"{', '.join(self.leaders[:-1])} and {self.leaders[-1]}"
        return f"These samples cannot tell {names} apart (best: {rate}). Of these take {chosen}, {reason}{also}."

    def rows(self) -> list[dict[str, Any]]:
        """One plain dict a method, the best first: means, what each set gave, and the cost.

        `tnr_error` is the mean TNR's standard error, `microseconds` and `of_forward` are the time to score a sample,
        the latter as a share of the model's forward pass; `seconds` is the time to learn and to score all samples.
        """
        rows = []
        for method in self.methods:
            row: dict[str, Any] = {"method": method}
            for metric, values in (("tnr", self.tnr[method]), ("auroc", self.auroc[method])):
                row |= {metric: fmean(values.values()), **{f"{metric} {ood}": value for ood, value in values.items()}}
            share = {} if self.forward is None else {"of_forward": self.cost[method] / self.forward}
            row |= {"microseconds": self.cost[method], **share, "seconds": self.seconds[method]}
            rows.append({**row, "tnr_error": self.errors[method]})
        return rows

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values."""
        about = {"tpr": self.tpr, "forward_microseconds": self.forward, "advice": self.advice, "leaders": self.leaders}
        return {**about, "methods": self.rows(), "left_out": self.left_out}

    def to_pandas(self) -> Any:
        """A pandas DataFrame with a row for each method."""
        import pandas  # noqa: PLC0415 (whoever asks for it has it)

        return pandas.DataFrame(self.rows()).set_index("method")

    def __repr__(self) -> str:
        """TNR in percent for each set, then means, costs, and advice."""
        sets = list(next(iter(self.tnr.values())))
        cost = "added time" if self.forward else "µs a sample"
        lines = [["method", *sets, "mean TNR", "±", "AUROC", cost, "seconds"]]
        for row in self.rows():
            cost = f"{100 * row['of_forward']:.1f}%" if self.forward else f"{row['microseconds']:.3g}"
            figures = [*(row[f"tnr {ood}"] for ood in sets), row["tnr"], row["tnr_error"], row["auroc"]]
            lines.append([row["method"], *(f"{100 * value:.1f}" for value in figures), cost, f"{row['seconds']:.2f}"])
        table = aligned(lines)
        if self.forward:
            table.append(f"added time: to score a sample, beside {self.forward:.3g} µs of the model's forward pass")
        table.append("seconds: to learn, and to score all samples")
        for reason in dict.fromkeys(self.left_out.values()):
            names = ", ".join(method for method, why in self.left_out.items() if why == reason)
            table.append(f"left out: {names} ({reason})")
        return "\n".join([*table, self.advice])


def compare(
    model: nn.Module | None,
    train: Any,
    held_out: Any,
    ood: Any,
    *,
    methods: Iterable[str | Detector] | None = None,
    exclude: Iterable[str] = (),
    layers: Layers = "auto",
    probabilities: bool = False,
    tpr: float = 0.95,
    seed: int = 0,
) -> Comparison:
    """Fit every untuned method on the same training pass, and measure each on the same samples.

    Each loader is read once, and one forward pass serves all methods. On a terminal bars show how far it is.

    Parameters
    ----------
    model : Module or None
        The classifier; None where the data are `Outputs` or logits.
    train : loader
        Labelled training samples, as for `Guard.fit`.
    held_out : loader
        In-distribution samples that training has not seen.
    ood : mapping of str to loader, or loader
        OOD samples, by name.
    methods : iterable of str or Detector, optional
        By default every method of `igeood.METHODS` that has an untuned form of its own, those of the laboratory apart.
        What does not suit the classifier or the data is left out, and `Comparison.left_out` says why.
    exclude : iterable of str
        Names of methods to leave out.
    layers : "auto" or names
        As in `white_box`.
    probabilities : bool
        The model, or the arrays, give probabilities, not logits.
    tpr : float
        The operating point.
    seed : int
        Of the resamples that standard errors are from.
    """
    sets = named_sets(ood, model)
    if not sets:
        raise InputError("empty", argument="ood", cure="give at least one OOD set, as a loader or by name")
    source = Source(model, layers)
    left_out: dict[str, str] = {}
    methods = [methods] if isinstance(methods, str) else methods
    exclude = [exclude] if isinstance(exclude, str) else list(exclude)
    wanted = _detectors(methods, exclude, probabilities, left_out)
    source.probabilities = any(one.probabilities for one in wanted.values())
    with random_state_kept(), torch.inference_mode(False), torch.no_grad(), progress_bars(lines=False) as report:
        read = partial(_batches, source, report)
        detectors, seconds = _fit(wanted, source, read(train, "train", training=True), left_out, report)
        spent = dict.fromkeys(["", *detectors], 0.0)
        known = _scores(detectors, source, read(held_out, "held_out"), spent)
        scores = {name: _scores(detectors, source, read(data, name), spent) for name, data in sets.items()}
    rates = {m: {name: evaluate(known[m], scores[name][m], tpr) for name in sets} for m in detectors}
    tnr = {method: {name: rate.tnr_at_tpr for name, rate in row.items()} for method, row in rates.items()}
    auroc = {method: {name: rate.auroc for name, rate in row.items()} for method, row in rates.items()}
    errors, leaders = _errors(tnr, np.stack(list(_resampled(known, list(scores.values()), tpr, seed))))
    samples = sum(len(next(iter(each.values()))) for each in (known, *scores.values()))
    cost = {method: 1e6 * spent[method] / samples for method in spent}
    forward = cost.pop("")
    seconds = {method: learning + spent[method] for method, learning in seconds.items()}
    return Comparison(tnr, auroc, errors, leaders, cost, seconds, None if model is None else forward, tpr, left_out)


def _resampled(known: Scores, ood: list[Scores], tpr: float, seed: int) -> Iterator[NDArray[np.float64]]:
    """Mean TNR (M,) of the methods, for each of 200 draws with replacement of rows, the same rows for all methods."""
    random = np.random.default_rng(seed)
    inside = np.stack(list(known.values()))  # (M, N)
    outside = [np.stack(list(scores.values())) for scores in ood]
    n = inside.shape[1]
    kept = math.ceil(exact_fraction(tpr, "tpr") * n)
    order = inside.argsort(axis=1)
    inside = np.take_along_axis(inside, order, axis=1)
    for _ in range(RESAMPLES):
        counts = _drawn(n, random).astype(np.int16)  # small, so that they stay in the cache
        places = (counts.take(order).cumsum(axis=1, dtype=np.int32) < kept).sum(axis=1, keepdims=True)
        thresholds = np.take_along_axis(inside, places, axis=1)  # (M, 1)
        weights = [_drawn(scores.shape[1], random).astype(np.float32) for scores in outside]
        refused = [(o > thresholds).astype(np.float32) @ w / len(w) for o, w in zip(outside, weights, strict=True)]
        yield np.mean(refused, axis=0, dtype=np.float64)


def _drawn(n: int, random: np.random.Generator) -> NDArray[np.int64]:
    """How often each of n rows is drawn, in n draws with replacement."""
    return np.bincount(random.integers(n, size=n), minlength=n)


def _errors(tnr: dict[str, dict[str, float]], draws: NDArray[np.float64]) -> tuple[dict[str, float], list[str]]:
    """The standard error of each method's mean TNR, and the methods that cannot be told from the best."""
    means = np.array([fmean(values.values()) for values in tnr.values()])
    best = int(means.argmax())
    margins = 2.0 * (draws[:, [best]] - draws).std(axis=0, ddof=1)
    leading = means[best] - means <= margins
    names = list(tnr)
    leaders = [names[place] for place in (-means).argsort(kind="stable") if leading[place]]
    return dict(zip(names, draws.std(axis=0, ddof=1).tolist(), strict=True)), leaders


def _detectors(
    methods: Iterable[str | Detector] | None, exclude: list[str], probabilities: bool, left_out: dict[str, str]
) -> dict[str, Detector]:
    """The methods by name; what does not take the classifier's outputs is left out."""
    for name in exclude:
        if name not in METHODS:
            raise InputError.unknown("exclude", name, METHODS)
    chosen = [method for method in (_usual_methods() if methods is None else methods) if method not in exclude]
    probabilities |= any(isinstance(method, Detector) and method.probabilities for method in chosen)
    detectors: dict[str, Detector] = {}
    for method in chosen:
        instance = make_detector(method) if isinstance(method, str) else method
        registered = (name for name, entry in METHODS.items() if entry.kind is type(instance))
        name = method if isinstance(method, str) else next(registered, type(instance).__name__)
        same = sum(other == name or other.startswith(f"{name} (") for other in detectors)
        name = f"{name} ({same + 1})" if same else name
        if probabilities and "probabilities" not in instance.params():
            left_out[name] = "has no option for probabilities"
            continue
        try:
            if probabilities:
                instance = type(instance)(**{**instance.params(), "probabilities": True})
            detectors[name] = instance
        except UnsuitedError as error:
            left_out[name] = str(error)
    return detectors


def _usual_methods() -> list[str]:
    """Methods of the core that need no tuning and that one pass serves."""
    core = {name: method for name, method in METHODS.items() if not method.kind.__module__.startswith(LABORATORY)}
    return [name for name, method in core.items() if method.tunes != "only" and method.needs.pool is None]


def _fit(
    wanted: dict[str, Detector], source: Source, batches: Batches, left_out: dict[str, str], report: Progress
) -> tuple[dict[str, Detector], dict[str, float]]:
    """Fitted detectors from one reading of the data, and the seconds that each took."""
    batch = next(batches)
    detectors = _readable(wanted, source, batch, left_out)
    summaries = [Summary(needs, model=source.weights()) for needs in merge_needs(o.needs for o in detectors.values())]
    blind = {name: Summary(one.needs) for name, one in detectors.items() if name not in wanted}
    for outputs in (source.read(each, labels=True, keys=True) for each in chain([batch], batches)):
        with precise():
            for summary in summaries:
                summary.head = source.reader.head if source.reader is not None else None
                summary.add(outputs)
            for summary in blind.values():
                summary.add(outputs.only(()))
    fitted: dict[str, Detector] = {}
    seconds: dict[str, float] = {}
    for number, (name, one) in enumerate(detectors.items(), start=1):
        needs = one.needs.describe()
        covering = blind.get(name) or next(each for each in summaries if not unserved(each.described, needs))
        start = time.perf_counter()
        try:
            with precise():
                fitted[name] = copy.copy(one).learn(covering)
        except UnsuitedError as error:
            left_out[name] = str(error)
        else:
            seconds[name] = time.perf_counter() - start
        report("methods", number, len(detectors))
    if not fitted:
        problem = "; ".join(f"{method}: {reason}" for method, reason in left_out.items()) or "empty"
        raise InputError(problem, argument="methods", cure="name others of igeood.METHODS, or leave it out")
    return fitted, seconds


def _readable(
    detectors: dict[str, Detector], source: Source, batch: Batch | Outputs, left_out: dict[str, str]
) -> dict[str, Detector]:
    """Those that find the layers that they read, which the source reads from now on; and those without layers."""
    wanted = [Needs(layers=one.needs.layers, pool=one.needs.pool, head=one.needs.head) for one in detectors.values()]
    needs, *others = merge_needs([*wanted, Needs()])
    if others:
        raise InputError("they pool layers differently", argument="methods", cure="compare them apart")
    reason = "reads hidden layers"
    try:
        if source.wanted != []:
            source.prepare(batch, needs)
            # what reads layers where there are some is compared without them too
            blind = {name: one for name, one in detectors.items() if source.layers and one.needs.layers == "any"}
            return detectors | {f"{name} (logits)": copy.copy(one) for name, one in blind.items()}
    except UnsuitedError as error:
        reason = str(error)
    source.wanted = []
    left_out |= {name: reason for name, one in detectors.items() if one.needs.must_read_layers}
    source.prepare(batch, Needs())
    return {name: one for name, one in detectors.items() if name not in left_out}


def named_sets(ood: Any, model: nn.Module | None) -> dict[str, Any]:
    """OOD sets by name; a mapping with a keyword of the model's is one batch."""
    keywords: set[str] = set()
    if model is not None:
        with suppress(ValueError):  # traced graphs have no names
            keywords = set(signature(bare(model).forward).parameters)
    if not isinstance(ood, Mapping) or keywords & set(ood):
        return {"ood": ood}
    return {str(name): data for name, data in ood.items()}


def _batches(source: Source, report: Progress, data: Any, name: str, *, training: bool = False) -> Batches:
    """The batches that have samples."""
    number = 0
    for number, batch in enumerate(filter(len, source.items(data, name=name, training=training)), start=1):
        yield batch
        report(name, number, length_hint(data) or None)
    if number == 0:
        raise InputError("empty", argument=name, cure="give at least one sample, or a new loader")
    report(name, number, number)


def _scores(detectors: dict[str, Detector], source: Source, batches: Batches, spent: dict[str, float]) -> Scores:
    """Scores of one set by each detector; adds to the seconds that each took, and the forward pass ("")."""
    parts: dict[str, list[NDArray[np.float64]]] = {method: [] for method in detectors}
    for batch in batches:
        start = time.perf_counter()
        outputs = source.read(batch)
        spent[""] += time.perf_counter() - start
        with precise():
            for method, detector in detectors.items():
                seen = outputs.only(detector.widths_)
                if not parts[method]:
                    detector.score(seen)  # a first call may prepare something
                start = time.perf_counter()
                parts[method].append(detector.score(seen).double().cpu().numpy())
                spent[method] += time.perf_counter() - start
    return {method: np.concatenate(scores) for method, scores in parts.items()}
