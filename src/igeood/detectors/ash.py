"""ASH-S: the energy of pruned and sharpened features."""

import torch
from torch import Tensor

from igeood.detectors.head import ShapedEnergy
from igeood.detectors.options import options
from igeood.detectors.registry import register
from igeood.geometry.precision import wide


def largest(z: Tensor, percentile: float) -> tuple[Tensor, Tensor]:
    """Which entries of each row are at or above its percentile, (N, k), and s₁/s₂: its sum over theirs, (N, 1)."""
    kept = max(1, z.shape[1] - round(z.shape[1] * percentile / 100))
    mask = z >= z.detach().topk(kept, dim=1).values[:, -1:]
    above = torch.where(mask, z, 0.0).sum(dim=1, keepdim=True)
    ratio = z.sum(dim=1, keepdim=True) / above.clamp(min=1e-30)
    return mask, ratio.clamp(min=0.0, max=z.shape[1] / kept)  # where entries are ≥ 0, it lies there


@register("ash", title="ASH-S", style=("#009E73", "--", "H"), tunes=False)
@options
class Ash(ShapedEnergy):
    r"""Energy of :math:`W z' + b`: z below its own percentile is 0, the rest times :math:`e^{s_1/s_2}` (2023).

    :math:`s_1` and :math:`s_2` are the sums of z before and after pruning (Djurisic et al.).

    Parameters
    ----------
    percentile : float
        Of each row's own entries.
    """

    percentile: float = 90.0

    def shape(self, z: Tensor) -> Tensor:
        """Prune, and scale the rest."""
        z = wide(z)
        mask, ratio = largest(z, self.percentile)
        return torch.where(mask, z, 0.0) * ratio.exp()
