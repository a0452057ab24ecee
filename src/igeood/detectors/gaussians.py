r"""The per-layer family: one Gaussian a class on each layer's features (the paper's Eq. 8–12), and Mahalanobis."""

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from igeood.detectors.base import Detector, StepScores
from igeood.errors import IgeoodWarning, InputError
from igeood.geometry import gaussian
from igeood.geometry.precision import by_rows, row_chunks, wide
from igeood.outputs import Array, Outputs
from igeood.summary import ClassSums, Needs, Summary

DEAD = 1e-4  # a channel whose deviation is below this part of the layer's median has its deviation raised to it
NOISE = (100.0 * 2.0**-23) ** 2  # a variance's share of the greatest that the rounding of a float32 network may make


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
    """A detector with one score a layer: `layer_scores` returns them all, `score` their sum over layers.

    Attributes
    ----------
    mean_ : dict of Tensor
        For each layer (C, k) class means, in the order of the columns.
    """

    mean_: dict[str, Tensor]

    @property
    def layers_(self) -> list[str]:
        """The layers, in the order of the columns."""
        self.check_fitted()
        return list(self.mean_)

    @property
    def columns_(self) -> list[str]:
        """What the score is made of: the layers."""
        return self.layers_

    @property
    def widths_(self) -> Mapping[str, int]:
        """Layers that are read, and their widths."""
        return {layer: mean.shape[1] for layer, mean in self.mean_.items()}

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
        return torch.stack([self._layer_score(batch, layer)[0] for layer in self.mean_], dim=1)

    def _score(self, batch: Outputs) -> Tensor:
        return self._columns(batch).sum(dim=1)

    def step_scores(self, batch: Outputs) -> StepScores:
        """See `Detector.step_scores`: each layer has an input step of its own."""
        return [(self._layer_score(batch, layer)[0], (layer,)) for layer in self.mean_]

    def _explain(self, batch: Outputs, top: int) -> dict[str, Any]:
        """The nearest class of each layer, and the channels that add most to the distance from it."""
        reasons: dict[str, dict[str, Tensor]] = {"nearest": {}, "channels": {}, "channel_shares": {}}
        for layer in self.mean_:
            x, nearest = batch.features[layer], self._layer_score(batch, layer)[1]

            def largest(rows: Tensor, x: Tensor = x, nearest: Tensor = nearest, layer: str = layer) -> Tensor:
                parts = self._channel_parts(x[rows], nearest[rows], layer)
                best = parts.topk(min(top, parts.shape[1]), dim=1)
                whole = parts.sum(dim=1, keepdim=True).clamp(min=torch.finfo(parts.dtype).tiny)
                return torch.stack([best.indices.to(parts.dtype), best.values / whole], dim=2)  # (n, top, 2)

            pairs = by_rows(largest, torch.arange(len(x), device=x.device), x.shape[1])
            reasons["nearest"][layer] = nearest
            reasons["channels"][layer], reasons["channel_shares"][layer] = pairs[:, :, 0].long(), pairs[:, :, 1]
        return reasons


class IgeoodFeatures(LayerDetector):
    r"""Fisher–Rao distance to the nearest class's Gaussian on each layer, FR_ℓ (Eq. 11); FR′_ℓ with `fit_ood` (Eq. 12).

    Attributes
    ----------
    mean_, std_ : dict of Tensor
        For each layer (C, k) class means and (k,) pooled deviation.
    dead_ : dict of Tensor
        Number of channels of each layer whose deviation was raised to the floor.
    ood_mean_, ood_std_ : dict of Tensor
        (k,) of OOD validation samples; empty before `fit_ood`.
    """

    needs: ClassVar[Needs] = Needs(layers="all", labels=True, sums="diagonal")
    state_names: ClassVar[tuple[str, ...]] = ("mean_", "std_", "dead_", "ood_mean_", "ood_std_")
    mean_: dict[str, Tensor]
    std_: dict[str, Tensor]
    dead_: dict[str, Tensor]
    ood_mean_: dict[str, Tensor]
    ood_std_: dict[str, Tensor]

    def _learn(self, summary: Summary) -> None:
        warn_of_single_samples(summary)
        std = {layer: floored_std(sums) for layer, sums in summary.sums.items()}
        self.mean_ = {layer: sums.mean for layer, sums in summary.sums.items()}
        self.std_ = {layer: value for layer, (value, _) in std.items()}
        self.dead_ = {layer: dead.sum() for layer, (_, dead) in std.items()}
        self.ood_mean_, self.ood_std_ = {}, {}

    def _prepare(self) -> None:
        self._classes = {layer: gaussian.prepare_nearest(mean, self.std_[layer]) for layer, mean in self.mean_.items()}
        self._together = gaussian.Layers(list(self._classes.values()))
        self._ood = {
            layer: gaussian.prepare_nearest(mean[None], self.ood_std_[layer]) for layer, mean in self.ood_mean_.items()
        }

    def _notes(self, n_classes: int) -> tuple[str, ...]:  # noqa: ARG002
        dead = {layer: int(count) for layer, count in self.dead_.items() if count}
        return tuple(f"layer {layer!r}: {n} dead channels, deviation raised to a floor" for layer, n in dead.items())

    def fit_ood(self, outputs: Outputs) -> "IgeoodFeatures":
        """Take the OOD Gaussian of each layer from OOD samples, for FR′_ℓ."""
        batch = self._scorable(outputs)
        if len(batch) < 2:
            raise InputError(f"ood: {len(batch)} sample(s); a mean and a deviation need at least 2")
        one = torch.zeros(len(batch), dtype=torch.int64, device=batch.logits.device)
        sums = {layer: ClassSums.of(batch.features[layer], one, 1) for layer in self.layers_}
        self.ood_mean_ = {layer: s.mean[0] for layer, s in sums.items()}
        self.ood_std_ = {layer: floored_std(s)[0] for layer, s in sums.items()}
        return self._fitted(self.n_classes_)

    def fr_layer_ood(self, batch: Outputs) -> Tensor:
        """FR′_ℓ (Eq. 12), (N, L): the distance to the OOD Gaussian; **lower** is out-of-distribution."""
        distances = [gaussian.nearest_prepared(batch.features[layer], ood)[0] for layer, ood in self._ood.items()]
        return torch.stack(distances, dim=1)

    def _columns(self, batch: Outputs) -> Tensor:
        rows = [batch.features[layer] for layer in self.mean_]
        return self._together.distances(rows) if self._together.fits(rows) else super()._columns(batch)

    def _layer_score(self, batch: Outputs, layer: str) -> tuple[Tensor, Tensor]:
        return gaussian.nearest_prepared(batch.features[layer], self._classes[layer])

    def _channel_parts(self, x: Tensor, nearest: Tensor, layer: str) -> Tensor:
        """ρ² of each channel (Eq. 9)."""
        mean, std = self.mean_[layer].to(x.device), self.std_[layer].to(x.device)
        return gaussian.univariate_distance(wide(x), std, mean[nearest], std).square()


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
        The same of all classes together, (k,) and (k, r); empty unless relative.
    """

    needs: ClassVar[Needs] = Needs(layers="all", labels=True, sums="full")
    state_names: ClassVar[tuple[str, ...]] = ("mean_", "whitening_", "background_mean_", "background_whitening_")
    whitening_: dict[str, Tensor]
    background_mean_: dict[str, Tensor]
    background_whitening_: dict[str, Tensor]

    def __init__(self, *, relative: bool = False) -> None:
        super().__init__()
        self.relative = relative

    def _learn(self, summary: Summary) -> None:
        warn_of_single_samples(summary)
        self.mean_ = {layer: sums.mean for layer, sums in summary.sums.items()}
        self.whitening_ = {layer: whiten(sums.covariance) for layer, sums in summary.sums.items()}
        self.background_mean_, self.background_whitening_ = {}, {}
        for layer, sums in summary.sums.items() if self.relative else ():
            pooled, root = sums.pooled(), self.whitening_[layer]
            self.background_mean_[layer] = pooled.mean[0]
            self.background_whitening_[layer] = root @ whiten(root.T @ pooled.covariance @ root)

    def _prepare(self) -> None:
        self._classes = {layer: Whitened(mean, self.whitening_[layer]) for layer, mean in self.mean_.items()}
        self._background = {
            layer: Whitened(mean[None], self.background_whitening_[layer])
            for layer, mean in self.background_mean_.items()
        }

    def _layer_score(self, batch: Outputs, layer: str) -> tuple[Tensor, Tensor]:
        x = batch.features[layer]
        score, nearest = self._classes[layer].distance(x)
        if self.relative:
            score = score - self._background[layer].distance(x)[0]
        return score, nearest

    def _channel_parts(self, x: Tensor, nearest: Tensor, layer: str) -> Tensor:
        """Squares of the whitened difference turned back to the channels, Σ^{+1/2}(f − μ): they sum to the distance."""
        whitening = self.whitening_[layer].to(x.device)
        directions = whitening / torch.linalg.vector_norm(whitening, dim=0)  # (k, r), orthonormal
        apart = wide(x) - self.mean_[layer].to(x.device)[nearest]
        parts: Tensor = (apart @ whitening @ directions.T).square()
        return parts


class Whitened:
    """Class means (C, k) in the space that a whitening (k, r) maps to, for distances to the nearest of them."""

    def __init__(self, means: Tensor, whitening: Tensor) -> None:
        self.whitening = wide(whitening).contiguous()
        self.origin = wide(means).mean(dim=0)
        self.centres = (wide(means) - self.origin) @ self.whitening  # (C, r)
        self.half = 0.5 * self.centres.square().sum(dim=1)
        self.width = max(means.shape)

    def distance(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Squared Mahalanobis distance (N,) of x (N, k) to the nearest class, and that class.

        The nearest is found by one matmul in the whitened space; its distance is then computed without cancellation.
        """
        origin, whitening, centres, half = (
            t.to(x.device) for t in (self.origin, self.whitening, self.centres, self.half)
        )
        # one block for all: small pieces between large ones would fragment memory
        distance, nearest = half.new_empty(len(x)), torch.empty(len(x), dtype=torch.int64, device=x.device)
        for rows in row_chunks(len(x), self.width // 2):  # a matmul wants more rows
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
    kept = values > values.max().clamp(min=0.0) * len(values) * NOISE
    root: Tensor = vectors[:, kept] / values[kept].sqrt()
    return root


def warn_of_single_samples(summary: Summary) -> None:
    """Warn where a class's mean is its only sample."""
    alone = (summary.counts == 1).nonzero()[:, 0].tolist()
    if alone:
        warnings.warn(
            f"labels: class {alone[0]} has a single sample ({len(alone)} of {len(summary.counts)} classes do); "
            f"its mean is that sample, the deviation is pooled over all classes",
            IgeoodWarning,
            stacklevel=4,
        )
