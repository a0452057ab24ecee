"""fDBD: distances to the decision boundaries."""

from functools import cached_property

import torch
from torch import Tensor

from igeood.detectors.head import MeanDetector
from igeood.detectors.registry import register
from igeood.geometry.precision import by_rows, wide
from igeood.outputs import Outputs


@register("fdbd", title="fDBD", style=("#F0E442", "-", "D"), tunes=False)
class FDBD(MeanDetector):
    r"""Minus the mean distance to the other classes' decision boundaries over that to the training mean (Liu, 2024).

    :math:`-\frac{1}{C-1}\sum_{c \ne \hat y} \frac{f_{\hat y} - f_c}{\lVert w_{\hat y} - w_c\rVert} \big/
    \lVert z - \bar z\rVert`.
    """

    @cached_property
    def _inverse(self) -> Tensor:
        apart = torch.cdist(self.weight_, self.weight_, compute_mode="donot_use_mm_for_euclid_dist")  # (C, C)
        return torch.where(apart > 0, 1.0 / apart, 0.0) / max(1, len(apart) - 1)

    def score(self, outputs: Outputs) -> Tensor:
        """Minus the mean distance to the boundaries over that to the mean."""
        z = self.last_features(outputs)
        inverse = self._inverse.to(z.device)

        def of_rows(z: Tensor) -> Tensor:
            logits = self.logits(z)
            best = logits.max(dim=1)
            boundary = ((best.values[:, None] - logits) * inverse[best.indices]).sum(dim=1)
            length: Tensor = torch.linalg.vector_norm(wide(z) - self.mean_.to(z.device), dim=1)
            return -boundary / length.clamp(min=1e-12)

        return by_rows(of_rows, z, max(inverse.shape[0], z.shape[1]))
