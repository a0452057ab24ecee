"""A guard as the service uses it. Queries are checked one by one before they are joined: none spoils another."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from igeood.calibration import Calibration
from igeood.detectors import METHODS, method_name
from igeood.errors import IgeoodError, InputError
from igeood.guard import Guard, Verdict
from igeood.model.batch import Batch, as_batch
from igeood.monitor import Monitor
from igeood.outputs import Outputs
from igeood.serve.batching import Job
from igeood.serve.protocol import OUTPUTS, Query, check_read
from igeood.tables import FEATURE

Tensors = Mapping[str, Tensor]  # inputs by the names that clients give them


class Served:
    """A calibrated guard, with the monitor of its verdicts.

    Parameters
    ----------
    guard : Guard
        The guard.
    calibration : Calibration
        Its own.
    monitor : Monitor
        Of its verdicts.
    fingerprint : str
        Of its file.
    """

    def __init__(self, guard: Guard, calibration: Calibration, monitor: Monitor, fingerprint: str) -> None:
        self.guard = guard
        self.calibration = calibration
        self.monitor = monitor
        self.fingerprint = fingerprint
        self.loaded = time.time()
        self.model: nn.Module | None = guard.source.model
        self.method = method_name(guard.detector)
        self.title = METHODS[self.method].title
        features = {FEATURE + layer: guard.detector.widths_[layer] for layer in guard.layers}
        self._widths = {"logits": guard.detector.n_classes_, **features}  # of a guard without a model
        self.default = "logits" if self.model is None else "x"  # the input that plain rows are

    def record(self) -> dict[str, Any]:
        """What the page shows."""
        about = {name: getattr(self, name) for name in ("method", "title", "loaded")}
        about |= {name: getattr(self.calibration, name) for name in ("promise", "threshold", "tpr", "guarantee")}
        about |= {name: getattr(self.guard, name) for name in ("access", "classes")}
        about |= {"n": len(self.calibration.scores), "n_classes": self.guard.detector.n_classes_}
        return {**about, "health": [asdict(finding) for finding in self.guard.health]}

    def describe_inputs(self) -> list[dict[str, Any]]:
        """The inputs, as the protocol describes them."""
        shapes = {name: [-1, width] for name, width in self._widths.items()} if self.model is None else {"x": [-1]}
        return [{"name": name, "datatype": "FP32", "shape": shape} for name, shape in shapes.items()]

    def describe_outputs(self) -> list[dict[str, Any]]:
        """The outputs; with `on_error` "refuse" there is a `reason` too."""
        datatypes = OUTPUTS if self.guard.classes is None else {**OUTPUTS, "name": "BYTES"}
        return [{"name": name, "datatype": datatype, "shape": [-1]} for name, datatype in datatypes.items()]

    def admit(self, query: Query) -> Job:
        """Check a query; jobs of the same guard, types and shapes can be judged together."""
        answered = [output["name"] for output in self.describe_outputs()]
        if query.refuses:
            answered.append("reason")
        for name in query.outputs or ():
            if name not in answered:
                raise InputError.unknown("outputs", name, answered)
        shapes = {name: list(array.shape) for name, array in query.inputs.items()}
        rows = {len(array) for array in query.inputs.values()}
        if len(rows) != 1 or not all(array.size for array in query.inputs.values()):
            raise InputError(f"shapes {shapes}", argument="inputs", cure="send one row or more, as many for each input")
        tensors = self._check_arrays(query) if self.model is None else self._model_inputs(self.model, query)
        reasons = self.as_data(tensors).reasons
        if not query.refuses:
            check_read(reasons)
        key = (self, *((name, tensor.dtype, tensor.shape[1:]) for name, tensor in tensors.items()))
        return Job(tensors, rows.pop(), key)

    def _check_arrays(self, query: Query) -> Tensors:
        """Logits and features, of the widths that the guard was fitted on."""
        names = ", ".join(self._widths)
        if set(query.inputs) != set(self._widths):
            raise InputError(f"got {', '.join(query.inputs)}", argument="inputs", cure=f"send just {names}")
        for name, width in self._widths.items():
            array = query.inputs[name]
            if array.ndim != 2 or array.shape[1] != width:
                cure = f"send rows of {width} numbers"
                raise InputError(f"shape {list(array.shape)}", argument=name, cure=cure)
            if query.is_typed and array.dtype.kind != "f":
                raise InputError(f"numbers of {array.dtype}", argument=name, cure="send FP32 or FP64")
        arrays = {name: query.inputs[name] for name in self._widths}
        return {name: _tensor(array if query.is_typed else array.astype(np.float64)) for name, array in arrays.items()}

    def _model_inputs(self, model: nn.Module, query: Query) -> Tensors:
        """What the model takes; plain numbers are floats, or stay integers if it has embeddings."""
        tensors = {name: _tensor(array) for name, array in sorted(query.inputs.items())}
        if query.is_typed:
            return tensors
        takes_integers = any(isinstance(module, nn.Embedding) for module in model.modules())
        stay = {name: takes_integers and not tensor.is_floating_point() for name, tensor in tensors.items()}
        return {name: tensor if stay[name] else tensor.float() for name, tensor in tensors.items()}

    def predict(self, tensors: Tensors) -> Verdict:
        """The guard's verdict; what the model raises is an error of the inputs, unless it is of the machine."""
        try:
            return self.guard.predict(self.as_data(tensors), on_error="refuse")
        except (IgeoodError, OSError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self.model is None:
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise InputError(f"the model fails on them ({reason})", argument="inputs", cure="correct them") from error

    def as_data(self, tensors: Tensors) -> Outputs | Batch:
        """Inputs as the guard takes them: `x` by position, other names as keywords; bad rows are marked."""
        if self.model is None:
            features = {name.removeprefix(FEATURE): tensors[name] for name in tensors if name != "logits"}
            return Outputs(tensors["logits"], features, on_error="refuse")
        return as_batch(tensors["x"] if set(tensors) == {"x"} else tensors, "refuse")


def join(parts: Sequence[Tensors]) -> Tensors:
    """The samples of several jobs of one key, in order."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _tensor(array: "np.ndarray[Any, Any]") -> Tensor:
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))
