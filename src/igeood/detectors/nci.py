"""NCI: how near a feature lies to its class's weights, as in neural collapse."""

import torch
from torch import Tensor

from igeood.detectors.head import MeanDetector
from igeood.detectors.options import options
from igeood.detectors.registry import register
from igeood.geometry.precision import wide
from igeood.outputs import Outputs


@register("nci", title="NCI", style=("#F0E442", "--", "v"), tunes=False)
@options
class NCI(MeanDetector):
    r""":math:`-\big(w_c^\top \frac{z - \bar z}{\lVert z - \bar z\rVert} + \alpha\lVert z\rVert_1\big)` (2025).

    c is the predicted class, z̄ the mean of all training rows.

    Parameters
    ----------
    alpha : float
        α.
    """

    alpha: float = 1e-4

    def score(self, outputs: Outputs) -> Tensor:
        """Minus the projection on the predicted class's weights, and the length."""
        z = wide(self.last_features(outputs))
        apart = z - self.mean_.to(z.device)
        weight = self.weight_.to(z.device)[outputs.logits.argmax(dim=1)]
        length: Tensor = torch.linalg.vector_norm(apart, dim=1).clamp(min=1e-12)
        projection: Tensor = (weight * apart).sum(dim=1) / length
        return -projection - self.alpha * z.abs().sum(dim=1)
