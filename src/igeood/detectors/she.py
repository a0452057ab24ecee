"""SHE: the inner product with the predicted class's pattern."""

import torch
from torch import Tensor
from typing_extensions import Self

from igeood.detectors.base import Detector
from igeood.detectors.registry import register
from igeood.errors import Finding
from igeood.geometry.precision import wide
from igeood.outputs import Outputs
from igeood.summary import Needs, Summary, by_correct


@register("she", title="SHE", style=("#CC79A7", "-.", "s"), tunes=False)
class SHE(Detector):
    r""":math:`-\langle z, \bar z_{\hat y}\rangle`: z with the predicted class's pattern (Zhang et al., 2023).

    The pattern is the mean of the class's correctly classified training rows.

    Attributes
    ----------
    pattern_ : Tensor
        (C, k) these means; of a class that is never predicted correctly, the mean of all.
    """

    needs = Needs(layers="last", labels=True, sums="mean", group=by_correct)

    def learn(self, summary: Summary) -> Self:
        """Take over the patterns."""
        super().learn(summary)
        (sums,) = (summary.sums[layer] for layer in self.widths_)
        missed = sums.count == 0
        overall = sums.count @ sums.mean / sums.count.sum().clamp(min=1.0)
        self.pattern_ = torch.where(missed[:, None], overall, sums.mean)
        if bool(missed.any()):
            message = f"labels: {int(missed.sum())} classes are never predicted: {int(missed.nonzero()[0])}, …"
            cure = "the mean of all correct rows stands for it: choose another method if there are many"
            self.findings_.append(Finding("never-correct", "info", message, cure))
        return self

    def score(self, outputs: Outputs) -> Tensor:
        """Minus the inner product with the predicted class's pattern."""
        z = wide(self.last_features(outputs))
        pattern = self.pattern_.to(z.device)
        return -(z * pattern[outputs.logits.argmax(dim=1)]).sum(dim=1)
