"""What every detector is: fit on in-distribution outputs, then score."""

import inspect
import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from igeood.errors import IgeoodWarning, InputError, NotReadyError
from igeood.outputs import Array, ArrayLike, Outputs, check_alike

D = TypeVar("D", bound="Detector")


class Detector(ABC):
    """Gives each sample a score: **the higher, the more out-of-distribution**, for every detector.

    A detector sees `Outputs` (or a bare array of logits), never a model. Options are constructor arguments, kept under
    their own names; what `fit` learns ends in an underscore. Fitting again forgets the first fit.

    Parameters
    ----------
    probabilities : bool
        The arrays hold probabilities, not logits. Declared, never guessed; rows must sum to 1.
    """

    needs_labels: ClassVar[bool] = False
    state_names: ClassVar[tuple[str, ...]] = ()

    n_classes_: int
    notes_: tuple[str, ...]

    def __init__(self, *, probabilities: bool = False) -> None:
        self.probabilities = probabilities

    def fit(self: D, outputs: Outputs | ArrayLike, labels: ArrayLike | None = None) -> D:
        """Learn from in-distribution samples.

        Parameters
        ----------
        outputs : Outputs or array
            Training outputs, or their logits (N, C).
        labels : array of int, optional
            (N,) true classes; part of an `Outputs` already. Only some detectors need them (`needs_labels`).

        Returns
        -------
        Detector
            Itself.
        """
        return self.fit_batches([Outputs.of(outputs, labels)])

    def fit_batches(self: D, batches: Iterable[Outputs]) -> D:
        """Learn from in-distribution samples that come in batches, which are read once, one at a time."""
        readable = self._readable(batches)
        first = next(readable, None)
        if first is None:
            raise InputError(f"outputs: no sample to fit {type(self).__name__} on; give at least one")
        self._fit(itertools.chain([first], readable))
        return self._fitted(first.n_classes)

    def _readable(self, batches: Iterable[Outputs]) -> Iterator[Outputs]:
        """The batches that are not empty, as logits, with labels where they are needed, all of one width."""
        earlier: Outputs | None = None
        first = 0
        for batch in batches:
            if len(batch) == 0:
                continue
            if self.needs_labels and batch.labels is None:
                raise InputError(
                    f"labels: {type(self).__name__} needs the true class of each sample; call fit(logits, labels), or "
                    f"give batches (x, y)"
                )
            if earlier is not None:
                check_alike(earlier, batch)
            elif not self.probabilities:
                warn_of_probabilities(batch.logits)
            earlier = batch[torch.empty(0, dtype=torch.int64)]  # its shapes, none of its memory
            yield self.read(batch, first)
            first += len(batch)

    def score(self, outputs: Outputs | ArrayLike) -> Array:
        """Score samples: (N,) float64 where the device has it, higher is more out-of-distribution.

        Parameters
        ----------
        outputs : Outputs or array
            Outputs to judge, or their logits (N, C). NumPy in, NumPy out; a tensor's score is differentiable.
        """
        batch = self._scorable(outputs)
        return batch.like(self._score(batch))

    def _scorable(self, outputs: Outputs | ArrayLike) -> Outputs:
        """Outputs as logits, once the detector is fitted and their width is right."""
        self.check_fitted()
        given = Outputs.of(outputs)
        if not self.probabilities:
            warn_of_probabilities(given.logits)
        batch = self.read(given)
        if batch.n_classes != self.n_classes_:
            raise InputError(
                f"logits: {batch.n_classes} columns, but {type(self).__name__} was fitted on {self.n_classes_} "
                f"classes; give logits of the same model"
            )
        return batch

    def read(self, batch: Outputs, first: int = 0) -> Outputs:
        """Outputs whose logits are logits: where probabilities were declared, their logarithm.

        `first` is the number of the first sample, for errors.
        """
        if not self.probabilities:
            return batch
        logits = log_probabilities(batch.logits, first)
        return Outputs.checked(logits, batch.features, batch.labels, batch.numpy)

    def check_fitted(self) -> None:
        """Raise unless `fit` has run."""
        if not hasattr(self, "n_classes_"):
            how = "fit(logits, labels)" if self.needs_labels else "fit(logits), which needs no labels,"
            raise NotReadyError(f"{type(self).__name__}: not fitted yet; call {how} first")

    @abstractmethod
    def _fit(self, batches: Iterable[Outputs]) -> None:
        """Learn from checked batches, read once; assigns only when everything is computed."""

    @abstractmethod
    def _score(self, batch: Outputs) -> Tensor:
        """Score checked outputs, (N,)."""

    def step_scores(self, batch: Outputs) -> list[tuple[Tensor, tuple[str, ...] | None]]:
        """What one input step should lower: scores (N,), each with the layers that are read after its step.

        None stands for everything: the logits and all layers are those of the one stepped input.
        """
        return [(self._score(batch), None)]

    def _notes(self, n_classes: int) -> tuple[str, ...]:  # noqa: ARG002
        """What the user should know of this fit."""
        return ()

    def params(self) -> dict[str, Any]:
        """Constructor arguments by name."""
        return {name: getattr(self, name) for name in parameter_names(type(self))}

    def at_temperature(self: D, temperature: float, train: Outputs) -> D:
        """A detector like this one at another temperature, fitted on `train`."""
        return self._with_temperature(temperature).fit(train)

    def over_temperatures(self: D, train: Outputs) -> Callable[[float], D]:
        """`at_temperature` for many temperatures in turn, which may share their work."""
        return lambda temperature: self.at_temperature(temperature, train)

    def _with_temperature(self: D, temperature: float) -> D:
        if "temperature" not in parameter_names(type(self)):
            raise InputError(f"temperature: {type(self).__name__} has none to set")
        return type(self)(**{**self.params(), "temperature": temperature})

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
        """Take over what `state` gave, in place of `fit`."""
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
        self.n_classes_, self.notes_ = n_classes, self._notes(n_classes)
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
        stacklevel=6,
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
    return torch.log(probabilities.double().clamp(min=1e-300))  # a 0 has a gradient then: none
