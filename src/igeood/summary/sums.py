"""Sums over training rows that add: counts, means and scatter of classes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from igeood.geometry.precision import chunk_rows, row_chunks, wide


@dataclass(frozen=True)
class ClassSums:
    """Count, mean and scatter of the classes' features, in float64; those of batches and shards add with ``+``.

    The scatter is about each class's own mean and summed over classes: (k,) for each channel, or (k, k) in full; it may
    be left out. Means are kept as differences from an origin among them, so that a large offset does not round them.
    """

    count: Tensor  # (C,)
    origin: Tensor  # (k,)
    shift: Tensor  # (C, k)
    scatter: Tensor  # (k,) or (k, k), or (0,) where it is left out

    @classmethod
    def of(cls, features: Tensor, labels: Tensor, n_classes: int, kind: str = "diagonal") -> "ClassSums":
        """Sums of one batch: features (N, k) and labels (N,); `kind` is that of `Needs.sums`."""
        x = features.detach()
        k = x.shape[1]
        few = wide(x[:256])
        origin = few.sum(dim=0) / max(1, len(few))
        shift = few.new_zeros(n_classes, k)
        for part, classes in _chunks(x, labels, origin, k):
            shift.index_add_(0, classes, part)
        count = torch.bincount(labels, minlength=n_classes).to(shift.dtype)
        shift /= count.clamp(min=1.0)[:, None]
        scatter = shift.new_zeros({"full": (k, k), "diagonal": (k,)}.get(kind, (0,)))
        chunks = _chunks(x, labels, origin, k // 4 if kind == "full" else k)  # a matmul wants more rows
        for part, classes in chunks if scatter.numel() else ():
            part.sub_(shift.index_select(0, classes))
            if kind == "full":
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
        scatter = self.scatter
        if scatter.numel():
            scatter = scatter + other.scatter + _weighted_squares(self.count * share, apart, full=scatter.ndim == 2)
        return ClassSums(count, self.origin, shift, scatter)

    def pooled(self) -> "ClassSums":
        """Sums of all classes taken as one, about their common mean."""
        n = self.count.sum()
        shift = (self.count[:, None] * self.shift).sum(dim=0, keepdim=True) / n  # (1, k)
        between = _weighted_squares(self.count, self.shift - shift, full=self.scatter.ndim == 2)
        return replace(self, count=n[None], shift=shift, scatter=self.scatter + between)

    @property
    def mean(self) -> Tensor:
        """Class means (C, k); undefined for a class without samples."""
        return self.origin + self.shift

    @property
    def present(self) -> Tensor:
        """(C',) the classes that have rows."""
        return (self.count > 0).nonzero()[:, 0]

    @property
    def covariance(self) -> Tensor:
        """Pooled covariance, or its diagonal, with 1/N (Eq. 8)."""
        return self.scatter / self.count.sum()

    @property
    def variance(self) -> Tensor:
        """Pooled variance of each channel, (k,)."""
        return self.covariance.diagonal() if self.scatter.ndim == 2 else self.covariance


@dataclass(frozen=True)
class LengthSums:
    """Full sums of features as they are, and of the same rows at length 1: two `ClassSums` with one count."""

    count: Tensor  # (C,)
    origin: Tensor
    shift: Tensor
    scatter: Tensor
    unit_origin: Tensor
    unit_shift: Tensor
    unit_scatter: Tensor

    @classmethod
    def of(cls, features: Tensor, labels: Tensor, n_classes: int) -> "LengthSums":
        """Sums of one batch: features (N, k) and labels (N,)."""
        raw = ClassSums.of(features, labels, n_classes, "full")
        return cls._pair(raw, ClassSums.of(unit_rows(features), labels, n_classes, "full"))

    @classmethod
    def _pair(cls, raw: ClassSums, unit: ClassSums) -> "LengthSums":
        return cls(raw.count, raw.origin, raw.shift, raw.scatter, unit.origin, unit.shift, unit.scatter)

    @property
    def raw(self) -> ClassSums:
        """Of the features as they are."""
        return ClassSums(self.count, self.origin, self.shift, self.scatter)

    @property
    def unit(self) -> ClassSums:
        """Of rows of length 1."""
        return ClassSums(self.count, self.unit_origin, self.unit_shift, self.unit_scatter)

    def __add__(self, other: "LengthSums") -> "LengthSums":
        return self._pair(self.raw + other.raw, self.unit + other.unit)


def unit_rows(z: Tensor) -> Tensor:
    """Rows (N, k) of length 1, in float64; a row of zeros stays as it is."""
    z = wide(z)
    length: Tensor = torch.linalg.vector_norm(z, dim=1, keepdim=True)
    return z / length.clamp(min=1e-12)


def _chunks(x: Tensor, labels: Tensor, origin: Tensor, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of x less the origin and their labels, by chunks, in one buffer: fresh memory costs more than sums do."""
    buffer = origin.new_empty(min(len(x), chunk_rows(width)), x.shape[1])
    for rows in row_chunks(len(x), width):
        yield buffer[: rows.stop - rows.start].copy_(x[rows]).sub_(origin), labels[rows]


def _weighted_squares(weights: Tensor, x: Tensor, *, full: bool) -> Tensor:
    """Sum over rows of weight · xxᵀ, (k, k), or its diagonal (k,); overwrites x (C, k)."""
    return x.T @ (weights[:, None] * x) if full else weights @ x.square_()
