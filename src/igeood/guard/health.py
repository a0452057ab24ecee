"""What a guard says of itself after fit, tune and calibrate: set-ups that are useless, or mistaken."""

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from igeood.detectors import Detector
from igeood.errors import IgeoodWarning
from igeood.guard.known import Known, Shared
from igeood.guard.tuning import NAMED, Tuning
from igeood.metrics import auroc
from igeood.outputs import Outputs, row_keys
from igeood.summary import Sample, Summary

STEPS = ("fit", "tune", "calibrate")
ROWS = 500  # of the training sample that are looked at: enough, and of a large bank no more than a moment
FEW = 20  # rows of which nothing is said
ALIKE = 1e-13  # of the scores' size: what rounding leaves between equal ones
DRAWN = 30  # contents from which on their counts tell whether they were drawn at random
UNLIKELY = 1e-3


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a guard, or worth knowing.

    Attributes
    ----------
    code : str
        A short name, the same in every version: for programs.
    level : {"warning", "info"}
        A warning is also an `IgeoodWarning`, when it is found.
    message, cure : str
        What was found, and what to do: together a sentence.
    """

    code: str
    level: Literal["warning", "info"]
    message: str
    cure: str

    def __str__(self) -> str:
        if self.message.endswith("?"):
            return f"{self.message} {self.cure[0].upper()}{self.cure[1:]}"
        return f"{self.message}; {self.cure}"


def warn(findings: Iterable[Finding], stacklevel: int = 3) -> None:
    """Warn of those that are warnings."""
    for finding in findings:
        if finding.level == "warning":
            warnings.warn(str(finding), IgeoodWarning, stacklevel=stacklevel)


def _warning(code: str, message: str, cure: str) -> Finding:
    return Finding(code, "warning", message, cure)


# -- after fit


def of_fit(detector: Detector, summary: Summary, scores: Tensor) -> Iterator[Finding]:
    """What the training sample shows: its outputs, and its scores beside those of itself with columns shuffled."""
    sample = next(iter(summary.samples.values()), None)
    drawn = summary.glimpse if sample is None else _drawn(sample)
    if drawn is not None:
        yield from _of_labels(drawn)
        if not detector.probabilities:
            yield from _of_outputs(drawn.logits)
    yield from of_counts(summary.key_counts, summary.n_classes, summary.identified, "training samples")
    rows = _scorable_rows(detector, summary) if len(scores) >= FEW else None
    if rows is not None:
        contents = len(np.unique(row_keys(rows.logits, *rows.features.values())))
        # a network that is sure of all its rows ties their scores, but not that of an answer that is not sure
        unsure = [rows[:1].replace(logits=torch.zeros_like(rows.logits[:1]))] * (contents > len(rows) / 2)
        every = torch.cat([scores, *(_scores(detector, row) for row in unsure)])
        yield from [*of_scores(every, contents, 1, "training")] or _of_shuffled(detector, rows, scores)


def training_scores(detector: Detector, summary: Summary | None) -> Tensor:
    """Scores of up to 500 rows of the training sample; none where it has not what the detector scores."""
    rows = None if summary is None else _scorable_rows(detector, summary)
    return torch.empty(0, dtype=torch.float64) if rows is None else _scores(detector, rows)


def _scorable_rows(detector: Detector, summary: Summary) -> Outputs | None:
    kinds = (kind for kind in summary.samples.values() if set(detector.widths_) <= set(kind.widths))
    sample = None if detector.needs.inputs else next(kinds, None)  # no model is run again
    return None if sample is None else _drawn(sample)


def _drawn(sample: Sample) -> Outputs:
    """Up to 500 rows, each as often as its weight says: no randomness, whatever the batches were."""
    outputs, weights = sample.outputs(per_class=-(-ROWS // sample.strata))
    ends = weights.double().cumsum(dim=0)
    n = min(ROWS, round(float(ends[-1])))
    places = (torch.arange(n, dtype=torch.float64) + 0.5) * (float(ends[-1]) / n)
    return outputs[torch.searchsorted(ends, places).clamp(max=len(outputs) - 1)]


def _of_labels(rows: Outputs) -> Iterator[Finding]:
    if rows.labels is None:
        return
    wrong = float((rows.logits.argmax(dim=1) != rows.labels).double().mean())
    if wrong > 0.5:
        problem = f"labels: the classifier disagrees with {100 * wrong:.0f}% of them"
        yield _warning("labels-disagree", problem, "are classes and rows in the order of the logits?")


def _of_outputs(logits: Tensor) -> Iterator[Finding]:
    if bool(((logits < 0) | (logits > 1)).any()):
        return
    off = float(((logits.sum(dim=1) - 1.0).abs() > 1e-3).double().mean())
    if off and float(logits.amax(dim=1).median()) <= 0.9:
        return  # small numbers, such as cosines
    if off:
        problem = f"logits: all lie in [0, 1], and {100 * off:.0f}% of the rows do not sum to 1: are these sigmoids?"
        yield _warning("sigmoid-outputs", problem, "give logits of a classifier that chooses one class")
    else:
        problem = "logits: every row is ≥ 0 and sums to 1: are these probabilities?"
        yield _warning("probabilities", problem, "then say so with probabilities=True")


def _of_shuffled(detector: Detector, rows: Outputs, scores: Tensor) -> Iterator[Finding]:
    """Each column shuffled across rows: values as usual, which belong to no class together.

    Only a method that knows classes by their features must see that. Shuffled logits are often those of a sure answer,
    and a method without classes may look at each channel alone.
    """
    if not (detector.needs.labels and rows.features) or _channel_knows(rows):
        return
    draw = torch.Generator().manual_seed(0)

    def shuffled(value: Tensor) -> Tensor:
        return torch.stack([column[torch.randperm(len(column), generator=draw)] for column in value.T], dim=1)

    features = {block: shuffled(value) for block, value in rows.features.items()}
    other = rows.replace(logits=shuffled(rows.logits), features=features)
    other = other[other.logits.amax(dim=1).isfinite()]
    if len(other) < FEW:
        return
    area, error = auroc(scores, _scores(detector, other)), _error(len(rows), len(other))
    if area <= 0.5 + min(2.0 * error, 0.05):
        problem = f"training samples are told from shuffled values no better than by chance, AUROC {area:.2f}"
        yield _warning("no-better-than-chance", problem, "check logits, features and labels, or choose another method")


def _channel_knows(rows: Outputs) -> bool:
    """Whether one channel tells much of the class by itself: shuffled, it looks the same."""
    classes = functional.one_hot(rows.labels if rows.labels is not None else rows.logits.argmax(dim=1)).double()
    counts = classes.sum(dim=0).clamp(min=1.0)
    for value in rows.features.values():
        x = value.double() - value.double().mean(dim=0)
        between = (counts[:, None] * (classes.T @ x / counts[:, None]).square()).sum(dim=0)
        if bool((between > 0.2 * x.square().sum(dim=0).clamp(min=1e-300)).any()):
            return True
    return False


def _scores(detector: Detector, rows: Outputs) -> Tensor:
    with torch.no_grad():  # a sample's probabilities are logarithms already
        return torch.as_tensor(detector._score(rows.only(detector.widths_))).double().cpu()


def _error(n: int, m: int) -> float:
    """Standard error of an AUROC of one half."""
    return math.sqrt((n + m + 1) / (12.0 * n * m))


# -- after every step


def of_counts(counts: NDArray[np.int64], n_classes: int, identified: bool, what: str) -> Iterator[Finding]:
    """Whether few distinct samples were given again and again.

    Samples of few values repeat in honest data too, but very unequally: some are frequent. A tiled or resampled set has
    counts as of equally frequent samples, by Pearson's test.
    """
    n, distinct = int(counts.sum()), len(counts)
    if n < max(FEW, 2 * distinct) or (not identified and distinct <= n_classes):
        return
    is_equal = bool((counts == counts[0]).all())
    if not is_equal and distinct >= DRAWN and n >= 4 * distinct and (identified or n_classes > 2):
        from scipy.stats import chi2  # noqa: PLC0415 (slow to import)

        mean = n / distinct
        is_equal = float(((counts - mean) ** 2).sum()) / mean <= chi2.isf(0.01, distinct - 1)
    if is_equal:
        problem = f"{what}: of {n} only {distinct} are distinct, and each occurs about {n / distinct:.0f} times"
        yield _warning("repeated-rows", problem, "give each sample once: copies say nothing new")


def of_scores(scores: Tensor, contents: int, few: int, what: str) -> Iterator[Finding]:
    """Whether all scores are the same, of so many distinct outputs.

    Outputs that are sure of their class may all score the same, and foreign ones otherwise. Not so if the outputs are
    as few as the classes (`few`; training samples may be so sure), or if most of them differ.
    """
    spread, size = float(scores.max() - scores.min()), float(scores.abs().max())
    is_telling = few < contents <= len(scores) / 2
    if len(scores) >= FEW and spread <= ALIKE * size and contents and not is_telling:
        problem = f"all {len(scores)} {what} scores are equal: the guard tells no two inputs apart"
        yield _warning("scores-tied", problem, "give logits, not answers of 0 and 1, or choose another method")


def of_tune(tuning: Tuning, tpr: float, trained_on: Shared | None) -> Iterator[Finding]:
    """What the validation samples show."""
    if trained_on is not None:
        cure = "tune on others" + f", {NAMED}" * (trained_on.chance is not None)
        yield _warning("tuned-on-training-samples", f"id_data: {trained_on.with_('training samples')}", cure)
    error = _error(tuning.n_id, tuning.n_ood) if tuning.n_ood else 0.0
    is_swapped = tuning.auroc is not None and tuning.auroc < 0.5 - 2.0 * error
    if is_swapped:
        problem = f"ood: scored as less foreign than in-distribution samples, AUROC {tuning.auroc:.2f}: swapped?"
        yield _warning("swapped", problem, "give in-distribution samples first, OOD samples second")
    elif tuning.n_ood and _is_chance(tuning, tpr, 0.5 + 3.0 * error):
        problem = f"ood: {100 * tuning.after:.1f}% of the OOD samples are refused, as in-distribution ones may be too"
        yield _warning("ood-not-refused", problem, "choose another method, or look at the samples")
    temperatures = [trial["temperature"] for trial in tuning.trials]
    if temperatures and tuning.temperature in (temperatures[0], temperatures[-1]):
        problem = f"tune: the best temperature, {tuning.temperature:g}, is at the end of the range that was tried"
        yield Finding("temperature-at-edge", "info", problem, "a method without temperature may do as well")


def _is_chance(tuning: Tuning, tpr: float, area: float) -> bool:
    """Whether as many are refused as of in-distribution samples; or a few more, the best of what was tried."""
    spread = math.sqrt(tpr * (1.0 - tpr) * (1.0 / tuning.n_id + 1.0 / tuning.n_ood))
    is_near = tuning.auroc is not None and tuning.auroc <= area
    return tuning.after <= 1.0 - tpr + (4.0 * spread if is_near else 1e-9)


def of_kinds(fitted_on: Known, tuned_on: Known, identified: bool) -> Iterator[Finding]:
    """Whether samples of an earlier step cannot be known again."""
    levels: tuple[tuple[Known, str, Literal["warning", "info"]], ...] = (
        (fitted_on, "training samples", "info"),
        (tuned_on, "samples that tune used", "warning"),
    )
    for known, what, level in levels:
        if known.is_of_other_kind(identified):
            theirs, these = ("ids", "outputs") if known.identified else ("outputs", "ids")
            problem = f"id_data: {what} are known by {theirs}, these by {these}, so none can be known again"
            yield Finding("not-compared", level, problem, "give ids to all, or to none")


def of_calibration(scores: Tensor, trained: Tensor, trained_on: Shared | None) -> Iterator[Finding]:
    """What calibration samples show beside training samples."""
    if trained_on is not None:
        problem = f"id_data: {trained_on.with_('training samples')}"
        cure = "calibrate on samples kept apart" + f", {NAMED}" * (trained_on.chance is not None)
        yield _warning("trained-on", f"{problem}; classifiers are surer of those, so nothing is promised", cure)
    if len(trained):
        from scipy.stats import ks_2samp  # noqa: PLC0415 (slow to import)

        test = ks_2samp(scores.numpy(), trained.numpy(), method="asymp")
        if test.pvalue < UNLIKELY:
            side = "higher" if float(scores.median()) > float(trained.median()) else "lower"
            problem = f"calibration scores are {side} than training scores, KS distance {test.statistic:.2f}"
            cure = "a classifier is surer of what it was trained on; else look for another source or preparation"
            yield Finding("calibration-shift", "info", problem, cure)
