r"""Terms combined into one score (the paper's Eq. 13): IGEOOD, IGEOOD+ and Mahalanobis over all layers.

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

from igeood.detectors.base import Detector, StepScores
from igeood.detectors.gaussians import IgeoodFeatures, Mahalanobis, OodFeatures
from igeood.detectors.logits import IgeoodLogits
from igeood.detectors.options import options
from igeood.detectors.registry import register
from igeood.errors import InputError
from igeood.metrics import Evaluation, evaluate
from igeood.outputs import Outputs
from igeood.summary import Needs, Summary

FOLDS = 5
FEWEST = 2 * FOLDS  # samples of each kind, so that each fold can be learnt from and measured
OOD = "ood"  # the name of a part that learns from OOD samples

Table = np.ndarray[Any, np.dtype[np.float64]]
Rows = tuple[Any, ...]  # numbers of in-distribution and of OOD samples


class WeightSearch(NamedTuple):
    """Outcome of `Weighted.learn_weights`: the strength chosen, and its mean TNR and AUROC over the folds."""

    strength: float
    tnr: float
    auroc: float


class Weighted(Detector):
    """A weighted sum of standardised columns, which are terms of other detectors (Eq. 13).

    A subclass names these detectors in `make_parts`, and says in `needs` what they need together, with a sample of
    features. A part named "ood" learns from the OOD samples that `learn_weights` gets, and is not there before.

    Attributes
    ----------
    parts : dict of Detector
        Detectors whose terms are weighted, by name.
    centre_, scale_, weights_ : Tensor
        (P,) of the columns; a term is weight · (column − centre) / scale.
    """

    standard_rows: ClassVar[int | None] = None  # of each class, from which columns are standardised; None: all
    strengths: ClassVar[tuple[float, ...]] = tuple(float(c) for c in np.logspace(-4, 4, 9))  # inverse; to choose from
    parts: ClassVar[dict[str, Detector]] = {}

    @abstractmethod
    def make_parts(self) -> dict[str, Detector]:
        """Unfitted detectors of the columns, by name."""

    def first_weights(self) -> list[float]:
        """Weights before any out-of-distribution sample is seen."""
        return [1.0] * len(self.term_names)

    def quality(self, rates: Evaluation) -> float:
        """By what strengths are chosen."""
        return rates.tnr_at_tpr

    @property
    def term_names(self) -> list[str]:
        """What each column is: a part with a single term has the part's name."""
        names = {name: part.term_names for name, part in self.parts.items()}
        return [term for name, terms in names.items() for term in ([name] if terms == ["output"] else terms)]

    @property
    def softmax(self) -> Detector | None:
        """The first part with a temperature."""
        return next((part for part in self.parts.values() if part.softmax), None)

    def part_terms(self, outputs: Outputs) -> Tensor:
        """Terms of all parts side by side, (N, P)."""
        return torch.cat([part.terms(outputs) for part in self.parts.values()], dim=1)

    def terms(self, outputs: Outputs) -> Tensor:
        """Weighted columns."""
        columns = self.part_terms(outputs)
        centre, scale, weights = (value.to(columns) for value in (self.centre_, self.scale_, self.weights_))
        return weights * (columns - centre) / scale

    def learn(self, summary: Summary) -> Self:
        """Let the parts learn, and standardise their terms."""
        super().learn(summary)
        parts = {name: part.learn(summary) for name, part in self.make_parts().items() if name != OOD}
        self.parts = parts  # type: ignore[misc]
        self.findings_ = list(dict.fromkeys(finding for part in parts.values() for finding in part.findings_))
        self.standardise(summary)
        return self

    def standardise(self, summary: Summary) -> None:
        """Centre, scale and weights before any out-of-distribution sample is seen."""
        sample = summary.samples[self.needs.samples[-1]]
        rows = [(self.part_terms(batch), weights) for batch, weights in sample.batches(self.standard_rows)]
        columns, weights = (torch.cat(side) for side in zip(*rows, strict=True))
        self.centre_, self.scale_ = standardised(columns, weights)
        self.weights_ = torch.tensor(self.first_weights(), dtype=torch.float64)

    def at_temperature(self, temperature: float, summary: Summary, near: Detector | None = None) -> Self:  # noqa: ARG002
        """The parts at another temperature; the weights have to be learnt again."""
        other = copy.copy(self)
        other.temperature = temperature  # type: ignore[attr-defined]
        parts = {n: p.at_temperature(temperature, summary) if p.softmax else p for n, p in self.parts.items()}
        other.parts = parts  # type: ignore[misc]
        return other

    def step_scores(self, outputs: Outputs) -> StepScores:
        """The step is that of the first part, such as FR₀ for IGEOOD (Eq. 6)."""
        return next(iter(self.parts.values())).step_scores(outputs)

    def explain(self, outputs: Outputs, top: int) -> dict[str, Any]:
        """Reasons of the parts."""
        reasons = {name: why for part in self.parts.values() for name, why in part.explain(outputs, top).items()}
        reasons.pop("rarity", None)  # it is of one part's terms
        return reasons

    def learn_weights(  # type: ignore[override]
        self,
        id_outputs: Outputs,
        ood_outputs: Outputs,
        *,
        tpr: float = 0.95,
        seed: int = 0,
    ) -> WeightSearch:
        """Learn the weights by logistic regression (Eq. 13), its strength chosen by cross-validation.

        The folds are shuffled with the seed; statistics of OOD samples, where the method uses any, come from the fold's
        own training part.

        Parameters
        ----------
        id_outputs, ood_outputs : Outputs
            Validation samples, at least 10 of each; report and calibrate on others.
        tpr : float
            The operating point.
        seed : int
            Of the folds.
        """
        pair = (id_outputs, ood_outputs)
        for name, batch in zip(("id", "ood"), pair, strict=True):
            if len(batch) < FEWEST:
                raise InputError(f"{len(batch)} samples, at least {FEWEST} are needed", argument=name)
        with torch.no_grad():
            parts = [part for name, part in self.parts.items() if name != OOD]
            fixed = [torch.cat([part.terms(batch) for part in parts], dim=1) for batch in pair]
            folds = [
                self._fold_rates(self.shown(pair, fixed, train)[1], train, test, tpr)
                for train, test in _folds(pair, seed)
            ]
            rates = np.mean(folds, axis=0)
            best = int(np.argmax(rates[:, 0]))  # of equals, the most regularised
            shown, tables = self.shown(pair, fixed, tuple(np.arange(len(batch)) for batch in pair))
        weights = regress(tables[0], tables[1], self.strengths[best])
        shown.weights_ = torch.from_numpy(weights).to(shown.centre_)
        self.__dict__ = shown.__dict__
        return WeightSearch(self.strengths[best], *rates[best, 1:].tolist())

    def _fold_rates(self, tables: list[Table], train: Rows, test: Rows, tpr: float) -> list[tuple[float, float, float]]:
        """For each strength its quality, TNR and AUROC, on one fold."""
        id_train, ood_train = (table[rows] for table, rows in zip(tables, train, strict=True))
        id_test, ood_test = (table[rows] for table, rows in zip(tables, test, strict=True))
        rates = []
        for strength in self.strengths:
            weights = regress(id_train, ood_train, strength)
            rate = evaluate(id_test @ weights, ood_test @ weights, tpr)
            rates.append((self.quality(rate), rate.tnr_at_tpr, rate.auroc))
        return rates

    def shown(self, pair: tuple[Outputs, Outputs], fixed: list[Tensor], rows: Rows) -> tuple[Self, list[Table]]:
        """A copy that has been shown these rows, and the columns of all samples of each kind as it standardises them.

        `fixed` are the columns that are the same for every copy.
        """
        shown = copy.copy(self)
        columns = fixed
        part = self.make_parts().get(OOD)
        if part is not None:
            part = self.learn_ood(part, pair[1][torch.from_numpy(rows[1])].replace(labels=None))
            shown.parts = {**self.parts, OOD: part}  # type: ignore[misc]
            columns = [torch.cat([side, part.terms(batch)], 1) for side, batch in zip(fixed, pair, strict=True)]
        chosen = [side[numbers] for side, numbers in zip(columns, rows, strict=True)]
        shown.centre_, shown.scale_ = standardised(torch.cat(chosen))
        return shown, [((side - shown.centre_) / shown.scale_).cpu().numpy() for side in columns]

    def learn_ood(self, part: Detector, outputs: Outputs) -> Detector:
        """The part "ood", having learnt from these OOD samples."""
        return part.learn(Summary.of(outputs, part.needs))

    def state(self) -> dict[str, Tensor]:
        """Fitted tensors by name; those of the parts as `part.name`."""
        tensors = super().state()
        for name, part in self.parts.items():
            tensors |= {f"{name}.{key}": value for key, value in part.state().items()}
        return tensors

    def load_state(self, state: Mapping[str, Tensor], n_classes: int, widths: Mapping[str, int]) -> Self:
        """Take over what `state` returned, in place of `fit`."""
        parts: dict[str, Detector] = {}
        for name, part in self.make_parts().items():
            prefix = f"{name}."
            theirs = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            if theirs or name != OOD:
                parts[name] = part.load_state(theirs, n_classes, widths)
        own = {key: value for key, value in state.items() if key.split(".")[0] not in parts}
        super().load_state(own, n_classes, widths)
        self.parts = parts  # type: ignore[misc]
        return self


def standardised(columns: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
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
    """Rows to learn from and rows to measure on, of both kinds, for each fold.

    Sets of one size are split alike: a sample and the attack made from it are never on two sides.
    """
    from sklearn.model_selection import KFold  # noqa: PLC0415 (slow to import)

    sides = [KFold(FOLDS, shuffle=True, random_state=seed).split(range(len(kind))) for kind in kinds]
    return [tuple(zip(*fold, strict=True)) for fold in zip(*sides, strict=True)]


@register("mahalanobis", title="Mahalanobis", style=("#009E73", "-", "D"))
@options
class MahalanobisLayers(Weighted):
    """The Mahalanobis detector: its distances on all layers, summed once standardised, or weighted by `learn_weights`.

    Parameters
    ----------
    relative : bool
        Relative Mahalanobis: see `Mahalanobis`.
    """

    needs = Needs(layers="all", labels=True, sums="full", samples=("features",))
    relative: bool = False

    def make_parts(self) -> dict[str, Detector]:
        """The layers' distances."""
        return {"layers": Mahalanobis(relative=self.relative)}


@register("igeood", title="IGEOOD", style=("#D55E00", "-", "h"))
@options
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

    def make_parts(self) -> dict[str, Detector]:
        """FR₀ and FR_ℓ."""
        return {"output": IgeoodLogits(temperature=self.temperature), "layers": IgeoodFeatures()}

    def first_weights(self) -> list[float]:
        """The output and the last layer."""
        return [1.0, *[0.0] * (len(self.parts["layers"].term_names) - 1), 1.0]


@register("igeood+", title="IGEOOD+", style=("#D55E00", "-.", "P"), tunes="only")
@options
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

    def make_parts(self) -> dict[str, Detector]:
        """FR₀, FR_ℓ and FR′_ℓ."""
        return {**super().make_parts(), OOD: OodFeatures(ood_sigma=self.ood_sigma, ood_means=self.ood_means)}

    def learn_ood(self, part: Any, outputs: Outputs) -> Detector:
        """FR′_ℓ, with the sample's deviation as Eq. 12 is read."""
        super().learn_ood(part, outputs)
        learnt: Detector = part.beside(self.parts["layers"])
        return learnt
