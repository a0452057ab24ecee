"""ViM: a virtual logit from the features' residual."""

from typing import Literal

import torch
from torch import Tensor
from typing_extensions import Self

from igeood.detectors.gaussians import whiten
from igeood.detectors.head import HeadDetector
from igeood.detectors.logits import energy
from igeood.detectors.options import options
from igeood.detectors.registry import register
from igeood.errors import InputError
from igeood.geometry.precision import wide
from igeood.outputs import Outputs
from igeood.summary import Needs, Summary


@register("vim", title="ViM", style=("#56B4E9", "--", "x"), tunes=False)
@options
class ViM(HeadDetector):
    r""":math:`\alpha\lVert R^\top(z - o)\rVert - \log\sum_y e^{f_y}` (Wang et al., 2022).

    o = −W⁺b; R are the directions of z − o with the least second moment, all but the D main ones; α makes the first
    term's mean that of the largest logit, over training rows.

    Parameters
    ----------
    dimension : int or "auto"
        D. "auto" is 1,000 from 2,048 channels on, 512 from 768 on, else half of them; half of the directions in which
        training rows move, where these are fewer.

    Attributes
    ----------
    origin_, residual_ : Tensor
        o (k,) and R (k, k − D).
    alpha_ : Tensor
        α.
    """

    needs = Needs(layers="last", head=True, sums="full", samples=("features",))
    dimension: int | Literal["auto"] = "auto"

    def learn(self, summary: Summary) -> Self:
        """Take over the head, and find the directions of the residual."""
        super().learn(summary)
        (sums,) = (summary.sums[layer].pooled() for layer in self.widths_)
        width = len(sums.covariance)
        rank = whiten(sums.covariance).shape[1]
        main = 1000 if width >= 2048 else 512 if width >= 768 else width // 2
        main = max(1, main if main < rank else rank // 2) if self.dimension == "auto" else self.dimension
        if main >= width:
            raise InputError(f"{main} of {width} channels leave no residual", argument="dimension", cure="give fewer")
        self.origin_ = -torch.linalg.pinv(self.weight_) @ self.bias_
        apart = sums.mean[0] - self.origin_
        _, directions = torch.linalg.eigh(sums.covariance + torch.outer(apart, apart))  # ascending
        self.residual_ = directions[:, : width - main].contiguous()
        peak = 0.0
        residual = 0.0
        for part, weights in summary.samples["features"].batches():
            peak += float(weights @ wide(part.logits.amax(dim=1)))
            residual += float(weights @ self._residual(part))
        self.alpha_ = torch.tensor(peak / max(residual, 1e-12), dtype=torch.float64)
        return self

    def _residual(self, outputs: Outputs) -> Tensor:
        z = self.last_features(outputs)
        apart = (wide(z) - self.origin_.to(z.device)) @ self.residual_.to(z.device)
        length: Tensor = torch.linalg.vector_norm(apart, dim=1)
        return length

    def score(self, outputs: Outputs) -> Tensor:
        """The scaled residual plus the energy."""
        return self.alpha_.to(outputs.logits.device) * self._residual(outputs) + energy(outputs.logits)
