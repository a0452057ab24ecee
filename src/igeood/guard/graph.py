"""What an exported graph computes: from a model's inputs, or from logits and features, to a verdict."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from igeood.detectors.base import is_no_distribution
from igeood.errors import InputError
from igeood.geometry.plain import plain
from igeood.guard.guard import Guard
from igeood.model.batches import Batch, has_rows
from igeood.model.reader import Reader
from igeood.outputs import LARGEST, Outputs

INPUT_NAME = "input"  # of a model's one input by position


def input_names(example: Batch | Outputs) -> list[str]:
    """The graph's inputs: what a model takes of each sample, or `logits` and `feature.<layer>` as in logits files."""
    if isinstance(example, Outputs):
        return ["logits", *(f"feature.{block}" for block in example.features)]
    return [name or INPUT_NAME for name, value in example.inputs.items() if has_rows(value, len(example))]


def input_tensors(part: Batch | Outputs, names: Sequence[str]) -> list[Tensor]:
    """The tensors of these names."""
    if isinstance(part, Outputs):
        return [part.logits, *part.features.values()]
    return [part.inputs["" if "" in part.inputs and name == INPUT_NAME else name] for name in names]


class Graph(nn.Module):
    """It is `predict` with `on_error="refuse"`: a row that cannot be read is refused, and has the label −1.

    A model is copied: tracing replaces its weights for a while, and other threads may be using it.

    Parameters
    ----------
    guard : Guard
        A calibrated guard without an input step.
    example : Batch or Outputs
        Samples, for all that is no input of the graph.
    names : sequence of str
        The inputs.
    refuses_negative : bool
        A negative integer cannot be read, such as a token id.
    """

    threshold: Tensor
    table: Tensor

    def __init__(
        self, guard: Guard, example: Any, names: Sequence[str], *, refuses_negative: bool = False
    ) -> None:  # fmt: skip
        super().__init__()
        self.example, self.names, self.reader = example, names, None
        self.refuses_negative = refuses_negative
        self.detector, self.judge = guard.detector, guard.detector.judge()
        if guard.inputs.bare is not None:
            self.reader = _reader(_copied(guard.inputs.bare), guard)
            self.model = self.reader.bare
        calibration: Any = guard.calibration
        self.n = n = len(calibration.scores)
        self.register_buffer("threshold", torch.tensor(calibration.threshold, dtype=torch.float64))
        width = math.isqrt(n) + 1  # a table of as many rows: the last of its values is infinite
        self.register_buffer("table", pad(calibration.raised, (0, width**2 - n), value=torch.inf).reshape(width, width))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Logits if there is a model, scores, p-values, verdicts and labels."""
        with plain():
            logits, features = self._read(tensors)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            bad = self._bad(logits, features, dict(zip(self.names, tensors, strict=True)))
            score = self.judge(logits, *features)
            score = torch.where(bad | score.isnan(), torch.inf, score)
            label = torch.where(bad, -1, logits.argmax(dim=1))
            verdict = score, self._p_value(score), ~(score <= self.threshold), label
        return verdict if self.reader is None else (logits, *verdict)

    def _read(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
        """Logits, and the features of the detector's blocks."""
        if self.reader is None:
            return tensors[0], list(tensors[1:])
        given = dict(zip(self.names, tensors, strict=True))
        if self.refuses_negative:
            samples = self.example.name or INPUT_NAME
            given[samples] = given[samples].clamp(min=0)
        named = {name: given.get(name or INPUT_NAME, value) for name, value in self.example.inputs.items()}
        logits, features = self.reader.tensors(replace(self.example, inputs=named))
        return logits, [features[block] for block in self.detector.widths_]

    def _bad(self, logits: Tensor, features: list[Tensor], given: dict[str, Tensor]) -> Tensor:
        """Which rows cannot be read, (N,): as batches and `Outputs` check them."""
        bad = _any(logits.isnan() | (logits == torch.inf)) | ~_any(logits > -torch.inf)
        for value in features:
            bad = bad | _any(~(value.double().abs() <= LARGEST))
        x = None if self.reader is None else given[self.example.name or INPUT_NAME]
        if x is not None and x.is_floating_point():
            bad = bad | _any(~x.isfinite())
        if x is not None and self.refuses_negative:
            bad = bad | _any(x < 0)
        return bad | is_no_distribution(logits) if self.detector.probabilities else bad

    def _p_value(self, score: Tensor) -> Tensor:
        """(1 + #{calibration ≥ score}) / (n + 1): the row of the table is found first, then the place in it."""
        row = (self.table[:, -1] < score[:, None]).sum(dim=1)
        less = row * len(self.table) + (self.table[row] < score[:, None]).sum(dim=1)
        return (self.n + 1.0 - less.double()) / (self.n + 1.0)


def _copied(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode."""
    try:
        return copy.deepcopy(model).eval()
    except Exception as error:
        problem = f"cannot be copied ({type(error).__name__}: {error})"
        raise InputError(f"model: {problem}; remove what cannot, or give it a __deepcopy__") from error


def _reader(model: nn.Module, guard: Guard) -> Reader:
    """A reader of a copy of the guard's model, which reads the same blocks."""
    inputs: Any = copy.copy(guard.inputs)
    inputs.model = model
    inputs.read(list(guard.detector.widths_), guard.inputs.layouts, guard.detector.needs.statistic)
    reader: Reader = inputs.reader
    return reader


def _any(rows: Tensor) -> Tensor:
    """Whether any value of each row (N, ...) is true, (N,)."""
    return rows.flatten(1).any(dim=1)
