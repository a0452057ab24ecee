"""A guard as one ONNX graph: model, score, p-value and verdict, for runtimes without torch."""

import json
import logging
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from igeood.detectors import method_name
from igeood.detectors.base import is_no_distribution
from igeood.errors import IgeoodError, InputError, MissingExtraError
from igeood.files import write_whole
from igeood.geometry.plain import plain
from igeood.guard.file import contents
from igeood.guard.guard import Guard
from igeood.model.batches import Batch, has_rows
from igeood.outputs import LARGEST, Outputs
from igeood.version import __version__

OPSET = 20
LARGEST_FILE = 2_000_000_000  # bytes; protobuf ends at 2 GiB
HEAD_ERROR, MODEL_ERROR = 1e-9, 1e-3  # of scores, relative: a runtime rounds a float32 network in its own way
OUTPUTS = ("logits", "score", "p_value", "is_ood", "label")
AXES = ("samples", "tokens")
_TALKATIVE = ("torch.onnx", "torch._subclasses", "torch.fx", "onnxscript", "onnx_ir")
_TRIED = (3, 1)  # samples, beside the whole example


class Graph(nn.Module):
    """What the file computes. It is `predict` with `on_error="refuse"`: a row that cannot be read has the label −1.

    Parameters
    ----------
    guard : Guard
        A calibrated guard without an input step.
    example : Batch or Outputs
        Samples, for the names of their tensors.
    """

    threshold: Tensor
    table: Tensor

    def __init__(self, guard: Guard, example: Any) -> None:
        super().__init__()
        self.model, self.reader, self.example = guard.inputs.bare, getattr(guard.inputs, "reader", None), example
        self.detector, self.judge = guard.detector, guard.detector.judge()
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
            bad = self._bad(logits, [*features, *(t for t in tensors if self.model is not None)])
            score = self.judge(logits, *features)
            score = torch.where(bad | score.isnan(), torch.inf, score)
            label = torch.where(bad, -1, logits.argmax(dim=1))
            verdict = score, self._p_value(score), ~(score <= self.threshold), label
        return verdict if self.model is None else (logits, *verdict)

    def _read(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
        """Logits, and the features of the detector's blocks."""
        if self.reader is None:
            return tensors[0], list(tensors[1:])
        inputs = dict(zip(named_tensors(self.example), tensors, strict=True))
        named = {name: inputs.get(name or INPUT_NAME, value) for name, value in self.example.inputs.items()}
        logits, features = self.reader.tensors(replace(self.example, inputs=named))
        return logits, [features[block] for block in self.detector.widths_]

    def _bad(self, logits: Tensor, others: list[Tensor]) -> Tensor:
        """Which rows cannot be read, (N,): as `Outputs` checks them."""
        bad = _any(logits.isnan() | (logits == torch.inf)) | ~_any(logits > -torch.inf)
        for value in others:
            if value.is_floating_point():
                bad = bad | _any(~(value.double().abs() <= LARGEST))
        return bad | is_no_distribution(logits) if self.detector.probabilities else bad

    def _p_value(self, score: Tensor) -> Tensor:
        """(1 + #{calibration ≥ score}) / (n + 1): the row of the table is found first, then the place in it."""
        row = (self.table[:, -1] < score[:, None]).sum(dim=1)
        less = row * len(self.table) + (self.table[row] < score[:, None]).sum(dim=1)
        return (self.n + 1.0 - less.double()) / (self.n + 1.0)


INPUT_NAME = "input"  # of a model's one input by position


def _any(rows: Tensor) -> Tensor:
    """Whether any value of each row (N, ...) is true, (N,)."""
    return rows.flatten(1).any(dim=1)


def named_tensors(example: Batch | Outputs) -> dict[str, Tensor]:
    """The graph's inputs by name: what a model takes, or `logits` and `feature.<layer>` as in logits files."""
    if isinstance(example, Outputs):
        return {"logits": example.logits, **{f"feature.{block}": value for block, value in example.features.items()}}
    tensors = {name or INPUT_NAME: value for name, value in example.inputs.items()}
    return {name: value for name, value in tensors.items() if has_rows(value, len(example))}


def export(guard: Guard, path: str | os.PathLike[str], example: Any = None) -> None:
    """Write a calibrated guard as an ONNX graph; see `Guard.export`."""
    if guard.epsilon:
        problem = "the input step needs a gradient, which an ONNX graph has not"
        raise InputError(f"epsilon: {problem}; export a black box, or a white box with epsilon=0, of any method")
    onnx, _ = _extra()
    guard.inputs.check_weights(strict=True)
    batch = _example(guard, example)
    _check_replaceable(onnx, path)
    content = _content(onnx, guard, batch)
    _check(content, guard, batch)
    write_whole(path, content)


def _extra() -> tuple[Any, Any]:
    """The modules onnx and onnxruntime."""
    try:
        import onnx  # noqa: PLC0415 (an extra)
        import onnxruntime  # noqa: PLC0415
        import onnxscript  # noqa: F401, PLC0415
    except ImportError as error:
        raise MissingExtraError(f"{error.name} is needed; pip install 'igeood[onnx]'") from error
    return onnx, onnxruntime


def _example(guard: Guard, given: Any) -> Any:
    """The first batch of the example, with the blocks that are read; without a model, made up where none is given."""
    detector = guard.detector
    if given is None and guard.inputs.model is None:
        draw = torch.Generator().manual_seed(0)
        logits = 4.0 * torch.randn(16, detector.n_classes_, generator=draw)
        features = {block: torch.rand(16, width, generator=draw) for block, width in detector.widths_.items()}
        given = Outputs(logits.softmax(dim=1) if detector.probabilities else logits, features)
    if given is None:
        raise InputError("example: the model's inputs are not known; give some, such as a batch of the held-out loader")
    batch = next(iter(guard.inputs.batches(given, "example")))
    if len(batch) == 0:
        raise InputError("example: has no sample; give at least one")
    try:
        guard.predict(batch[:1])
    except Exception as error:
        reason = error if isinstance(error, IgeoodError) else f"{type(error).__name__}: {error}"
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in named_tensors(batch).items())
        raise InputError(
            f"example: the guard cannot judge it ({shapes}): {_line(reason)}; give what predict takes"
        ) from error
    reader: Any = getattr(guard.inputs, "reader", None)
    return batch.only(detector.widths_) if reader is None else reader.place(batch)


def _line(reason: object) -> str:
    """The first line of an error's text."""
    return next(iter(str(reason).strip().splitlines()), "")[:300]


def _rows(batch: Any, n: int) -> Any:
    """The first n samples, which come again where there are fewer."""
    return batch[torch.arange(n) % len(batch)]


def _content(onnx: Any, guard: Guard, batch: Batch | Outputs) -> bytes:
    """The file's content."""
    few = _rows(batch, 3)  # torch takes an axis of length 1 as fixed
    tensors, graph = named_tensors(few), Graph(guard, few)
    samples = torch.export.Dim("samples")
    axes = tuple({0: samples, **({1: torch.export.Dim.AUTO} if _is_tokens(t) else {})} for t in tensors.values())
    names = OUTPUTS if guard.inputs.model is not None else OUTPUTS[1:]
    running = graph.reader.running() if graph.reader is not None else _quiet()
    with _quiet(), running, torch.inference_mode(False), torch.no_grad():
        try:
            traced = torch.export.export(graph, tuple(tensors.values()), dynamic_shapes=(axes,), strict=False)
            program: Any = torch.onnx.export(
                traced, opset_version=OPSET, input_names=list(tensors), output_names=list(names), verbose=False
            )
        except Exception as error:
            who = "detector" if guard.inputs.model is None else "model"
            cure = "it must not decide by values, nor fix the number of samples"
            raise InputError(f"{who}: cannot be traced ({type(error).__name__}: {_line(error)}); {cure}") from error
    model = program.model
    _tidy(model.graph)
    model.metadata_props.update(_metadata(onnx, guard))
    model.producer_name, model.producer_version = "igeood", __version__
    size = sum(value.const_value.nbytes for value in model.graph.initializers.values())
    if size > LARGEST_FILE:
        raise InputError(f"model: its graph has {size:,} bytes, but an ONNX file {LARGEST_FILE:,} at most; reduce it")
    content: bytes = program.model_proto.SerializeToString()
    return content


def _tidy(graph: Any) -> None:
    """Name the free axes, and leave out where in somebody's files an operation comes from."""
    names: dict[str, str] = {}
    for value in graph.inputs:
        names |= {str(size): name for size, name in zip(value.shape, AXES, strict=False) if not isinstance(size, int)}
    for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
        for axis, size in enumerate(value.shape or ()):
            if str(size) in names:
                value.shape[axis] = names[str(size)]
        value.metadata_props.clear()
    for node in graph:
        node.metadata_props.clear()
        node.doc_string = None


def _is_tokens(value: Any) -> bool:
    """Whether an input is of token ids, or of a mask for them: how many there are may differ."""
    return isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] > 2 and not value.is_floating_point()


def _metadata(onnx: Any, guard: Guard) -> dict[str, str]:
    """What the file says of itself; values that are no text are JSON."""
    calibration: Any = guard.calibration
    versions = {"igeood": __version__, "torch": torch.__version__, "onnx": onnx.__version__, "opset": OPSET}
    about = {
        "method": method_name(guard.detector), "options": guard.detector.params(), "access": guard.access,
        "layers": guard.layers, "promise": guard.promise, "threshold": guard.threshold, "tpr": calibration.tpr,
        "calibration_samples": len(calibration.scores), "fingerprint": guard.inputs.fingerprint or "",
        "guard": guard._identity(), "contains": contents(guard.detector), "classes": guard.classes,
        "preparation": guard.preparation, "versions": versions,
    }  # fmt: skip
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in about.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's own remarks on exporting, and without its fused attention, which no other runtime has."""
    fused, loggers = torch.backends.mha.get_fastpath_enabled(), [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        torch.backends.mha.set_fastpath_enabled(False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        torch.backends.mha.set_fastpath_enabled(fused)


def _check_replaceable(onnx: Any, path: str | os.PathLike[str]) -> None:
    """Raise if there is a file that is no guard's graph: it may be somebody's only copy."""
    there = Path(path)
    if not there.is_file() or not there.stat().st_size:
        return
    try:
        ours = onnx.load(there, load_external_data=False).producer_name == "igeood"
    except Exception:  # noqa: BLE001 (of protobuf, whatever is in the file)
        ours = False
    if not ours:
        raise InputError(f"path: {path} is there, and is no guard's graph; name another file, or remove it first")


def _check(content: bytes, guard: Guard, batch: Any) -> None:
    """Raise unless onnxruntime runs the graph, and agrees with the guard."""
    _, onnxruntime = _extra()
    try:
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise InputError(f"model: onnxruntime cannot run its graph ({_line(error)}); change that operation") from error
    for part in (batch, *(_rows(batch, n) for n in _TRIED)):
        _agree(session, guard, part)
    if any("tokens" in value.shape for value in session.get_inputs()):
        _agree(session, guard, batch.mapped(lambda value: value[:, :-1] if _is_tokens(value) else value))


def _agree(session: Any, guard: Guard, part: Batch | Outputs) -> None:
    """Raise unless the graph says the same of these samples as the guard, but for rounding."""
    given = {name: value.detach().cpu().numpy() for name, value in named_tensors(part).items()}
    names = [output.name for output in session.get_outputs()]
    graph = {name: np.asarray(value) for name, value in zip(names, session.run(None, given), strict=True)}
    verdict = guard.predict(part, on_error="refuse")
    score, is_ood, label = (torch.as_tensor(v).cpu().numpy() for v in (verdict.score, verdict.is_ood, verdict.label))
    calibration: Any = guard.calibration
    allowed = HEAD_ERROR if guard.inputs.model is None else MODEL_ERROR
    size = np.maximum(np.abs(score), float(calibration.scores.abs().median()))
    with np.errstate(invalid="ignore"):  # both may be infinite
        off = np.where(score == graph["score"], 0.0, np.abs(score - graph["score"]) / size)
    if not off.max(initial=0.0) <= allowed:
        row = int(np.argmax(~(off <= allowed)))
        problem = f"{graph['score'][row]:.9g} of sample {row}, where the guard has {score[row]:.9g}"
        raise InputError(f"example: the graph's score is {problem}; such a guard cannot be exported")
    near = np.abs(score - guard.threshold) <= allowed * size
    if not ((is_ood == graph["is_ood"]) | near).all() or not _same_labels(label, graph, allowed):
        raise InputError("example: the graph's verdicts or labels are not the guard's; such a guard cannot be exported")


def _same_labels(label: np.ndarray[Any, Any], graph: dict[str, np.ndarray[Any, Any]], allowed: float) -> bool:
    """Whether the labels are the same, but for logits that are alike."""
    other = label != graph["label"]
    if not other.any() or "logits" not in graph or (label[other] < 0).any():
        return not other.any()
    logits = graph["logits"][other]
    both = np.take_along_axis(logits, np.stack([label[other], graph["label"][other]], axis=1), axis=1)
    return bool((np.abs(both[:, 0] - both[:, 1]) <= allowed * np.abs(logits).max(axis=1)).all())
