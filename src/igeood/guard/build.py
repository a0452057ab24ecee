"""Guards by what the user has of the model: its logits, its gradients, its hidden layers."""

from typing import Any

from torch import nn

from igeood.detectors import METHODS, Detector
from igeood.detectors import detector as make_detector
from igeood.errors import InputError
from igeood.guard.guard import Access, Guard
from igeood.guard.source import Source
from igeood.model.layers import Layers
from igeood.model.step import Channels


def black_box(
    model: nn.Module | None = None,
    *,
    method: str | Detector = "evidence",
    temperature: float | None = None,
    probabilities: bool = False,
    **options: Any,
) -> Guard:
    """Make a guard that uses logits only: a model's, or arrays from any framework.

    Parameters
    ----------
    model : Module, optional
        The classifier. Without it the guard takes logits in place of inputs.
    method : str or Detector
        One of `igeood.METHODS` that needs no layers, or a detector of your own options. "igeood-logits" is the paper's.
    temperature : float, optional
        Of the softmax; each method has its own default.
    probabilities : bool
        The model, or the arrays, give probabilities, not logits.
    options
        Further options of the method, such as `centroid_temperature=1.0`.

    Examples
    --------
    >>> guard = black_box().fit([[4.0, 0, 0], [0, 5.0, 0], [0, 0, 3.0]], [0, 1, 2])
    >>> guard.score([[0.1, 0.2, 0.0]]).shape
    (1,)
    """
    detector = _detector(method, "black box", temperature=temperature, probabilities=probabilities, **options)
    return Guard(detector, Source(model, ()), "black box")


def grey_box(
    model: nn.Module,
    *,
    epsilon: float = 0.0012,
    std: Channels = 1.0,
    method: str | Detector = "evidence",
    temperature: float | None = None,
    probabilities: bool = False,
    **options: Any,
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
    method, temperature, probabilities, options
        As in `black_box`.
    """
    if model is None:
        raise InputError("a grey box needs the model's gradients", argument="model", cure="give {model}")
    detector = _detector(method, "grey box", temperature=temperature, probabilities=probabilities, **options)
    return Guard(detector, Source(model, (), epsilon=epsilon, std=std), "grey box")


def white_box(
    model: nn.Module | None = None,
    *,
    layers: Layers = "auto",
    epsilon: float = 0.0,
    std: Channels = 1.0,
    method: str | Detector = "evidence",
    temperature: float | None = None,
    **options: Any,
) -> Guard:
    """Make a guard that uses hidden layers too: by default the evidence of them all, which needs no OOD sample.

    Parameters
    ----------
    model : Module, optional
        The classifier. Without it the guard takes `Outputs` with features in place of inputs.
    layers : "auto" or names
        Keys of `model.named_modules()`; "auto" finds the ends of the model's blocks, or takes all features there are.
    epsilon : float
        Size of the input step in pixel units; 0 for none.
    std : float or one for each channel
        Of the input's normalisation.
    method : str or Detector
        One of `igeood.METHODS` that needs layers, or a detector of your own options. `"igeood"` is the paper's;
        `"probe"` learns most from OOD samples in `tune`.
    temperature : float, optional
        Of the softmax, in methods that have one.
    options
        Further options of the method, such as `k=10` of "knn", or `probabilities=True` of "evidence".
    """
    if model is None and epsilon:
        raise InputError("a step needs the model", argument="epsilon", cure="give the model, or leave epsilon at 0")
    source = Source(model, layers, epsilon=epsilon, std=std)
    if source.wanted == []:
        raise InputError("empty", argument="layers", cure="name at least one layer, or leave it to 'auto'")
    return Guard(_detector(method, "white box", temperature=temperature, **options), source, "white box")


def _detector(method: str | Detector, access: Access, **options: Any) -> Detector:
    for name, default in (("temperature", None), ("probabilities", False)):
        if options.get(name) is default:
            options.pop(name, None)  # methods without this option take the default of all
    if isinstance(method, Detector) and options:
        raise InputError("a detector has its own options", argument="method", cure="give temperature and so on to it")
    detector = method if isinstance(method, Detector) else make_detector(method, **options)
    is_white = access == "white box"
    if not (detector.needs.reads_layers if is_white else not detector.needs.must_read_layers):
        fitting = [n for n, m in METHODS.items() if (m.needs.reads_layers if is_white else not m.needs_layers)]
        other = "a black box ({access=black-box})" if is_white else "a white box ({access=white-box})"
        cure = f"use {other}, or one of {', '.join(fitting)}"
        raise InputError(f"{method!r} is not one for a {access}", argument="method", cure=cure)
    return detector
