"""Mahalanobis++ and relative Mahalanobis++: Mahalanobis on rows of length 1."""

from torch import Tensor

from igeood.detectors.gaussians import Mahalanobis
from igeood.detectors.registry import register
from igeood.outputs import Outputs
from igeood.summary import Needs, unit_rows


@register(
    "relative-mahalanobis++",
    title="Relative Mahalanobis++",
    fixed={"relative": True},
    style=("#009E73", ":", "v"),
    tunes=False,
)
@register("mahalanobis++", title="Mahalanobis++", fixed={"relative": False}, style=("#009E73", "--", "^"), tunes=False)
class MahalanobisPlusPlus(Mahalanobis):
    r""":math:`\min_y (u-\mu_y)^\top\Sigma^{-1}(u-\mu_y)` with :math:`u = z/\lVert z\rVert` of the last layer (2025).

    `relative-mahalanobis++` subtracts the distance to one Gaussian of all such rows.
    """

    needs = Needs(layers="last", labels=True, sums="full", transform=unit_rows)

    def layer_score(self, outputs: Outputs, layer: str) -> tuple[Tensor, Tensor]:
        """The distance of rows of length 1."""
        return super().layer_score(outputs.replace(features={layer: unit_rows(outputs.features[layer])}), layer)

    def channel_parts(self, x: Tensor, nearest: Tensor, layer: str) -> Tensor:
        """Parts of rows of length 1."""
        return super().channel_parts(unit_rows(x), nearest, layer)
