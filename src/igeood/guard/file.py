"""A guard's file: one safetensors file, read only if nothing in it has changed. Nothing in it is executed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from igeood.calibration import Calibration
from igeood.detectors import METHODS, Detector, method_name
from igeood.detectors import detector as make_detector
from igeood.errors import GuardFileError, InputError, NotReadyError
from igeood.files import read_record, record_head, write_record
from igeood.guard.guard import Guard
from igeood.guard.health import STEPS, Finding
from igeood.guard.inputs import ArrayInputs, ModelInputs
from igeood.guard.known import Known
from igeood.guard.names import checked_names
from igeood.guard.tuning import Tuning
from igeood.model.fingerprint import fingerprint
from igeood.outputs import Keys, Outputs

CALIBRATION_FIELDS = ("tpr", "guarantee", "confidence", "left_out", "trained_on")


def save(guard: Guard, path: str | os.PathLike[str]) -> None:
    """Write a fitted guard; see `Guard.save`."""
    guard.inputs.check_weights(strict=True)
    tensors = {f"detector.{name}": value for name, value in guard.detector.state().items()}
    known = {"fitted_on": guard.fitted_on, "tuned_on": guard._tuned_on}
    for name, samples in known.items():
        tensors[name] = torch.from_numpy(samples.keys.view(np.int64).copy())
    tensors["training_scores"] = guard._training_scores
    record: dict[str, Any] = {
        "kind": "guard", "access": guard.access, "method": method_name(guard.detector),
        "params": guard.detector.params(), "n_classes": guard.detector.n_classes_,
        "widths": list(guard.detector.widths_.items()), "layers": guard.layers, "layouts": dict(guard.inputs.layouts),
        "epsilon": guard.epsilon, "mean": guard.inputs.mean, "std": guard.inputs.std,
        "model": guard.inputs.fingerprint, "preparation": guard.preparation,
        "contains": contents(guard.detector),
        "tuning": None if guard.tuning is None else asdict(guard.tuning), "calibration": None, "classes": guard.classes,
        "known": {name: [of.rows, of.repeated, of.identified, of.draws] for name, of in known.items()},
        "health": {step: [asdict(finding) for finding in found] for step, found in guard._findings.items()},
    }  # fmt: skip
    if guard.calibration is not None:
        tensors["calibration.scores"] = guard.calibration.scores
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
        raise InputError(f"path: {path} is there, and is no guard's file; name another file, or remove it first")


def load(path: str | os.PathLike[str], model: nn.Module | None = None, *, strict: bool = True) -> Guard:
    """Read a guard that `Guard.save` wrote. A damaged, foreign or newer file is an error, and nothing is executed.

    Parameters
    ----------
    path : path
        The file.
    model : Module, optional
        The classifier that the guard was made with, if it was made with one.
    strict : bool
        Refuse another model than that, by its fingerprint.
    """
    if not (model is None or isinstance(model, nn.Module)):
        raise InputError(f"model: expected a torch.nn.Module, got {type(model).__name__}; give the model itself")
    record, tensors = read_record(path, "guard")
    if (method := str(record.get("method"))) not in METHODS:
        cure = f"import the module whose class has @igeood.register({method!r}) first"
        raise GuardFileError(f"path: {path} holds a guard of method {method!r}, which is not registered here; {cure}")
    wanted, given = record.get("model"), None if model is None else fingerprint(model)
    if (wanted is None) != (given is None):
        problem = "needs its model: load(path, model), or --model" if wanted else "has no model; leave it out"
        raise InputError(f"model: the guard in {path} {problem}")
    if strict and given != wanted:
        problem = f"its fingerprint is {given}, the guard in {path} was made with {wanted}: another model or precision"
        raise InputError(f"model: {problem}; load that model, or pass strict=False")
    with _describing(path), torch.inference_mode(False):  # what is made in it cannot serve for gradients
        return _restored(record, tensors, model)


def load_calibration(path: str | os.PathLike[str]) -> Calibration:
    """The calibration of the guard in a file; neither its model nor its method is needed."""
    record, tensors = read_record(path, "guard")
    with _describing(path):
        calibration = _calibration(record, tensors)
    if calibration is None:
        cure = f"run `igeood calibrate {path} held-out.parquet` first"
        raise NotReadyError(f"guard: {path} has no threshold yet; {cure}")
    return calibration


@contextmanager
def _describing(path: str | os.PathLike[str]) -> Iterator[None]:
    """An error in what a sound file says is a `GuardFileError`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        reason = " ".join(str(error).split())  # it may quote the file
        raise GuardFileError(f"path: {path} does not describe a guard ({reason}); save it again") from error


def _restored(record: dict[str, Any], tensors: dict[str, Tensor], model: nn.Module | None) -> Guard:
    method, classes, preparation = record["method"], record["n_classes"], record["preparation"]
    if type(classes) is not int or not 2 <= classes <= 1 << 22:
        raise InputError(f"n_classes: {classes!r}")
    if preparation is not None and not 1 <= preparation["size"] <= 4096:
        raise InputError(f"preparation: size {preparation['size']!r}")
    options = {name: value for name, value in record["params"].items() if name not in METHODS[method].fixed}
    prefix = "detector."
    state = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    detector = make_detector(method, **options)
    detector.load_state(state, classes, {str(block): width for block, width in record["widths"]})
    layers = [str(layer) for layer in record["layers"]]
    inputs: ArrayInputs | ModelInputs = ArrayInputs(layers)
    if model is not None:
        given = {name: record[name] for name in ("epsilon", "mean", "std")}
        inputs = ModelInputs(model, layers, **given)
        inputs.read(list(detector.widths_), record["layouts"], METHODS[method].needs.statistic)
        inputs.settle()
    guard = Guard(detector, inputs, record["access"])
    keys = {name: tensors[name].numpy().view(np.uint64) for name in ("fitted_on", "tuned_on")}
    known = {name: _known(keys[name], record.get("known", {}).get(name), model is not None) for name in keys}
    guard.fitted_on, guard._tuned_on, guard._first_tuned_on = known["fitted_on"], *[known["tuned_on"]] * 2
    findings = record.get("health", {})
    guard._findings = {step: [_finding(each) for each in findings[step]] for step in STEPS if step in findings}
    guard._training_scores = tensors.get("training_scores", torch.empty(0)).double().reshape(-1)
    guard.preparation = preparation
    if record.get("classes") is not None:
        guard.classes = checked_names(record["classes"], classes)
    guard.tuning = None if record["tuning"] is None else Tuning(**{"auroc": None, **record["tuning"]})
    guard.calibration = _calibration(record, tensors)
    _try_out(detector)
    return guard


def _calibration(record: dict[str, Any], tensors: dict[str, Tensor]) -> Calibration | None:
    if record["calibration"] is None:
        return None
    return Calibration(
        tensors["calibration.scores"], **{name: record["calibration"][name] for name in CALIBRATION_FIELDS}
    )


def _known(keys: Keys, about: list[Any] | None, has_model: bool) -> Known:
    """Samples that a file remembers; an older one has their keys only."""
    rows, repeated, identified, draws = about or (len(keys), 0, has_model, ())
    if not (0 <= int(repeated) <= int(rows) and isinstance(identified, bool) and keys.ndim == 1):
        raise InputError(f"known: {about!r}")
    drawn = tuple((int(n), int(total), float(share), int(seed)) for n, total, share, seed in draws)
    return Known(np.sort(keys), int(rows), int(repeated), identified, drawn)


def _finding(about: dict[str, Any]) -> Finding:
    finding = Finding(**about)
    texts = (finding.code, finding.message, finding.cure)
    if finding.level not in ("warning", "info") or not all(text and text.isprintable() for text in texts):
        raise InputError(f"health: {about!r}")
    return finding


def _try_out(detector: Detector) -> None:
    """Score one made-up sample: a state whose shapes do not fit fails here, not at the first input."""
    features = {block: torch.ones(1, width) for block, width in detector.widths_.items()}
    logits = 2.0 * torch.arange(float(detector.n_classes_))[None]  # nobody takes them for probabilities
    score = detector.score(Outputs(logits.softmax(dim=1) if detector.probabilities else logits, features))
    if not bool(torch.as_tensor(score).isfinite().all()):
        raise InputError("its state has values that are not finite")
