"""SCALE: the energy of sharpened features."""

from torch import Tensor

from igeood.detectors.ash import Ash, largest
from igeood.detectors.options import options
from igeood.detectors.registry import register
from igeood.geometry.precision import wide


@register("scale", title="SCALE", style=("#009E73", "-.", "+"), tunes=False)
@options
class Scale(Ash):
    r"""Energy of :math:`W z e^{s_1/s_2} + b`: ASH without pruning (Xu et al., 2024).

    Parameters
    ----------
    percentile : float
        Of each row's own entries: s₂ is the sum of those at or above it, s₁ of all.
    """

    percentile: float = 85.0

    def shape(self, z: Tensor) -> Tensor:
        """Scale."""
        z = wide(z)
        _, ratio = largest(z, self.percentile)
        return z * ratio.exp()
