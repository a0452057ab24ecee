r"""The per-layer family: one Gaussian a class on each layer's features (the paper's Eq. 8–12), and Mahalanobis."""

from abc import abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import Self

from igeood.detectors.base import ColumnDetector, StepScores
from igeood.errors import UnsuitedError
from igeood.geometry import gaussian
from igeood.geometry.precision import by_rows, row_chunks, wide
from igeood.outputs import Array, Outputs
from igeood.summary import ClassSums, Needs, Summary

DEAD = 1e-4  # a channel whose deviation is below this part of the layer's median has its deviation raised to it
NOISE = (100.0 * 2.0**-23) ** 2  # a variance's share of the greatest that the rounding of a float32 network may make
OOD_SUFFIX = " (OOD)"  # of a column that is a distance to OOD statistics


def floored_std(sums: ClassSums) -> tuple[Tensor, Tensor]:
    """Standard deviations (k,) with those of dead channels raised to a floor, and which those are, (k,) bool.

    The floor is 1e-4 of the median of the deviations that are not 0; with none such, 1. A deviation of less than a
    float32's rounding of the means (C, k) is 0.
    """
    std = sums.variance.clamp(min=0.0).sqrt()
    rounding = torch.finfo(torch.float32).eps * sums.mean.abs().amax(dim=0)
    std = torch.where(std > rounding, std, torch.zeros_like(std))
    alive = std[std > 0]
    floor = DEAD * float(alive.median()) if len(alive) else 1.0
    return std.clamp(min=floor), std < floor


class LayerDetector(ColumnDetector):
    """A detector with one score a layer: `layer_scores` returns them all, `score` their sum over layers.

    Attributes
    ----------
    mean_ : dict of Tensor
        For each layer (C, k) class means.
    """

    def _learn(self, summary: Summary) -> None:
        self.mean_ = {layer: sums.mean for layer, sums in summary.sums.items()}
        if not self.mean_:
            raise UnsuitedError(
                "layers: the model has none but its head; use a method of the last layer, such as 'knn'"
            )
        alone = (summary.counts == 1).nonzero()[:, 0].tolist()
        if alone:
            which = f"class {alone[0]} has a single sample ({len(alone)} of {len(summary.counts)} classes do)"
            self.notes_ += (f"labels: {which}; its mean is that sample, deviations are pooled over all classes",)

    def layer_scores(self, outputs: Outputs) -> Array:
        """Score of each layer, (N, L): higher is more out-of-distribution."""
        return self.contributions(outputs)

    @abstractmethod
    def _layer_score(self, batch: Outputs, layer: str) -> tuple[Tensor, Tensor]:
        """Score of one layer, (N,), and its nearest class, (N,)."""

    @abstractmethod
    def _channel_parts(self, x: Tensor, nearest: Tensor, layer: str) -> Tensor:
        """What each channel of the rows x (n, k) adds to the squared distance to their nearest class, (n, k)."""

    def _columns(self, batch: Outputs) -> Tensor:
        return torch.stack([self._layer_score(batch, layer)[0] for layer in self.widths_], dim=1)

    def step_scores(self, batch: Outputs) -> StepScores:
        """See `Detector.step_scores`: each layer has an input step of its own."""
        return [(self._layer_score(batch, layer)[0], (layer,)) for layer in self.widths_]

    def _explain(self, batch: Outputs, top: int) -> dict[str, Any]:
        """The nearest class of each layer, and the channels that add most to the distance from it."""
        reasons: dict[str, dict[str, Tensor]] = {"nearest": {}, "channels": {}, "channel_shares": {}}
        for layer in self.widths_:
            nearest = self._layer_score(batch, layer)[1]
            parts = self._channel_parts(batch.features[layer], nearest, layer)
            best = parts.topk(min(top, parts.shape[1]), dim=1)
            whole = parts.sum(dim=1, keepdim=True).clamp(min=torch.finfo(parts.dtype).tiny)
            reasons["nearest"][layer], reasons["channels"][layer] = nearest, best.indices
            reasons["channel_shares"][layer] = best.values / whole
        return reasons


class IgeoodFeatures(LayerDetector):
    r"""Fisher–Rao distance to the nearest class's Gaussian on each layer, FR_ℓ (Eq. 11).

    Attributes
    ----------
    mean_, std_ : dict of Tensor
        For each layer (C, k) class means and (k,) pooled deviation, with that of dead channels raised to a floor.
    """

    needs = Needs(layers="all", labels=True, sums="diagonal")

    def _learn(self, summary: Summary) -> None:
        super()._learn(summary)
        floored = {layer: floored_std(sums) for layer, sums in summary.sums.items()}
        self.std_ = {layer: std for layer, (std, _) in floored.items()}
        dead = {layer: int(is_dead.sum()) for layer, (_, is_dead) in floored.items()}
        said = "dead channels, deviation raised to a floor"
        self.notes_ += tuple(f"layer {layer.removeprefix('|')!r}: {n} {said}" for layer, n in dead.items() if n)

    def _prepare(self) -> None:
        self._classes = {layer: gaussian.prepare_nearest(self.mean_[layer], self.std_[layer]) for layer in self.widths_}

    def _layer_score(self, batch: Outputs, layer: str) -> tuple[Tensor, Tensor]:
        return gaussian.nearest_prepared(batch.features[layer], self._classes[layer])

    def _channel_parts(self, x: Tensor, nearest: Tensor, layer: str) -> Tensor:
        """ρ² of each channel (Eq. 9)."""
        mean, std = self.mean_[layer].to(x.device), self.std_[layer].to(x.device)
        return gaussian.univariate_distance(wide(x), std, mean[nearest], std).square()


class OodFeatures(IgeoodFeatures):
    r"""Minus the Fisher–Rao distance to the Gaussian of OOD samples on each layer, FR′_ℓ (Eq. 12): fitted on those.

    Parameters
    ----------
    ood_sigma : {"printed", "both"}
        The sample's deviation: the in-distribution one, as Eq. 12 is printed, or the OOD samples' own on both sides.
    ood_means : {"one", "predicted"}
        One mean of all OOD samples, or one of each predicted class, of which the nearest counts: with
        `ood_sigma="both"` as in the authors' code.

    Attributes
    ----------
    mean_, std_ : dict of Tensor
        For each layer the OOD samples' means, (1, k) or one a predicted class, and their deviation (k,).
    own_std_ : dict of Tensor
        For each layer the sample's deviation (k,).
    """

    needs = Needs(layers="all", sums="diagonal", group="predicted")
    ood_sigma: Literal["printed", "both"] = "printed"
    ood_means: Literal["one", "predicted"] = "one"

    def _learn(self, summary: Summary) -> None:
        one = self.ood_means == "one"
        sums = {layer: each.pooled() if one else each for layer, each in summary.sums.items()}
        self.mean_ = {layer: each.mean[each.count > 0] for layer, each in sums.items()}
        self.std_ = {layer: floored_std(each)[0] for layer, each in sums.items()}
        self.own_std_ = dict(self.std_)

    def beside(self, known: IgeoodFeatures) -> Self:
        """Take the sample's deviation from the in-distribution samples, if that is the one to take."""
        self.own_std_ = dict(known.std_ if self.ood_sigma == "printed" else self.std_)
        return self

    def _prepare(self) -> None:
        """With one deviation on both sides the nearest mean is found as that of a class."""
        if self.ood_sigma == "both":
            super()._prepare()

    @property
    def columns_(self) -> list[str]:
        """What the score is made of: the layers against OOD."""
        return [f"{layer}{OOD_SUFFIX}" for layer in self.widths_]

    def _layer_score(self, batch: Outputs, layer: str) -> tuple[Tensor, Tensor]:
        if self.ood_sigma == "both":
            distance, nearest = super()._layer_score(batch, layer)
            return -distance, nearest
        x = batch.features[layer]
        mean, std, own = (t[layer].to(x.device) for t in (self.mean_, self.std_, self.own_std_))
        apart = by_rows(lambda rows: gaussian.distance(wide(rows)[:, None], own, mean, std), x, mean.numel())
        least = apart.min(dim=1)
        return -least.values, least.indices

    def _explain(self, batch: Outputs, top: int) -> dict[str, Any]:  # noqa: ARG002
        return {}


class Mahalanobis(LayerDetector):
    r"""Mahalanobis distance to the nearest class on each layer, :math:`\min_y (f-\mu_y)^\top\Sigma^+(f-\mu_y)`.

    The covariance is tied: pooled over the classes. Its pseudo-inverse comes from an eigendecomposition in float64.

    Parameters
    ----------
    relative : bool
        Subtract the distance to one background Gaussian of all classes together (relative Mahalanobis), on the
        directions that the class covariance keeps.

    Attributes
    ----------
    mean_ : dict of Tensor
        For each layer (C, k) class means.
    whitening_ : dict of Tensor
        For each layer (k, r), a root of the pseudo-inverse: its rank is r.
    background_mean_, background_whitening_ : dict of Tensor
        The same of all classes together, (1, k) and (k, r); empty unless relative.
    """

    needs = Needs(layers="all", labels=True, sums="full")
    relative: bool = False

    def _learn(self, summary: Summary) -> None:
        super()._learn(summary)
        self.whitening_ = {layer: whiten(sums.covariance) for layer, sums in summary.sums.items()}
        pooled = {layer: sums.pooled() for layer, sums in summary.sums.items() if self.relative}
        self.background_mean_ = {layer: sums.mean for layer, sums in pooled.items()}
        w = self.whitening_
        self.background_whitening_ = {k: w[k] @ whiten(w[k].T @ s.covariance @ w[k]) for k, s in pooled.items()}

    def _prepare(self) -> None:
        self._classes = {layer: Whitened(self.mean_[layer], self.whitening_[layer]) for layer in self.widths_}
        if self.relative:
            roots = self.background_whitening_
            self._background = {layer: Whitened(mean, roots[layer]) for layer, mean in self.background_mean_.items()}

    def _layer_score(self, batch: Outputs, layer: str) -> tuple[Tensor, Tensor]:
        x = batch.features[layer]
        score, nearest = self._classes[layer].distance(x)
        if self.relative:
            score = score - self._background[layer].distance(x)[0]
        return score, nearest

    def _channel_parts(self, x: Tensor, nearest: Tensor, layer: str) -> Tensor:
        return whitened_parts(x, self.mean_[layer].to(x.device)[nearest], self.whitening_[layer].to(x.device))


def whitened_parts(x: Tensor, centres: Tensor, whitening: Tensor) -> Tensor:
    """Squares of the whitened difference turned back to the channels, Σ^{+1/2}(f − μ): they sum to the distance."""
    directions: Tensor = whitening / torch.linalg.vector_norm(whitening, dim=0)  # (k, r), orthonormal
    return ((wide(x) - centres) @ whitening @ directions.T).square()


class Whitened:
    """Class means (C, k) in the space that a whitening (k, r) maps to, for distances to the nearest of them."""

    def __init__(self, means: Tensor, whitening: Tensor) -> None:
        origin, whitening, self.width = wide(means).mean(dim=0), wide(whitening).contiguous(), max(means.shape)
        centres = (wide(means) - origin) @ whitening  # (C, r)
        self.tensors = (origin, whitening, centres, 0.5 * centres.square().sum(dim=1))

    def distance(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Squared Mahalanobis distance (N,) of x (N, k) to the nearest class, and that class.

        The nearest is found by one matmul in the whitened space; its distance is then computed without cancellation.
        """
        origin, whitening, centres, half = (t.to(x.device) for t in self.tensors)
        # one block for all: small pieces between large ones would fragment memory
        distance, nearest = half.new_empty(x.shape[0]), torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
        for rows in row_chunks(x.shape[0], self.width // 2):  # a matmul wants more rows
            z = (wide(x[rows]) - origin) @ whitening  # (n, r)
            with torch.no_grad():
                closest = torch.addmm(half, z, centres.T, alpha=-1.0).argmin(dim=1)
            distance[rows] = (z - centres[closest]).square().sum(dim=1)
            nearest[rows] = closest
        return distance, nearest


def whiten(covariance: Tensor) -> Tensor:
    """A root W (k, r) of the pseudo-inverse of a covariance (k, k): W Wᵀ = Σ⁺, in float64.

    Directions whose variance is no more than the rounding of the features (a hundred times float32's, which the sums of
    a network make of it) are left out: they would turn noise into distance. So it is for float64 features too: most
    were float32 once, and a decomposition has few digits of so small a variance.
    """
    values, vectors = torch.linalg.eigh(covariance)
    kept = values > values[-1:].clamp(min=0.0) * len(values) * NOISE  # they ascend
    root: Tensor = vectors[:, kept] / values[kept].sqrt()
    return root
