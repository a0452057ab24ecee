"""Whether a graph in onnxruntime says what the guard says."""

from typing import Any

import onnxruntime
import torch
from torch import Tensor

from igeood.errors import InputError
from igeood.export.graph import graph_inputs
from igeood.guard.guard import Guard
from igeood.model.batch import Batch
from igeood.outputs import Outputs

# How far scores may be apart, relative: without a model, and with one; runtimes round float32 differently.
HEAD_ERROR = 1e-9
MODEL_ERROR = {torch.float64: 1e-7, torch.float32: 1e-3}


def run(content: bytes, parts: list[Any]) -> list[dict[str, Tensor]]:
    """Inputs and outputs of a graph, by name, for each part of the samples."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    results = []
    for part in parts:
        values = graph_inputs(part)
        inputs = {each.name: values[each.name].detach().cpu() for each in session.get_inputs()}
        outputs = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        results.append(inputs | {name: torch.as_tensor(value) for name, value in zip(names, outputs, strict=True)})
    return results


def check_agreement(results: dict[str, Tensor], guard: Guard, samples: Batch | Outputs) -> None:
    """Raise unless a graph's results are the guard's, but for rounding."""
    verdict = guard.predict(samples, on_error="refuse")
    expected = torch.as_tensor(verdict.score).cpu()
    label = torch.as_tensor(verdict.label).cpu()
    calibration: Any = guard.calibration
    score = results["score"]
    logits = results["logits"]
    tolerance = HEAD_ERROR if guard.source.model is None else MODEL_ERROR[logits.dtype]
    size = expected.abs().maximum(calibration.scores.abs().median())
    is_close = expected.isfinite() & ((score - expected).abs() <= tolerance * size)
    at_label = logits.gather(1, label.clamp(min=0)[:, None])[:, 0]
    is_tied = (label >= 0) & (logits.amax(dim=1) - at_label <= tolerance * logits.abs().amax(dim=1))
    agrees = {
        "score": (score == expected) | is_close,
        "p_value": results["p_value"] == calibration.tensor_p_values(score),
        "is_ood": results["is_ood"] == ~(score <= guard.threshold),
        "label": (results["label"] == label) | (is_tied & (results["label"] >= 0)),
    }
    for name, is_same in agrees.items():
        if not bool(is_same.all()):
            row = int((~is_same).nonzero()[0])
            value = getattr(verdict, name)[row].item()
            problem = f"the graph's {name} is {results[name][row].item()} for sample {row}, the guard's is {value}"
            raise InputError(problem, argument="example", cure="such a guard cannot be exported")
