"""What every detector is: it learns from a summary of in-distribution outputs, then scores outputs."""

import copy
import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from igeood.errors import IgeoodWarning, InputError, NotReadyError
from igeood.outputs import Array, ArrayLike, Outputs
from igeood.summary import Needs, Sample, Summary
from igeood.summary.needs import check_covers

D = TypeVar("D", bound="Detector")
Samples = Mapping[str, Sample]
StepScores = list[tuple[Tensor, tuple[str, ...] | None]]


class Detector(ABC):
    """Scores samples: **the higher, the more out-of-distribution**, for every detector.

    A detector sees `Outputs` (or a bare array of logits), never a model; `needs` says what they must hold. Options are
    constructor arguments, kept under their own names; what `fit` learns ends in an underscore. A subclass defines
    `needs`, `_learn` and `_score`, and names its fitted tensors in `state_names`.

    Parameters
    ----------
    probabilities : bool
        The arrays hold probabilities, not logits. Declared, never guessed; rows must sum to 1.
    """

    needs: ClassVar[Needs] = Needs()
    state_names: ClassVar[tuple[str, ...]] = ()

    n_classes_: int
    notes_: tuple[str, ...]
    _widths: Mapping[str, int] = {}

    def __init__(self, *, probabilities: bool = False) -> None:
        self.probabilities = probabilities

    def fit(self: D, outputs: Outputs | ArrayLike, labels: ArrayLike | None = None) -> D:
        """Learn from in-distribution samples: `learn` of their summary.

        Parameters
        ----------
        outputs : Outputs or array
            Training outputs, or their logits (N, C).
        labels : array of int, optional
            (N,) true classes; part of an `Outputs` already. Only some detectors need them (`needs.labels`).

        Returns
        -------
        Detector
            Itself.
        """
        batch = Outputs.of(outputs, labels)
        if not self.probabilities:
            warn_of_probabilities(batch.logits)
        return self.learn(Summary.of(self.read(batch), self.needs))

    def learn(self: D, summary: Summary) -> D:
        """Learn from a summary of in-distribution samples. Learning again forgets what was learnt before."""
        check_covers(summary.described, self.needs.describe(), type(self).__name__)
        n_classes = summary.n_classes
        if self.needs.labels:
            summary.check_classes()
        learnt = copy.copy(self)  # an error leaves this one as it was
        widths = summary.widths
        learnt._widths = {block: widths[block] for block in self.needs.blocks(widths)}
        with torch.no_grad():
            learnt._learn(summary)
        self.__dict__.update(learnt.__dict__)
        return self._fitted(n_classes)

    def score(self, outputs: Outputs | ArrayLike) -> Array:
        """Score samples: (N,) float64 where the device has it, higher is more out-of-distribution.

        Parameters
        ----------
        outputs : Outputs or array
            Outputs to score, or their logits (N, C). NumPy in, NumPy out; a tensor's score is differentiable.
        """
        given = Outputs.of(outputs)
        if not self.probabilities:
            warn_of_probabilities(given.logits)
        batch = self._scorable(given)
        return batch.like(self._score(batch))

    def contributions(self, outputs: Outputs | ArrayLike) -> Array:
        """What each of `columns_` adds to the score, (N, P): they sum to it."""
        batch = self._scorable(Outputs.of(outputs))
        return batch.like(self._contributions(batch))

    def _scorable(self, given: Outputs) -> Outputs:
        """Outputs as logits, once the detector is fitted and they have what it was fitted on."""
        self.check_fitted()
        batch = self.read(given)
        if batch.n_classes != self.n_classes_:
            raise InputError(
                f"logits: {batch.n_classes} columns, but {type(self).__name__} was fitted on {self.n_classes_} "
                f"classes; give logits of the same model"
            )
        for block, width in self._widths.items():
            if block not in batch.features:
                have = ", ".join(map(repr, batch.features)) or "none"
                raise InputError(
                    f"outputs: {type(self).__name__} needs the features of layer {block!r}; these have {have}; add them"
                )
            if batch.features[block].shape[1] != width:
                raise InputError(
                    f"features[{block!r}]: {batch.features[block].shape[1]} channels, but {type(self).__name__} was "
                    f"fitted on {width}; give the same layer"
                )
        return batch

    def read(self, batch: Outputs) -> Outputs:
        """Outputs whose logits are logits: where probabilities were declared, their logarithm."""
        return batch.replace(logits=log_probabilities(batch.logits, batch.first)) if self.probabilities else batch

    def check_fitted(self) -> None:
        """Raise unless `fit` has run."""
        if not hasattr(self, "n_classes_"):
            how = "fit(logits, labels)" if self.needs.labels else "fit(logits), which needs no labels,"
            raise NotReadyError(f"{type(self).__name__}: not fitted yet; call {how} first")

    @abstractmethod
    def _learn(self, summary: Summary) -> None:
        """Learn from a summary that has what `needs` asks for."""

    @abstractmethod
    def _score(self, batch: Outputs) -> Tensor:
        """Score checked outputs, (N,)."""

    def _prepare(self) -> None:  # noqa: B027 (many have nothing to prepare)
        """Bring what was learnt, or loaded, into the form in which scoring uses it."""

    def _notes(self, n_classes: int) -> tuple[str, ...]:  # noqa: ARG002
        """What the user should know of this fit."""
        return ()

    @property
    def widths_(self) -> Mapping[str, int]:
        """Blocks of features that are read, and their widths."""
        return self._widths

    @property
    def columns_(self) -> list[str]:
        """What the score is made of."""
        return ["output"]

    def _columns(self, batch: Outputs) -> Tensor:
        """Columns of checked outputs, (N, P): higher is more out-of-distribution."""
        return self._score(batch)[:, None]

    def _contributions(self, batch: Outputs) -> Tensor:
        """What each column adds to the score, (N, P)."""
        return self._columns(batch)

    def _explain(self, batch: Outputs, top: int) -> dict[str, Any]:  # noqa: ARG002
        """Further reasons for the scores of checked outputs: fields of `igeood.guard.Explanation`."""
        return {}

    def step_scores(self, batch: Outputs) -> StepScores:
        """What one input step should lower: scores (N,), each with the layers that are read after its step.

        None means everything: the logits and all layers are those of the one stepped input.
        """
        return [(self._score(batch), None)]

    @property
    def softmax_part(self) -> "Detector | None":
        """The detector whose temperature `tune` chooses: itself, a part of it, or none."""
        return self if "temperature" in parameter_names(type(self)) else None

    def at_temperature(self: D, temperature: float, samples: Samples, near: "Detector | None" = None) -> D:
        """A detector like this one at another temperature, learnt from a summary's samples.

        Parameters
        ----------
        temperature : float
            Of the softmax.
        samples : mapping of str to Sample
            `Summary.samples`.
        near : Detector, optional
            The same at a neighbouring temperature: start there, and learn roughly, from a part of the sample.
        """
        if "temperature" not in parameter_names(type(self)):
            raise InputError(f"temperature: {type(self).__name__} has none to set")
        other = type(self)(**{**self.params(), "temperature": temperature})
        other._widths = self._widths
        other._learn_softmax(samples, near or self, roughly=near is not None)
        return other._fitted(self.n_classes_)

    def _learn_softmax(self, samples: Samples, near: "Detector | None", *, roughly: bool) -> None:  # noqa: B027
        """Learn what depends on the temperature, starting at a detector of another one; `roughly` from a part."""

    def learn_weights(self, id_outputs: Outputs, ood_outputs: Outputs, *, tpr: float, seed: int) -> Any:  # noqa: ARG002
        """Learn how to weight columns from validation samples, in place; None for a detector without weights."""
        return None

    def params(self) -> dict[str, Any]:
        """Constructor arguments by name."""
        return {name: getattr(self, name) for name in parameter_names(type(self))}

    def state(self) -> dict[str, Tensor]:
        """Fitted tensors by name; with `params` and `n_classes_` all there is to save.

        Those of the layers are `name:place:layer`: their order matters, and files do not keep it.
        """
        self.check_fitted()
        tensors: dict[str, Tensor] = {}
        for name in self.state_names:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                tensors[name] = value
            else:
                tensors |= {f"{name}:{i}:{layer}": tensor for i, (layer, tensor) in enumerate(value.items())}
        return tensors

    def load_state(self: D, state: Mapping[str, Tensor], n_classes: int) -> D:
        """Take over what `state` returned, in place of `fit`."""
        by_name: dict[str, Any] = {name: {} for name in self.state_names}
        for key in sorted(state, key=lambda key: int(key.split(":", 2)[1]) if ":" in key else 0):
            name, *place = key.split(":", 2)
            if name not in by_name:
                raise InputError(f"state: expected {list(self.state_names)}, got {name!r}")
            if place:
                by_name[name][place[1]] = state[key]
            else:
                by_name[name] = state[key]
        for name, value in by_name.items():
            setattr(self, name, value)
        return self._fitted(n_classes)

    def _fitted(self: D, n_classes: int) -> D:
        self.n_classes_ = n_classes
        self._prepare()
        self._widths = dict(self.widths_)
        self.notes_ = self._notes(n_classes)
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.params().items())})"


@cache
def parameter_names(kind: type[Detector]) -> tuple[str, ...]:
    """Names of a detector's constructor arguments."""
    return tuple(name for name in inspect.signature(kind).parameters if name != "self")


def warn_of_probabilities(logits: Tensor) -> None:
    """Warn where what should be logits looks like probabilities in every row."""
    first = logits[:1].detach()  # the others are looked at only if this one looks like it
    for rows in (first, logits.detach()):
        if len(rows) == 0 or bool((rows < 0).any()) or bool(((rows.sum(dim=1) - 1.0).abs() > 1e-3).any()):
            return
    warnings.warn(
        "logits: every row is ≥ 0 and sums to 1: are these probabilities? Then say so with probabilities=True",
        IgeoodWarning,
        stacklevel=3,
    )


def log_probabilities(probabilities: Tensor, first: int = 0) -> Tensor:
    """Logarithm of declared probabilities (N, C), once every row is known to be ≥ 0 and to sum to 1.

    The sum may be off by what rounding to half precision leaves, 1 part in 1,000 for up to about 1,000 classes.
    """
    low = (probabilities < 0).any(dim=1)
    off = low | ((probabilities.sum(dim=1) - 1.0).abs() > 1e-3)
    if bool(off.any()):
        row = int(off.nonzero()[0])
        what = "has a negative entry" if bool(low[row]) else f"sums to {float(probabilities[row].sum()):.6g}"
        raise InputError(
            f"probabilities: row {row + first} {what}, not a distribution ({int(off.sum())} of {len(off)} rows are "
            f"not); renormalise rounded probabilities; if these are logits, leave probabilities=False"
        )
    return torch.log(probabilities.double().clamp(min=1e-300))  # so that a 0 has a gradient: none
