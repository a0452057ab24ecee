"""The largest logit."""

from torch import Tensor

from igeood.detectors.base import Detector
from igeood.detectors.registry import register
from igeood.geometry.precision import wide
from igeood.outputs import Outputs


@register("max-logit", title="Max logit", style=("#E69F00", "--", "1"), tunes=False)
class MaxLogit(Detector):
    r"""Minus the largest logit, :math:`-\max_y f_y` (Hendrycks et al., 2022)."""

    def _score(self, batch: Outputs) -> Tensor:
        return -wide(batch.logits.amax(dim=1))
