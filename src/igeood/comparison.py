"""Every untuned method on one classifier, side by side."""

import copy
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from igeood.detectors import METHODS, Detector
from igeood.detectors import detector as make_detector
from igeood.errors import InputError, UnsuitedError
from igeood.guard.source import Source
from igeood.metrics import evaluate
from igeood.model.layers import Layers, bare
from igeood.model.reader import random_state_kept
from igeood.outputs import Outputs
from igeood.summary import Needs, Summary
from igeood.summary.needs import check_covers, merge_needs

LOGITS = "logits"  # what a method reads, where it is compared without layers
LABORATORY = "igeood.bench"  # whose methods are compared only if they are named


@dataclass(frozen=True)
class Comparison:
    """Methods × OOD sets: how many OOD samples each refuses, and what that costs.

    Attributes
    ----------
    tnr, auroc : dict
        For each method a dict from OOD set to the share of its samples that are refused at `tpr`, and to the AUROC.
    cost : dict of float
        For each method its time to score a sample, in microseconds, in batches as they came.
    forward : float or None
        Microseconds of the model's forward pass for a sample; None for arrays.
    tpr : float
        The share of in-distribution samples that are kept.
    left_out : dict of str
        Methods that the classifier lacks something for, and what.
    """

    tnr: dict[str, dict[str, float]]
    auroc: dict[str, dict[str, float]]
    cost: dict[str, float]
    forward: float | None
    tpr: float
    left_out: dict[str, str]

    @property
    def methods(self) -> list[str]:
        """The methods, by their mean TNR, the best first."""
        return sorted(self.tnr, key=lambda method: -fmean(self.tnr[method].values()))

    def rows(self) -> list[dict[str, Any]]:
        """One plain dict a method, the best first: means, what each set gave, and the cost."""
        return [self._row(method) for method in self.methods]

    def _row(self, method: str) -> dict[str, Any]:
        row: dict[str, Any] = {"method": method}
        for metric, values in (("tnr", self.tnr[method]), ("auroc", self.auroc[method])):
            row |= {metric: fmean(values.values()), **{f"{metric} {ood}": value for ood, value in values.items()}}
        share = {} if self.forward is None else {"of_forward": self.cost[method] / self.forward}
        return {**row, "microseconds": self.cost[method], **share}

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values."""
        return {"tpr": self.tpr, "forward_microseconds": self.forward, "methods": self.rows()}

    def to_pandas(self) -> Any:
        """A pandas DataFrame with a row for each method."""
        import pandas  # noqa: PLC0415 (whoever asks for it has it)

        return pandas.DataFrame(self.rows()).set_index("method")

    def __repr__(self) -> str:
        """TNR in percent for each set, then means and cost."""
        sets = list(next(iter(self.tnr.values())))
        lines = [["method", *sets, "mean TNR", "AUROC", "of forward" if self.forward else "µs a sample"]]
        for row in self.rows():
            cost = f"{100 * row['of_forward']:.1f}%" if self.forward else f"{row['microseconds']:.3g}"
            figures = [*(row[f"tnr {ood}"] for ood in sets), row["tnr"], row["auroc"]]
            lines.append([row["method"], *(f"{100 * value:.1f}" for value in figures), cost])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
        return "\n".join([*table, *(f"{method} is left out: {reason}" for method, reason in self.left_out.items())])


def compare(
    model: nn.Module | None,
    train: Any,
    held_out: Any,
    ood: Any,
    *,
    methods: Iterable[str | Detector] | None = None,
    layers: Layers = "auto",
    tpr: float = 0.95,
) -> Comparison:
    """Fit every untuned method on the same training pass, and measure each on the same samples.

    Each loader is read once, and one forward pass serves all methods.

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
        By default every method of `igeood.METHODS` that has an untuned form of its own and finds what it needs,
        those of the laboratory apart.
    layers : "auto" or names
        As in `white_box`.
    tpr : float
        The operating point.
    """
    sets = _named_sets(ood, model)
    if not sets:
        raise InputError("empty", argument="ood", cure="give at least one OOD set, as a loader or by name")
    features = getattr(train, "features", {}) if model is None else None
    source = Source(model, layers if features is None or features else ())
    wanted = _detectors(_usual_methods(features) if methods is None else methods)
    if source.wanted != []:  # what reads layers where there are some is compared without them too
        blind = {n: one for n, one in wanted.items() if one.needs.layers == "any" and not one.probabilities}
        wanted |= {f"{name} ({LOGITS})": copy.copy(one) for name, one in blind.items()}
    source.probabilities = any(one.probabilities for one in wanted.values())
    if source.probabilities and not all(one.probabilities for one in wanted.values()):
        raise InputError("some take probabilities and some logits", argument="methods", cure="compare them apart")
    with random_state_kept(), torch.inference_mode(False), torch.no_grad():
        detectors, left_out = _fit(wanted, source, train, is_strict=methods is not None)
        seconds = dict.fromkeys(["", *detectors], 0.0)
        known = _scores(detectors, source, held_out, "held_out", seconds)
        scores = {name: _scores(detectors, source, data, name, seconds) for name, data in sets.items()}
    rates = {m: {name: evaluate(known[m], scores[name][m], tpr) for name in sets} for m in detectors}
    tnr = {method: {name: rate.tnr_at_tpr for name, rate in row.items()} for method, row in rates.items()}
    auroc = {method: {name: rate.auroc for name, rate in row.items()} for method, row in rates.items()}
    samples = sum(len(next(iter(each.values()))) for each in (known, *scores.values()))
    cost = {method: 1e6 * spent / samples for method, spent in seconds.items()}
    forward = cost.pop("")
    return Comparison(tnr, auroc, cost, None if model is None else forward, tpr, left_out)


def _usual_methods(features: Mapping[str, Any] | None) -> list[str]:
    """Methods that need no tuning and that one pass serves; of arrays, those that find their features."""
    core = {name: method for name, method in METHODS.items() if not method.kind.__module__.startswith(LABORATORY)}
    usual = {name: m.needs for name, m in core.items() if m.tunes != "only" and m.needs.pool is None}
    return [n for n, needs in usual.items() if features is None or not needs.must_read_layers or needs.blocks(features)]


def _detectors(methods: Iterable[str | Detector]) -> dict[str, Detector]:
    detectors: dict[str, Detector] = {}
    for method in methods:
        instance = make_detector(method) if isinstance(method, str) else method
        registered = (name for name, entry in METHODS.items() if entry.kind is type(instance))
        name = method if isinstance(method, str) else next(registered, type(instance).__name__)
        same = sum(other == name or other.startswith(f"{name} (") for other in detectors)
        detectors[f"{name} ({same + 1})" if same else name] = instance
    if not detectors:
        raise InputError("empty", argument="methods", cure="name some of igeood.METHODS, or leave it out")
    return detectors


def _fit(
    detectors: dict[str, Detector], source: Source, train: Any, *, is_strict: bool
) -> tuple[dict[str, Detector], dict[str, str]]:
    """Fitted detectors from one reading of the data; unless strict, the others with the reason."""
    wanted = merge_needs(one.needs for one in detectors.values())
    read, *others = merge_needs(Needs(layers=needs.layers, pool=needs.pool, head=needs.head) for needs in wanted)
    if others:
        raise InputError("they pool layers differently", argument="methods", cure="compare them apart")
    summaries = [Summary(needs, model=source.weights()) for needs in wanted]
    blind = {name: Summary(one.needs) for name, one in detectors.items() if _is_blind(name)}
    for outputs, _ in _outputs(source, train, "train", read):
        for summary in summaries:
            summary.head = source.reader.head if source.reader is not None else None
            summary.add(outputs)
        for summary in blind.values():
            summary.add(outputs.only(()))
    fitted: dict[str, Detector] = {}
    left_out: dict[str, str] = {}
    for name, one in detectors.items():
        covering = blind.get(name) or next(summary for summary in summaries if _covers(summary, one))
        try:
            fitted[name] = copy.copy(one).learn(covering)
        except UnsuitedError as error:
            if is_strict:
                raise
            left_out[name] = str(error)
    return fitted, left_out


def _is_blind(name: str) -> bool:
    return name.endswith(f"({LOGITS})")


def _covers(summary: Summary, detector: Detector) -> bool:
    with suppress(InputError):
        check_covers(summary.described, detector.needs.describe(), "")
        return True
    return False


def _named_sets(ood: Any, model: nn.Module | None) -> dict[str, Any]:
    """OOD sets by name; a mapping with a keyword of the model's is one batch."""
    keywords = set() if model is None else set(signature(bare(model).forward).parameters)
    if not isinstance(ood, Mapping) or keywords & set(ood):
        return {"ood": ood}
    return {str(name): data for name, data in ood.items()}


def _outputs(source: Source, data: Any, name: str, read: Needs | None = None) -> Iterator[tuple[Outputs, float]]:
    """Outputs of each batch, and the seconds that it took; with `read`, the source reads this from now on."""
    is_empty = True
    for batch in filter(len, source.items(data, name=name)):
        if is_empty and read is not None:
            source.prepare(batch, read)
        is_empty = False
        start = time.perf_counter()
        outputs = source.read(batch, labels=read is not None, keys=read is not None)
        yield outputs, time.perf_counter() - start
    if is_empty:
        raise InputError("empty", argument=name, cure="give at least one sample, or a new loader")


def _scores(
    detectors: dict[str, Detector], source: Source, data: Any, name: str, seconds: dict[str, float]
) -> dict[str, Tensor]:
    """Scores of one set by each detector; adds to the seconds that each took, and the forward pass ("")."""
    parts: dict[str, list[Tensor]] = {method: [] for method in detectors}
    for outputs, spent in _outputs(source, data, name):
        seconds[""] += spent
        for method, detector in detectors.items():
            seen = outputs.only(()) if _is_blind(method) else outputs
            if not parts[method]:
                detector.score(seen)  # a first call may prepare something
            start = time.perf_counter()
            parts[method].append(detector.score(seen).cpu())
            seconds[method] += time.perf_counter() - start
    return {method: torch.cat(scores) for method, scores in parts.items()}
