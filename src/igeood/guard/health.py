"""Health checks after fit, tune and calibrate: set-ups that are useless, or mistaken."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from igeood.detectors import Detector
from igeood.errors import Finding
from igeood.guard.tune import Tuning
from igeood.outputs import Outputs, is_no_distribution
from igeood.summary import Sample, Summary

STEPS = ("fit", "tune", "calibrate")
ROWS = 500  # of the training sample that are looked at
FEW = 20  # rows of which nothing is said
ALIKE = 1e-13  # of the scores' size: what rounding leaves between equal ones


def _warning(code: str, message: str, cure: str) -> Finding:
    return Finding(code, "warning", message, cure)


def of_fit(detector: Detector, summary: Summary) -> Iterator[Finding]:
    """What training rows show: their outputs, and their scores."""
    yield from detector.findings_
    yield from _of_sample(summary)
    sample = next(iter(summary.samples.values()), None)
    rows = summary.preview if sample is None else draw_rows(sample)
    if rows is None:
        return
    wrong = 0.0 if rows.labels is None else float((rows.logits.argmax(dim=1) != rows.labels).double().mean())
    if wrong > 0.5:
        message = f"labels: the classifier disagrees with {100 * wrong:.0f}% of them"
        yield _warning("labels-disagree", message, "are classes and rows in the order of the logits?")
    if not detector.probabilities:
        yield from _of_logits(rows.logits)
    kept = next((each for each in summary.samples.values() if set(detector.widths_) <= set(each.widths)), None)
    if kept is not None:
        rows = draw_rows(kept)
        # a network that is sure of all its rows ties their scores, but not that of an answer that is not sure
        unsure = rows[:1].replace(logits=torch.zeros_like(rows.logits[:1]))
        with torch.inference_mode(False), torch.no_grad():
            scores = torch.cat([detector.score(part.only(detector.widths_)).double().cpu() for part in (rows, unsure)])
        yield from of_scores(scores, "training")


def draw_rows(sample: Sample) -> Outputs:
    """Up to 500 rows, each as often as its weight says: no randomness, whatever the batches were."""
    outputs, weights = sample.outputs(per_class=-(-ROWS // sample.strata))
    ends = weights.double().cumsum(dim=0)
    n = min(ROWS, round(float(ends[-1])))
    places = (torch.arange(n, dtype=torch.float64) + 0.5) * (float(ends[-1]) / n)
    return outputs[torch.searchsorted(ends, places).clamp(max=len(outputs) - 1)]


def _of_sample(summary: Summary) -> Iterator[Finding]:
    """How many rows of each class were kept, where not all were."""
    for name, sample in summary.samples.items():
        if sample.quota < int(sample.totals.max()):
            rows = f"{sample.kept.min()} to {sample.kept.max()} of {sample.totals.min()} to {sample.totals.max()} rows"
            message = f"fit: the budget of {summary.budget / 2**20:.3g} MiB keeps {rows} of a class, with {name}"
            yield Finding("sampled", "info", message, "nothing has to be done")


def _of_logits(logits: Tensor) -> Iterator[Finding]:
    if bool(((logits < 0) | (logits > 1)).any()):
        return
    off = float(is_no_distribution(logits).double().mean())
    if off == 0.0:
        message = "logits: every row is ≥ 0 and sums to 1: are these probabilities?"
        yield _warning("probabilities", message, "then say so with {probabilities=True}")
    elif float(logits.amax(dim=1).median()) > 0.9:  # others may be small numbers, such as cosines
        message = f"logits: all lie in [0, 1], and {100 * off:.0f}% of the rows do not sum to 1: are these sigmoids?"
        yield _warning("sigmoid-outputs", message, "give logits of a classifier that chooses one class")


def of_scores(scores: Tensor, what: str) -> Iterator[Finding]:
    """Whether all scores are the same, whatever the cause."""
    spread = float(scores.max() - scores.min())
    if len(scores) >= FEW and spread <= ALIKE * float(scores.abs().max()):
        message = f"all {what} scores are equal: the guard tells no two inputs apart"
        yield _warning("scores-tied", message, "give logits, not answers of 0 and 1, or choose another method")


def of_tune(tuning: Tuning, tpr: float, trained_on: int, halved: list[str]) -> Iterator[Finding]:
    """What the validation samples show."""
    if trained_on:
        message = f"id_data: {trained_on} of {tuning.n_id} samples are training samples"
        yield _warning("tuned-on-training-samples", message, "tune on others")
    for name in halved:
        yield Finding("sampled", "info", f"tune: the budget holds a part of {name}", "raise {budget}")
    error = math.sqrt((tuning.n_id + tuning.n_ood + 1) / (12.0 * tuning.n_id * tuning.n_ood))  # of an AUROC of one half
    if tuning.auroc < 0.5 - 2.0 * error:
        message = f"ood: scored as less foreign than in-distribution samples, AUROC {tuning.auroc:.2f}: swapped?"
        yield _warning("swapped", message, "give in-distribution samples first, OOD samples second")
    elif _is_chance(tuning, tpr, 0.5 + 3.0 * error):
        message = f"ood: {100 * tuning.after:.1f}% of the OOD samples are refused, as in-distribution ones may be too"
        yield _warning("ood-not-refused", message, "choose another method, or look at the samples")
    elif tuning.after <= tuning.before:
        message = f"tune: no more OOD validation samples are refused than before, {100 * tuning.before:.1f}%"
        yield Finding("no-gain", "info", message, "leave tune out")
    temperatures = [trial["temperature"] for trial in tuning.trials]
    if temperatures and tuning.temperature in (temperatures[0], temperatures[-1]):
        message = f"tune: the best temperature, {tuning.temperature:g}, is at the end of the range that was tried"
        yield Finding("temperature-at-edge", "info", message, "a method without temperature may do as well")


def _is_chance(tuning: Tuning, tpr: float, area: float) -> bool:
    """Whether as many are refused as of in-distribution samples; or a few more, the best of what was tried."""
    spread = math.sqrt(tpr * (1.0 - tpr) * (1.0 / tuning.n_id + 1.0 / tuning.n_ood))
    return tuning.after <= 1.0 - tpr + (4.0 * spread if tuning.auroc <= area else 1e-9)


def of_calibration(scores: Tensor, trained_on: int, left_out: int) -> Iterator[Finding]:
    """What calibration samples show."""
    if trained_on:
        message = f"id_data: {trained_on} of {len(scores)} samples are training samples, so nothing is promised"
        yield _warning("trained-on", message, "calibrate on samples kept apart")
    if left_out:
        message = f"calibrate: left out {left_out} of {left_out + len(scores)} samples, which tune had used"
        yield Finding("left-out", "info", message, "nothing has to be done")
    yield from of_scores(scores, "calibration")
