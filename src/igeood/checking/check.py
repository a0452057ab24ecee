"""The check itself: a pass over the held-out samples and each OOD set, and one for each fault."""

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import betabinom
from torch import Tensor

from igeood.calibration import exact_interval, rank
from igeood.checking.faults import Fault, Usual, faults_for, kind_of, on_inputs, tokens_there
from igeood.checking.result import Check, Example, FaultResult, OodResult, Share
from igeood.checking.sampling import Sample
from igeood.comparison import named_sets
from igeood.errors import InputError
from igeood.guard import Guard, Verdict
from igeood.guard.identity import Seen, draw
from igeood.metrics import auroc
from igeood.model.batch import Batch
from igeood.model.reader import random_state_kept
from igeood.terminal import Progress, progress_bars

Faults = Literal["auto"] | Mapping[str, Callable[[Tensor], Tensor]] | None
SHOWN = 3  # least and most surprising samples of an OOD set


@dataclass
class Pass:
    """What a pass over a set shows: a row for each sample that can be read and was not seen before.

    Attributes
    ----------
    columns : dict of list of array
        Scores, refusals, answers and labels (−1 without one), batch by batch.
    sample : Sample
        Some of the samples, at random.
    least, most : Sample
        Those with the smallest and the largest scores.
    """

    sample: Sample
    least: Sample = field(default_factory=lambda: Sample(SHOWN))
    most: Sample = field(default_factory=lambda: Sample(SHOWN))
    columns: dict[str, list[NDArray[Any]]] = field(default_factory=dict)
    left_out: int = 0
    unread: int = 0

    def column(self, name: str) -> NDArray[Any]:
        """All values of a column."""
        return np.concatenate(self.columns[name])


def check(
    guard: Guard,
    held_out: Any,
    ood: Any = None,
    faults: Faults = "auto",
    limit: int = 500,
    seed: int = 0,
    *,
    decode: Callable[[Tensor], str] | None = None,
) -> Check:
    """Try a guard on samples of one's own: what it keeps, which faults it catches, what it refuses of OOD sets.

    Faults are made of the held-out inputs: an image turned upside down, words in another order, units that are wrong. A
    fault whose samples get another answer and are kept is a *silent failure*.

    Parameters
    ----------
    guard : Guard
        Calibrated.
    held_out : loader, or array of logits
        In-distribution samples, as for `Guard.calibrate`, with labels if there are some. Those that training, `tune` or
        `calibrate` has seen are left out and counted.
    ood : mapping of str to loader, or loader, optional
        OOD samples, by name.
    faults : "auto", mapping of str to callable, or None
        By default those of the catalogue that suit the inputs: images, token ids, or vectors. Or your own, by name: a
        function gets the inputs, (N, ...), and returns others.
    limit : int
        Held-out samples that faults are made of, at most.
    seed : int
        Of the choice of these samples, and of faults that draw numbers.
    decode : callable, optional
        Makes a text of a row of token ids, for the report.
    """
    guard.promise  # noqa: B018 (raises if the guard is not calibrated)
    for name, number, least in (("limit", limit, 1), ("seed", seed, 0)):
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < least:
            raise InputError(f"expected an integer, at least {least}; got {number!r}", argument=name)
    if not (
        faults is None or faults == "auto" or (isinstance(faults, Mapping) and all(map(callable, faults.values())))
    ):
        raise InputError(f"expected 'auto', None or functions by name; got {faults!r}", argument="faults")
    sets = {} if ood is None else named_sets(ood, guard.source.model)
    seed = int(seed)
    with progress_bars(lines=False) as report:
        seen = (guard.fitted_on, *guard.tuned_on, guard.calibrated_on)
        known = _read(guard, held_out, "held_out", seen, Sample(limit), seed, report)
        if not known.columns:
            problem = f"{known.left_out} were seen before, {known.unread} cannot be read, and there are no others"
            raise InputError(problem, argument="held_out", cure="give samples that the guard has not seen")
        kept = known.sample.batches()
        usual = Usual.of(kept) if kept and kind_of(kept[0]) in ("images", "vectors") else None
        tried, no_faults = _chosen(guard, kept, usual, faults)
        results = list(_try_faults(guard, kept, tried, seed, report))
        scores = known.column("score")
        foreign = [
            _of_set(guard, name, _read(guard, data, name, (), Sample(0), seed, report), scores)
            for name, data in sets.items()
        ]
    return Check(
        guard.promise,
        guard.calibration.tpr,  # type: ignore[union-attr]
        **_kept(guard, known),
        left_out=known.left_out,
        unread=known.unread,
        faults=results,
        no_faults=no_faults,
        ood=foreign,
        calibration=guard.calibration,  # type: ignore[arg-type]
        guard=repr(guard),
        usual=usual,
        decode=decode,
        findings=guard.health,
    )


def _read(
    guard: Guard, data: Any, name: str, seen: tuple[Seen, ...], sample: Sample, seed: int, report: Progress
) -> Pass:
    """Judge all samples of a set, without those that were seen."""
    done = Pass(sample)
    data = data.settled(guard.classes) if hasattr(data, "settled") else data  # a file of logits
    n = 0
    with guard.source.reading(data):
        for item in guard.source.items(data, name=name, on_error="refuse", keys=True):
            verdict = guard.predict(item, on_error="refuse")
            outputs = item if isinstance(item, Batch) else guard.source.read(item, on_error="refuse")
            is_read = verdict.is_read
            is_new = is_read.copy()
            for samples in seen:
                is_new &= ~samples.among(outputs.keys, isinstance(item, Batch) or item.identified)
            done.unread += int((~is_read).sum())
            done.left_out += int((is_read & ~is_new).sum())
            numbers = draw(outputs.keys, np.zeros(len(verdict), dtype=np.int64), seed)
            _add(done, item, verdict, is_new, numbers, is_known=bool(seen))
            n += len(verdict)
            report(name, n, None)
    return done


def _add(
    done: Pass, item: Any, verdict: Verdict, rows: NDArray[np.bool_], numbers: NDArray[np.float64], *, is_known: bool
) -> None:
    """Add the rows of a batch; the labels of known samples count."""
    if not rows.any():
        return
    labels = None if item.labels is None or not is_known else torch.as_tensor(item.labels)
    if labels is not None and (labels.shape != (len(verdict),) or labels.is_floating_point()):
        problem = f"labels of shape {tuple(labels.shape)}, {labels.dtype}, for {len(verdict)} samples"
        raise InputError(problem, argument="held_out", cure="give one integer for each, or none")
    columns = {name: torch.as_tensor(getattr(verdict, name)).cpu().numpy() for name in ("score", "is_ood", "label")}
    columns["true"] = np.full(len(verdict), -1) if labels is None else labels.cpu().numpy()
    for name, values in columns.items():
        done.columns.setdefault(name, []).append(values[rows])
    if isinstance(item, Batch):
        batch = item[torch.from_numpy(rows)]
        done.sample.add(batch, numbers[rows])
        done.least.add(batch, columns["score"][rows].astype(np.float64))
        done.most.add(batch, -columns["score"][rows].astype(np.float64))


def _kept(guard: Guard, known: Pass) -> dict[str, Any]:
    """Shares that are kept: of all, by label, by answer; and how many answers are right."""
    is_kept = ~known.column("is_ood")
    answers, labels = known.column("label"), known.column("true")
    tpr = guard.calibration.tpr  # type: ignore[union-attr]

    def share(name: str, rows: NDArray[np.bool_], of: int = 1) -> Share:
        n = int(rows.sum())
        kept = int(is_kept[rows].sum())
        low, high = (float(end) for end in exact_interval(kept, n))
        below = exact_interval(kept, n, 1.0 - 0.05 / of)[1] < tpr  # of so many classes none is marked by chance
        return Share(name, n, kept / n, low, high, bool(below))

    def by(column: NDArray[Any]) -> list[Share]:
        present = np.unique(column[column >= 0]).tolist()
        shares = [share(names[label], column == label, len(present)) for label in present]
        return sorted(shares, key=lambda one: (one.high, one.kept))

    names = guard.classes or tuple(map(str, range(guard.detector.n_classes_)))
    has_label = labels >= 0
    if labels.max() >= guard.detector.n_classes_:
        problem = f"{labels.max()} among the labels of {guard.detector.n_classes_} classes"
        raise InputError(problem, argument="held_out", cure="number the classes as in training")
    accuracy = float((answers == labels)[has_label].mean()) if has_label.any() else None
    everything = replace(share("all", np.ones(len(is_kept), dtype=bool)), below=_is_below(guard, is_kept))
    return {"kept": everything, "by_true": by(labels), "by_predicted": by(answers), "accuracy": accuracy}


def _is_below(guard: Guard, is_kept: NDArray[np.bool_]) -> bool:
    """Whether fewer are kept than the calibration's chance and the samples' explain, at a level of 2.5%."""
    calibration: Any = guard.calibration
    n = len(calibration.scores)
    place = rank(n, calibration.tpr, calibration.guarantee, calibration.confidence)
    chance = betabinom.cdf(is_kept.sum(), len(is_kept), place, n + 1 - place)
    return bool(chance < 0.025) and not calibration.trained_on and not calibration.per_class


def _changed(change: Callable[[Tensor], Tensor], x: Tensor, _: torch.Generator) -> Tensor:
    return change(x.clone())


def _chosen(guard: Guard, kept: list[Batch], usual: Usual | None, faults: Faults) -> tuple[dict[str, Fault], str]:
    """The faults to try; or none, and why."""
    if guard.source.model is None:
        return {}, "the guard has no model, and faults are made of its inputs"
    if faults is None:
        return {}, "none were asked for"
    if isinstance(faults, Mapping):
        own = {str(name): on_inputs(partial(_changed, change)) for name, change in faults.items()}
        return own, "none were given" if not own else ""
    found = faults_for(kept[0], usual)
    return found, "" if found else f"inputs of shape {tuple(kept[0].x.shape[1:])} are neither images, texts nor vectors"


def _try_faults(
    guard: Guard, kept: list[Batch], faults: dict[str, Fault], seed: int, report: Progress
) -> Iterator[FaultResult]:
    if not faults:
        return
    clean = [guard.predict(batch) for batch in kept]
    for number, (name, fault) in enumerate(faults.items(), start=1):
        yield _try_fault(guard, kept, clean, name, fault, seed)
        report("faults", number, len(faults))


def _try_fault(
    guard: Guard, kept: list[Batch], clean: list[Verdict], name: str, fault: Fault, seed: int
) -> FaultResult:
    """One fault on all samples; whatever goes wrong is said in its row."""
    number = zlib.crc32(name.encode()) ^ (seed % 2**32)
    generator = torch.Generator().manual_seed(number)
    refused: list[Tensor] = []
    changed: list[Tensor] = []
    broken: list[Batch] = []
    n = sum(map(len, kept))
    try:
        for batch, clear in zip(kept, clean, strict=True):
            with random_state_kept():  # of a fault of one's own
                torch.manual_seed(number)
                faulty = fault(batch, generator)
            _check_faulty(faulty, len(batch))
            verdict = guard.predict(faulty)
            refused.append(torch.as_tensor(verdict.is_ood).cpu())
            changed.append(torch.as_tensor(verdict.label != clear.label).cpu())
            broken.append(faulty)
    except Exception as error:  # noqa: BLE001 (of somebody's function, or of the model)
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return FaultResult(name, n, problem=reason)
    silent = [c & ~r for c, r in zip(changed, refused, strict=True)]
    group = next((i for i, each in enumerate(silent) if each.any()), 0)
    row = int(silent[group].int().argmax())
    before, after = (_examples(guard, part[group][row : row + 1])[0] for part in (kept, broken))
    shares = {"refused": refused, "changed": changed, "silent": silent}
    means = {name: float(torch.cat(each).double().mean()) for name, each in shares.items()}
    return FaultResult(name, n, **means, before=before, after=after)  # type: ignore[arg-type]


def _check_faulty(batch: Batch, n: int) -> None:
    if len(batch) != n:
        raise InputError(f"returned {len(batch)} samples for {n}")
    if batch.x.is_floating_point() and not bool(batch.x.isfinite().all()):
        raise InputError("returned NaN or infinity")


def _examples(guard: Guard, batch: Batch) -> list[Example]:
    """Samples with what the guard says of them."""
    verdict = guard.predict(batch, on_error="refuse")
    explained = guard.explain(batch)
    sure: Any = explained.probability
    return [
        Example(
            tokens_there(batch, row).cpu(),
            one.name or str(one.label),
            float(sure[row][0]),
            one.p_value,
            one.is_ood,
            explained.reason(row),
        )
        for row, one in enumerate(verdict)
    ]


def _of_set(guard: Guard, name: str, read: Pass, known: NDArray[Any]) -> OodResult:
    """What is refused of an OOD set."""
    if not read.columns:
        raise InputError("no sample that can be read", argument="ood", place=name, cure="give some")
    scores = read.column("score")
    least, most = (
        [example for batch in part.batches() for example in _examples(guard, batch)][:SHOWN]
        for part in (read.least, read.most)
    )
    return OodResult(name, len(scores), float(read.column("is_ood").mean()), auroc(known, scores), least, most)
