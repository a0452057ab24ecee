r"""One signed-gradient step on the input: the grey box's pre-processing (the paper's Eq. 6).

Sizes are in pixel units: on an input normalised by a standard deviation, the step is ε/std for each channel. Only the
input's gradient is computed; no parameter is touched.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from igeood.detectors import Detector
from igeood.errors import InputError
from igeood.geometry.precision import precise
from igeood.model.batch import Batch
from igeood.model.reader import Reader
from igeood.outputs import OnError, Outputs

Channels = float | Sequence[float]


def input_gradients(objectives: Callable[[Tensor], Sequence[Tensor]], x: Tensor) -> list[Tensor]:
    """Gradients of summed objectives with respect to the input only, each of the shape of `x`; one forward pass.

    Parameters
    ----------
    objectives : callable
        Maps inputs (N, ...) to one or more numbers a sample, each (N,).
    x : Tensor
        (N, ...) floating-point inputs.
    """
    check_steppable(x)
    with torch.inference_mode(False), torch.enable_grad():
        leaf = x.detach().clone().requires_grad_()
        values = objectives(leaf)
        if not all(value.requires_grad for value in values):
            raise InputError("no gradient in the input", argument="model", cure="use black_box, or {epsilon=0}")
        last = len(values) - 1
        with precise():  # what the model computed in lower precision has its gradients in that
            return [torch.autograd.grad(v.sum(), leaf, retain_graph=i < last)[0] for i, v in enumerate(values)]


def check_steppable(x: Tensor) -> None:
    """Raise unless an input has a gradient."""
    if not x.is_floating_point():
        raise InputError(f"a step needs floats, got {x.dtype}", argument="x", cure="use black_box, or {epsilon=0}")


def signed_step(x: Tensor, gradient: Tensor, epsilon: float, std: Channels = 1.0) -> Tensor:
    r"""Eq. 6's step, :math:`x + \frac{\varepsilon}{\mathrm{std}}\,\operatorname{sign}(\mathrm{gradient})`.

    The sign of 0 is 0, and nothing is clamped.

    Parameters
    ----------
    x, gradient : Tensor
        (N, C, ...) inputs and the direction to go.
    epsilon : float
        In pixel units; negative goes down the gradient.
    std : float or one for each channel
        Of the input's normalisation.

    Examples
    --------
    >>> signed_step(torch.zeros(1, 3), torch.tensor([[2.0, 0.0, -5.0]]), 0.1, std=0.5)
    tensor([[ 0.2000,  0.0000, -0.2000]])
    """
    return x + gradient.sign() * (epsilon / per_channel(std, x, "std"))


def stepped(
    reader: Reader,
    batch: Batch,
    detector: Detector,
    epsilons: Sequence[float],
    std: Channels = 1.0,
    on_error: OnError = "raise",
) -> list[Outputs]:
    """Outputs for each size after a step that lowers the detector's score (Eq. 6), with the answer on the clean input.

    One forward pass gives the clean outputs and the gradient, which all sizes share. A row that is not valid in one of
    the passes is not valid after the step.
    """
    batch = reader.place(batch)
    passes: list[Outputs] = []
    targets: list[tuple[str, ...] | None] = []  # for each gradient the layers that are read after its step; None: all

    def read(x: Tensor) -> Outputs:
        outputs = reader(batch.with_x(x), on_error=on_error)
        return outputs.from_probabilities(on_error) if detector.probabilities else outputs

    def objectives(x: Tensor) -> list[Tensor]:
        passes.append(read(x))
        with precise():
            scores, layers = zip(*detector.step_scores(passes[0]), strict=True)
        targets.extend(layers)
        return list(scores)

    gradients = input_gradients(objectives, batch.x)
    clean = passes[0].detached()

    def after(epsilon: float) -> Outputs:
        parts = [read(signed_step(batch.x, gradient, -epsilon, std)) for gradient in gradients]
        reasons = {row: reason for part in (*parts, clean) for row, reason in part.reasons.items()}
        if targets == [None]:
            return parts[0].replace(reasons=reasons, _predicted=clean.predicted)
        pairs = zip(parts, targets, strict=True)
        features = {layer: part.features[layer] for part, layers in pairs for layer in layers or ()}
        return clean.replace(features=features, reasons=reasons)

    with torch.inference_mode(False), torch.no_grad():
        return [after(epsilon) if epsilon else clean for epsilon in epsilons]


def check_epsilon(epsilon: float, name: str = "epsilon") -> None:
    """Raise unless ε is a number ≥ 0."""
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float)) or not 0.0 <= epsilon < float("inf"):
        raise InputError(f"must be a finite number ≥ 0, in pixel units; got {epsilon!r}", argument=name)


def check_channels(values: Any, name: str, *, positive: bool = False) -> Channels:
    """One plain number or several, from numbers or arrays of them; finite, and positive where they must be."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.asarray(np.nan)
    if array.ndim > 1 or not array.size or not np.isfinite(array).all() or (positive and (array <= 0).any()):
        sign = "positive " if positive else ""
        raise InputError(f"expected a finite {sign}number, or one for each channel; got {values!r}", argument=name)
    channels: Channels = array.tolist()
    return channels


def per_channel(values: Channels, x: Tensor, name: str) -> Tensor:
    """One number, or one for each channel (the second axis), shaped to broadcast to `x`."""
    tensor = torch.as_tensor(values, dtype=x.dtype, device=x.device)
    if tensor.ndim == 0:
        return tensor
    if tensor.ndim != 1 or x.ndim < 2 or len(tensor) != x.shape[1]:
        raise InputError(f"expected one number, or one for each channel of {tuple(x.shape)}", argument=name)
    return tensor.view(1, -1, *[1] * (x.ndim - 2))
