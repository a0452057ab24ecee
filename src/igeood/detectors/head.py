"""Detectors that read the last layer and the classifier's head: its logits are W z + b."""

from abc import abstractmethod
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import Self

from igeood.detectors.base import Detector
from igeood.detectors.gaussians import whiten
from igeood.detectors.logits import energy
from igeood.detectors.options import options
from igeood.errors import Finding, InputError, UnsuitedError
from igeood.geometry.precision import wide
from igeood.outputs import Outputs
from igeood.summary import Needs, Summary

NOT_LINEAR = 1e-3  # the residual of the head as a share of the logits' range, from which on there is none


def solve_head(z: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, int]:
    """Weight (C, k), bias (C,) and rank of the linear map from features z (N, k) to logits (N, C), by least squares.

    Raises where the logits are no linear map of the features. Of directions in which the features do not move, the
    weight is 0.
    """
    rows = logits.isfinite().all(dim=1)
    z, f = wide(z[rows]), wide(logits[rows])
    if len(z) < 2:
        raise UnsuitedError("no row with finite logits", argument="head", cure="give the model, or more rows")
    mean_z = z.mean(dim=0)
    mean_f = f.mean(dim=0)
    root = whiten((z - mean_z).T @ (z - mean_z) / len(z))  # (k, r)
    weight = (f - mean_f).T @ (z - mean_z) @ root @ root.T / len(z)
    bias = mean_f - weight @ mean_z
    residual = float((z @ weight.T + bias - f).square().mean().sqrt())
    span = float(f.max() - f.min())
    if residual > NOT_LINEAR * span:
        problem = f"the logits are not linear in the last layer: off by {100 * residual / span:.2g}% of their range"
        cure = "name the layer that is the head's input last, or use a method without a head, such as 'knn'"
        raise UnsuitedError(problem, argument="head", cure=cure)
    return weight, bias, root.shape[1]


class HeadDetector(Detector):
    """A detector of the last layer's features z and the head's W and b.

    They are the model's own, or for arrays found from the training sample.

    Attributes
    ----------
    weight_, bias_ : Tensor
        (C, k) and (C,), float64.
    """

    needs = Needs(layers="last", head=True, samples=("features",))

    def learn(self, summary: Summary) -> Self:
        """Take over the model's head, or find it."""
        super().learn(summary)
        if summary.head is not None:
            self.weight_, self.bias_ = (wide(part) for part in summary.head)
            return self
        sample = summary.samples["features"]
        rows, _ = sample.outputs(max(1, (1 << 24) // sum(self.widths_.values()) // sample.strata))
        z = self.last_features(rows)
        self.weight_, self.bias_, rank = solve_head(z, rows.logits)
        if rank < z.shape[1]:
            message = f"head: training rows move in {rank} of {z.shape[1]} directions"
            cure = "give the model: what the head does in the other directions is not known, and taken for nothing"
            self.findings_.append(Finding("head-partly-known", "info", message, cure))
        return self

    def logits(self, z: Tensor) -> Tensor:
        """W z + b, (N, C) in float64."""
        return wide(z) @ self.weight_.to(z.device).T + self.bias_.to(z.device)


class MeanDetector(HeadDetector):
    """A detector of the head, and of the mean of the features.

    Attributes
    ----------
    mean_ : Tensor
        (k,) of the training rows.
    """

    needs = Needs(layers="last", head=True, sums="mean", samples=("features",))

    def learn(self, summary: Summary) -> Self:
        """Take over the head and the mean."""
        super().learn(summary)
        (sums,) = (summary.sums[layer] for layer in self.widths_)
        self.mean_ = sums.count @ sums.mean / sums.count.sum()
        return self


@options
class ShapedEnergy(HeadDetector):
    """The energy of the logits that the head makes of shaped features."""

    percentile: float | Literal["auto"] = 90.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.percentile != "auto" and not self.percentile < 100:
            raise InputError(f"must lie between 0 and 100, got {self.percentile!r}", argument="percentile")

    @abstractmethod
    def shape(self, z: Tensor) -> Tensor:
        """Features as the head is to see them, (N, k)."""

    def score(self, outputs: Outputs) -> Tensor:
        """The energy of the shaped features' logits."""
        return energy(self.logits(self.shape(self.last_features(outputs))))


def quantile(values: Tensor, weights: Tensor, share: float) -> Tensor:
    """The least of the values (n,) at or below which lies a share of the weight (n,)."""
    order = values.argsort()
    total = weights[order].cumsum(dim=0)
    place = torch.searchsorted(total, share * total[-1]).clamp(max=len(values) - 1)
    return values[order[place]]
