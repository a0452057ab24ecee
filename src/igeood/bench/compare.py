"""Every untuned method on one classifier, side by side."""

import copy
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from igeood.detectors import METHODS, Detector, method_name
from igeood.detectors import detector as make_detector
from igeood.detectors.wrapped import Wrapped
from igeood.errors import InputError, UnsuitedError
from igeood.guard.inputs import ArrayInputs, ModelInputs
from igeood.guard.tuning import named_kinds
from igeood.metrics import evaluate
from igeood.model.layers import Layers
from igeood.model.reader import random_state_kept
from igeood.outputs import Outputs
from igeood.summary import BUDGET, Needs, Summary
from igeood.summary.needs import check_covers, joined

log = logging.getLogger("igeood")


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
    """

    tnr: dict[str, dict[str, float]]
    auroc: dict[str, dict[str, float]]
    cost: dict[str, float]
    forward: float | None
    tpr: float

    @property
    def methods(self) -> list[str]:
        """The methods, by their mean TNR, the best first."""
        return sorted(self.tnr, key=lambda method: -fmean(self.tnr[method].values()))

    def rows(self) -> list[dict[str, Any]]:
        """One plain dict a method, the best first: means, what each set gave, and the cost."""
        rows = []
        for method in self.methods:
            figures = {"tnr": self.tnr[method], "auroc": self.auroc[method]}
            means = {name: fmean(values.values()) for name, values in figures.items()}
            each = {f"{name} {ood}": value for name, values in figures.items() for ood, value in values.items()}
            share = {} if self.forward is None else {"of_forward": self.cost[method] / self.forward}
            rows.append({"method": method, **means, **each, "microseconds": self.cost[method], **share})
        return rows

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values."""
        return {"tpr": self.tpr, "forward_microseconds": self.forward, "methods": self.rows()}

    def to_pandas(self) -> Any:
        """A pandas DataFrame with a row for each method."""
        import pandas  # noqa: PLC0415 (whoever asks for it has it)

        return pandas.DataFrame(self.rows()).set_index("method")

    def __repr__(self) -> str:
        """TNR in percent for each set, then means and cost."""
        sets, rows = list(next(iter(self.tnr.values()))), self.rows()
        costs = "of forward" if self.forward else "µs a sample"
        lines = [["method", *sets, "mean TNR", "AUROC", costs]]
        for row in rows:
            cost = f"{100 * row['of_forward']:.1f}%" if self.forward else f"{row['microseconds']:.3g}"
            figures = [row[f"tnr {ood}"] for ood in sets] + [row["tnr"], row["auroc"]]
            lines.append([row["method"], *(f"{100 * value:.1f}" for value in figures), cost])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)


def compare(
    model: nn.Module | None, train: Any, held_out: Any, ood: Any, *, methods: Iterable[str | Detector] | None = None,
    layers: Layers = "auto", tpr: float = 0.95, budget: int = BUDGET,
) -> Comparison:  # fmt: skip
    """Fit every untuned method on the same training pass, and measure each on the same samples.

    Each loader is read once; one forward pass serves all methods that read the same statistic of the same layers. What
    another statistic adds to the pass is a part of its methods' cost.

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
        By default every method of `igeood.METHODS` that has an untuned form of its own and finds what it needs.
    layers : "auto" or names
        As in `white_box`.
    tpr : float
        The operating point.
    budget : int
        Bytes of training rows to keep, as in `Guard.fit`.
    """
    detectors, kinds = _detectors(methods), named_kinds(ood, model)
    if not kinds:
        raise InputError("ood: empty; give at least one OOD set, as a loader or by name")
    make_inputs = partial(ArrayInputs, layers) if model is None else partial(ModelInputs, model, layers)
    with random_state_kept(), torch.inference_mode(False), torch.no_grad():
        groups = _fit(detectors, make_inputs, train, budget, is_strict=methods is not None)
        detectors = {name: detector for group in groups for name, detector in group.detectors.items()}
        seconds = dict.fromkeys(["", *detectors], 0.0)
        inside = _scores(groups, held_out, "held_out", seconds)
        scores = {name: _scores(groups, source, name, seconds) for name, source in kinds.items()}
    n = sum(len(next(iter(part.values()))) for part in (inside, *scores.values()))
    rates = {m: {name: evaluate(inside[m], outside[m], tpr) for name, outside in scores.items()} for m in detectors}
    tnr = {method: {name: rate.tnr_at_tpr for name, rate in row.items()} for method, row in rates.items()}
    auroc = {method: {name: rate.auroc for name, rate in row.items()} for method, row in rates.items()}
    cost = {method: 1e6 * spent / n for method, spent in seconds.items()}
    forward = cost.pop("")
    return Comparison(tnr, auroc, cost, None if model is None else forward, tpr)


def _detectors(methods: Iterable[str | Detector] | None) -> dict[str, Detector]:
    if methods is None:
        methods = [name for name, method in METHODS.items() if method.tunes != "only"]
    detectors: dict[str, Detector] = {}
    for method in methods:
        instance = method if isinstance(method, Detector) else make_detector(method)
        name = type(method).__name__ if isinstance(method, Wrapped) else method
        name = name if isinstance(name, str) else method_name(name)
        same = sum(known == name or known.startswith(f"{name} (") for known in detectors)
        detectors[f"{name} ({same + 1})" if same else name] = instance
    if not detectors:
        raise InputError("methods: empty; name some of igeood.METHODS, or leave it out")
    return detectors


@dataclass
class _Group:
    """Methods that one forward pass serves: they read the same statistic of the same kind of layers."""

    inputs: ArrayInputs | ModelInputs
    detectors: dict[str, Detector]
    summaries: list[Summary]

    def add(self, batch: Any, number: int) -> None:
        """Take in a batch of training samples."""
        with self.inputs.at("train", number):
            outputs = self.inputs.outputs(batch, labels=True, keys=True)
        for summary in self.summaries:
            summary.add(outputs)

    def learn(self, is_strict: bool) -> None:
        """Fit the methods; unless strict, those that find what they need."""
        for summary in self.summaries:
            summary.head = self.inputs.head
        fitted: dict[str, Detector] = {}
        for name, one in self.detectors.items():
            with _left_out([name], is_strict):
                fitted[name] = copy.copy(one).learn(_covering(self.summaries, one))
        self.detectors = fitted


@contextmanager
def _left_out(methods: Iterable[str], is_strict: bool) -> Iterator[None]:
    """Unless strict, a message in place of the error where the classifier lacks what methods need."""
    try:
        yield
    except UnsuitedError as error:
        if is_strict:
            raise
        log.warning("compare: %s is left out: %s", ", ".join(methods), error)


def _fit(
    detectors: dict[str, Detector], make_inputs: Callable[[], ArrayInputs | ModelInputs], train: Any, budget: int, *,
    is_strict: bool,
) -> list[_Group]:  # fmt: skip
    """Fitted detectors, from one reading of the data; unless strict, those that find what they need."""
    batches = filter(len, make_inputs().batches(train, "train"))
    first: Any = next(batches, None)
    if first is None:
        raise InputError("train: no training row; give at least one, or a new loader if this one was read already")
    if isinstance(first, Outputs) and not is_strict:
        has = {name: one.needs.blocks(first.features) for name, one in detectors.items()}
        detectors = {name: one for name, one in detectors.items() if has[name] or not one.needs.reads_layers}
    kinds: dict[tuple[str, str], dict[str, Detector]] = {}
    for name, detector in detectors.items():
        layers = detector.needs.layers if detector.needs.layers in ("convolutions", "norms") else ""
        kinds.setdefault((layers, detector.needs.statistic), {})[name] = detector
    groups: list[_Group] = []
    for kind in sorted(kinds):  # "" is the first
        with _left_out(kinds[kind], is_strict):
            groups.append(_group(kinds[kind], make_inputs(), first, budget))
    for number, batch in enumerate(chain([first], batches)):
        for group in groups:
            group.add(batch, number)
    for group in groups:
        group.learn(is_strict)
    return groups


def _group(detectors: dict[str, Detector], inputs: ArrayInputs | ModelInputs, first: Any, budget: int) -> _Group:
    """Methods with inputs that read what they need."""
    wanted = joined(detector.needs for detector in detectors.values())
    (read,) = joined(
        Needs(one.layers, one.statistic, head=one.head, inputs=one.inputs, returns=one.returns) for one in wanted
    )
    inputs.prepare(first, read)  # by all of them together
    inputs.outputs(first)
    return _Group(inputs, detectors, [Summary(needs, budget=budget, model=inputs.weights()) for needs in wanted])


def _covering(summaries: list[Summary], detector: Detector) -> Summary:
    for summary in summaries:
        with suppress(InputError):
            check_covers(summary.described, detector.needs.describe(), "")
            return summary
    raise InputError(f"methods: {detector!r} needs what others' passes do not have; compare it alone")


def _scores(groups: list[_Group], source: Any, name: str, seconds: dict[str, float]) -> dict[str, Tensor]:
    """Scores of one set by each detector; adds to the seconds that each took, and the forward pass ("")."""
    parts: dict[str, list[Tensor]] = {method: [] for group in groups for method in group.detectors}
    for number, batch in enumerate(filter(len, groups[0].inputs.batches(source, name))):
        with groups[0].inputs.at(name, number):
            passes = []
            for group in groups:
                start = time.perf_counter()
                outputs = group.inputs.outputs(batch)
                passes.append(time.perf_counter() - start)
                for method, detector in group.detectors.items():
                    if number == 0:  # a first call may prepare something
                        detector._score(detector._scorable(outputs))
                    start = time.perf_counter()
                    parts[method].append(detector._score(detector._scorable(outputs)).cpu())
                    seconds[method] += time.perf_counter() - start + max(0.0, passes[-1] - passes[0])
            seconds[""] += passes[0]
    if not all(parts.values()):
        raise InputError(f"{name}: empty; give at least one sample, or a new loader if this one was read already")
    return {method: torch.cat(values) for method, values in parts.items()}
