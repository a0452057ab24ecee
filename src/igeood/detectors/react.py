"""ReAct: the energy of clipped features."""

from typing import Literal

from torch import Tensor
from typing_extensions import Self

from igeood.detectors.head import ShapedEnergy, quantile
from igeood.detectors.options import options
from igeood.detectors.registry import register
from igeood.geometry.precision import wide
from igeood.summary import Summary

PERCENTILES = (85.0, 90.0, 95.0, 99.0)
CHANGED = 0.01  # of the training rows may change their class


@register("react", title="ReAct", style=("#009E73", ":", "4"), tunes=False)
@options
class React(ShapedEnergy):
    r""":math:`-\log\sum_y e^{f_y}` with :math:`f = W\min(z, c) + b` (Sun et al., 2021).

    Parameters
    ----------
    percentile : float or "auto"
        Of all entries of the training features, which is c. 90 in its paper, which destroys some classifiers: "auto"
        is the first of 85, 90, 95 and 99 that changes the class of at most 1% of the training rows.

    Attributes
    ----------
    ceiling_ : Tensor
        c.
    """

    percentile: float | Literal["auto"] = "auto"

    def learn(self, summary: Summary) -> Self:
        """Take over the head, and choose the ceiling."""
        super().learn(summary)
        sample = summary.samples["features"]
        rows, weights = sample.outputs(max(1, (1 << 22) // sum(self.widths_.values()) // sample.strata))
        z = wide(self.last_features(rows))
        entries = weights.repeat_interleave(z.shape[1])
        classes = self.logits(z).argmax(dim=1)
        for percentile in PERCENTILES if self.percentile == "auto" else (self.percentile,):
            self.ceiling_ = quantile(z.flatten(), entries, percentile / 100)
            changed = self.logits(self.shape(z)).argmax(dim=1) != classes
            if float(weights @ changed.to(weights.dtype)) <= CHANGED * float(weights.sum()):
                break
        return self

    def shape(self, z: Tensor) -> Tensor:
        """Clip."""
        return wide(z).minimum(self.ceiling_.to(z.device))
