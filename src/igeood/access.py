"""Guards by what the user has of the model: its logits, its gradients, its hidden layers; and guards from files."""

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from igeood import storage
from igeood.calibration import Calibration
from igeood.detectors import METHODS, Detector, Ensemble
from igeood.detectors import detector as make_detector
from igeood.detectors.ensemble import WeightSearch
from igeood.errors import GuardFileError, IgeoodError, InputError
from igeood.extraction import Layers
from igeood.fingerprints import fingerprint
from igeood.guard import CALIBRATION_FIELDS, Access, Guard
from igeood.inputs import ArrayInputs, ModelInputs
from igeood.layers import check_layers
from igeood.outputs import Keys, Outputs
from igeood.perturbation import Attack, Channels, check_channels, check_epsilon
from igeood.tuning import StepTrial, TemperatureSearch, Trial, Tuning


def black_box(
    model: nn.Module | None = None,
    *,
    method: str | Detector = "igeood-logits",
    temperature: float | None = None,
    probabilities: bool = False,
) -> Guard:
    """Make a guard that uses logits only: a model's, or arrays from any framework.

    Parameters
    ----------
    model : Module, optional
        The classifier. Without it the guard takes logits in place of inputs.
    method : str or Detector
        One of `igeood.METHODS` that needs no layers, or a detector of your own options.
    temperature : float, optional
        Of the softmax; each method has its own default.
    probabilities : bool
        The model, or the arrays, give probabilities, not logits.

    Examples
    --------
    >>> guard = black_box().fit([[4.0, 0, 0], [0, 5.0, 0], [0, 0, 3.0]], [0, 1, 2])
    >>> guard.score([[0.1, 0.2, 0.0]]).shape
    (1,)
    """
    detector = _detector(method, "black box", temperature, probabilities)
    return Guard(detector, ArrayInputs() if model is None else ModelInputs(model, ()), "black box")


def grey_box(
    model: nn.Module,
    *,
    epsilon: float = 0.0012,
    std: Channels = 1.0,
    method: str | Detector = "igeood-logits",
    temperature: float | None = None,
    probabilities: bool = False,
    fold: bool = False,
) -> Guard:
    """Make a guard that moves each input one signed-gradient step before scoring its logits (Eq. 6).

    Parameters
    ----------
    model : Module
        The classifier.
    epsilon : float
        Size of the step in pixel units; `tune` chooses one.
    std : float or one for each channel
        Of the input's normalisation; 1 for inputs in [0, 1].
    method, temperature, probabilities
        As in `black_box`.
    fold : bool
        Run a private stand-in of the model: batch normalisation folded into the convolutions, channels last. About
        1.5 times as fast on a CPU; the scores are the same up to rounding, so one guard keeps one way. It shares the
        model's weights and follows them. A model that cannot be traced runs as it is, with a note in the log.
    """
    check_epsilon(epsilon)
    detector = _detector(method, "grey box", temperature, probabilities)
    return Guard(detector, ModelInputs(model, (), epsilon=epsilon, std=std, fold=fold), "grey box")


def white_box(
    model: nn.Module | None = None,
    *,
    layers: Layers = "auto",
    plus: bool = False,
    epsilon: float = 0.0,
    mean: Channels | None = None,
    std: Channels = 1.0,
    method: str | Detector | None = None,
    temperature: float | None = None,
) -> Guard:
    """Make a guard that uses hidden layers too: IGEOOD, which works before `tune`, with no OOD sample.

    Parameters
    ----------
    model : Module, optional
        The classifier. Without it the guard takes `Outputs` with features in place of inputs.
    layers : "auto" or names
        Keys of `model.named_modules()`; "auto" finds the ends of the model's blocks, or takes all features there are.
    plus : bool
        IGEOOD+: `tune` learns the OOD samples' own statistics as well.
    epsilon : float
        Size of the input step in pixel units; 0 for none.
    mean, std : float or one for each channel
        Of the input's normalisation: for the step, and for adversarial samples.
    method : str or Detector, optional
        Another white-box method, such as `"mahalanobis"`.
    temperature : float, optional
        Of the softmax in FR₀.
    """
    check_epsilon(epsilon)
    if layers != "auto" and not isinstance(layers, str) and not list(layers):
        raise InputError("layers: empty; name at least one layer, or leave it to 'auto'")
    if method is not None and plus:
        raise InputError("plus: means method='igeood+'; give one of the two")
    detector = _detector(method or ("igeood+" if plus else "igeood"), "white box", temperature, False)
    if model is None:
        if epsilon:
            raise InputError("epsilon: an input step needs the model; give it, or leave epsilon at 0")
        return Guard(detector, ArrayInputs(layers), "white box")
    return Guard(detector, ModelInputs(model, layers, epsilon=epsilon, mean=mean, std=std), "white box")


def _detector(method: str | Detector, access: Access, temperature: float | None, probabilities: bool) -> Detector:
    if isinstance(method, Detector):
        if temperature is not None or probabilities:
            raise InputError("method: a detector has its own options; give temperature and probabilities to it")
        if isinstance(method, Ensemble) != (access == "white box"):
            raise InputError(f"method: {type(method).__name__} is not a detector for a {access}")
        return method
    options: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
    if probabilities:
        options["probabilities"] = True
    made = make_detector(method, **options)
    if METHODS[method].needs_layers != (access == "white box"):
        fitting = [name for name, m in METHODS.items() if m.needs_layers == (access == "white box")]
        raise InputError(f"method: {method!r} is not one for a {access}; those are {', '.join(fitting)}")
    return made


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
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"path: expected the guard's file, got {type(path).__name__}; call load(path, model)")
    if not (model is None or isinstance(model, nn.Module)):
        raise InputError(f"model: expected a torch.nn.Module, got {type(model).__name__}; give the model itself")
    record, tensors = storage.read(path)
    try:
        wanted = record["model"]
        if (wanted is None) != (model is None):
            need = (
                "was made without a model; leave it out"
                if wanted is None
                else "needs its model: load(path, model), or --model"
            )
            raise InputError(f"model: the guard in {path} {need}")
        if model is not None:
            found = fingerprint(model)
            if strict and found != wanted:
                raise InputError(
                    f"model: its fingerprint is {found}, the guard in {path} was made with {wanted}: other weights, "
                    f"precision or architecture; load that model, or pass strict=False"
                )
            check_layers(model, [str(layer) for layer in record["layers"]])
    except KeyError as error:
        raise GuardFileError(f"path: {path} does not describe a guard ({error})") from None
    try:
        with torch.inference_mode(False):  # what is made in it cannot serve for gradients
            return _restore(record, tensors, model)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, IgeoodError) as error:
        reason = " ".join(str(error).split())  # it may quote the file
        raise GuardFileError(f"path: {path} does not describe a guard ({reason})") from None


def _restore(record: dict[str, Any], tensors: dict[str, Tensor], model: nn.Module | None) -> Guard:
    method = record["method"]
    options = {k: v for k, v in record["params"].items() if k not in METHODS[method].fixed}
    prefix = "detector."
    state = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    classes = record["n_classes"]
    if isinstance(classes, bool) or not isinstance(classes, int) or not 2 <= classes <= 1 << 22:
        raise InputError(f"n_classes: {classes!r}")
    if any(value.ndim > 2 for value in state.values()):
        raise InputError("a tensor of more than two axes")
    detector = make_detector(method, **options).load_state(state, classes)
    inputs: ArrayInputs | ModelInputs = ArrayInputs([str(layer) for layer in record["layers"]])
    if model is not None:
        options = {name: record[name] for name in ("epsilon", "mean", "std")}
        inputs = ModelInputs(model, record["layers"], **options, fold=record.get("fold", False))
    guard = Guard(detector, inputs, record["access"])
    guard._tuned_on = guard._first_tuned_on = _keys(tensors["tuned_on"])
    guard.fitted_on = _keys(tensors.get("fitted_on", torch.empty(0, dtype=torch.int64)))  # earlier files have none
    guard.preparation = _preparation(record.get("preparation"))
    inputs.settle()
    guard.tuning = None if record["tuning"] is None else _restore_tuning(record["tuning"])
    if record["calibration"] is not None:
        kept = {"trained_on": 0, **record["calibration"]}  # earlier files do not tell
        guard.calibration = Calibration(tensors["calibration.scores"], **{n: kept[n] for n in CALIBRATION_FIELDS})
    _try_out(detector)
    return guard


def _keys(tensor: Tensor) -> Keys:
    if tensor.dtype != torch.int64 or tensor.ndim != 1:
        raise InputError(f"keys of samples: expected int64 of shape (N,), got {tensor.dtype} {tuple(tensor.shape)}")
    return tensor.numpy().view(np.uint64)


def _preparation(record: Any) -> dict[str, Any] | None:
    """How images become inputs, if it can be followed."""
    if record is None:
        return None
    if not isinstance(record["size"], int) or not 1 <= record["size"] <= 4096:
        raise InputError(f"preparation: size {record['size']!r}")
    for name in ("mean", "std"):
        check_channels(record[name], name, positive=name == "std")
        if len(record[name]) not in (1, 3):
            raise InputError(f"preparation: {len(record[name])} values of {name}, for three channels")
    return dict(record)


def _restore_tuning(record: dict[str, Any]) -> Tuning:
    temperature = record["temperature"]
    return Tuning(
        temperature=None
        if temperature is None
        else TemperatureSearch(Trial(**temperature["best"]), tuple(Trial(**t) for t in temperature["trials"])),
        epsilon=record["epsilon"],
        steps=tuple(StepTrial(**step) for step in record["steps"]),
        weights=None if record["weights"] is None else WeightSearch(**record["weights"]),
        attack=None if record["attack"] is None else Attack(**record["attack"]),
        n_id=record["n_id"],
        n_ood=record["n_ood"],
        before=record["before"],
        after=record["after"],
    )


def _try_out(detector: Detector) -> None:
    """Score one made-up sample: a state whose shapes do not fit fails here, not at the first input."""
    layers = getattr(getattr(detector, "features_", None), "mean_", {})
    features = {layer: torch.zeros(1, mean.shape[1]) for layer, mean in layers.items()}
    logits = 2.0 * torch.arange(float(detector.n_classes_))[None]  # nobody takes them for probabilities
    score = detector.score(Outputs(logits.softmax(dim=1) if detector.probabilities else logits, features))
    if not bool(torch.as_tensor(score).isfinite().all()):
        raise InputError("its state has values that are not finite")
