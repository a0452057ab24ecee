"""The file of a guard: everything that `predict` needs but the model, in one safetensors file."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from igeood.calibration import Calibration
from igeood.detectors import METHODS, Detector, method_name
from igeood.errors import Finding, GuardFileError, InputError, NotReadyError
from igeood.files import describing, read_record, record_head, write_record
from igeood.geometry.precision import precise
from igeood.guard.guard import Guard
from igeood.guard.health import STEPS
from igeood.guard.identity import Seen
from igeood.guard.names import checked_columns, checked_names, checked_text
from igeood.guard.source import Source
from igeood.guard.tune import Tuning
from igeood.outputs import Outputs

CALIBRATION_FIELDS = ("tpr", "guarantee", "confidence", "per_class", "trained_on")


def save(guard: Guard, path: str | os.PathLike[str]) -> None:
    """Write a fitted guard; see `Guard.save`."""
    guard.source.check_weights(strict=True)
    detector = guard.detector
    tensors = {f"detector.{name}": value for name, value in detector.state().items()}
    seen = {"fitted_on": guard.fitted_on, "calibrated_on": guard.calibrated_on}
    seen |= {f"tuned_on.{i}": part for i, part in enumerate(guard.tuned_on)}
    for name, samples in seen.items():
        tensors[name] = torch.from_numpy(samples.keys.view(np.int64).copy())
    record: dict[str, Any] = {
        "kind": "guard",
        "access": guard.access,
        "method": method_name(detector),
        "params": detector.params(),
        "n_classes": detector.n_classes_,
        "widths": list(detector.widths_.items()),
        "layers": guard.layers,
        "wanted": guard.source.wanted,
        "untuned": guard._first,
        "layouts": dict(guard.source.layouts),
        "epsilon": guard.epsilon,
        "std": guard.source.std,
        "model": guard.source.fingerprint,
        "device": guard.source.fitted_device,
        "autocast": guard.source.fitted_autocast,
        "preparation": guard.preparation,
        "contains": contents(detector),
        "tuning": None if guard.tuning is None else asdict(guard.tuning),
        "calibration": None,
        "classes": guard.classes,
        "highest": guard.highest,
        "columns": guard.columns,
        "seen": {name: [samples.identified, samples.drawn_from] for name, samples in seen.items()},
        "health": {step: [asdict(finding) for finding in findings] for step, findings in guard.findings.items()},
    }
    if guard.calibration is not None:
        tensors["calibration.scores"] = guard.calibration.scores
        tensors["calibration.left_out"] = torch.from_numpy(guard.calibration.left_out)
        if guard.calibration.labels is not None:
            tensors["calibration.labels"] = guard.calibration.labels
        promised = {name: getattr(guard.calibration, name) for name in CALIBRATION_FIELDS}
        record["calibration"] = {"n": len(guard.calibration.scores), "threshold": guard.threshold, **promised}
    check_replaceable(path)
    write_record(path, record, tensors)


def contents(detector: Detector) -> str:
    """What a fitted detector has kept of the training data."""
    has_bank = any(name.partition(":")[0].endswith("bank_") for name in detector.state())
    return "outputs of training rows" if has_bank else "statistics of training rows"


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Raise if there is a file that is no guard, and not empty: it may be somebody's only copy."""
    there = Path(path)
    if there.is_file() and there.stat().st_size and record_head(there).get("kind") != "guard":
        raise InputError(f"{path} is there, and is no guard's file", argument="path", cure="name another file")


def load(path: str | os.PathLike[str], model: nn.Module | None = None, *, strict: bool = True) -> Guard:
    """Read a guard that `Guard.save` wrote. A damaged or foreign file is an error, and nothing is executed.

    Parameters
    ----------
    path : path
        The file.
    model : Module, optional
        The classifier that the guard was made with, if it was made with one.
    strict : bool
        Refuse another model than that, by its fingerprint.
    """
    record, tensors = read_record(path, "guard")
    method = str(record.get("method"))
    if method not in METHODS:
        problem = f"{path} is of method {method!r}, which is not registered"
        raise GuardFileError(
            problem, argument="path", cure="import the module that has it first, or name it with {model}"
        )
    wanted = record.get("model")
    present = Source(model).weights()
    if (wanted is None) != (present is None):
        problem = "was made with a model" if wanted else "was made without a model"
        cure = "give it: {model}" if wanted else "leave {model} out"
        raise InputError(f"the guard in {path} {problem}", argument="model", cure=cure)
    if strict and present != wanted:
        problem = f"its fingerprint is {present}, the guard in {path} was made with {wanted}"
        raise InputError(problem, argument="model", cure="load that model, in that precision")
    with describing(path, "guard"), precise():
        return _restored(record, tensors, model)


def load_calibration(path: str | os.PathLike[str]) -> Calibration:
    """The calibration of the guard in a file; neither its model nor its method is needed."""
    record, tensors = read_record(path, "guard")
    with describing(path, "guard"):
        calibration = _calibration(record, tensors)
    if calibration is None:
        raise NotReadyError(f"{path} has no threshold yet", argument="guard", cure="calibrate it first")
    return calibration


def _restored(record: dict[str, Any], tensors: dict[str, Tensor], model: nn.Module | None) -> Guard:
    n_classes = record["n_classes"]
    preparation = record["preparation"]
    if type(n_classes) is not int or not 2 <= n_classes <= 1 << 22:
        raise InputError(f"n_classes: {n_classes!r}")
    if preparation is not None and not 1 <= preparation["size"] <= 4096:
        raise InputError(f"preparation: size {preparation['size']!r}")
    prefix = "detector."
    state = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    detector = METHODS[record["method"]].kind(**record["params"])
    detector.load_state(state, n_classes, {str(block): width for block, width in record["widths"]})
    source = Source(model, epsilon=record["epsilon"], std=record["std"])
    source.follow([str(layer) for layer in record["layers"]], record["layouts"], detector.needs)
    source.wanted = record["wanted"]
    source.columns = checked_columns(record["columns"])
    source.settle()
    source.fitted_device = checked_text(record["device"], "device")
    source.fitted_autocast = checked_text(record["autocast"], "autocast")
    guard = Guard(detector, source, record["access"])
    guard.fitted_on = _seen(record, tensors, "fitted_on")
    source.identified = guard.fitted_on.identified
    guard.calibrated_on = _seen(record, tensors, "calibrated_on")
    guard.tuned_on = tuple(_seen(record, tensors, name) for name in record["seen"] if name.startswith("tuned_on"))
    params, epsilon = record["untuned"]
    guard._first = (type(detector)(**params).params(), float(epsilon))
    findings = record["health"]
    guard.findings = {step: [_finding(each) for each in findings[step]] for step in STEPS if step in findings}
    guard.preparation = preparation
    if record["classes"] is not None:
        guard.classes = source.classes = checked_names(record["classes"], n_classes)
    guard.tuning = None if record["tuning"] is None else Tuning(**record["tuning"])
    guard.calibration = _calibration(record, tensors)
    guard.highest = None if record["highest"] is None else float(record["highest"])
    _try_out(detector)
    return guard


def _calibration(record: dict[str, Any], tensors: dict[str, Tensor]) -> Calibration | None:
    if record["calibration"] is None:
        return None
    promised = {name: record["calibration"][name] for name in CALIBRATION_FIELDS}
    if record["classes"] is not None:
        promised["classes"] = checked_names(record["classes"], record["n_classes"])
    if type(promised["per_class"]) is not bool or type(promised["trained_on"]) is not int:
        raise InputError(f"calibration: {record['calibration']!r}")
    promised |= {"labels": tensors.get("calibration.labels"), "left_out": tensors["calibration.left_out"].numpy()}
    calibration = Calibration(tensors["calibration.scores"], n_classes=record["n_classes"], **promised)
    _ = calibration.places  # what does not fit fails here, not at the first input
    return calibration


def _seen(record: dict[str, Any], tensors: dict[str, Tensor], name: str) -> Seen:
    identified, drawn_from = record["seen"][name]
    if not isinstance(identified, bool) or tensors[name].ndim != 1:
        raise InputError(f"seen: {record['seen'][name]!r}")
    return Seen(np.sort(tensors[name].numpy().view(np.uint64)), identified, tuple(drawn_from) if drawn_from else None)


def _finding(about: dict[str, Any]) -> Finding:
    finding = Finding(**about)
    texts = (finding.code, finding.message, finding.cure)
    if finding.level not in ("warning", "info") or not all(text and text.isprintable() for text in texts):
        raise InputError(f"health: {about!r}")
    return finding


def _try_out(detector: Detector) -> None:
    """Score one made-up sample: a state whose shapes do not fit fails here, not at the first input."""
    features = {block: torch.ones(1, width) for block, width in detector.widths_.items()}
    logits = 2.0 * torch.arange(float(detector.n_classes_))[None]
    if not bool(detector.score(Outputs(logits, features)).isfinite().all()):
        raise InputError("its state has values that are not finite")
