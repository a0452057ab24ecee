"""A guard as one ONNX graph: model, score, p-value and verdict, for runtimes without torch."""

import json
import logging
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from igeood.detectors import method_name
from igeood.errors import IgeoodError, InputError, MissingExtraError
from igeood.files import write_whole
from igeood.guard.file import contents
from igeood.guard.graph import Graph, input_names, input_tensors
from igeood.guard.guard import Guard
from igeood.outputs import Outputs
from igeood.version import __version__

OPSET = 20
LARGEST_FILE = 2_000_000_000  # bytes; protobuf ends at 2 GiB
OUTPUTS = ("logits", "score", "p_value", "is_ood", "label")
AXES = ("samples", "tokens")
# How far scores may be apart, relative: without a model, with one in float64, and in float32, which each runtime rounds
# in its own way; and how near the threshold a verdict may differ.
HEAD_ERROR, DOUBLE_ERROR, MODEL_ERROR, NEAR = 1e-9, 1e-7, 1e-3, 1e-4
_TALKATIVE = ("torch.onnx", "torch._subclasses", "torch.fx", "onnxscript", "onnx_ir")
_TRIED = (3, 1)  # samples, beside the whole example
_lock = threading.Lock()  # tracing changes torch's own settings

Arrays = dict[str, np.ndarray[Any, Any]]


def export(guard: Guard, path: str | os.PathLike[str], example: Any = None) -> None:
    """Write a calibrated guard as an ONNX graph; see `Guard.export`."""
    if guard.epsilon:
        problem = "the input step needs a gradient, and an ONNX graph has none"
        raise InputError(f"epsilon: {problem}; export a black box, or a white box with epsilon=0, of any method")
    onnx, onnxruntime = _extra()
    guard.inputs.check_weights(strict=True)
    _check_precision(guard)
    batch = _example(guard, example)
    names = input_names(batch)
    outputs = OUTPUTS if guard.inputs.model is not None else OUTPUTS[1:]
    if same := {*names} & {*outputs}:
        raise InputError(
            f"model: it takes {min(same)!r}, which is an output's name here; wrap it in one that renames it"
        )
    _check_replaceable(onnx, path)
    for free in (True, False):  # how many tokens there are
        with _lock:
            content = _content(onnx, guard, batch, names, outputs, free)
        if _check(onnxruntime, content, guard, batch, names):
            break
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


def _check_precision(guard: Guard) -> None:
    """Raise for a model in half precision: runtimes differ in it by more than verdicts bear."""
    model = guard.inputs.bare
    kinds = {weight.dtype for weight in model.parameters()} if model is not None else set()
    for kind in kinds & {torch.float16, torch.bfloat16}:
        name = str(kind).removeprefix("torch.")
        raise InputError(
            f"model: its weights are {name}, which runtimes round differently; fit the guard with model.float()"
        )


def _is_double(guard: Guard) -> bool:
    model = guard.inputs.bare
    return model is not None and any(weight.dtype == torch.float64 for weight in model.parameters())


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
        problem = f"the guard cannot judge it ({_shapes(batch)}): {_line(reason)}"
        raise InputError(f"example: {problem}; give what predict takes") from error
    reader: Any = getattr(guard.inputs, "reader", None)
    return batch.only(detector.widths_) if reader is None else reader.place(batch)


def _shapes(batch: Any) -> str:
    names = input_names(batch)
    tensors = zip(names, input_tensors(batch, names), strict=True)
    return ", ".join(f"{name} {tuple(value.shape)}" for name, value in tensors)


def _line(reason: object) -> str:
    """The first line of an error's text."""
    return next(iter(str(reason).strip().splitlines()), "")[:300]


def _rows(batch: Any, n: int) -> Any:
    """The first n samples, which come again where there are fewer."""
    return batch[torch.arange(n) % len(batch)]


def _content(onnx: Any, guard: Guard, batch: Any, names: Sequence[str], outputs: Sequence[str], free: bool) -> bytes:
    """The file's content; with the number of tokens `free`, where there are any and the model allows it."""
    few = _rows(batch, 3)  # torch takes an axis of length 1 as fixed
    tensors, samples = input_tensors(few, names), torch.export.Dim("samples")
    axes = tuple({0: samples, **({1: torch.export.Dim.AUTO} if free and _is_tokens(t) else {})} for t in tensors)
    graph = Graph(guard, few, names, refuses_negative=_refuses_negative(guard, few))
    with _quiet(), torch.inference_mode(False), torch.no_grad():
        try:
            traced = torch.export.export(graph, tuple(tensors), dynamic_shapes=(axes,), strict=False)
            program: Any = torch.onnx.export(
                traced, opset_version=OPSET, input_names=list(names), output_names=list(outputs), verbose=False
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


def _refuses_negative(guard: Guard, few: Any) -> bool:
    """Whether a model of integers fails on −1, as embeddings do; in a graph it would count from the end."""
    if guard.inputs.model is None or few.x.is_floating_point():
        return False
    try:
        guard.predict(few.with_x(torch.full_like(few.x, -1)))
    except Exception:  # noqa: BLE001 (of somebody's model)
        return True
    return False


def _is_tokens(value: Any) -> bool:
    """Whether an input is of token ids, or of a mask for them: how many there are may differ."""
    return isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] > 2 and not value.is_floating_point()


def _tidy(graph: Any) -> None:
    """Name the free axes, and leave out where in somebody's files an operation comes from."""
    names: dict[str, str] = {}
    for value in graph.inputs:
        for size, name in zip(value.shape, AXES, strict=False):
            if not isinstance(size, int) and str(size) not in names:
                names[str(size)] = name if name not in names.values() else f"{name} of {value.name}"
    for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
        for axis, size in enumerate(value.shape or ()):
            if str(size) in names:
                value.shape[axis] = names[str(size)]
        value.metadata_props.clear()
    for node in graph:
        node.metadata_props.clear()
        node.doc_string = None


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
    return {name: value if isinstance(value, str) else json.dumps(value, default=str) for name, value in about.items()}


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
    if there.exists() and not there.is_file():
        raise InputError(f"path: {path} is a folder, or no ordinary file; name a file")
    if not there.is_file() or not there.stat().st_size:
        return
    try:
        ours = onnx.load(there, load_external_data=False).producer_name == "igeood"
    except Exception:  # noqa: BLE001 (of protobuf, whatever is in the file)
        ours = False
    if not ours:
        raise InputError(f"path: {path} is there, and is no guard's graph; name another file, or remove it first")


def _check(onnxruntime: Any, content: bytes, guard: Guard, batch: Any, names: Sequence[str]) -> bool:
    """Raise unless onnxruntime runs the graph and agrees with the guard; whether it does with fewer tokens too."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised
    cure = "convert the model to float32 and fit again" if _is_double(guard) else "change that operation"
    parts = [batch, *(_rows(batch, n) for n in _TRIED)]
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        results = [_run(session, part, names) for part in parts]
    except Exception as error:
        raise InputError(f"model: onnxruntime cannot run its graph ({_line(error)}); {cure}") from error
    for part, graph in zip(parts, results, strict=True):
        _agree(graph, guard, part)
    if not any(isinstance(size, str) and size != "samples" for value in session.get_inputs() for size in value.shape):
        return True
    shorter = batch.mapped(lambda value: value[:, :-1] if _is_tokens(value) else value)
    try:
        _agree(_run(session, shorter, names), guard, shorter)
    except Exception:  # noqa: BLE001 (of onnxruntime, or of somebody's model)
        return False
    return True


def _run(session: Any, part: Any, names: Sequence[str]) -> Arrays:
    """What the graph says of some samples."""
    given = {name: value.detach().cpu().numpy() for name, value in zip(names, input_tensors(part, names), strict=True)}
    outputs = [output.name for output in session.get_outputs()]
    return {name: np.asarray(value) for name, value in zip(outputs, session.run(None, given), strict=True)}


def _agree(graph: Arrays, guard: Guard, part: Any) -> None:
    """Raise unless the graph says the same of these samples as the guard, but for rounding."""
    verdict, calibration = guard.predict(part, on_error="refuse"), guard.calibration
    score, is_ood, label = (torch.as_tensor(v).cpu() for v in (verdict.score, verdict.is_ood, verdict.label))
    found = torch.from_numpy(graph["score"])
    allowed = HEAD_ERROR if guard.inputs.model is None else DOUBLE_ERROR if _is_double(guard) else MODEL_ERROR
    size = score.abs().maximum(calibration.scores.abs().median())  # type: ignore[union-attr]
    size = torch.where(score.isfinite(), size, 0.0)
    apart = torch.where(score == found, 0.0, (score - found).abs())  # both may be infinite
    if not bool((apart <= allowed * size).all()):
        row = int((~(apart <= allowed * size)).nonzero()[0])
        problem = f"{float(found[row]):.9g} of sample {row}, where the guard has {float(score[row]):.9g}"
        raise InputError(f"example: the graph's score is {problem}; such a guard cannot be exported")
    least, most = (calibration.tensor_p_values(score + sign * allowed * size) for sign in (1, -1))  # type: ignore[union-attr]
    p_value = torch.from_numpy(graph["p_value"])
    near = score.isfinite() & ((score - guard.threshold).abs() <= min(NEAR, allowed) * size)
    wrong = (p_value < least) | (p_value > most) | ((torch.from_numpy(graph["is_ood"]) != is_ood) & ~near)
    if bool(wrong.any()) or not _same_labels(label.numpy(), graph, allowed):
        raise InputError("example: the graph's verdicts or labels are not the guard's; such a guard cannot be exported")


def _same_labels(label: np.ndarray[Any, Any], graph: Arrays, allowed: float) -> bool:
    """Whether the labels are the same, but for logits that are alike."""
    other = label != graph["label"]
    if not other.any() or "logits" not in graph or (label[other] < 0).any():
        return not other.any()
    logits = graph["logits"][other]
    both = np.take_along_axis(logits, np.stack([label[other], graph["label"][other]], axis=1), axis=1)
    return bool((np.abs(both[:, 0] - both[:, 1]) <= allowed * np.abs(logits).max(axis=1)).all())
