"""Reading training samples: a pass over each rank's samples makes a summary, and summaries add."""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save

from igeood.detectors import Detector
from igeood.distributed import Ranks
from igeood.errors import InputError
from igeood.geometry.precision import precise
from igeood.guard.health import ROWS
from igeood.guard.names import checked_columns, checked_names, checked_text, class_names
from igeood.guard.source import Source, joined
from igeood.summary import BUDGET, Summary

if TYPE_CHECKING:
    from igeood.guard.guard import Guard


def summarise(
    guard: "Guard", data: Any, labels: Any = None, *, classes: Sequence[str] | None = None, budget: int = BUDGET
) -> Summary:
    """Sum up training samples for a guard, in one pass; summaries of shards add with ``+``, and `guard.fit` takes one.

    Parameters
    ----------
    guard : Guard
        Whose method and model it is for; it is not changed.
    data, labels, classes, budget
        As in `Guard.fit`.
    """
    if not hasattr(guard, "detector"):
        raise InputError(f"got {type(guard).__name__}", argument="guard", cure="give one, as white_box(model)")
    summary = Summary(guard.detector.needs, budget=budget)
    read_training(copy.copy(guard.source), guard.detector, summary, data, labels, None, classes)
    return summary


def read_training(
    source: Source, detector: Detector, summary: Summary, data: Any, labels: Any, ids: Any, classes: Any
) -> None:
    """Add training samples to a summary, in one pass, and prepare the source for such samples."""
    before = source.weights()
    source.columns = None
    source.classes = None if classes is None else checked_names(classes)
    outputs = source.batches(data, labels, ids=ids, name="data", needs=detector.needs, keys=True)
    with source.reading(data), torch.inference_mode(False):
        for block in joined(part for part in outputs if len(part)):
            if summary.preview is None:
                summary.preview = block.detached()[torch.arange(min(ROWS, len(block)))]
            with precise():
                summary.add(block)
    source.settle(before)
    if summary.rows:
        summary.model = before
        summary.head = source.reader.head if detector.needs.head and source.reader is not None else None
        summary.about = {"probabilities": source.probabilities, "layouts": dict(source.layouts)}
        summary.about["autocast"] = source.fitted_autocast
        source.classes = class_names(source.classes, summary.n_classes, data, source.bare)
        about = {"classes": source.classes and list(source.classes), "columns": source.columns}
        summary.about |= {name: value for name, value in about.items() if value is not None}


def add_up(summary: Summary, ranks: Ranks) -> Summary:
    """The sum of all ranks' summaries, in the order of the ranks: the same bits on each."""
    if ranks.alone:
        return summary
    parts = [Summary.from_bytes(part, summary.needs) for part in ranks.gather(summary.to_bytes())]
    total = parts[0]
    for rank, part in enumerate(parts[1:], start=1):
        try:
            total += part
        except InputError as error:  # noqa: PERF203 (a summary is much work)
            raise error.within(f"rank {rank}") from error
    return total


def take_over_first(detector: Detector, ranks: Ranks) -> None:
    """Let all ranks have what the first has learnt: machines may round differently."""
    state = {name: value.detach().cpu().contiguous().clone() for name, value in detector.state().items()}
    state = load(ranks.gather(save(state) if ranks.rank == 0 else b"")[0])
    findings = detector.findings_
    detector.load_state(state, detector.n_classes_, detector.widths_).findings_ = findings


def learn(source: Source, detector: Detector, summary: Summary, *, has_read: bool) -> None:
    """Let a detector learn, and its source read what it needs; `has_read` says that the source read the samples."""
    if not has_read:
        follow(source, detector, summary)
    detector.learn(summary)
    if list(detector.widths_) != source.layers:
        source.follow(list(detector.widths_), source.layouts, detector.needs)


def follow(source: Source, detector: Detector, summary: Summary) -> None:
    """Let a source read the layers that the method needs of those that a summary has."""
    needs = detector.needs
    weights = source.weights()
    if weights not in (None, summary.model):
        raise InputError(f"of model {summary.model}, not {weights}", argument="summary", cure="make it with that model")
    blocks = needs.blocks(summary.widths)
    if source.wanted is not None and needs.blocks(needs.named(source.wanted)) != blocks:
        raise InputError(f"has layers {blocks}, not {source.wanted}", argument="summary", cure="make it with this one")
    if summary.about.get("probabilities", source.probabilities) != source.probabilities:
        raise InputError("one is of probabilities, the other is not", argument="summary", cure="make both alike")
    source.columns = checked_columns(summary.about.get("columns"))
    source.follow(blocks, summary.about.get("layouts", {}), needs)
    source.settle()
    source.fitted_autocast = checked_text(summary.about.get("autocast"), "autocast")
