"""Relative Mahalanobis on the last layer."""

from igeood.detectors.gaussians import Mahalanobis
from igeood.detectors.registry import register
from igeood.summary import Needs


@register(
    "relative-mahalanobis",
    title="Relative Mahalanobis",
    fixed={"relative": True},
    style=("#009E73", "-", "v"),
    tunes=False,
)
class RelativeMahalanobis(Mahalanobis):
    r""":math:`\min_y (z-\mu_y)^\top\Sigma^{-1}(z-\mu_y) - (z-\mu_0)^\top\Sigma_0^{-1}(z-\mu_0)` (Ren et al., 2021).

    The second Gaussian is that of all classes together.
    """

    needs = Needs(layers="last", labels=True, sums="full")
