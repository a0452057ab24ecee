"""Detectors of other libraries, in the shape of ours."""

import copy
import inspect
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from igeood.detectors.base import Detector
from igeood.detectors.registry import register
from igeood.errors import InputError
from igeood.geometry.precision import wide
from igeood.outputs import Outputs
from igeood.summary import Needs, Summary

Reads = Literal["logits", "features"]
_SCORES = ("score_samples", "decision_function", "predict", "__call__")  # scikit-learn's predict is a verdict


class Wrapped(Detector):
    """Somebody else's detector: made by `wrap`, as a class of its own."""

    theirs: ClassVar[Any]
    sign: ClassVar[float]
    reads: ClassVar[Reads]

    def learn(self, summary: Summary) -> Self:
        """Fit a copy of their detector on the training sample, if it learns."""
        super().learn(summary)
        self._mine = copy.deepcopy(self.theirs)
        fit = _method(self._mine, f"fit_{self.reads}", "fit")
        if fit is None:
            return self
        rows, _ = summary.samples[self.reads].outputs()
        arguments = list(inspect.signature(fit).parameters)
        data: tuple[Any, ...] = (self._input(rows), rows.labels)
        if arguments and "loader" in arguments[0]:
            data = ([data],)
        with torch.inference_mode(False), torch.enable_grad():
            fit(*data[: len(arguments)])
        return self

    def _input(self, outputs: Outputs) -> Tensor:
        rows = outputs.logits if self.reads == "logits" else self.last_features(outputs)
        return rows if rows.requires_grad else rows.detach()  # a detector may ask for gradients of its input

    def score(self, outputs: Outputs) -> Tensor:
        """Their score, in our orientation."""
        predict = _method(self._mine, f"predict_{self.reads}", *_SCORES)
        with torch.inference_mode(False), torch.enable_grad():  # some detectors use gradients
            result = predict(self._input(outputs))
        scores = self.sign * wide(result if isinstance(result, Tensor) else torch.as_tensor(np.asarray(result)))
        if scores.shape != (len(outputs),) or bool(scores.isnan().any()):
            problem = f"NaN, or shape {tuple(scores.shape)} for {len(outputs)} samples"
            raise InputError(problem, argument="detector", cure="it has to give one score each")
        return scores.to(outputs.logits.device)

    def state(self) -> dict[str, Tensor]:
        """Raise: somebody else's detector cannot be saved or exported."""
        raise InputError(
            f"{type(self).__name__} is not ours: it can be neither saved nor exported", argument="detector"
        )


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
    on : {"logits", "features"}, optional
        What it reads: logits, or the last layer's features. By default what it has methods for (`predict_logits`,
        `predict_features`); else features if its argument is called `features` or `z`, and logits otherwise.
    name : str, optional
        Register it under this name, for the benchmark and its report.

    Examples
    --------
    >>> margin = wrap(lambda logits: logits.max(dim=1).values - logits.mean(dim=1), higher_is="id")
    >>> margin.fit([[4.0, 0.0], [0.0, 3.0]])([[2.0, 0.0]])
    array([-1.])
    """
    if higher_is not in ("ood", "id"):
        raise InputError(f"expected 'ood' or 'id', got {higher_is!r}", argument="higher_is")
    if isinstance(detector, type) or not _method(detector, "predict_logits", "predict_features", *_SCORES):
        raise InputError(f"{detector!r} has no `predict` and is no function", argument="detector", cure="give one")
    reads = on or _reads(detector)
    if reads not in ("logits", "features"):
        raise InputError.unknown("on", reads, ["logits", "features"])
    learns = _method(detector, f"fit_{reads}", "fit") is not None
    title = str(name or getattr(detector, "__name__", type(detector).__name__))
    attributes = {
        "theirs": staticmethod(detector),
        "sign": 1.0 if higher_is == "ood" else -1.0,
        "reads": reads,
        "needs": Needs(layers="last" if reads == "features" else "none", samples=(reads,) if learns else ()),
        "__doc__": f"{title}, wrapped.",
    }
    kind: type[Detector] = type(title, (Wrapped,), attributes)
    return (register(name, tunes=False)(kind) if name else kind)()


def _method(owner: Any, *names: str) -> Any:
    """The first of these methods that an object has, if any."""
    methods = (getattr(owner, name, None) for name in names)
    return next((method for method in methods if callable(method)), None)


def _reads(detector: Any) -> Reads:
    """What a detector reads, by the methods it has, or the name of its argument."""
    reads: Reads
    for reads in ("logits", "features"):
        if _method(detector, f"predict_{reads}"):
            return reads
    arguments = inspect.signature(_method(detector, "predict") or detector).parameters
    return "features" if next(iter(arguments), "") in ("features", "z") else "logits"
