"""What a guard takes from requests: checked one by one before they are joined, so that none spoils another."""

import inspect
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from igeood.calibration import Calibration
from igeood.detectors import METHODS, method_name
from igeood.errors import IgeoodError, InputError
from igeood.guard import Guard, Verdict
from igeood.model.batches import Batch, as_batch
from igeood.outputs import Outputs, Refused, take_over
from igeood.serve.batching import Job
from igeood.serve.protocol import OUTPUTS, Problem, Request, check_wanted
from igeood.tables import FEATURE

Data = Outputs | Batch


@dataclass(frozen=True, eq=False)
class Served:
    """A calibrated guard, as the service uses it."""

    guard: Guard
    calibration: Calibration
    fingerprint: str  # of its file
    loaded: float = field(default_factory=time.time)

    @property
    def title(self) -> str:
        """Its method's name for people."""
        return METHODS[method_name(self.guard.detector)].title

    @property
    def default(self) -> str:
        """The input that plain rows are."""
        return "logits" if self.guard.inputs.model is None else "x"

    def tensors(self) -> list[dict[str, Any]]:
        """The inputs, as the protocol describes them."""
        if self.guard.inputs.model is not None:
            return [{"name": "x", "datatype": "FP32", "shape": [-1]}]
        widths = {"logits": self.guard.detector.n_classes_} | self._features()
        return [{"name": name, "datatype": "FP32", "shape": [-1, width]} for name, width in widths.items()]

    def outputs(self) -> list[dict[str, Any]]:
        """The outputs; with `on_error` "refuse" there is a `reason` too."""
        kinds = OUTPUTS if self.guard.classes is None else {**OUTPUTS, "name": "BYTES"}
        return [{"name": name, "datatype": kind, "shape": [-1]} for name, kind in kinds.items()]

    def _features(self) -> dict[str, int]:
        return {FEATURE + layer: self.guard.detector.widths_[layer] for layer in self.guard.layers}

    def admit(self, request: Request) -> tuple[Data, Hashable]:
        """A request's inputs, checked; and what others must have in common to be judged with them."""
        check_wanted(request, has_names=self.guard.classes is not None)
        refused: Refused | None = {} if request.refuses else None
        try:
            rows = {len(array) for array in request.inputs.values()}
            if len(rows) != 1 or not all(array.size for array in request.inputs.values()):
                given = ", ".join(f"{name} {list(array.shape)}" for name, array in request.inputs.items()) or "none"
                raise InputError(f"inputs: {given}; send one row or more, as many for each input")
            is_array = self.guard.inputs.model is None
            data = self._outputs(request, refused) if is_array else self._batch(request, refused)
        except IgeoodError as error:
            cure = ", or send on_error 'refuse'" if refused is None and ": row " in f": {error}" else ""
            raise Problem(400, f"{error}{cure}") from None
        parts = {"": data.logits, **data.features} if isinstance(data, Outputs) else data.inputs
        return data, tuple((name, part.dtype, part.shape[1:]) for name, part in parts.items())

    def _outputs(self, request: Request, refused: Refused | None) -> Outputs:
        """Logits and features, of the widths and kind that the guard was fitted on."""
        inputs, expected = request.inputs, ["logits", *self._features()]
        if set(inputs) != set(expected):
            raise InputError(f"inputs: {', '.join(inputs)}; this guard takes {', '.join(expected)}: send just these")
        for name, array in inputs.items():
            if request.is_typed and array.dtype.kind != "f":
                raise InputError(f"{name}: numbers of {array.dtype}; send FP32 or FP64")
        features = {name.removeprefix(FEATURE): inputs[name] for name in expected[1:]}
        outputs = Outputs(inputs["logits"], features, refused=refused)
        self.guard.detector._scorable(outputs)  # raises what is wrong with widths and probabilities
        return outputs

    def _batch(self, request: Request, refused: Refused | None) -> Batch:
        """Whatever the model takes: `x` by position, other names as keywords."""
        tensors: Mapping[str, Tensor] = {
            name: torch.from_numpy(np.require(array, requirements=["C", "W"])) for name, array in request.inputs.items()
        }
        unknown = [] if self._keywords is None else [name for name in tensors if name not in self._keywords]
        if unknown:
            raise InputError(f"inputs: the model takes no {', '.join(unknown)}; send x, or its own keywords")
        if not request.is_typed:
            tensors = {name: self._typed(tensor) for name, tensor in tensors.items()}
        return as_batch(tensors["x"] if set(tensors) == {"x"} else tensors, 0, refused)

    @cached_property
    def _keywords(self) -> set[str] | None:
        """Names that an input may have; None where the model takes any, or does not tell."""
        model: Any = self.guard.inputs.bare
        try:
            parameters = inspect.signature(model.forward).parameters.values()
        except (TypeError, ValueError):  # a traced model
            return None
        return (
            None if any(each.kind is each.VAR_KEYWORD for each in parameters) else {"x", *(p.name for p in parameters)}
        )

    def _typed(self, tensor: Tensor) -> Tensor:
        """Plain numbers in the type that the model most likely takes: integers stay if it has embeddings."""
        takes_integers = any(isinstance(module, nn.Embedding) for module in self.guard.inputs.model.modules())  # type: ignore[union-attr]
        return tensor if not tensor.is_floating_point() and takes_integers else tensor.float()

    def judge(self, jobs: Sequence[Job]) -> tuple[Data, Verdict]:
        """The inputs of all jobs joined, and what the guard says of them."""
        data, refused = _joined([job.data for job in jobs]), Refused()
        score, label, _ = self.guard._judge(data, refused=refused, all_lost=True)
        return data, Verdict.of(score, label, self.calibration, refused, self.guard.classes, to_numpy=True)


def _joined(parts: Sequence[Data]) -> Data:
    """All samples of several requests, in order."""
    first = parts[0]
    if len(parts) == 1 or isinstance(first, Outputs):
        return first if len(parts) == 1 else Outputs.concat(parts)  # type: ignore[arg-type]
    refused: Refused = {}
    number = 0
    for part in parts:
        take_over(part, number, refused)
        number += len(part)
    inputs = {name: torch.cat([part.inputs[name] for part in parts]) for name in first.inputs}  # type: ignore[union-attr]
    return Batch(inputs, first.name, None, 0, refused)


def columns_of(verdict: Verdict, rows: slice, *, refuses: bool) -> dict[str, NDArray[Any] | list[Any]]:
    """A request's rows of a verdict, by the names of outputs; a row that was not read is an error unless it refuses."""
    reasons = [None] * (rows.stop - rows.start) if verdict.reason is None else verdict.reason[rows].tolist()
    if not refuses:
        for row, why in enumerate(reasons):
            if why is not None:
                raise Problem(400, f"row {row}: {why}; correct that row, or send on_error 'refuse'")
    columns: dict[str, Any] = {name: getattr(verdict, name)[rows] for name in OUTPUTS}
    if columns["score"].dtype != np.float64:
        columns["score"] = columns["score"].astype(np.float64)
    if verdict.classes is not None:
        names = [*verdict.classes, None]  # the last one for −1
        columns["name"] = [names[label] for label in columns["label"].tolist()]
    return {**columns, "reason": reasons} if refuses else columns
