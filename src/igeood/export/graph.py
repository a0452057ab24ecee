"""What an exported graph computes: from a model's inputs, or from logits and features, to a verdict."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from igeood.calibration import Places
from igeood.geometry.precision import wide
from igeood.guard.guard import Guard
from igeood.model.batch import Batch, has_rows
from igeood.outputs import LARGEST, Outputs, is_no_distribution, log_probabilities
from igeood.tables import FEATURE

INPUT_NAME = "input"  # of a model's one input by position


def graph_inputs(samples: Batch | Outputs) -> dict[str, Tensor]:
    """The graph's inputs: what a model takes of each sample, or `logits` and `feature.<layer>` as in logits files."""
    if isinstance(samples, Outputs):
        return {"logits": samples.logits, **{f"{FEATURE}{block}": value for block, value in samples.features.items()}}
    n = len(samples)
    return {name or INPUT_NAME: value for name, value in samples.inputs.items() if has_rows(value, n)}


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

    def __init__(self, guard: Guard, example: Any, names: Sequence[str], *, refuses_negative: bool = False) -> None:
        super().__init__()
        self.example = example
        self.names = names
        self.refuses_negative = refuses_negative
        self.detector = guard.detector
        self.source = copy.copy(guard.source)
        if self.source.bare is not None:
            self.source.model = copy.deepcopy(self.source.bare).eval()
            self.source.follow(list(self.detector.widths_), self.source.layouts, self.detector.needs)
        self.model = self.source.bare
        calibration: Any = guard.calibration
        self.places: Places = calibration.places
        self.values = _square(self.places.values)
        self.keys = _square(self.places.keys.double()) if calibration.own else None

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Logits if there is a model, scores, p-values, verdicts and labels."""
        inputs = dict(zip(self.names, tensors, strict=True))
        logits, features = self.read(inputs)
        is_bad = self.is_bad(inputs, logits, features)
        read = log_probabilities(logits) if self.detector.probabilities else logits
        score = wide(self.detector.score(Outputs.checked(read, features)))
        score = torch.where(is_bad | score.isnan(), torch.inf, score)
        label = torch.where(is_bad, -1, logits.argmax(dim=1))
        place = _below(self.values, score)
        if self.keys is not None:
            place = _below(self.keys, (self.places.offsets[label] + place).double())
        verdict = (score, self.places.p_values[place], is_bad | self.places.above[place], label)
        return verdict if self.model is None else (logits, *verdict)

    def read(self, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits, and the blocks of features."""
        if self.source.reader is None:
            return inputs["logits"], {block: inputs[f"{FEATURE}{block}"] for block in self.detector.widths_}
        values = {name: inputs.get(name or INPUT_NAME, value) for name, value in self.example.inputs.items()}
        batch: Batch = replace(self.example, inputs=values)
        if self.refuses_negative:
            batch = batch.with_x(batch.x.clamp(min=0))
        logits, features = self.source.reader.tensors(batch)
        return logits if logits.dtype == torch.float64 else logits.float(), features

    def is_bad(self, inputs: dict[str, Tensor], logits: Tensor, features: dict[str, Tensor]) -> Tensor:
        """Which rows cannot be read, (N,): as `Batch` and `Outputs` check them."""
        is_bad = _any(logits.isnan() | (logits == torch.inf)) | ~_any(logits > -torch.inf)
        for value in features.values():
            is_bad = is_bad | _any(~(value.double().abs() <= LARGEST))
        if self.model is not None:
            x = inputs[self.example.name or INPUT_NAME]
            if x.is_floating_point():
                is_bad = is_bad | _any(~x.isfinite())
            if self.refuses_negative:
                is_bad = is_bad | _any(x < 0)
        return is_bad | is_no_distribution(logits) if self.detector.probabilities else is_bad


def _square(ascending: Tensor) -> Tensor:
    """A square table of values, whose last one is infinite."""
    width = math.isqrt(len(ascending)) + 1
    return pad(ascending, (0, width**2 - len(ascending)), value=torch.inf).reshape(width, width)


def _below(table: Tensor, values: Tensor) -> Tensor:
    """How many of a table's values are below each of these: the row is found first, then the place in it."""
    row: Tensor = (table[:, -1] < values[:, None]).sum(dim=1)
    return row * len(table) + (table[row] < values[:, None]).sum(dim=1)


def _any(values: Tensor) -> Tensor:
    """Whether any value of each row (N, ...) is true, (N,)."""
    return values.flatten(1).any(dim=1)
