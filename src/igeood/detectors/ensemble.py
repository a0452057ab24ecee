r"""Layer scores combined into one (the paper's Eq. 13): IGEOOD, IGEOOD+ and the Mahalanobis ensemble.

Each column is standardised and weighted; the score is the sum. Before any out-of-distribution sample is seen, the
weights are fixed ones; `fit_weights` learns them by logistic regression.
"""

import copy
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from igeood.detectors.base import Detector
from igeood.detectors.features import IgeoodFeatures, LayerDetector, Mahalanobis, check_features
from igeood.detectors.logits import IgeoodLogits
from igeood.errors import InputError
from igeood.geometry import categorical
from igeood.metrics import tnr_at_tpr
from igeood.outputs import Array, ArrayLike, Outputs, RowBuffer, row_keys

STRENGTHS = tuple(float(c) for c in np.logspace(-4, 4, 9))  # inverse regularisation strengths to choose from
FOLDS = 5
OOD_SUFFIX = " (OOD)"  # of a column that is a distance to OOD statistics
FEWEST = 2 * FOLDS  # samples of each kind, so that each fold can be learnt from and judged on
SAMPLE = 5000  # training samples kept to standardise the columns with

E = TypeVar("E", bound="Ensemble")
I = TypeVar("I", bound="Igeood")  # noqa: E741 (its initial)
Table = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class WeightSearch:
    """Outcome of `Ensemble.fit_weights`: the strength chosen, and its mean TNR over the folds."""

    strength: float
    tnr: float


class Ensemble(Detector):
    """A weighted sum of standardised columns: the output's, where the method has one, and those of the layers.

    Attributes
    ----------
    output_ : IgeoodLogits or None
        Gives the output's column.
    features_ : LayerDetector
        Gives the layers' columns.
    centre_, scale_, weights_ : Tensor
        (P,) of the columns; a contribution is weight · (column − centre) / scale.
    """

    needs_labels: ClassVar[bool] = True
    state_names: ClassVar[tuple[str, ...]] = ("centre_", "scale_", "weights_")
    output_: IgeoodLogits | None
    features_: LayerDetector
    centre_: Tensor
    scale_: Tensor
    weights_: Tensor

    @abstractmethod
    def _make_parts(self) -> tuple[IgeoodLogits | None, LayerDetector]:
        """Unfitted detectors of the output and of the layers."""

    @abstractmethod
    def _first_weights(self) -> list[float]:
        """Weights before any out-of-distribution sample is seen."""

    @property
    def columns_(self) -> list[str]:
        """What each column is: the output, then the layers."""
        return ["output"] * (self.output_ is not None) + self.features_.layers_

    def _columns(self, batch: Outputs) -> Tensor:
        """Columns of checked outputs, (N, P): higher is more out-of-distribution."""
        columns = self.features_._layer_scores(batch)
        return columns if self.output_ is None else torch.cat([self.output_._score(batch)[:, None], columns], dim=1)

    def _fit(self, batches: Iterable[Outputs]) -> None:
        sample, logits, labels = _Sample(), RowBuffer(), RowBuffer()
        made = copy.copy(self)
        made.output_, made.features_ = self._make_parts()

        def watched() -> Iterator[Outputs]:
            for batch in sample.watch(batches):
                if made.output_ is not None and batch.labels is not None:
                    logits.append(batch.logits.detach())
                    labels.append(batch.labels)
                yield batch

        made.features_.fit_batches(watched())
        if made.output_ is not None:
            made.output_.fit(Outputs.checked(logits.rows, {}, labels.rows, False))
        with torch.no_grad():
            made.centre_, made.scale_ = _standardise(made._columns(sample.outputs))
        made.weights_ = torch.tensor(made._first_weights()).to(made.centre_)
        self.__dict__.update(made.__dict__)

    def contributions(self, outputs: Outputs) -> Array:
        """What each column adds to the score, (N, P): they sum to it."""
        batch = self._scorable(outputs)
        return batch.like(self._contributions(batch))

    def _contributions(self, batch: Outputs) -> Tensor:
        columns = self._columns(batch)
        centre, scale, weights = (t.to(columns) for t in (self.centre_, self.scale_, self.weights_))
        return weights * (columns - centre) / scale

    def _score(self, batch: Outputs) -> Tensor:
        return self._contributions(batch).sum(dim=1)

    def _scorable(self, outputs: Outputs | ArrayLike) -> Outputs:
        batch = super()._scorable(outputs)
        check_features(batch, self.features_.mean_, type(self).__name__)
        return batch

    def _learn_ood(self: E, ood: Outputs) -> E:  # noqa: ARG002
        """A copy that knows the OOD samples' statistics, where the method uses any."""
        return copy.copy(self)

    def fit_weights(
        self, id_outputs: Outputs, ood_outputs: Outputs, *, tpr: float = 0.95, seed: int = 0
    ) -> WeightSearch:
        """Learn the weights by logistic regression (Eq. 13), its strength chosen by cross-validation.

        The folds are shuffled with the seed and judged by TNR at `tpr` of the decision function; statistics of OOD
        samples, where the method uses any, come from the fold's own training part.

        Parameters
        ----------
        id_outputs, ood_outputs : Outputs
            Validation samples, at least 10 of each; report and calibrate on others.
        tpr : float
            The operating point.
        seed : int
            Of the folds.
        """
        inside, outside = self._scorable(id_outputs), self._scorable(ood_outputs)
        for name, batch in (("id", inside), ("ood", outside)):
            if len(batch) < FEWEST:
                raise InputError(f"{name}: {len(batch)} samples; the regression needs at least {FEWEST} of each kind")
        rates = np.zeros(len(STRENGTHS))
        for learn, judge in _folds(inside, outside, seed):
            member = self._learn_ood(learn[1])
            centre, scale, x, y = member._table(*learn)
            held = [((member._columns(part) - centre) / scale).cpu().numpy() for part in judge]
            for i, strength in enumerate(STRENGTHS):
                model = _regression(strength).fit(x, y)
                known, foreign = (model.decision_function(part) for part in held)
                rates[i] += tnr_at_tpr(known, foreign, tpr) / FOLDS
        best = int(rates.argmax())  # of equals, the most regularised
        member = self._learn_ood(outside)
        centre, scale, x, y = member._table(inside, outside)
        weights = _regression(STRENGTHS[best]).fit(x, y).coef_[0]
        self.__dict__.update(member.__dict__)
        self.centre_, self.scale_, self.weights_ = centre, scale, torch.from_numpy(weights).to(centre)
        return WeightSearch(STRENGTHS[best], float(rates[best]))

    def _table(self, inside: Outputs, outside: Outputs) -> tuple[Tensor, Tensor, Table, Table]:
        """Centre and scale of the columns; the columns standardised by them, and the targets, for the regression."""
        with torch.no_grad():
            columns = torch.cat([self._columns(inside), self._columns(outside)])
        centre, scale = _standardise(columns)
        targets = np.r_[np.zeros(len(inside)), np.ones(len(outside))]
        return centre, scale, ((columns - centre) / scale).cpu().numpy(), targets

    def state(self) -> dict[str, Tensor]:
        """Fitted tensors by name; those of the parts as `part.name`."""
        tensors = super().state()
        for part in ("output_", "features_"):
            detector: Detector | None = getattr(self, part)
            if detector is not None:
                tensors |= {f"{part}.{name}": value for name, value in detector.state().items()}
        return tensors

    def load_state(self: E, state: Mapping[str, Tensor], n_classes: int) -> E:
        """Take over what `state` gave, in place of `fit`."""

        def of(part: str) -> dict[str, Tensor]:
            return {name.removeprefix(part): value for name, value in state.items() if name.startswith(part)}

        self.output_, self.features_ = self._make_parts()
        if self.output_ is not None:
            self.output_.load_state(of("output_."), n_classes)
        self.features_.load_state(of("features_."), n_classes)
        own = {name: value for name, value in state.items() if not name.startswith(("output_.", "features_."))}
        return super().load_state(own, n_classes)


def _standardise(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of columns (N, P), each (P,); a constant column has deviation 1."""
    centre, scale = columns.mean(dim=0), columns.std(dim=0, correction=0)
    return centre, torch.where(scale > 0, scale, torch.ones_like(scale))


def _regression(strength: float) -> Any:
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415 (slow to import)

    return LogisticRegression(C=strength, class_weight="balanced", max_iter=2000)


def _folds(
    inside: Outputs, outside: Outputs, seed: int
) -> Iterator[tuple[tuple[Outputs, Outputs], tuple[Outputs, Outputs]]]:
    """Training and held-out parts of both kinds, for each fold.

    Sets of one size are split alike: a sample and the attack made from it are never on two sides.
    """
    from sklearn.model_selection import KFold  # noqa: PLC0415 (slow to import)

    device = inside.logits.device
    splits = [
        [
            [torch.from_numpy(rows).to(device) for rows in pair]
            for pair in KFold(FOLDS, shuffle=True, random_state=seed).split(o)
        ]
        for o in (range(len(inside)), range(len(outside)))
    ]
    for (learn_id, judge_id), (learn_ood, judge_ood) in zip(*splits, strict=True):
        yield (inside[learn_id], outside[learn_ood]), (inside[judge_id], outside[judge_ood])


class _Sample:
    """At most `SAMPLE` of the samples that pass by: those with the smallest keys, whatever their order."""

    outputs: Outputs

    def watch(self, batches: Iterable[Outputs]) -> Iterator[Outputs]:
        """Pass the batches on, keeping a sample of them in `outputs`."""
        kept: list[Outputs] = []
        for batch in batches:
            kept.append(batch)
            if sum(map(len, kept)) > 2 * SAMPLE:
                kept = [self._smallest(kept)]
            yield batch
        self.outputs = self._smallest(kept)

    @staticmethod
    def _smallest(parts: list[Outputs]) -> Outputs:
        whole = Outputs.concat(parts)
        order = np.argsort(row_keys(whole.logits), kind="stable")[:SAMPLE]
        return whole[torch.from_numpy(order).to(whole.logits.device)]


class Igeood(Ensemble):
    """IGEOOD (Eq. 13 with α′ = 0): FR₀ of the output and FR_ℓ of each layer.

    Before `fit_weights` the score is z(−FR₀) + z(FR of the last layer), standardised on training samples: no
    out-of-distribution or adversarial sample is needed.

    Parameters
    ----------
    temperature : float
        Of the softmax, in FR₀.
    """

    output_: IgeoodLogits
    features_: IgeoodFeatures

    def __init__(self, *, temperature: float = 1.0) -> None:
        categorical.check_temperature(temperature)
        super().__init__()
        self.temperature = float(temperature)

    def _make_parts(self) -> tuple[IgeoodLogits, LayerDetector]:
        return IgeoodLogits(temperature=self.temperature), IgeoodFeatures()

    def _first_weights(self) -> list[float]:
        return [1.0, *[0.0] * (len(self.features_.layers_) - 1), 1.0]

    def _notes(self, n_classes: int) -> tuple[str, ...]:
        dead = {layer: int(count) for layer, count in self.features_.dead_.items() if count}
        found = [
            f"layer {layer!r}: {count} dead channels, deviation raised to a floor" for layer, count in dead.items()
        ]
        return (*self.output_._notes(n_classes), *found)

    def step_scores(self, batch: Outputs) -> list[tuple[Tensor, tuple[str, ...] | None]]:
        """See `Detector.step_scores`: the step raises FR₀ (Eq. 6), and every layer is read after it."""
        return self.output_.step_scores(batch)

    def at_temperature(self: I, temperature: float, train: Outputs) -> I:
        """A detector like this one with FR₀ at another temperature; the weights want fitting again."""
        other = copy.copy(self)
        other.temperature = temperature
        other.output_ = self.output_.at_temperature(temperature, train)
        return other


class IgeoodPlus(Igeood):
    """IGEOOD+ (Eq. 13): IGEOOD with FR′_ℓ, the distance of each layer to the OOD validation samples' Gaussian.

    Before `fit_weights` it has no OOD sample, and is IGEOOD.

    Parameters
    ----------
    temperature : float
        Of the softmax, in FR₀.
    """

    @property
    def columns_(self) -> list[str]:
        """What each column is: the output, the layers, and the layers against OOD."""
        return super().columns_ + [f"{layer}{OOD_SUFFIX}" for layer in self.features_.ood_mean_]

    def _columns(self, batch: Outputs) -> Tensor:
        columns = super()._columns(batch)
        if not self.features_.ood_mean_:
            return columns
        return torch.cat([columns, -self.features_.fr_layer_ood(batch)], dim=1)

    def _learn_ood(self, ood: Outputs) -> "IgeoodPlus":
        other = copy.copy(self)
        other.features_ = copy.copy(self.features_).fit_ood(ood)
        return other


class MahalanobisEnsemble(Ensemble):
    """The Mahalanobis detector: its distances on all layers, summed once standardised, or weighted by `fit_weights`.

    Parameters
    ----------
    relative : bool
        Relative Mahalanobis: see `Mahalanobis`.
    """

    features_: Mahalanobis

    def __init__(self, *, relative: bool = False) -> None:
        super().__init__()
        self.relative = relative

    def _make_parts(self) -> tuple[None, LayerDetector]:
        return None, Mahalanobis(relative=self.relative)

    def _first_weights(self) -> list[float]:
        return [1.0] * len(self.features_.layers_)

    def step_scores(self, batch: Outputs) -> list[tuple[Tensor, tuple[str, ...] | None]]:
        """See `Detector.step_scores`: each layer has an input step of its own."""
        return self.features_.step_scores(batch)
