"""Traces a guard, compares the graph with it, and writes the file."""

import json
import logging
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch import Tensor

from igeood.detectors import Detector, method_name
from igeood.errors import InputError, NoRowsError
from igeood.export.graph import Graph, graph_inputs
from igeood.export.plain import DECOMPOSITIONS, TRANSLATIONS
from igeood.files import digest, write_whole
from igeood.geometry.precision import exporting
from igeood.guard.file import contents
from igeood.guard.guard import Guard
from igeood.model.batch import Batch
from igeood.outputs import Outputs
from igeood.version import __version__

OPSET = 20
LARGEST_FILE = 2_000_000_000  # bytes; protobuf ends at 2 GiB
OUTPUTS = ["logits", "score", "p_value", "is_ood", "label"]
_PRODUCER = b"\x12\x06igeood"  # as protobuf writes it, at the start of the file
# How far scores may be apart, relative: without a model, and with one; runtimes round float32 differently.
HEAD_ERROR = 1e-9
MODEL_ERROR = {torch.float64: 1e-7, torch.float32: 1e-3}
_lock = threading.Lock()  # tracing changes torch's own settings


def export(guard: Guard, path: str | os.PathLike[str], example: Any = None) -> None:
    """Write a calibrated guard as an ONNX graph; see `Guard.export`."""
    _check_exportable(guard)
    _check_replaceable(Path(path))
    metadata = _metadata(guard)
    samples = _example(guard, example)
    parts = [samples, _repeated(samples, 3), _repeated(samples, 1)]
    try:
        program = _trace(guard, samples)
        if "tokens" in {str(size) for value in program.model.graph.inputs for size in value.shape}:
            parts.append(_shorter(samples))
        ClearMetadataAndDocStringPass()(program.model)  # it says where in somebody's files an operation comes from
        program.model.metadata_props.update(metadata)
        program.model.producer_name = "igeood"
        program.model.producer_version = __version__
        content: bytes = program.model_proto.SerializeToString()
        results = run(content, parts)
    except Exception as error:
        argument = "detector" if guard.source.model is None else "model"
        cure = "do not decide by values nor fix the number of samples, and use operations that onnxruntime has"
        raise InputError(f"cannot be exported ({_line(error)})", argument=argument, cure=cure) from error
    for part, result in zip(parts, results, strict=True):
        check_agreement(result, guard, part)
    write_whole(path, content)


def _check_exportable(guard: Guard) -> None:
    """Raise for an input step, changed weights, half precision and too large a model."""
    if guard.epsilon:
        raise InputError("the input step needs a gradient", argument="epsilon", cure="export a guard with {epsilon=0}")
    guard.source.check_weights(strict=True)
    weights = [] if guard.source.bare is None else list(guard.source.bare.state_dict().values())
    for dtype in {weight.dtype for weight in weights} & {torch.float16, torch.bfloat16}:
        raise InputError(f"its weights are {dtype}", argument="model", cure="fit the guard with model.float()")
    size = sum(value.nbytes for value in (*weights, *guard.detector.state().values()))
    if size > LARGEST_FILE:
        raise InputError(f"{size:,} bytes, more than {LARGEST_FILE:,}", argument="model", cure="reduce it")


def _check_replaceable(path: Path) -> None:
    """Raise if there is a file that is no guard's graph: it may be somebody's only copy."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        head = file.read(64)
    if head and _PRODUCER not in head:
        raise InputError(f"{path} is there, and is no guard's graph", argument="path", cure="name another file")


def _metadata(guard: Guard) -> dict[str, str]:
    """What the file says of itself; values that are no text are JSON."""
    detector = guard.detector
    calibration: Any = guard.calibration
    method = {"method": method_name(detector), "options": detector.params()}
    own = ("access", "layers", "promise", "threshold", "classes", "preparation")
    about = {
        **method,
        **{name: getattr(guard, name) for name in own},
        "tpr": calibration.tpr,
        "per_class": calibration.per_class,
        "calibration_samples": len(calibration.scores),
        "fingerprint": guard.source.fingerprint or "",
        "guard": digest(method, {**detector.state(), "calibration.scores": calibration.scores}),
        "contains": contents(detector),
        "versions": {"igeood": __version__, "torch": torch.__version__, "onnx": onnx.__version__, "opset": OPSET},
    }
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in about.items()}


def _example(guard: Guard, example: Any) -> Any:
    """The first batch of the example, with the blocks that are read; without a model, made up where none is given."""
    reader = guard.source.reader
    if example is None and reader is not None:
        raise InputError("the model's inputs are not known", argument="example", cure="give some: {example}")
    samples = next(guard.source.items(_made_up(guard.detector) if example is None else example, name="example"))
    if len(samples) == 0:
        raise NoRowsError("no sample", argument="example", cure="give at least one")
    try:
        guard.predict(samples[:1])
    except Exception as error:
        raise InputError(f"the guard cannot judge it ({_line(error)})", argument="example") from error
    return samples.only(guard.detector.widths_) if reader is None else reader.place(samples)


def _made_up(detector: Detector) -> Outputs:
    """Random outputs that the detector takes."""
    generator = torch.Generator().manual_seed(0)
    logits = 4.0 * torch.randn(16, detector.n_classes_, generator=generator)
    features = {block: torch.rand(16, width, generator=generator) for block, width in detector.widths_.items()}
    return Outputs(logits.softmax(dim=1) if detector.probabilities else logits, features)


def _line(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _repeated(samples: Any, n: int) -> Any:
    """The first n samples, which come again where there are fewer."""
    return samples[torch.arange(n) % len(samples)]


def _is_tokens(value: Any) -> bool:
    """Whether an input is of token ids, or of a mask for them: how many there are may differ."""
    return isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] > 2 and not value.is_floating_point()


def _shorter(samples: Batch) -> Batch:
    """Samples of one token less."""
    return samples.mapped(lambda value: value[:, :-1] if _is_tokens(value) else value)


def _takes(guard: Guard, samples: Batch) -> bool:
    """Whether the guard's model takes these samples."""
    try:
        guard.predict(samples)
    except Exception:  # noqa: BLE001 (of somebody's model)
        return False
    return True


def _trace(guard: Guard, samples: Any) -> Any:
    """The ONNX program, for any number of samples, and of tokens where the model takes any number."""
    names = list(graph_inputs(samples))
    few = _repeated(samples, 3)  # torch takes an axis of length 1 as fixed
    tensors = tuple(graph_inputs(few)[name] for name in names)
    is_free = any(_is_tokens(each) for each in tensors) and _takes(guard, _shorter(samples))
    axes = [{0: "samples", 1: "tokens"} if is_free and _is_tokens(each) else {0: "samples"} for each in tensors]
    dims = {"samples": torch.export.Dim("samples"), "tokens": torch.export.Dim.AUTO}
    free = tuple({axis: dims[name] for axis, name in each.items()} for each in axes)
    is_integer = guard.source.model is not None and not few.x.is_floating_point()
    # a graph of an embedding counts negative numbers from the end
    refuses_negative = is_integer and not _takes(guard, few.with_x(torch.full_like(few.x, -1)))
    graph = Graph(guard, few, names, refuses_negative=refuses_negative)
    with _lock, _tracing(), torch.inference_mode(False), torch.no_grad():
        traced = torch.export.export(graph, tensors, dynamic_shapes=(free,), strict=False)
        return torch.onnx.export(
            traced.run_decompositions(DECOMPOSITIONS),
            opset_version=OPSET,
            input_names=names,
            output_names=OUTPUTS[1:] if guard.source.model is None else OUTPUTS,
            dynamic_shapes=(tuple(axes),),
            custom_translation_table=TRANSLATIONS,
            verbose=False,
        )


@contextmanager
def _tracing() -> Iterator[None]:
    """Say that a graph is traced, and silence torch's own remarks on it."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    token = exporting.set(True)
    try:
        logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)
        exporting.reset(token)


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
    is_ood, p_value = calibration.look_up(score, results["label"])
    agrees = {
        "score": (score == expected) | is_close,
        "p_value": results["p_value"] == p_value,
        "is_ood": results["is_ood"] == is_ood,
        "label": (results["label"] == label) | (is_tied & (results["label"] >= 0)),
    }
    for name, is_same in agrees.items():
        if not bool(is_same.all()):
            row = int((~is_same).nonzero()[0])
            value = getattr(verdict, name)[row].item()
            problem = f"the graph's {name} is {results[name][row].item()} for sample {row}, the guard's is {value}"
            raise InputError(problem, argument="example", cure="such a guard cannot be exported")
