r"""Columns combined into one score (the paper's Eq. 13): IGEOOD, IGEOOD+ and Mahalanobis over all layers.

Each column is standardised and weighted; the score is the sum. Before any out-of-distribution sample is seen, the
weights are fixed ones; `learn_weights` learns them by logistic regression.
"""

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from igeood.detectors.base import Detector, Samples, StepScores
from igeood.detectors.gaussians import IgeoodFeatures, Mahalanobis
from igeood.detectors.logits import IgeoodLogits
from igeood.detectors.registry import register
from igeood.errors import InputError
from igeood.geometry import categorical
from igeood.metrics import tnr_at_tpr
from igeood.outputs import Outputs
from igeood.summary import Needs, Summary

STRENGTHS = tuple(float(c) for c in np.logspace(-4, 4, 9))  # inverse regularisation strengths to choose from
FOLDS = 5
FEWEST = 2 * FOLDS  # samples of each kind, so that each fold can be learnt from and judged on
OOD_SUFFIX = " (OOD)"  # of a column that is a distance to OOD statistics

W = TypeVar("W", bound="Weighted")
Table = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class WeightSearch:
    """Outcome of `Weighted.learn_weights`: the strength chosen, and its mean TNR over the folds."""

    strength: float
    tnr: float


class Weighted(Detector):
    """A weighted sum of standardised columns, which other detectors compute (Eq. 13).

    A subclass names its parts in `_make_parts`, and says in `needs` what they need together, with a sample of features.

    Attributes
    ----------
    parts_ : dict of Detector
        Detectors whose columns are weighted, by name.
    centre_, scale_, weights_ : Tensor
        (P,) of the columns; a contribution is weight · (column − centre) / scale.
    """

    state_names: ClassVar[tuple[str, ...]] = ("centre_", "scale_", "weights_")
    parts_: dict[str, Detector]
    centre_: Tensor
    scale_: Tensor
    weights_: Tensor

    @abstractmethod
    def _make_parts(self) -> dict[str, Detector]:
        """Unfitted detectors of the columns, by name."""

    def _first_weights(self) -> list[float]:
        """Weights before any out-of-distribution sample is seen."""
        return [1.0] * len(self.columns_)

    @property
    def columns_(self) -> list[str]:
        """What each column is: a part with a single column has the part's name."""
        names = []
        for name, part in self.parts_.items():
            names += [name] if part.columns_ == ["output"] else part.columns_
        return names

    @property
    def widths_(self) -> Mapping[str, int]:
        """Layers that the parts read, and their widths."""
        return {layer: width for part in self.parts_.values() for layer, width in part.widths_.items()}

    @property
    def softmax_part(self) -> Detector | None:
        """The first part with a temperature."""
        parts = (part.softmax_part for part in self.parts_.values())
        return next((part for part in parts if part is not None), None)

    def _columns(self, batch: Outputs) -> Tensor:
        return torch.cat([part._columns(batch) for part in self.parts_.values()], dim=1)

    def _learn(self, summary: Summary) -> None:
        self.parts_ = {name: part.learn(summary) for name, part in self._make_parts().items()}
        columns, weights = [], []
        for batch, weight in summary.samples["features"].batches():
            columns.append(self._columns(batch))
            weights.append(weight)
        self.centre_, self.scale_ = standardise(torch.cat(columns), torch.cat(weights))
        self.weights_ = torch.tensor(self._first_weights(), dtype=torch.float64)

    def _notes(self, n_classes: int) -> tuple[str, ...]:
        return tuple(note for part in self.parts_.values() for note in part._notes(n_classes))

    def _contributions(self, batch: Outputs) -> Tensor:
        return self._weigh(self._columns(batch))

    def _weigh(self, columns: Tensor) -> Tensor:
        centre, scale, weights = (t.to(columns) for t in (self.centre_, self.scale_, self.weights_))
        return weights * (columns - centre) / scale

    def _score(self, batch: Outputs) -> Tensor:
        return self._contributions(batch).sum(dim=1)

    def _explain(self, batch: Outputs, top: int) -> dict[str, Any]:
        reasons: dict[str, Any] = {}
        for part in self.parts_.values():
            reasons |= part._explain(batch, top)
        return reasons

    def at_temperature(self: W, temperature: float, samples: Samples, near: Detector | None = None) -> W:
        """A detector like this one with another temperature of its output; the weights have to be learnt again."""
        if self.softmax_part is None:
            raise InputError(f"temperature: {type(self).__name__} has none to set")
        other = copy.copy(self)
        other.temperature = temperature  # type: ignore[attr-defined]
        other.parts_ = {
            name: part if part.softmax_part is None else part.at_temperature(temperature, samples, near)
            for name, part in self.parts_.items()
        }
        return other

    def _learn_ood(self: W, ood: Outputs) -> W:  # noqa: ARG002
        """A detector that knows the OOD samples' statistics, where the method uses any."""
        return self

    def _ood_columns(self, batch: Outputs) -> Tensor:
        """Columns that depend on what `_learn_ood` has learnt, (N, Q)."""
        return batch.logits.new_empty(len(batch), 0)

    def learn_weights(
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
        pair = (self._scorable(id_outputs), self._scorable(ood_outputs))
        for name, batch in zip(("id", "ood"), pair, strict=True):
            if len(batch) < FEWEST:
                raise InputError(f"{name}: {len(batch)} samples; the regression needs at least {FEWEST} of each kind")
        with torch.no_grad():
            fixed = [torch.cat([part._columns(b) for part in self.parts_.values()], dim=1) for b in pair]
            folds = [self._fold_rates(pair, fixed, rows, tpr) for rows in _folds(len(pair[0]), len(pair[1]), seed)]
            rates = np.mean(folds, axis=0)
            best = int(np.argmax(rates))  # of equals, the most regularised
            member = self._learn_ood(pair[1])
            columns = torch.cat([member._joined(b, c) for b, c in zip(pair, fixed, strict=True)])
            centre, scale = standardise(columns)
        x, y = ((columns - centre) / scale).cpu().numpy(), _targets(len(pair[0]), len(pair[1]))
        weights = logistic_regression(x, y, STRENGTHS[best])[:-1]
        self.__dict__.update(member.__dict__)
        self.centre_, self.scale_, self.weights_ = centre, scale, torch.from_numpy(weights).to(centre)
        return WeightSearch(STRENGTHS[best], float(np.max(rates)))

    def _joined(self, batch: Outputs, fixed: Tensor) -> Tensor:
        return torch.cat([fixed, self._ood_columns(batch).to(fixed)], dim=1)

    def _fold_rates(self, pair: tuple[Outputs, Outputs], fixed: list[Tensor], rows: "FoldRows", tpr: float) -> Table:
        """TNR of each strength on one fold."""
        learn, judge = rows
        member = self._learn_ood(pair[1][learn[1]])
        columns = [member._joined(batch, part) for batch, part in zip(pair, fixed, strict=True)]
        centre, scale = standardise(torch.cat([columns[side][learn[side]] for side in (0, 1)]))
        known, foreign = (((side - centre) / scale).cpu().numpy() for side in columns)
        x, y = np.concatenate([known[learn[0]], foreign[learn[1]]]), _targets(len(learn[0]), len(learn[1]))
        rates = np.zeros(len(STRENGTHS))
        beta: Table | None = None
        for i, strength in enumerate(STRENGTHS):
            beta = logistic_regression(x, y, strength, beta)
            inside, outside = (part @ beta[:-1] for part in (known[judge[0]], foreign[judge[1]]))
            rates[i] = tnr_at_tpr(inside, outside, tpr)
        return rates

    def state(self) -> dict[str, Tensor]:
        """Fitted tensors by name; those of the parts as `part.name`."""
        tensors = super().state()
        for name, part in self.parts_.items():
            tensors |= {f"{name}.{key}": value for key, value in part.state().items()}
        return tensors

    def load_state(self: W, state: Mapping[str, Tensor], n_classes: int) -> W:
        """Take over what `state` returned, in place of `fit`."""
        own = dict(state)
        self.parts_ = self._make_parts()
        for name, part in self.parts_.items():
            prefix = f"{name}."
            theirs = {key: own.pop(key) for key in list(own) if key.startswith(prefix)}
            part.load_state({key.removeprefix(prefix): value for key, value in theirs.items()}, n_classes)
        return super().load_state(own, n_classes)


FoldRows = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


def standardise(columns: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and deviation of columns (N, P) over rows of given weights (N,), each (P,); a constant has deviation 1."""
    shares = torch.ones(len(columns), dtype=columns.dtype) if weights is None else weights.to(columns.dtype)
    shares = (shares / shares.sum()).to(columns.device)[:, None]
    centre = (shares * columns).sum(dim=0)
    scale = (shares * (columns - centre).square()).sum(dim=0).sqrt()
    constant = scale <= 1e-9 * centre.abs()  # but for rounding
    return centre, torch.where(constant, torch.ones_like(scale), scale)


def logistic_regression(x: Table, y: Table, strength: float, start: Table | None = None) -> Table:
    """Weights (P,) and intercept, as (P + 1,), of a logistic regression with L2 penalty, by Newton's method.

    Minimises strength · Σ w_i log(1 + exp(∓z_i)) + ½‖weights‖² with classes of equal total weight w. scikit-learn's
    takes tens of milliseconds for so few columns, most of it for checks.

    Parameters
    ----------
    x : array
        (N, P) standardised columns.
    y : array
        (N,) 0 or 1.
    strength : float
        Inverse strength of the penalty.
    start : array, optional
        (P + 1,) where to start.
    """
    design = np.column_stack([x, np.ones(len(x))])
    penalty = np.append(np.ones(x.shape[1]), 1e-9)  # the intercept's is there for a regular matrix only
    share = strength * 0.5 * len(y) / np.where(y == 1, y.sum(), len(y) - y.sum())

    def loss(beta: Table) -> float:
        z = design @ beta
        return float(share @ (np.logaddexp(0.0, z) - y * z) + 0.5 * penalty @ beta**2)

    beta = np.zeros(design.shape[1]) if start is None else start
    for _ in range(100):
        p = 0.5 * (1.0 + np.tanh(0.5 * (design @ beta)))
        gradient = design.T @ (share * (p - y)) + penalty * beta
        hessian = (design.T * (share * p * (1.0 - p))) @ design + np.diag(penalty)
        step = np.linalg.solve(hessian, gradient)
        before, size = loss(beta), 1.0
        while size > 1e-6 and loss(beta - size * step) > before:
            size /= 2.0
        beta = beta - size * step
        if gradient @ step < 1e-12 * (1.0 + before):
            break
    return beta


def _targets(n_id: int, n_ood: int) -> Table:
    targets: Table = np.repeat([0.0, 1.0], [n_id, n_ood])
    return targets


def _folds(n_id: int, n_ood: int, seed: int) -> Iterator[FoldRows]:
    """Rows to learn from and rows to judge on, of both kinds, for each fold.

    Sets of one size are split alike: a sample and the attack made from it are never on two sides.
    """
    from sklearn.model_selection import KFold  # noqa: PLC0415 (slow to import)

    splits = [KFold(FOLDS, shuffle=True, random_state=seed).split(range(n)) for n in (n_id, n_ood)]
    for (learn_id, judge_id), (learn_ood, judge_ood) in zip(*splits, strict=True):
        rows = [torch.from_numpy(part) for part in (learn_id, learn_ood, judge_id, judge_ood)]
        yield (rows[0], rows[1]), (rows[2], rows[3])


@register("mahalanobis", title="Mahalanobis", style=("#009E73", "-", "D"))
class MahalanobisLayers(Weighted):
    """The Mahalanobis detector: its distances on all layers, summed once standardised, or weighted by `learn_weights`.

    Parameters
    ----------
    relative : bool
        Relative Mahalanobis: see `Mahalanobis`.
    """

    needs: ClassVar[Needs] = Needs(layers="all", labels=True, sums="full", samples=("features",))

    def __init__(self, *, relative: bool = False) -> None:
        super().__init__()
        self.relative = relative

    def _make_parts(self) -> dict[str, Detector]:
        return {"layers": Mahalanobis(relative=self.relative)}

    def step_scores(self, batch: Outputs) -> StepScores:
        """See `Detector.step_scores`: each layer has an input step of its own."""
        return self.parts_["layers"].step_scores(batch)


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

    needs: ClassVar[Needs] = Needs(layers="all", labels=True, sums="diagonal", samples=("logits", "features"))

    def __init__(self, *, temperature: float = 1.0) -> None:
        categorical.check_temperature(temperature)
        super().__init__()
        self.temperature = float(temperature)

    def _make_parts(self) -> dict[str, Detector]:
        return {"output": IgeoodLogits(temperature=self.temperature), "layers": IgeoodFeatures()}

    def _first_weights(self) -> list[float]:
        return [1.0, *[0.0] * (len(self.parts_["layers"].columns_) - 1), 1.0]

    def step_scores(self, batch: Outputs) -> StepScores:
        """See `Detector.step_scores`: the step raises FR₀ (Eq. 6), and every layer is read after it."""
        return self.parts_["output"].step_scores(batch)


@register("igeood+", title="IGEOOD+", style=("#D55E00", "-.", "P"))
class IgeoodPlus(Igeood):
    """IGEOOD+ (Eq. 13): IGEOOD with FR′_ℓ, the distance of each layer to the OOD validation samples' Gaussian.

    Before `learn_weights` it has no OOD sample, and is IGEOOD.

    Parameters
    ----------
    temperature : float
        Of the softmax, in FR₀.
    """

    @property
    def _features(self) -> IgeoodFeatures:
        features = self.parts_["layers"]
        assert isinstance(features, IgeoodFeatures)  # noqa: S101 (`_make_parts` says so)
        return features

    @property
    def columns_(self) -> list[str]:
        """What each column is: the output, the layers, and the layers against OOD."""
        return super().columns_ + [f"{layer}{OOD_SUFFIX}" for layer in self._features.ood_mean_]

    def _columns(self, batch: Outputs) -> Tensor:
        columns = super()._columns(batch)
        return self._joined(batch, columns) if self._features.ood_mean_ else columns

    def _ood_columns(self, batch: Outputs) -> Tensor:
        return -self._features.fr_layer_ood(batch)

    def _learn_ood(self, ood: Outputs) -> "IgeoodPlus":
        other = copy.copy(self)
        other.parts_ = {**self.parts_, "layers": copy.copy(self._features).fit_ood(ood)}
        return other
