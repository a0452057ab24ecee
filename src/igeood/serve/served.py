"""A guard as the service uses it. Queries are checked one by one before they are joined: none spoils another."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from igeood.detectors import METHODS, method_name
from igeood.errors import IgeoodError, InputError
from igeood.guard import Guard, Verdict
from igeood.model.batch import Batch, as_batch
from igeood.monitor import Monitor
from igeood.outputs import OnError, Outputs
from igeood.serve.batching import Job
from igeood.serve.protocol import OUTPUTS, Query
from igeood.tables import FEATURE

Tensors = Mapping[str, Tensor]  # inputs by the names that clients give them


class Served:
    """A calibrated guard, with the monitor of its verdicts.

    Parameters
    ----------
    guard : Guard
        The guard.
    monitor : Monitor
        Of its verdicts.
    fingerprint : str
        Of its file.
    """

    def __init__(self, guard: Guard, monitor: Monitor, fingerprint: str) -> None:
        self.guard = guard
        self.calibration = monitor.calibration
        self.monitor = monitor
        self.fingerprint = fingerprint
        self.loaded = time.time()
        self.model: nn.Module | None = guard.source.model
        self.method = method_name(guard.detector)
        self.default = "logits" if self.model is None else "x"  # the input that plain rows are
        layers = {FEATURE + layer: [-1, guard.detector.widths_[layer]] for layer in guard.layers}
        logits = {"logits": [-1, guard.detector.n_classes_]}
        self.shapes = {**logits, **layers} if self.model is None else {"x": [-1]}
        self.outputs = OUTPUTS if guard.classes is None else {**OUTPUTS, "name": "BYTES"}

    def record(self) -> dict[str, Any]:
        """What the page shows."""
        own = ("promise", "threshold", "per_class", "tpr", "guarantee")
        about = {name: getattr(self.calibration, name) for name in own}
        about |= {name: getattr(self.guard, name) for name in ("access", "classes")}
        about |= {"n": len(self.calibration.scores), "n_classes": self.guard.detector.n_classes_}
        about |= {"method": self.method, "title": METHODS[self.method].title, "loaded": self.loaded}
        return {**about, "health": [asdict(finding) for finding in self.guard.health]}

    def job(self, query: Query) -> Job:
        """Check a query; jobs of the same guard, types and shapes can be answered together."""
        answered = [*self.outputs, "reason"] if query.refuses else [*self.outputs]
        for name in query.outputs or ():
            if name not in answered:
                raise InputError.unknown("outputs", name, answered)
        rows = {len(array) for array in query.inputs.values()}
        if len(rows) != 1 or not all(array.size for array in query.inputs.values()):
            shapes = {name: list(array.shape) for name, array in query.inputs.items()}
            raise InputError(f"shapes {shapes}", argument="inputs", cure="send one row or more, as many for each input")
        if self.model is None and query.inputs.keys() != self.shapes.keys():
            raise InputError(f"got {', '.join(query.inputs)}", argument="inputs", cure=f"send {', '.join(self.shapes)}")
        tensors = {name: self._tensor(array, query.is_typed) for name, array in sorted(query.inputs.items())}
        reasons = {} if query.refuses else self.as_data(tensors).reasons
        if reasons:
            row = min(reasons)
            raise InputError(reasons[row], cure="correct that row, or send on_error 'refuse'", place=f"row {row}")
        key = (self, query.refuses, *((name, tensor.dtype, tensor.shape[1:]) for name, tensor in tensors.items()))
        return Job(tensors, rows.pop(), key)

    def _tensor(self, array: "np.ndarray[Any, Any]", is_typed: bool) -> Tensor:
        """An input; plain numbers are floats, or stay integers if the model has embeddings."""
        tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
        if self.model is None:
            return tensor if is_typed and tensor.is_floating_point() else tensor.double()
        takes_integers = any(isinstance(module, nn.Embedding) for module in self.model.modules())
        stays = is_typed or (takes_integers and not tensor.is_floating_point())
        return tensor if stays else tensor.float()

    def predict(self, tensors: Tensors, on_error: OnError = "refuse") -> Verdict:
        """The guard's verdict; what the model raises is an error of the inputs, unless it is of the machine."""
        try:
            return self.guard.predict(self.as_data(tensors), on_error=on_error)
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
