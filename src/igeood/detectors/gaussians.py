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
LEAST = 1e-3  # of the mean of a covariance's eigenvalues: none is taken for smaller
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
    classes_ : Tensor
        (C',) the classes that have rows.
    mean_ : dict of Tensor
        For each layer (C', k) their means.
    """

    def learn(self, summary: Summary) -> Self:
        """Take over the class means."""
        super().learn(summary)
        if not self.widths_:
            raise UnsuitedError("the model has none but its head", argument="layers", cure="use a method such as 'knn'")
        self.classes_ = summary.sums[next(iter(self.widths_))].present
        self.mean_ = {layer: summary.sums[layer].mean[self.classes_] for layer in self.widths_}
        alone = (summary.counts == 1).nonzero()[:, 0].tolist()
        if alone:
            message = f"labels: class {alone[0]} has a single sample ({len(alone)} of {len(summary.counts)} classes do)"
            cure = "give more samples: its mean is that sample, deviations are pooled over all classes"
            self.findings_.append(Finding("single-sample", "info", message, cure))
        return self

    @abstractmethod
    def layer_score(self, outputs: Outputs, layer: str) -> tuple[Tensor, Tensor]:
        """Score of one layer, (N,), and its nearest mean's place in `mean_`, (N,)."""

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
        nearest = {layer: self.layer_score(outputs, layer)[1] for layer in self.widths_}
        parts = {layer: self.channel_parts(outputs.features[layer], at, layer) for layer, at in nearest.items()}
        return channel_reasons({layer: self.classes_.to(at.device)[at] for layer, at in nearest.items()}, parts, top)


def channel_reasons(nearest: dict[str, Tensor], parts: dict[str, Tensor], top: int) -> dict[str, Any]:
    """For each layer its nearest class (N,), the channels with the largest parts (N, k), and their shares."""
    best = {layer: each.topk(min(top, each.shape[1]), dim=1) for layer, each in parts.items()}
    tiny = torch.finfo(torch.float32).tiny
    whole = {layer: each.sum(dim=1, keepdim=True).clamp(min=tiny) for layer, each in parts.items()}
    channels = {layer: each.indices for layer, each in best.items()}
    shares = {layer: each.values / whole[layer] for layer, each in best.items()}
    return {"nearest": nearest, "channels": channels, "channel_shares": shares}


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

    def layer_score(self, outputs: Outputs, layer: str) -> tuple[Tensor, Tensor]:
        """FR_ℓ and the nearest class (Eq. 10–11)."""
        x = outputs.features[layer]
        return gaussian.nearest(x, self.mean_[layer].to(x.device), self.std_[layer].to(x.device))

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
    r"""Mahalanobis distance to the nearest class on each layer, :math:`\min_y (f-\mu_y)^\top\Sigma^{-1}(f-\mu_y)`.

    One covariance for all classes, that of `shrunk_covariance`.

    Parameters
    ----------
    relative : bool
        Subtract the distance to one background Gaussian of all classes together (relative Mahalanobis).

    Attributes
    ----------
    classes_, mean_
        As in `LayerDetector`.
    whitening_ : dict of Tensor
        For each layer (k, k), the inverse root of the covariance.
    background_mean_, background_whitening_ : dict of Tensor
        The same of all classes together, (1, k) and (k, k); empty unless relative.
    """

    needs = Needs(layers="all", labels=True, sums="full")
    relative: bool = False

    def learn(self, summary: Summary) -> Self:
        """Whiten by the covariance."""
        super().learn(summary)
        self.whitening_ = {layer: inverse_root(shrunk_covariance(summary.sums[layer])) for layer in self.widths_}
        pooled = {layer: summary.sums[layer].pooled() for layer in self.widths_ if self.relative}
        self.background_mean_ = {layer: sums.mean for layer, sums in pooled.items()}
        self.background_whitening_ = {layer: inverse_root(shrunk_covariance(sums)) for layer, sums in pooled.items()}
        return self

    @cached_property
    def _classes(self) -> dict[str, "Whitened"]:
        return {layer: Whitened(self.mean_[layer], self.whitening_[layer]) for layer in self.widths_}

    @cached_property
    def _background(self) -> dict[str, "Whitened"]:
        means = self.background_mean_.items()
        return {layer: Whitened(mean, self.background_whitening_[layer]) for layer, mean in means}

    def layer_score(self, outputs: Outputs, layer: str) -> tuple[Tensor, Tensor]:
        """The distance to the nearest class, and that class's place."""
        x = outputs.features[layer]
        score, nearest = self._classes[layer].distance(x)
        if self.relative:
            score = score - self._background[layer].distance(x)[0]
        return score, nearest

    def channel_parts(self, x: Tensor, nearest: Tensor, layer: str) -> Tensor:
        """See `Whitened.parts`."""
        return self._classes[layer].parts(x, nearest)


class Whitened:
    """Class means (C, k) in the space that a whitening (k, k) maps to, for distances to the nearest of them."""

    def __init__(self, means: Tensor, whitening: Tensor) -> None:
        origin = wide(means).mean(dim=0)
        whitening = wide(whitening).contiguous()
        self.width = max(means.shape)
        centres = (wide(means) - origin) @ whitening  # (C, k)
        self.tensors: tuple[Tensor, ...] = (origin, whitening, centres, 0.5 * centres.square().sum(dim=1))

    def _on(self, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(tensor.to(device) for tensor in self.tensors)

    def distance(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Squared Mahalanobis distance (N,) of x (N, k) to the nearest class, and that class's place."""
        chunks = list(row_chunks(x.shape[0], self.width // 2))  # a matmul wants more rows
        if len(chunks) == 1:
            return self._distance(x)
        # one block for all: small pieces between large ones would fragment memory
        distance = self.tensors[0].new_empty(x.shape[0], device=x.device)
        nearest = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
        for rows in chunks:
            distance[rows], nearest[rows] = self._distance(x[rows])
        return distance, nearest

    def _distance(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest is found by one matmul in the whitened space; its distance is computed without cancellation."""
        origin, whitening, centres, half = self._on(x.device)
        z = (wide(x) - origin) @ whitening  # (n, k)
        with torch.no_grad():
            nearest = torch.addmm(half, z, centres.T, alpha=-1.0).argmin(dim=1)
        return (z - centres[nearest]).square().sum(dim=1), nearest

    def parts(self, x: Tensor, nearest: Tensor) -> Tensor:
        """What each channel of Σ^{-1/2}(f − μ) adds to the squared distance from a class, (N, k)."""
        origin, whitening, centres, _ = self._on(x.device)
        return ((wide(x) - origin) @ whitening - centres[nearest]).square()


def shrunk_covariance(sums: ClassSums) -> Tensor:
    r"""Covariance (k, k) of the classes, from any number of rows, in float64.

    With N rows of C classes it is :math:`(1 - C/N)` of the pooled covariance within classes and :math:`C/N` of that of
    all rows; then :math:`\min(\tfrac12, k/10N)` of it is replaced by its mean eigenvalue times the identity.
    """
    n = sums.count.sum()
    k = sums.scatter.shape[0]
    within = len(sums.present) / n
    covariance = (1.0 - within) * sums.covariance + within * sums.pooled().covariance
    share = (k / (10.0 * n)).clamp(max=0.5)
    level = covariance.diagonal().mean()
    return (1.0 - share) * covariance + share * level * torch.eye(k).to(covariance)


def inverse_root(covariance: Tensor) -> Tensor:
    """The symmetric Σ^{-1/2} (k, k) in float64, of eigenvalues that are at least 1e-3 of their mean; of 0, identity."""
    values, vectors = torch.linalg.eigh(covariance)
    level = values.clamp(min=0.0).mean()
    floored = values.clamp(min=LEAST * level) if float(level) > 0.0 else torch.ones_like(values)
    root: Tensor = (vectors / floored.sqrt()) @ vectors.T
    return root


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
