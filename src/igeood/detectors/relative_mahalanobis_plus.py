"""Relative Mahalanobis++: relative Mahalanobis on rows of length 1."""

from igeood.detectors.mahalanobis_plus import MahalanobisPlusPlus
from igeood.detectors.registry import register


@register(
    "relative-mahalanobis++",
    title="Relative Mahalanobis++",
    fixed={"relative": True},
    style=("#009E73", ":", "v"),
    tunes=False,
)
class RelativeMahalanobisPlusPlus(MahalanobisPlusPlus):
    r"""`relative-mahalanobis` of :math:`z/\lVert z\rVert`: both Gaussians are of rows of length 1 (2025)."""
