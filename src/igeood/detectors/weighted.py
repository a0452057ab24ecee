r"""Columns combined into one score (the paper's Eq. 13): IGEOOD, IGEOOD+ and Mahalanobis over all layers.

Each column is standardised and weighted; the score is the sum. Before any out-of-distribution sample is seen, the
weights are fixed ones; `learn_weights` learns them by logistic regression.
"""

import copy
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sized
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from igeood.detectors.base import ColumnDetector, Detector, Samples, StepScores
from igeood.detectors.gaussians import IgeoodFeatures, Mahalanobis, OodFeatures
from igeood.detectors.logits import IgeoodLogits
from igeood.detectors.registry import register
from igeood.errors import InputError
from igeood.metrics import Evaluation, evaluate
from igeood.outputs import Outputs
from igeood.summary import Needs, Summary

FOLDS = 5
FEWEST = 2 * FOLDS  # samples of each kind, so that each fold can be learnt from and judged on
OOD = "ood"  # the name of a part that learns from OOD samples

Table = np.ndarray[Any, np.dtype[np.float64]]
Rows = tuple[Any, ...]  # numbers of in-distribution and of OOD samples


class WeightSearch(NamedTuple):
    """Outcome of `Weighted.learn_weights`: the strength chosen, and its mean TNR and AUROC over the folds."""

    strength: float
    tnr: float
    auroc: float


class Weighted(ColumnDetector):
    """A weighted sum of standardised columns, which other detectors compute (Eq. 13).

    A subclass names its parts in `_make_parts`, and says in `needs` what they need together, with a sample of features.
    A part named "ood" learns from the OOD samples that `learn_weights` gets, and has no columns before.

    Attributes
    ----------
    parts_ : dict of Detector
        Detectors whose columns are weighted, by name.
    centre_, scale_, weights_ : Tensor
        (P,) of the columns; a contribution is weight · (column − centre) / scale.
    """

    standard_rows: ClassVar[int | None] = None  # of each class, from which columns are standardised; None: all
    strengths: ClassVar[tuple[float, ...]] = tuple(float(c) for c in np.logspace(-4, 4, 9))  # inverse; to choose from

    @abstractmethod
    def _make_parts(self) -> dict[str, Detector]:
        """Unfitted detectors of the columns, by name."""

    def _first_weights(self) -> list[float]:
        """Weights before any out-of-distribution sample is seen."""
        return [1.0] * len(self.columns_)

    @property
    def columns_(self) -> list[str]:
        """What each column is: a part with a single column has the part's name."""
        parts = self.parts_.items()
        return [column for name, part in parts for column in ([name] if part.columns_ == ["output"] else part.columns_)]

    @property
    def softmax_part(self) -> Detector | None:
        """The first part with a temperature."""
        return next((part for part in self.parts_.values() if part.softmax_part), None)

    def _columns(self, batch: Outputs) -> Tensor:
        return torch.cat([part._columns(batch) for part in self.parts_.values()], dim=1)

    def _learn(self, summary: Summary) -> None:
        self.parts_ = {name: part.learn(summary) for name, part in self._make_parts().items() if name != OOD}
        self.notes_ = tuple(note for part in self.parts_.values() for note in part.notes_)
        self._standardise(summary)

    def _standardise(self, summary: Summary) -> None:
        """Centre, scale and weights before any out-of-distribution sample is seen."""
        sample = summary.samples[self.needs.samples[-1]]
        rows = [(self._columns(batch), weights) for batch, weights in sample.batches(self.standard_rows)]
        columns, weights = (torch.cat(side) for side in zip(*rows, strict=True))
        self.centre_, self.scale_ = standardise(columns, weights)
        self.weights_ = torch.tensor(self._first_weights(), dtype=torch.float64)

    def _learn_softmax(self, samples: Samples, near: Any, *, roughly: bool) -> None:  # noqa: ARG002
        """The parts at another temperature; the weights have to be learnt again."""
        self.parts_ = {
            name: part.at_temperature(self.temperature, samples) if part.softmax_part else part
            for name, part in self.parts_.items()
        }

    def _contributions(self, batch: Outputs) -> Tensor:
        columns = self._columns(batch)
        centre, scale, weights = (t.to(columns) for t in (self.centre_, self.scale_, self.weights_))
        return weights * (columns - centre) / scale

    @property
    def step_part(self) -> Detector:
        """The first part, as FR₀ for IGEOOD (Eq. 6)."""
        return next(iter(self.parts_.values()))

    def step_scores(self, batch: Outputs) -> StepScores:
        """See `Detector.step_scores`: the step is that of `step_part`."""
        return self.step_part.step_scores(batch)

    def _explain(self, batch: Outputs, top: int) -> dict[str, Any]:
        reasons = {name: why for part in self.parts_.values() for name, why in part._explain(batch, top).items()}
        return {name: why for name, why in reasons.items() if name != "usual"}  # of one part's columns

    def learn_weights(
        self, id_outputs: Outputs, ood_outputs: Outputs, *, tpr: float = 0.95, seed: int = 0,
        strength: float | None = None,
    ) -> WeightSearch:  # fmt: skip
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
        strength : float, optional
            The strength, in place of choosing one.
        """
        pair = (self._scorable(id_outputs), self._scorable(ood_outputs).keyed())
        for name, batch in zip(("id", "ood"), pair, strict=True):
            if len(batch) < FEWEST:
                raise InputError(f"{name}: {len(batch)} samples; the regression needs at least {FEWEST} of each kind")
        strengths = self.strengths if strength is None else (strength,)
        parts = [part for name, part in self.parts_.items() if name != OOD]
        with torch.no_grad():
            fixed = [torch.cat([part._columns(batch) for part in parts], dim=1) for batch in pair]
            parts_of = ((self._shown(pair, fixed, learn)[1], learn, judge) for learn, judge in _folds(pair, seed))
            rates = np.mean([self._rates(*fold, tpr, strengths) for fold in parts_of], axis=0)
            best = int(np.argmax(rates[:, 0]))  # of equals, the most regularised
            shown, tables = self._shown(pair, fixed, tuple(np.arange(len(batch)) for batch in pair))
        weights = regress(tables[0], tables[1], strengths[best])
        shown.weights_ = torch.from_numpy(weights).to(shown.centre_)
        self.__dict__ = shown.__dict__
        return WeightSearch(strengths[best], *rates[best, 1:].tolist())

    def _judge(self, rates: Evaluation) -> float:
        """By what strengths are chosen."""
        return rates.tnr_at_tpr

    def _rates(
        self, tables: list[Table], learn: Rows, judge: Rows, tpr: float, strengths: Iterable[float]
    ) -> list[tuple[float, float, float]]:
        """For each strength by what it is chosen, TNR and AUROC, on one fold."""
        known, foreign = (table[rows] for table, rows in zip(tables, learn, strict=True))
        inside, outside = (table[rows] for table, rows in zip(tables, judge, strict=True))
        rates = []
        for strength in strengths:
            weights = regress(known, foreign, strength)
            rate = evaluate(inside @ weights, outside @ weights, tpr)
            rates.append((self._judge(rate), rate.tnr_at_tpr, rate.auroc))
        return rates

    def _shown(self, pair: tuple[Outputs, Outputs], fixed: list[Tensor], rows: Rows) -> tuple[Self, list[Table]]:
        """A copy that has been shown these rows, and the columns of all samples of each kind as it standardises them.

        `fixed` are the columns that are the same for every copy.
        """
        shown, columns, part = copy.copy(self), fixed, self._make_parts().get(OOD)
        if part is not None:
            part = self._learn_ood(part, pair[1][torch.from_numpy(rows[1])].replace(labels=None))
            shown.parts_ = {**self.parts_, OOD: part}
            columns = [torch.cat([first, part._columns(batch)], 1) for first, batch in zip(fixed, pair, strict=True)]
        chosen = [side[numbers] for side, numbers in zip(columns, rows, strict=True)]
        shown.centre_, shown.scale_ = standardise(torch.cat(chosen))
        return shown, [((side - shown.centre_) / shown.scale_).cpu().numpy() for side in columns]

    def _learn_ood(self, part: Detector, outputs: Outputs) -> Detector:
        """The part "ood", having learnt from these OOD samples."""
        return part.learn(Summary.of(outputs, part.needs))

    def state(self) -> dict[str, Tensor]:
        """Fitted tensors by name; those of the parts as `part.name`."""
        tensors = super().state()
        for name, part in self.parts_.items():
            tensors |= {f"{name}.{key}": value for key, value in part.state().items()}
        return tensors

    def load_state(self, state: Mapping[str, Tensor], n_classes: int, widths: Mapping[str, int]) -> Self:
        """Take over what `state` returned, in place of `fit`."""
        self.parts_ = {}
        for name, part in self._make_parts().items():
            theirs = {key.removeprefix(f"{name}."): t for key, t in state.items() if key.startswith(f"{name}.")}
            if theirs or name != OOD:
                self.parts_[name] = part.load_state(theirs, n_classes, widths)
        own = {key: t for key, t in state.items() if key.split(".")[0] not in self.parts_}
        return super().load_state(own, n_classes, widths)


def standardise(columns: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and deviation of columns (N, P) over rows of given weights (N,), each (P,); a constant has deviation 1."""
    shares = torch.ones(len(columns), dtype=columns.dtype) if weights is None else weights.to(columns.dtype)
    shares = (shares / shares.sum()).to(columns.device)[:, None]
    centre = (shares * columns).sum(dim=0)
    scale = (shares * (columns - centre).square()).sum(dim=0).sqrt()
    constant = scale <= 1e-9 * centre.abs().clamp(min=1e-3)  # but for rounding
    return centre, torch.where(constant, torch.ones_like(scale), scale)


def regress(inside: Table, outside: Table, strength: float) -> Table:
    """Weights (P,) of a logistic regression with L2 penalty on standardised columns of both kinds, of equal weight."""
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415 (slow to import)

    y = np.repeat([0, 1], [len(inside), len(outside)])
    solver = "newton-cholesky" if inside.shape[1] < 500 else "lbfgs"
    model = LogisticRegression(C=strength, solver=solver, max_iter=5000, tol=1e-7, class_weight="balanced")
    weights: Table = model.fit(np.concatenate([inside, outside]), y).coef_[0]
    return weights


def _folds(kinds: Iterable[Sized], seed: int) -> list[tuple[Rows, ...]]:
    """Rows to learn from and rows to judge on, of both kinds, for each fold.

    Sets of one size are split alike: a sample and the attack made from it are never on two sides.
    """
    from sklearn.model_selection import KFold  # noqa: PLC0415 (slow to import)

    sides = [KFold(FOLDS, shuffle=True, random_state=seed).split(range(len(kind))) for kind in kinds]
    return [tuple(zip(*fold, strict=True)) for fold in zip(*sides, strict=True)]


@register("mahalanobis", title="Mahalanobis", style=("#009E73", "-", "D"))
class MahalanobisLayers(Weighted):
    """The Mahalanobis detector: its distances on all layers, summed once standardised, or weighted by `learn_weights`.

    Parameters
    ----------
    relative : bool
        Relative Mahalanobis: see `Mahalanobis`.
    """

    needs = Needs(layers="all", labels=True, sums="full", samples=("features",))
    relative: bool = False

    def _make_parts(self) -> dict[str, Detector]:
        return {"layers": Mahalanobis(relative=self.relative)}


@register("igeood", title="IGEOOD", style=("#D55E00", "-", "h"))
class Igeood(Weighted):
    """IGEOOD (Eq. 13 with α′ = 0): FR₀ of the output and FR_ℓ of each layer.

    Before `learn_weights` the score is z(−FR₀) + z(FR of the last layer), standardised on training samples: no
    out-of-distribution or adversarial sample is needed.

    Parameters
    ----------
    temperature : float
        Of the softmax, in FR₀.
    """

    needs = Needs(layers="all", labels=True, sums="diagonal", samples=("logits", "features"))
    temperature: float = 1.0

    def _make_parts(self) -> dict[str, Detector]:
        return {"output": IgeoodLogits(temperature=self.temperature), "layers": IgeoodFeatures()}

    def _first_weights(self) -> list[float]:
        return [1.0, *[0.0] * (len(self.parts_["layers"].columns_) - 1), 1.0]


@register("igeood+", title="IGEOOD+", style=("#D55E00", "-.", "P"), tunes="only")
class IgeoodPlus(Igeood):
    """IGEOOD+ (Eq. 13): IGEOOD with FR′_ℓ, the distance of each layer to the OOD validation samples' Gaussian.

    Before `learn_weights` it has no OOD sample, and is IGEOOD.

    Parameters
    ----------
    temperature : float
        Of the softmax, in FR₀.
    ood_sigma, ood_means : str
        How Eq. 12 is read: see `OodFeatures`.
    """

    ood_sigma: Literal["printed", "both"] = "printed"
    ood_means: Literal["one", "predicted"] = "one"

    def _make_parts(self) -> dict[str, Detector]:
        return {**super()._make_parts(), OOD: OodFeatures(ood_sigma=self.ood_sigma, ood_means=self.ood_means)}

    def _learn_ood(self, part: Any, outputs: Outputs) -> Detector:
        super()._learn_ood(part, outputs)
        learnt: Detector = part.beside(self.parts_["layers"])
        return learnt
