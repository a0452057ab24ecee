r"""The per-layer family: one Gaussian a class on each layer's features (the paper's Eq. 8–12), and Mahalanobis.

Statistics stream: `ClassSums` of batches add up, so no more than a large batch or a few small ones are held at a time.
"""

import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from igeood.detectors.base import Detector
from igeood.errors import IgeoodWarning, InputError
from igeood.geometry import gaussian
from igeood.geometry.precision import by_rows, chunk_rows, row_chunks, wide
from igeood.outputs import Array, ArrayLike, Outputs

DEAD = 1e-4  # a channel whose deviation is below this part of the layer's median has its deviation raised to it
NOISE = (100.0 * 2.0**-23) ** 2  # a variance's share of the greatest that the rounding of a float32 network may make
HELD = 1 << 22  # values of small batches that are held to be summed together


@dataclass(frozen=True)
class ClassSums:
    """Count, mean and scatter of the classes' features, in float64; those of batches and shards add with ``+``.

    The scatter is about each class's own mean and summed over classes: (k,) for each channel, or (k, k) in full.
    Means are kept as differences from an origin among them, so that a large offset does not round them.
    """

    count: Tensor  # (C,)
    origin: Tensor  # (k,)
    shift: Tensor  # (C, k)
    scatter: Tensor  # (k,) or (k, k)

    @classmethod
    def of(cls, features: Tensor, labels: Tensor, n_classes: int, *, full: bool = False) -> "ClassSums":
        """Sums of one batch: features (N, k) and labels (N,)."""
        x, k = features.detach(), features.shape[1]
        few = wide(x[:256])
        origin = few.sum(dim=0) / max(1, len(few))
        shift = few.new_zeros(n_classes, k)
        for part, classes in _chunks(x, labels, origin, k):
            shift.index_add_(0, classes, part)
        count = torch.bincount(labels, minlength=n_classes).to(shift.dtype)
        shift /= count.clamp(min=1.0)[:, None]
        scatter = shift.new_zeros((k, k) if full else k)
        for part, classes in _chunks(x, labels, origin, k // 4 if full else k):  # a matmul wants more rows
            part.sub_(shift.index_select(0, classes))
            if full:
                scatter.addmm_(part.T, part)
            else:
                scatter += part.square_().sum(dim=0)
        return cls(count, origin, shift, scatter)

    def __add__(self, other: "ClassSums") -> "ClassSums":
        count = self.count + other.count
        apart = other.shift - self.shift
        apart += other.origin - self.origin  # (C, k), between the means
        share = other.count / count.clamp(min=1.0)  # (C,)
        shift = torch.addcmul(self.shift, share[:, None], apart)
        between = _weighted_squares(self.count * share, apart, full=self.scatter.ndim == 2)
        scatter = self.scatter + other.scatter + between
        return ClassSums(count, self.origin, shift, scatter)

    def pooled(self) -> "ClassSums":
        """Sums of all classes taken as one, about their common mean."""
        n = self.count.sum()
        shift = (self.count[:, None] * self.shift).sum(dim=0, keepdim=True) / n  # (1, k)
        between = _weighted_squares(self.count, self.shift - shift, full=self.scatter.ndim == 2)
        return ClassSums(n[None], self.origin, shift, self.scatter + between)

    @property
    def mean(self) -> Tensor:
        """Class means (C, k); of a class without samples, anything."""
        return self.origin + self.shift

    @property
    def covariance(self) -> Tensor:
        """Pooled covariance, or its diagonal, with 1/N (Eq. 8)."""
        return self.scatter / self.count.sum()


def _chunks(x: Tensor, labels: Tensor, origin: Tensor, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of x less the origin and their labels, by chunks, in one buffer: fresh memory costs more than sums do."""
    buffer = origin.new_empty(min(len(x), chunk_rows(width)), x.shape[1])
    for rows in row_chunks(len(x), width):
        yield buffer[: rows.stop - rows.start].copy_(x[rows]).sub_(origin), labels[rows]


def _weighted_squares(weights: Tensor, x: Tensor, *, full: bool) -> Tensor:
    """Sum over rows of weight · xxᵀ, (k, k), or its diagonal (k,); overwrites x (C, k)."""
    return x.T @ (weights[:, None] * x) if full else weights @ x.square_()


def sum_layers(batches: Iterable[Outputs], *, full: bool = False) -> dict[str, ClassSums]:
    """`ClassSums` of each layer over all batches, which are read once."""
    totals: dict[str, ClassSums] = {}
    for batch in _gathered(batches):
        for layer, features in batch.features.items():
            assert batch.labels is not None  # noqa: S101 (`_gathered` has checked it; this tells the type checker)
            part = ClassSums.of(features, batch.labels, batch.n_classes, full=full)
            totals[layer] = totals[layer] + part if layer in totals else part
    _check_counts(next(iter(totals.values())).count)
    return totals


def _gathered(batches: Iterable[Outputs]) -> Iterator[Outputs]:
    """Batches joined until they have a few samples for each class: adding two sums costs as much as one for each.

    They have no logits, only their width.
    """
    held: list[Outputs] = []
    rows = 0
    for batch in batches:
        if not batch.features or batch.labels is None:
            raise InputError("outputs: no features to learn from; give Outputs(logits, features, labels)")
        rows += len(batch)
        full = rows >= 4 * max(256, batch.n_classes) or rows * sum(f.shape[1] for f in batch.features.values()) >= HELD
        features, labels = batch.features, batch.labels
        if not full:  # what is held is a copy: the caller may use its memory again
            features, labels = {layer: f.clone() for layer, f in features.items()}, labels.clone()
        held.append(Outputs.checked(batch.logits[:0].clone(), features, labels, batch.numpy))
        if full:
            joined, held, rows = Outputs.concat(held), [], 0
            yield joined
    if held:
        yield Outputs.concat(held)


def _check_counts(count: Tensor) -> None:
    missing, alone = ((count == c).nonzero()[:, 0].tolist() for c in (0, 1))
    if missing:
        raise InputError(
            f"labels: no sample of class {missing[0]} ({len(missing)} of {len(count)} classes have none); "
            f"give every class at least one, to have a mean"
        )
    if alone:
        warnings.warn(
            f"labels: class {alone[0]} has a single sample ({len(alone)} of {len(count)} classes do); "
            f"its mean is that sample, the deviation is pooled over all classes",
            IgeoodWarning,
            stacklevel=5,
        )


def floored_std(variance: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
    """Standard deviations (k,) with those of dead channels raised to a floor, and which those are, (k,) bool.

    The floor is 1e-4 of the median of the deviations that are not 0; with none such, 1. A deviation of less than a
    float32's rounding of the means (C, k) is 0.
    """
    std = variance.clamp(min=0.0).sqrt()
    std = torch.where(std > torch.finfo(torch.float32).eps * means.abs().amax(dim=0), std, torch.zeros_like(std))
    alive = std[std > 0]
    floor = DEAD * float(alive.median()) if len(alive) else 1.0
    return std.clamp(min=floor), std < floor


class LayerDetector(Detector):
    """A detector with one score a layer: `layer_scores` gives them all, `score` their sum over layers.

    Attributes
    ----------
    mean_ : dict of Tensor
        For each layer (C, k) class means, in the order of the columns.
    """

    needs_labels: ClassVar[bool] = True
    mean_: dict[str, Tensor]

    @property
    def layers_(self) -> list[str]:
        """The layers, in the order of the columns."""
        self.check_fitted()
        return list(self.mean_)

    def layer_scores(self, outputs: Outputs) -> Array:
        """Score of each layer, (N, L): higher is more out-of-distribution."""
        batch = self._scorable(outputs)
        return batch.like(self._layer_scores(batch))

    def _scorable(self, outputs: Outputs | ArrayLike) -> Outputs:
        batch = super()._scorable(outputs)
        check_features(batch, self.mean_, type(self).__name__)
        return batch

    @abstractmethod
    def _layer_scores(self, batch: Outputs) -> Tensor:
        """Layer scores of checked outputs, (N, L)."""

    @abstractmethod
    def channel_shares(self, batch: Outputs, layer: str) -> tuple[Tensor, Tensor]:
        """What each channel adds to the squared distance to the layer's nearest class, (N, k); and that class, (N,)."""

    def step_scores(self, batch: Outputs) -> list[tuple[Tensor, tuple[str, ...] | None]]:
        """See `Detector.step_scores`: each layer has an input step of its own."""
        columns = self._layer_scores(batch)
        return [(columns[:, i], (layer,)) for i, layer in enumerate(self.layers_)]

    def _score(self, batch: Outputs) -> Tensor:
        return self._layer_scores(batch).sum(dim=1)


def check_features(batch: Outputs, means: Mapping[str, Tensor], what: str) -> None:
    """Raise unless the outputs have the layers of these means, in their widths."""
    for layer, mean in means.items():
        if layer not in batch.features:
            have = ", ".join(map(repr, batch.features)) or "none"
            raise InputError(f"outputs: {what} needs the features of layer {layer!r}; these have {have}; give it too")
        width = batch.features[layer].shape[1]
        if width != mean.shape[1]:
            raise InputError(
                f"features[{layer!r}]: {width} channels, but {what} was fitted on {mean.shape[1]}; give the same layer"
            )


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

    state_names: ClassVar[tuple[str, ...]] = ("mean_", "std_", "dead_", "ood_mean_", "ood_std_")
    mean_: dict[str, Tensor]
    std_: dict[str, Tensor]
    dead_: dict[str, Tensor]
    ood_mean_: dict[str, Tensor]
    ood_std_: dict[str, Tensor]

    def _fit(self, batches: Iterable[Outputs]) -> None:
        sums = sum_layers(batches)
        std = {layer: floored_std(s.covariance, s.mean) for layer, s in sums.items()}
        self.mean_ = {layer: s.mean for layer, s in sums.items()}
        self.std_ = {layer: value for layer, (value, _) in std.items()}
        self.dead_ = {layer: dead.sum() for layer, (_, dead) in std.items()}
        self.ood_mean_, self.ood_std_ = {}, {}

    def fit_ood(self, outputs: Outputs) -> "IgeoodFeatures":
        """Take the OOD Gaussian of each layer from OOD samples, for FR′_ℓ."""
        batch = self._scorable(outputs)
        if len(batch) < 2:
            raise InputError(f"ood: {len(batch)} sample(s); a mean and a deviation need at least 2")
        one = torch.zeros(len(batch), dtype=torch.int64, device=batch.logits.device)
        sums = {layer: ClassSums.of(batch.features[layer], one, 1) for layer in self.layers_}
        self.ood_mean_ = {layer: s.mean[0] for layer, s in sums.items()}
        self.ood_std_ = {layer: floored_std(s.covariance, s.mean)[0] for layer, s in sums.items()}
        return self

    def fr_layer(self, batch: Outputs) -> tuple[Tensor, Tensor]:
        """FR_ℓ (Eq. 11) and the nearest class, each (N, L): higher is out-of-distribution."""
        found = [
            gaussian.nearest_distance(batch.features[layer], *_to(batch, self.mean_[layer], self.std_[layer]))
            for layer in self.layers_
        ]
        return torch.stack([d for d, _ in found], dim=1), torch.stack([y for _, y in found], dim=1)

    def fr_layer_ood(self, batch: Outputs) -> Tensor:
        """FR′_ℓ (Eq. 12), (N, L): the distance to the OOD Gaussian; **lower** is out-of-distribution."""
        found = [
            gaussian.nearest_distance(
                batch.features[layer], *_to(batch, self.ood_mean_[layer][None], self.ood_std_[layer])
            )[0]
            for layer in self.layers_
        ]
        return torch.stack(found, dim=1)

    def _layer_scores(self, batch: Outputs) -> Tensor:
        return self.fr_layer(batch)[0]

    def channel_shares(self, batch: Outputs, layer: str) -> tuple[Tensor, Tensor]:
        """What each channel adds to FR_ℓ², its ρ² (Eq. 9), (N, k); and the nearest class, (N,)."""
        x, (means, std) = batch.features[layer], _to(batch, self.mean_[layer], self.std_[layer])
        _, nearest = gaussian.nearest_distance(x, means, std)

        def shares(rows: Tensor) -> Tensor:
            return gaussian.univariate_distance(x[rows], std, means[nearest[rows]], std).square()

        return by_rows(shares, torch.arange(len(x), device=x.device), x.shape[1]), nearest


class Mahalanobis(LayerDetector):
    r"""Mahalanobis distance to the nearest class on each layer, :math:`\min_y (f-\mu_y)^\top\Sigma^+(f-\mu_y)`.

    The covariance is tied: pooled over the classes. Its pseudo-inverse comes from an eigendecomposition in float64.

    Parameters
    ----------
    relative : bool
        Take off the distance to one background Gaussian of all classes together (relative Mahalanobis).

    Attributes
    ----------
    mean_ : dict of Tensor
        For each layer (C, k) class means.
    whitening_ : dict of Tensor
        For each layer (k, r), a root of the pseudo-inverse: its rank is r.
    background_mean_, background_whitening_ : dict of Tensor
        The same of all classes together, (k,) and (k, r); empty unless relative.
    """

    state_names: ClassVar[tuple[str, ...]] = ("mean_", "whitening_", "background_mean_", "background_whitening_")
    whitening_: dict[str, Tensor]
    background_mean_: dict[str, Tensor]
    background_whitening_: dict[str, Tensor]

    def __init__(self, *, relative: bool = False) -> None:
        super().__init__()
        self.relative = relative

    def _fit(self, batches: Iterable[Outputs]) -> None:
        sums = sum_layers(batches, full=True)
        whitening = {layer: whiten(s.covariance) for layer, s in sums.items()}
        background = {layer: s.pooled() for layer, s in sums.items()} if self.relative else {}
        self.mean_ = {layer: s.mean for layer, s in sums.items()}
        self.whitening_ = whitening
        self.background_mean_ = {layer: s.mean[0] for layer, s in background.items()}
        self.background_whitening_ = {layer: whiten(s.covariance) for layer, s in background.items()}

    def _layer_scores(self, batch: Outputs) -> Tensor:
        return torch.stack([self._layer_score(batch, layer) for layer in self.layers_], dim=1)

    def channel_shares(self, batch: Outputs, layer: str) -> tuple[Tensor, Tensor]:
        """What each channel adds to the squared distance, its part of the product with Σ⁺, (N, k); and the class."""
        x, (means, whitening) = batch.features[layer], _to(batch, self.mean_[layer], self.whitening_[layer])
        _, nearest = mahalanobis_distance(x, means, whitening)

        def shares(rows: Tensor) -> Tensor:
            apart = wide(x[rows]) - means[nearest[rows]]
            return apart * (apart @ whitening @ whitening.T)

        return by_rows(shares, torch.arange(len(x), device=x.device), x.shape[1]), nearest

    def _layer_score(self, batch: Outputs, layer: str) -> Tensor:
        x = batch.features[layer]
        score, _ = mahalanobis_distance(x, *_to(batch, self.mean_[layer], self.whitening_[layer]))
        if self.relative:
            mean, whitening = _to(batch, self.background_mean_[layer], self.background_whitening_[layer])
            score = score - mahalanobis_distance(x, mean[None], whitening)[0]
        return score


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


def mahalanobis_distance(x: Tensor, means: Tensor, whitening: Tensor) -> tuple[Tensor, Tensor]:
    """Squared Mahalanobis distance (N,) of x (N, k) to the nearest of the means (C, k), and that class.

    The nearest is found by one matmul in the whitened space; its distance is then computed without cancellation.
    """
    origin = means.mean(dim=0)
    centres = (means - origin) @ whitening  # (C, r)
    half = 0.5 * centres.square().sum(dim=1)
    # one block for all: small pieces between large ones would fragment memory
    distance, nearest = half.new_empty(len(x)), torch.empty(len(x), dtype=torch.int64, device=x.device)
    for rows in row_chunks(len(x), max(means.shape) // 2):  # a matmul wants more rows
        z = (wide(x[rows]) - origin) @ whitening  # (n, r)
        with torch.no_grad():
            found = torch.addmm(half, z, centres.T, alpha=-1.0).argmin(dim=1)
        distance[rows] = (z - centres[found]).square().sum(dim=1)
        nearest[rows] = found
    return distance, nearest


def _to(batch: Outputs, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors on the device of the outputs, in the widest type that it has."""
    like = wide(batch.logits[:0])
    return tuple(tensor.to(like) for tensor in tensors)
