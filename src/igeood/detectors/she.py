"""SHE: the inner product with the predicted class's pattern."""

import torch
from torch import Tensor

from igeood.detectors.base import Detector
from igeood.detectors.registry import register
from igeood.geometry.precision import wide
from igeood.outputs import Outputs
from igeood.summary import Needs, Summary


@register("she", title="SHE", style=("#CC79A7", "-.", "s"), tunes=False)
class SHE(Detector):
    r""":math:`-\langle z, \bar z_{\hat y}\rangle`: z with the predicted class's pattern (Zhang et al., 2023).

    The pattern is the mean of the class's correctly classified training rows.

    Attributes
    ----------
    pattern_ : Tensor
        (C, k) these means; of a class that is never predicted correctly, the mean of all.
    """

    needs = Needs(layers="last", labels=True, sums="mean", group="correct")

    def _learn(self, summary: Summary) -> None:
        (sums,) = summary.sums.values()
        missed = sums.count == 0
        overall = sums.count @ sums.mean / sums.count.sum().clamp(min=1.0)
        self.pattern_ = torch.where(missed[:, None], overall, sums.mean)
        if bool(missed.any()):
            first, n = int(missed.nonzero()[0]), int(missed.sum())
            which = f"class {first} is never predicted correctly ({n} classes are not)"
            self.notes_ = (f"labels: {which}; the mean of all correct rows stands for it",)

    def _score(self, batch: Outputs) -> Tensor:
        z, pattern = wide(self._last_features(batch)), self.pattern_.to(batch.logits.device)
        return -(z * pattern[batch.logits.argmax(dim=1)]).sum(dim=1)
