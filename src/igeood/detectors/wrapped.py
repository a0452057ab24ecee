"""Detectors of other libraries, in the shape of ours."""

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from igeood.detectors.base import Detector, Judge
from igeood.detectors.registry import register
from igeood.errors import InputError
from igeood.geometry.precision import wide
from igeood.outputs import Outputs
from igeood.summary import Needs, Summary

Reads = Literal["logits", "features", "inputs"]

_NEEDS: Mapping[str, Needs] = {
    "logits": Needs(samples=("logits",)),
    "features": Needs(layers="last", samples=("features",)),
    "inputs": Needs(inputs=True, samples=("features",)),
}


class Wrapped(Detector):
    """Somebody else's detector: made by `wrap`, as a class of its own."""

    theirs: ClassVar[Any]
    sign: ClassVar[float]
    reads: ClassVar[Reads]

    def _learn(self, summary: Summary) -> None:
        shared = {id(model): model for model in _models(self.theirs) if model is not self.theirs}
        self._mine = copy.deepcopy(self.theirs, shared)
        fit = _chosen(self._mine, "fit", self.reads)
        if fit is None:
            return
        rows, _ = summary.samples["logits" if self.reads == "logits" else "features"].outputs()
        given: tuple[Any, ...] = (self._given(rows), rows.labels)
        arguments = list(inspect.signature(fit).parameters)
        if arguments and "loader" in arguments[0]:
            given = ([given],)
        with _as_found(self._mine):
            fit(*given[: len(arguments)])

    def _given(self, batch: Outputs) -> Tensor:
        """What the detector reads of checked outputs."""
        if self.reads == "logits":
            return batch.logits
        x = self._last_features(batch)
        if self.reads == "features":
            return x
        return x.reshape(-1, *map(int, next(iter(self.widths_)).split()[1:]))

    def _score(self, batch: Outputs) -> Tensor:
        predict = _chosen(self._mine, "predict", self.reads) or self._mine
        with _as_found(self._mine):
            scores = predict(self._given(batch))
        scores = self.sign * wide(torch.as_tensor(np.asarray(scores) if not isinstance(scores, Tensor) else scores))
        if scores.shape != (len(batch),) or bool(scores.isnan().any()):
            what = "NaN" if scores.shape == (len(batch),) else f"shape {tuple(scores.shape)}"
            problem = f"{type(self).__name__} returned {what} for {len(batch)} samples"
            raise InputError(f"detector: {problem}; it has to give one score each")
        return scores.to(batch.logits.device)

    def judge(self) -> Judge:
        """Not known: somebody else's detector has no plain module."""
        problem = f"{type(self).__name__} is not ours, and cannot be exported"
        raise InputError(f"detector: {problem}; use one of igeood.METHODS")

    def state(self) -> dict[str, Tensor]:
        """Not known: somebody else's detector cannot be saved."""
        problem = f"{type(self).__name__} is not ours, and cannot be saved"
        raise InputError(f"detector: {problem}; keep the process, or fit it again")


def wrap(
    detector: Any, *, higher_is: Literal["ood", "id"], on: Reads | None = None, name: str | None = None
) -> Detector:
    """Put somebody else's detector in the shape of ours: guards, calibration and comparisons take it.

    It is fitted on the training sample of the guard's summary. It cannot be saved.

    Parameters
    ----------
    detector : object or callable
        One with `predict`, and `fit` if it learns, such as those of pytorch-ood; of scikit-learn's `score_samples` or
        `decision_function` is used. Or a function from an array (N, ...) to scores (N,).
    higher_is : {"ood", "id"}
        What a higher score means. It is never guessed.
    on : {"logits", "features", "inputs"}, optional
        What it reads: logits, the last layer's features, or the model's inputs, if it runs a model itself. By default
        what it has methods for (`predict_logits`, `predict_features`), else inputs if it holds a model; else features
        if its argument is called `features` or `z`, and logits otherwise.
    name : str, optional
        Register it under this name, for the benchmark and its report.

    Examples
    --------
    >>> margin = wrap(lambda logits: logits.max(dim=1).values - logits.mean(dim=1), higher_is="id")
    >>> margin.fit([[4.0, 0.0], [0.0, 3.0]]).score([[2.0, 0.0]])
    array([-1.])
    """
    if higher_is not in ("ood", "id"):
        raise InputError(f"higher_is: expected 'ood' or 'id', got {higher_is!r}; say what a higher score means")
    if not (_chosen(detector, "predict", "features") or callable(detector)) or isinstance(detector, type):
        raise InputError(f"detector: {detector!r} has no `predict` and is no function; give an object of its class")
    reads = on or _reads(detector)
    if reads not in _NEEDS:
        raise InputError.unknown("on", reads, _NEEDS)
    title = str(name or getattr(detector, "__name__", type(detector).__name__))
    sign = 1.0 if higher_is == "ood" else -1.0
    needs = _NEEDS[reads] if _chosen(detector, "fit", reads) else replace(_NEEDS[reads], samples=())
    parts = {"theirs": staticmethod(detector), "sign": sign, "reads": reads, "needs": needs}
    kind: type[Detector] = type(title, (Wrapped,), {**parts, "__doc__": f"{title}, wrapped."})
    return (register(name, tunes=False)(kind) if name else kind)()


def _method(owner: Any, *names: str) -> Any:
    """The first of these methods that an object has, if any."""
    return next((found for name in names if callable(found := getattr(owner, name, None))), None)


def _chosen(owner: Any, verb: str, reads: str) -> Any:
    """The method that fits or predicts; where `predict_features` takes logits, `fit_features` does too."""
    named = "features" if reads == "logits" and _features_are_logits(owner) else reads
    scores = ("score_samples", "decision_function") if verb == "predict" else ()  # scikit-learn's predict is a verdict
    return _method(owner, f"{verb}_{reads}", f"{verb}_{named}", *scores, verb)


def _features_are_logits(owner: Any) -> bool:
    """Whether `predict_features` is there, and its argument is called `logits`, as in older pytorch-ood."""
    by_features = _method(owner, "predict_features")
    return by_features is not None and "logits" in inspect.signature(by_features).parameters


def _models(owner: Any) -> list[nn.Module]:
    """Models that a detector holds, itself or by a method of theirs, or is."""
    owner = getattr(owner, "__self__", owner)
    values = [getattr(value, "__self__", value) for value in getattr(owner, "__dict__", {}).values()]
    return [value for value in (owner, *values) if isinstance(value, nn.Module)]


@contextmanager
def _as_found(owner: Any) -> Iterator[None]:
    """Gradients are on; models that a detector holds are in evaluation mode, and are left as they were found."""
    modules = [module for model in _models(owner) for module in model.modules() if module.training]
    gradients = [(weight, weight.grad) for model in _models(owner) for weight in model.parameters()]
    try:
        for module in modules:
            module.training = False
        for weight, _ in gradients:
            weight.grad = None
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for module in modules:
            module.training = True
        for weight, gradient in gradients:
            weight.grad = gradient


def _reads(detector: Any) -> Reads:
    """What a detector reads, by the methods it has, the model it holds, or the name of its argument."""
    if _method(detector, "predict_logits"):
        return "logits"
    if _method(detector, "predict_features"):
        return "logits" if _features_are_logits(detector) else "features"
    if _models(detector):
        return "inputs"
    arguments = inspect.signature(_method(detector, "predict") or detector).parameters
    return "features" if next(iter(arguments), "") in ("features", "z") else "logits"
