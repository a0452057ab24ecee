"""Health checks after fit, tune and calibrate: set-ups that are useless, or mistaken."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from igeood.calibration import Calibration
from igeood.detectors import Detector
from igeood.errors import Finding, Level
from igeood.geometry.precision import precise
from igeood.guard.identity import Seen
from igeood.guard.tune import Tuning
from igeood.outputs import Outputs, is_no_distribution
from igeood.summary import Sample, Summary

STEPS = ("fit", "tune", "calibrate")
ROWS = 500  # of the training sample that are looked at
SHOWN = 5  # rows that were left out
FEW = 20  # rows of which nothing is said
ALIKE = 1e-13  # of the scores' size: what rounding leaves between equal ones
MANY = 0.05  # of validation samples: fewer may be in the training set by chance, as short texts are
SURE = 0.01  # chance that a class is said to be kept less often than it is
_OF_TIES = "give logits, or probabilities with more decimals, not answers of 0 and 1; or choose another method"


def _warning(code: str, message: str, cure: str) -> Finding:
    return Finding(code, "warning", message, cure)


def of_fit(detector: Detector, summary: Summary, scores: Tensor | None) -> Iterator[Finding]:
    """What training rows show: their outputs, and their scores (`training_scores`)."""
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
    if scores is not None:
        is_same = bool((rows.logits == rows.logits[0]).all())
        cure = "look at the classifier, which answers all of them alike" if is_same else _OF_TIES
        yield from of_scores(scores[:-1] if is_same else scores, len(scores) - 1, "training", cure)


def training_scores(detector: Detector, summary: Summary | None) -> tuple[Tensor | None, float | None]:
    """Scores of training rows, of a sample or the first ones, then of an answer that is not sure; and the highest.

    A network that is sure of all its rows ties their scores, but not that of an answer that is not sure. There is no
    highest where all are tied, or few.
    """
    samples = {} if summary is None else summary.samples
    needed = set(detector.widths_)
    kept = next((each for each in samples.values() if needed <= set(each.widths)), None)
    rows = getattr(summary, "preview", None) if kept is None else draw_rows(kept)
    if rows is None or not needed <= set(rows.features):
        return None, None
    rows = rows.only(detector.widths_)
    unsure = rows[:1].replace(logits=torch.zeros_like(rows.logits[:1]))
    with precise(), torch.no_grad():
        scores = torch.cat([detector.score(part).double().cpu() for part in (rows, unsure)])
    is_tied = len(rows) < FEW or _are_tied(scores[:-1])
    return scores, None if is_tied else float(scores[:-1].max())


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


def of_scores(scores: Tensor, n: int, what: str, cure: str) -> Iterator[Finding]:
    """Whether all scores, of n samples, are the same, whatever the cause."""
    if n >= FEW and _are_tied(scores):
        yield _warning("scores-tied", f"all {n} {what} scores are equal: the guard tells no two inputs apart", cure)


def _are_tied(scores: Tensor) -> bool:
    """Whether scores differ by rounding alone."""
    return float(scores.max() - scores.min()) <= ALIKE * float(scores.abs().max())


def of_tune(tuning: Tuning, tpr: float, trained_on: int, halved: list[str]) -> Iterator[Finding]:
    """What the validation samples show."""
    if trained_on:
        message = f"id_data: {trained_on} of {tuning.n_id} samples are training samples"
        level: Level = "warning" if trained_on > MANY * tuning.n_id else "info"
        yield Finding("tuned-on-training-samples", level, message, "tune on others")
    for name in halved:
        yield Finding("sampled", "info", f"tune: the budget holds a part of {name}", "raise {budget}")
    error = math.sqrt((tuning.n_id + tuning.n_ood + 1) / (12.0 * tuning.n_id * tuning.n_ood))  # of an AUROC of one half
    if tuning.auroc < 0.5 - 2.0 * error:
        message = f"ood: scored as less foreign than in-distribution samples, AUROC {tuning.auroc:.2f}: swapped?"
        yield _warning("swapped", message, "give in-distribution samples first, OOD samples second")
    elif _is_chance(tuning, tpr, 0.5 + 3.0 * error):
        message = f"ood: {100 * tuning.after:.1f}% of the OOD samples are refused, as in-distribution ones may be too"
        level = "warning" if tuning.auroc <= 0.5 + 3.0 * error else "info"
        yield Finding("ood-not-refused", level, message, "choose another method, or look at the samples")
    elif tuning.after <= tuning.before:
        message = f"tune: no more OOD validation samples are refused than before, {100 * tuning.before:.1f}%"
        yield Finding("no-gain", "info", message, "leave tune out")


def _is_chance(tuning: Tuning, tpr: float, area: float) -> bool:
    """Whether as many are refused as of in-distribution samples; or a few more, the best of what was tried."""
    spread = math.sqrt(tpr * (1.0 - tpr) * (1.0 / tuning.n_id + 1.0 / tuning.n_ood))
    return tuning.after <= 1.0 - tpr + (4.0 * spread if tuning.auroc <= area else 1e-9)


def of_calibration(
    calibration: Calibration, offered: Seen, fitted_on: Seen, n_tuned: int, highest: float | None
) -> Iterator[Finding]:
    """What calibration samples show: tuning used `n_tuned` of them, and training samples score `highest` at most."""
    how = "their ids or inputs" if offered.identified else "equal rows"
    scores = calibration.scores
    n = len(scores)
    left_out = calibration.left_out
    if len(fitted_on.keys) and offered.identified != fitted_on.identified:
        message = "calibrate: one of training and calibration samples have ids, the others none: they are not compared"
        yield Finding("not-compared", "info", message, "give ids to both")
    if calibration.trained_on:
        message = (
            f"id_data: {calibration.trained_on} of {n} samples are training samples, by {how}; nothing is promised"
        )
        yield _warning("trained-on", message, "calibrate on samples kept apart")
    if len(left_out):
        which = f"rows {', '.join(map(str, left_out[:SHOWN]))}{' …' if len(left_out) > SHOWN else ''}"
        why = f"{n_tuned} were used by tune, {len(left_out) - n_tuned} are training samples"
        message = f"calibrate: left out {len(left_out)} of {len(left_out) + n} samples ({which}): {why}"
        yield Finding("left-out", "info", message, "nothing has to be done")
    is_new = highest is not None  # those of training samples differ
    yield from of_scores(scores, n, "calibration", "look whether these inputs are all the same" if is_new else _OF_TIES)
    if highest is not None and n >= FEW and float(scores[0]) > highest:
        message = f"id_data: all {n} scores are above those of the training samples that were looked at"
        yield _warning("unlike-training", message, "prepare these samples as those, and look whether they are the same")
    n_tied = int((scores >= scores[-1] - ALIKE * scores[-1].abs()).sum())
    if n_tied < n and calibration.threshold >= float(scores[-1]) and n_tied > 1:
        message = f"id_data: the {n_tied} largest of {n} scores are equal, and a score must be larger to be refused"
        yield Finding("largest-tied", "info", message, _OF_TIES)
    yield from _of_classes(calibration)


def _of_classes(calibration: Calibration) -> Iterator[Finding]:
    """Whether fewer samples of some predicted classes are kept than the promise over all says."""
    shares = calibration.by_class(1.0 - SURE / max(1, calibration.n_classes))
    below = [share for share in shares if share.high < calibration.tpr]
    if below:
        worst = below[0]
        which = f"{len(below)} of {len(shares)} predicted classes are kept less often than {100 * calibration.tpr:.4g}%"
        message = f"calibrate: {which}; {worst.name} is kept in {100 * worst.kept:.0f}% of {worst.n} samples"
        more = "give more calibration samples of such classes"
        cure = more if calibration.per_class else "for a promise to each class give {per_class=True}"
        yield Finding("classes-kept-less", "info", message, cure)
