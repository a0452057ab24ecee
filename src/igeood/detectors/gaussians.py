r"""The per-layer family: one Gaussian a class on each layer's features (the paper's Eq. 8–12), and Mahalanobis."""

from abc import abstractmethod
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import Self

from igeood.detectors.base import Detector, StepScores
from igeood.detectors.options import options
from igeood.errors import Finding, UnsuitedError
from igeood.geometry import gaussian
from igeood.geometry.precision import by_rows, row_chunks, wide
from igeood.outputs import Outputs
from igeood.summary import ClassSums, Needs, Summary, by_prediction

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


class LayerDetector(Detector):
    """A detector with one term a layer; the score is their sum.

    Attributes
    ----------
    mean_ : dict of Tensor
        For each layer (C, k) class means.
    """

    def learn(self, summary: Summary) -> Self:
        """Take over the class means."""
        super().learn(summary)
        self.mean_ = {layer: summary.sums[layer].mean for layer in self.widths_}
        if not self.mean_:
            raise UnsuitedError("the model has none but its head", argument="layers", cure="use a method such as 'knn'")
        alone = (summary.counts == 1).nonzero()[:, 0].tolist()
        if alone:
            message = f"labels: class {alone[0]} has a single sample ({len(alone)} of {len(summary.counts)} classes do)"
            cure = "give more samples: its mean is that sample, deviations are pooled over all classes"
            self.findings_.append(Finding("single-sample", "info", message, cure))
        return self

    @abstractmethod
    def layer_score(self, outputs: Outputs, layer: str) -> tuple[Tensor, Tensor]:
        """Score of one layer, (N,), and its nearest class, (N,)."""

    @abstractmethod
    def channel_parts(self, x: Tensor, nearest: Tensor, layer: str) -> Tensor:
        """What each channel of the rows x (n, k) adds to the squared distance to their nearest class, (n, k)."""

    @property
    def term_names(self) -> list[str]:
        """The layers."""
        return list(self.widths_)

    def terms(self, outputs: Outputs) -> Tensor:
        """Score of each layer, (N, L)."""
        return torch.stack([self.layer_score(outputs, layer)[0] for layer in self.widths_], dim=1)

    def step_scores(self, outputs: Outputs) -> StepScores:
        """See `Detector.step_scores`: each layer has an input step of its own."""
        return [(self.layer_score(outputs, layer)[0], (layer,)) for layer in self.widths_]

    def explain(self, outputs: Outputs, top: int) -> dict[str, Any]:
        """The nearest class of each layer, and the channels that add most to the distance from it."""
        reasons: dict[str, dict[str, Tensor]] = {"nearest": {}, "channels": {}, "channel_shares": {}}
        for layer in self.widths_:
            nearest = self.layer_score(outputs, layer)[1]
            parts = self.channel_parts(outputs.features[layer], nearest, layer)
            best = parts.topk(min(top, parts.shape[1]), dim=1)
            whole = parts.sum(dim=1, keepdim=True).clamp(min=torch.finfo(parts.dtype).tiny)
            reasons["nearest"][layer] = nearest
            reasons["channels"][layer] = best.indices
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

    def learn(self, summary: Summary) -> Self:
        """Take over class means and pooled deviations (Eq. 8)."""
        super().learn(summary)
        floored = {layer: floored_std(summary.sums[layer]) for layer in self.widths_}
        self.std_ = {layer: std for layer, (std, _) in floored.items()}
        for layer, (_, is_dead) in floored.items():
            if bool(is_dead.any()):
                message = f"layer {layer.removeprefix('|')!r}: {int(is_dead.sum())} dead channels"
                self.findings_.append(Finding("dead-channels", "info", message, "their deviation is a floor"))
        return self

    @cached_property
    def _classes(self) -> dict[str, Any]:
        return {layer: gaussian.prepare_nearest(self.mean_[layer], self.std_[layer]) for layer in self.widths_}

    def layer_score(self, outputs: Outputs, layer: str) -> tuple[Tensor, Tensor]:
        """FR_ℓ and the nearest class (Eq. 10–11)."""
        return gaussian.nearest_prepared(outputs.features[layer], self._classes[layer])

    def channel_parts(self, x: Tensor, nearest: Tensor, layer: str) -> Tensor:
        """ρ² of each channel (Eq. 9)."""
        mean, std = self.mean_[layer].to(x.device), self.std_[layer].to(x.device)
        return gaussian.univariate_distance(wide(x), std, mean[nearest], std).square()


@options
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

    needs = Needs(layers="all", sums="diagonal", group=by_prediction)
    ood_sigma: Literal["printed", "both"] = "printed"
    ood_means: Literal["one", "predicted"] = "one"

    def learn(self, summary: Summary) -> Self:
        """Take over the OOD samples' means and deviations (Eq. 12)."""
        Detector.learn(self, summary)
        one = self.ood_means == "one"
        sums = {layer: summary.sums[layer].pooled() if one else summary.sums[layer] for layer in self.widths_}
        self.mean_ = {layer: each.mean[each.count > 0] for layer, each in sums.items()}
        self.std_ = {layer: floored_std(each)[0] for layer, each in sums.items()}
        self.own_std_ = dict(self.std_)
        return self

    def beside(self, known: IgeoodFeatures) -> Self:
        """Take the sample's deviation from the in-distribution samples, if that is the one to take."""
        self.own_std_ = dict(known.std_ if self.ood_sigma == "printed" else self.std_)
        return self

    @property
    def term_names(self) -> list[str]:
        """The layers against OOD."""
        return [f"{layer}{OOD_SUFFIX}" for layer in self.widths_]

    def layer_score(self, outputs: Outputs, layer: str) -> tuple[Tensor, Tensor]:
        """Minus FR′_ℓ (Eq. 12), and the nearest mean."""
        if self.ood_sigma == "both":  # with one deviation the nearest mean is found as that of a class
            distance, nearest = super().layer_score(outputs, layer)
            return -distance, nearest
        x = outputs.features[layer]
        mean, std, own = (t[layer].to(x.device) for t in (self.mean_, self.std_, self.own_std_))
        apart = by_rows(lambda rows: gaussian.distance(wide(rows)[:, None], own, mean, std), x, mean.numel())
        least = apart.min(dim=1)
        return -least.values, least.indices

    def explain(self, outputs: Outputs, top: int) -> dict[str, Any]:  # noqa: ARG002
        """Nothing: the in-distribution layers say more."""
        return {}


@options
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

    def learn(self, summary: Summary) -> Self:
        """Whiten by the pooled covariance."""
        super().learn(summary)
        self.whitening_ = {layer: whiten(summary.sums[layer].covariance) for layer in self.widths_}
        pooled = {layer: summary.sums[layer].pooled() for layer in self.widths_ if self.relative}
        self.background_mean_ = {layer: sums.mean for layer, sums in pooled.items()}
        w = self.whitening_
        self.background_whitening_ = {k: w[k] @ whiten(w[k].T @ s.covariance @ w[k]) for k, s in pooled.items()}
        return self

    @cached_property
    def _classes(self) -> dict[str, "Whitened"]:
        return {layer: Whitened(self.mean_[layer], self.whitening_[layer]) for layer in self.widths_}

    @cached_property
    def _background(self) -> dict[str, "Whitened"]:
        means = self.background_mean_.items()
        return {layer: Whitened(mean, self.background_whitening_[layer]) for layer, mean in means}

    def layer_score(self, outputs: Outputs, layer: str) -> tuple[Tensor, Tensor]:
        """The distance to the nearest class, and that class."""
        x = outputs.features[layer]
        score, nearest = self._classes[layer].distance(x)
        if self.relative:
            score = score - self._background[layer].distance(x)[0]
        return score, nearest

    def channel_parts(self, x: Tensor, nearest: Tensor, layer: str) -> Tensor:
        """See `whitened_parts`."""
        return whitened_parts(x, self.mean_[layer].to(x.device)[nearest], self.whitening_[layer].to(x.device))


def whitened_parts(x: Tensor, centres: Tensor, whitening: Tensor) -> Tensor:
    """Squares of the whitened difference turned back to the channels, Σ^{+1/2}(f − μ): they sum to the distance."""
    directions: Tensor = whitening / torch.linalg.vector_norm(whitening, dim=0)  # (k, r), orthonormal
    return ((wide(x) - centres) @ whitening @ directions.T).square()


class Whitened:
    """Class means (C, k) in the space that a whitening (k, r) maps to, for distances to the nearest of them."""

    def __init__(self, means: Tensor, whitening: Tensor) -> None:
        origin = wide(means).mean(dim=0)
        whitening = wide(whitening).contiguous()
        self.width = max(means.shape)
        centres = (wide(means) - origin) @ whitening  # (C, r)
        self.tensors = (origin, whitening, centres, 0.5 * centres.square().sum(dim=1))

    def distance(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Squared Mahalanobis distance (N,) of x (N, k) to the nearest class, and that class.

        The nearest is found by one matmul in the whitened space; its distance is then computed without cancellation.
        """
        origin, whitening, centres, half = (t.to(x.device) for t in self.tensors)
        # one block for all: small pieces between large ones would fragment memory
        distance = half.new_empty(x.shape[0])
        nearest = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
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
