"""How a guard learns: a pass over each rank's training samples makes a summary, and summaries add."""

import copy
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save

from igeood.detectors import Detector
from igeood.errors import InputError
from igeood.guard.health import ROWS
from igeood.guard.inputs import ArrayInputs, ModelInputs
from igeood.guard.names import class_names
from igeood.guard.ranks import Ranks
from igeood.model.batches import unpadded
from igeood.model.reader import random_state_kept
from igeood.outputs import Outputs, recut, returned_blocks
from igeood.summary import BUDGET, Summary

if TYPE_CHECKING:
    from igeood.guard.guard import Guard

log = logging.getLogger("igeood")
Inputs = ArrayInputs | ModelInputs


def summarise(guard: "Guard", data: Any, labels: Any = None, *, budget: int = BUDGET) -> Summary:
    """Sum up training samples for a guard, in one pass; summaries of shards add with ``+``, and `guard.fit` takes one.

    Parameters
    ----------
    guard : Guard
        Whose method and model it is for; it is not changed.
    data, labels, budget
        As in `Guard.fit`.
    """
    if not hasattr(guard, "detector"):
        cure = "give the guard that it is for, such as igeood.white_box(model)"
        raise InputError(f"guard: expected a guard, got {type(guard).__name__}; {cure}")
    summary = Summary(guard.detector.needs, budget=budget)
    read(copy.copy(guard.inputs), guard.detector, summary, data, labels)
    return summary


def learn(
    inputs: Inputs, detector: Detector, ranks: Ranks, samples: tuple[Any, Any, Any], budget: int
) -> tuple[Inputs, Summary]:
    """Fit a detector to all ranks' samples, in place; returns inputs that read what it needs, and the summary.

    Parameters
    ----------
    inputs : Inputs
        Of the guard; they are not changed.
    detector : Detector
        To fit; those of all ranks end up equal to the bit.
    ranks : Ranks
        Who has the shards.
    samples : tuple
        This rank's data, labels and ids, as in `Guard.fit`.
    budget : int
        Bytes of training rows to keep.
    """
    own, (data, labels, ids) = copy.copy(inputs), samples
    summary = data if isinstance(data, Summary) else Summary(detector.needs)
    with ranks.agreed():
        if summary is not data:
            summary = Summary(detector.needs, budget=budget)
            read(own, detector, summary, own.named(data, ids, "data"), labels)
    must_follow = summary is data or summary.shape is None
    summary = add_up(summary, ranks)
    with ranks.agreed():
        own = follow(inputs, detector, summary) if must_follow else own
        detector.learn(summary)
    if not ranks.alone:  # machines may round differently: all take over what the first has learnt
        state = {name: value.detach().cpu().contiguous().clone() for name, value in detector.state().items()}
        first, *_ = ranks.each_bytes(save(state) if ranks.rank == 0 else b"")
        detector.load_state(load(first), detector.n_classes_, detector.widths_)
    for note in (*detector.notes_, *_sample_notes(summary)):
        log.warning(note)
    return own, summary


def read(inputs: Inputs, detector: Detector, summary: Summary, data: Any, labels: Any) -> None:
    """Add training samples to a summary, in one pass, and prepare the inputs for such samples."""
    before, needs, data = inputs.weights(), detector.needs, unpadded(data, "data")

    def outputs() -> Iterator[Outputs]:
        for number, batch in enumerate(filter(len, inputs.batches(data, "data", labels))):
            with inputs.at("data", number):
                if number == 0:
                    inputs.prepare(batch, needs)
                    summary.model, summary.head = before, inputs.head if needs.head else None
                outputs = inputs.outputs(batch, labels=True, keys=True)
                if number == 0:
                    summary.glimpse = outputs.only(()).detached()[:ROWS]
                yield detector.read(outputs)

    with random_state_kept(), torch.inference_mode(False):
        for block in recut(outputs()):
            summary.add(block)
    if summary.rows:
        summary.about = {"probabilities": detector.probabilities, "layouts": dict(inputs.layouts)}
        names = class_names(None, summary.n_classes, data, inputs.bare)
        summary.about |= {} if names is None else {"classes": list(names)}
    inputs.settle(before)


def add_up(summary: Summary, ranks: Ranks) -> Summary:
    """The sum of all ranks' summaries, in the order of the ranks: the same bits on each."""
    if ranks.alone:
        return summary
    with ranks.agreed():
        mine = summary.to_bytes()
    parts = map(Summary.from_bytes, ranks.each_bytes(mine))
    total = next(parts)
    for rank, part in enumerate(parts, start=1):
        try:
            total += part
        except InputError as error:  # noqa: PERF203 (a summary is much work)
            raise InputError(f"rank {rank}: {error}") from error
    return total


def follow(inputs: Inputs, detector: Detector, summary: Summary) -> Inputs:
    """Inputs that read the layers that the method needs of those that a summary has."""
    inputs, needs = copy.copy(inputs), detector.needs
    weights, blocks = inputs.weights(), needs.blocks(summary.widths)
    if weights not in (None, summary.model):
        problem = f"was made with model {summary.model}, this guard's is {weights}"
        raise InputError(f"summary: {problem}; make it with that")
    mine = needs.blocks([*needs.named(inputs.layers), *returned_blocks(needs.returns)])
    if inputs.wanted != "auto" and mine != blocks:
        raise InputError(f"summary: has layers {blocks}, this guard reads {inputs.layers}; make it with this guard")
    if summary.about.get("probabilities", detector.probabilities) != detector.probabilities:
        raise InputError("summary: probabilities differ: make it and this guard with the same probabilities=")
    inputs.read(blocks, summary.about.get("layouts"), needs.statistic)
    inputs.settle()
    return inputs


def _sample_notes(summary: Summary) -> Iterator[str]:
    """How many rows of each class were kept, where not all were."""
    for kind, sample in summary.samples.items():
        kept = sample.kept
        if sample.quota < int(sample.totals.max()):
            rows = f"{kept.min()} to {kept.max()} of {sample.totals.min()} to {sample.totals.max()} rows of a class"
            yield f"fit: the budget of {summary.budget / 2**20:.3g} MiB keeps {rows}, with {kind}"
