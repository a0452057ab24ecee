"""CADRef: what of a feature's difference from its class speaks for the class, and what against it."""

import torch
from torch import Tensor
from typing_extensions import Self

from igeood.detectors.head import HeadDetector
from igeood.detectors.logits import energy
from igeood.detectors.registry import register
from igeood.geometry.precision import wide
from igeood.outputs import Outputs
from igeood.summary import Needs, Summary

LEAST = 1e-2  # of the training rows' mean: an energy near 0 would make anything of a score

NO_WEIGHT = 1e-3  # of the largest: what is less has the sign of rounding


@register("cadref", title="CADRef", style=("#CC79A7", "-", "d"), tunes=False)
class CADRef(HeadDetector):
    r""":math:`\big(\lVert(ds)_+\rVert_1 / L + \lVert(-ds)_+\rVert_1 / \bar L\big) / \lVert z\rVert_1` (2025).

    d is z less the mean of the predicted class c, s the signs of the head's weights of c (0 for those below 1e-3 of the
    largest), L = logsumexp of the logits.

    Attributes
    ----------
    mean_ : Tensor
        (C, k) class means; of a class without rows, the mean of all.
    level_ : Tensor
        L's mean over training rows.
    """

    needs = Needs(layers="last", head=True, labels=True, sums="mean", samples=("features",))

    def learn(self, summary: Summary) -> Self:
        """Take over the head and the class means."""
        super().learn(summary)
        (sums,) = (summary.sums[layer] for layer in self.widths_)
        overall = sums.count @ sums.mean / sums.count.sum()
        self.mean_ = torch.where((sums.count > 0)[:, None], sums.mean, overall)
        pairs = [(-energy(part.logits), weights) for part, weights in summary.samples["features"].batches()]
        levels, weights = (torch.cat(side).double() for side in zip(*pairs, strict=True))
        self.level_ = torch.stack([weights @ levels, LEAST * (weights @ levels.abs())]).max() / weights.sum()
        return self

    def score(self, outputs: Outputs) -> Tensor:
        """The two parts, each over the length of z and an energy."""
        z = wide(self.last_features(outputs))
        best = outputs.logits.argmax(dim=1)
        weight = self.weight_.to(z.device)
        signs = torch.where(weight.abs() > NO_WEIGHT * weight.abs().max(), weight.sign(), 0.0)
        sided = (z - self.mean_.to(z.device)[best]) * signs[best]
        level = self.level_.to(z.device).clamp(min=1e-12)
        energies = torch.maximum(-energy(outputs.logits), LEAST * level)
        parts = sided.clamp(min=0.0).sum(dim=1) / energies - sided.clamp(max=0.0).sum(dim=1) / level
        return parts / z.abs().sum(dim=1).clamp(min=1e-12)
