"""What every detector is: it learns from a summary of in-distribution outputs, then scores outputs."""

import copy
import inspect
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

import torch
from torch import Tensor, nn
from typing_extensions import Self, dataclass_transform

from igeood.errors import IgeoodWarning, InputError, NotReadyError
from igeood.geometry.centroids import check_every_class
from igeood.geometry.plain import is_plain, plain
from igeood.geometry.precision import wide
from igeood.outputs import Array, ArrayLike, Outputs, Refused, without
from igeood.summary import Needs, Sample, Summary
from igeood.summary.needs import check_covers

Samples = Mapping[str, Sample]
StepScores = list[tuple[Tensor, tuple[str, ...] | None]]

_UNSAVED = ("n_classes_", "widths_", "notes_", "reduce_", "parts_")  # attributes that are no tensors of a fit
_EXPECTED = {int: "a whole number, at least 1", float: "a positive finite number", bool: "True or False"}


@dataclass_transform(kw_only_default=True)
class Detector(ABC):
    """Scores samples: **the higher, the more out-of-distribution**, for every detector.

    A detector sees `Outputs` (or a bare array of logits), never a model; `needs` says what they must hold. A subclass
    defines `needs`, `_learn` and `_score`. Its options are annotated class attributes, as in a dataclass: they become
    keyword arguments of the constructor, and are checked against their annotations. What `_learn` keeps in attributes
    that end in an underscore, tensors and dicts of tensors by layer, is saved and loaded.

    Attributes
    ----------
    probabilities : bool
        The arrays hold probabilities, not logits. Declared, never guessed; rows must sum to 1. An option of some.
    id_steps : tuple of float
        Sizes of the input step to choose from by the scores of in-distribution samples alone; empty for most methods,
        which are tuned on OOD samples.
    n_classes_ : int
        C, the width of the logits.
    widths_ : dict of int
        Blocks of features that are read, in order, and their widths; known when `_learn` is called.
    notes_ : tuple of str
        What the user should know of this fit.
    """

    needs: ClassVar[Needs] = Needs()
    id_steps: ClassVar[tuple[float, ...]] = ()
    probabilities: bool = False  # this and the next are options where a subclass makes them so
    temperature: float

    n_classes_: int
    widths_: dict[str, int]
    notes_: tuple[str, ...]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        names = inspect.get_annotations(cls)
        for fitted in [name for name in names if name.endswith("_") and name not in vars(cls)]:
            del cls.__annotations__[fitted]  # no option
        if names:
            dataclass(kw_only=True, eq=False, repr=False)(cls)

    def __post_init__(self) -> None:
        for option in fields(self):  # type: ignore[arg-type]
            setattr(self, option.name, checked_option(option.name, getattr(self, option.name), option.type))

    def fit(self, outputs: Outputs | ArrayLike, labels: ArrayLike | None = None) -> Self:
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

    def learn(self, summary: Summary) -> Self:
        """Learn from a summary of in-distribution samples. Learning again forgets what was learnt before."""
        check_covers(summary.described, self.needs.describe(), type(self).__name__)
        learnt = copy.copy(self)._of_shape(summary.n_classes, summary.widths)  # an error leaves this one as it was
        if self.needs.labels:
            check_every_class(summary.counts)
        with torch.inference_mode(False), torch.no_grad():
            learnt._learn(summary.only(learnt.widths_))
            learnt._prepare()
        self.__dict__ = learnt.__dict__
        return self

    def _of_shape(self, n_classes: int, widths: Mapping[str, int]) -> Self:
        self.n_classes_, self.notes_ = n_classes, ()
        self.widths_ = {block: widths[block] for block in self.needs.blocks(widths)}
        return self

    def score(self, outputs: Outputs | ArrayLike) -> Array:
        """Score samples: (N,) float64 where the device has it, higher is more out-of-distribution.

        Parameters
        ----------
        outputs : Outputs or array
            Outputs to score, or their logits (N, C). NumPy in, NumPy out; a tensor's score is differentiable.
        """
        batch = self._scorable(Outputs.of(outputs))
        return batch.like(self._score(batch))

    def judge(self) -> "Judge":
        """The score as a plain module, which can be traced: for `Guard.export`."""
        self.check_fitted()
        return Judge(self)

    def contributions(self, outputs: Outputs | ArrayLike) -> Array:
        """What each of `columns_` adds to the score, (N, P): they sum to it."""
        batch = self._scorable(Outputs.of(outputs))
        return batch.like(self._contributions(batch))

    def _scorable(self, given: Outputs) -> Outputs:
        """Outputs as logits, once the detector is fitted and they have what it was fitted on."""
        self.check_fitted()
        batch, who = self.read(given), type(self).__name__
        if batch.n_classes != self.n_classes_:
            problem = f"{batch.n_classes} columns, but {who} was fitted on {self.n_classes_} classes"
            raise InputError(f"logits: {problem}; give logits of the same model")
        for block, width in self.widths_.items():
            if block not in batch.features:
                have = ", ".join(map(repr, batch.features)) or "none"
                raise InputError(f"outputs: {who} needs the features of layer {block!r}; these have {have}; add them")
            if (found := batch.features[block].shape[1]) != width:
                cure = "give the same layer"
                raise InputError(f"features[{block!r}]: {found} channels, but {who} was fitted on {width}; {cure}")
        return batch

    def read(self, batch: Outputs) -> Outputs:
        """Outputs whose logits are logits: where probabilities were declared, their logarithm."""
        if not self.probabilities:
            return batch
        return batch.replace(logits=log_probabilities(batch.logits, batch.first, batch.refused))

    def check_fitted(self) -> None:
        """Raise unless `fit` has run."""
        if not hasattr(self, "n_classes_"):
            raise NotReadyError(f"{type(self).__name__}: not fitted yet; call fit(logits, labels) first")

    def _learn(self, summary: Summary) -> None:
        """Learn from a summary that has what `needs` asks for."""
        self._learn_softmax(summary.samples, None, roughly=False)

    def _learn_softmax(self, samples: Samples, near: Any, *, roughly: bool) -> None:  # noqa: B027
        """Learn what depends on the temperature, starting at a detector of another one; `roughly` from a part."""

    def _prepare(self) -> None:  # noqa: B027 (many have nothing to prepare)
        """Bring what was learnt, or loaded, into the form in which scoring uses it."""

    @abstractmethod
    def _score(self, batch: Outputs) -> Tensor:
        """Score checked outputs, (N,)."""

    def _last_features(self, outputs: Outputs) -> Tensor:
        """Features of the last block that is read, (N, k)."""
        return outputs.features[next(reversed(self.widths_))]

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
    def step_part(self) -> "Detector":
        """The detector whose scores an input step lowers: itself, or a part of it."""
        return self

    @property
    def softmax_part(self) -> "Detector | None":
        """The detector whose temperature `tune` chooses: itself, a part of it, or none."""
        return self if "temperature" in parameter_names(type(self)) else None

    def at_temperature(self, temperature: float, samples: Samples, near: "Detector | None" = None) -> Self:
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
        other = copy.copy(self)
        other.temperature = temperature
        other._learn_softmax(samples, near or self, roughly=near is not None)
        other._prepare()
        return other

    def learn_weights(
        self, id_outputs: Outputs, ood_outputs: Outputs, *, tpr: float, seed: int, strength: float | None = None
    ) -> Any:
        """Learn how to weight columns from validation samples, in place; None for a detector without weights."""
        del id_outputs, ood_outputs, tpr, seed, strength

    def params(self) -> dict[str, Any]:
        """Constructor arguments by name."""
        return {name: getattr(self, name) for name in parameter_names(type(self))}

    def state(self) -> dict[str, Tensor]:
        """Fitted tensors by name, those of a layer as `name:layer`; to save with `params`, classes and widths."""
        self.check_fitted()
        tensors: dict[str, Tensor] = {}
        for name, value in vars(self).items():
            if name.endswith("_") and name not in _UNSAVED:
                tensors |= {f"{name}:{k}": t for k, t in value.items()} if isinstance(value, dict) else {name: value}
        for name, value in tensors.items():
            if not isinstance(value, Tensor):
                raise InputError(f"detector: {name} is {type(value).__name__}; keep tensors, or dicts of them by layer")
        return tensors

    def load_state(self, state: Mapping[str, Tensor], n_classes: int, widths: Mapping[str, int]) -> Self:
        """Take over what `state` returned, in place of `fit`."""
        self._of_shape(n_classes, widths)
        for key, tensor in state.items():
            name, _, layer = key.partition(":")
            place = vars(self).setdefault(name, {}) if layer else vars(self)
            place[layer or name] = tensor
        self._prepare()
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.params().items())})"


class Judge(nn.Module):
    """A fitted detector's score in plain mode: no check, and no decision that depends on values.

    Called with logits (N, C) and the features (N, k) of each of the detector's blocks, in the order of `widths_`, it
    returns scores (N,).
    """

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, logits: Tensor, *features: Tensor) -> Tensor:
        """Scores (N,)."""
        with plain():
            blocks = dict(zip(self.detector.widths_, features, strict=True))
            return wide(self.detector._score(self.detector.read(Outputs.checked(logits, blocks, None))))


class ColumnDetector(Detector):
    """A detector whose score is the sum of columns, one for each layer unless `columns_` says otherwise."""

    @property
    def columns_(self) -> list[str]:
        """What the score is made of: the layers."""
        return [layer.removesuffix(self.needs.ending) for layer in self.widths_]

    @abstractmethod
    def _columns(self, batch: Outputs) -> Tensor:
        """Columns of checked outputs, (N, P)."""

    def _score(self, batch: Outputs) -> Tensor:
        return self._contributions(batch).sum(dim=1)


@cache
def parameter_names(kind: type[Detector]) -> tuple[str, ...]:
    """Names of a detector's constructor arguments."""
    return tuple(inspect.signature(kind).parameters)


def checked_option(name: str, value: Any, hint: Any) -> Any:
    """An option's value if its annotation allows it. Numbers are positive; other annotations allow anything."""
    is_positive = isinstance(value, Real) and not isinstance(value, bool) and 0.0 < float(value) < math.inf
    expected: list[str] = []
    for kind in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        if get_origin(kind) is Literal:
            fits = value in get_args(kind)
        elif kind in (int, float):
            fits = is_positive and (kind is float or isinstance(value, Integral))
        else:
            fits = not isinstance(kind, type) or isinstance(value, kind)
        if fits:
            return kind(value) if kind in (int, float) else value
        expected += map(repr, get_args(kind)) if get_args(kind) else [_EXPECTED.get(kind, "None")]
    raise InputError(f"{name}: expected {' or '.join(expected)}, got {value!r}")


def warn_of_probabilities(logits: Tensor) -> None:
    """Warn where what should be logits looks like probabilities in every row."""
    if len(logits) and not bool(is_no_distribution(logits.detach()).any()):
        what = "logits: every row is ≥ 0 and sums to 1: are these probabilities? Then say so with probabilities=True"
        warnings.warn(what, IgeoodWarning, stacklevel=3)


def is_no_distribution(rows: Tensor) -> Tensor:
    """Which rows (N, C) have a negative entry or do not sum to 1, (N,) bool.

    The sum may be off by what rounding to half precision leaves, 1 part in 1,000 for up to about 1,000 classes.
    """
    return (rows < 0).any(dim=1) | ((rows.sum(dim=1) - 1.0).abs() > 1e-3)


def log_probabilities(probabilities: Tensor, first: int = 0, refused: Refused | None = None) -> Tensor:
    """Logarithm of declared probabilities (N, C), once every row is known to be ≥ 0 and to sum to 1.

    `first` and `refused` as in `Outputs`.
    """
    if is_plain():
        return torch.log(probabilities.double().clamp(min=1e-300))
    bad, uniform = is_no_distribution(probabilities), 1.0 / probabilities.shape[1]
    problem, cure = (
        "a negative entry, or a sum that is not 1",
        "renormalise rounded ones; of logits, leave probabilities=False",
    )
    fine = without(bad, probabilities, "probabilities", problem, cure, first, refused, uniform)
    return torch.log(fine.double().clamp(min=1e-300))  # so that a 0 has a gradient: none
