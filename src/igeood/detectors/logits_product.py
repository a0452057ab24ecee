"""The Fisher–Rao product of the logits alone."""

import torch
from torch import Tensor

from igeood.detectors.logits import IgeoodLogits
from igeood.detectors.options import options
from igeood.detectors.registry import register
from igeood.geometry.precision import by_rows, exporting, wide
from igeood.outputs import Outputs

FLOOR = 1e-12  # of a distance, before its logarithm


def centred_energy(logits: Tensor) -> Tensor:
    r""":math:`E = \log\sum_y e^{l_y - \bar l}` with the mean over the finite logits, (N,): at least log C.

    >>> centred_energy(torch.full((1, 4), 7.0)).item()
    1.38629...
    """

    def of_rows(f: Tensor) -> Tensor:
        f = wide(f)
        mean = f.mean(dim=-1)
        if exporting.get() or not bool(mean.isfinite().all()):
            finite = f.isfinite()
            mean = (torch.where(finite, f, 0.0) / finite.sum(dim=-1, keepdim=True)).sum(dim=-1)
        return torch.logsumexp(f, dim=-1) - mean

    return by_rows(of_rows, logits, logits.shape[-1])


@register("logits-product", title="Logits product", fixed={"reduce": "min"}, style=("#D55E00", ":", "8"))
@options
class LogitsProduct(IgeoodLogits):
    r""":math:`\log \min_y d(q(x), \mu_y) - \log E`: the nearest centroid's distance over the centred energy.

    Parameters
    ----------
    temperature : float
        Of the softmax in q and in the centroids.
    probabilities : bool
        The arrays hold probabilities, not logits.
    """

    temperature: float = 5.0

    @property
    def term_names(self) -> list[str]:
        """What the score is made of."""
        return ["nearest centroid", "energy"]

    def terms(self, outputs: Outputs) -> Tensor:
        """Logarithms of the distance and of the energy's inverse."""
        nearest = super().score(outputs).clamp(min=FLOOR)
        energy = centred_energy(outputs.logits).clamp(min=FLOOR)  # 0 where one class alone is not masked
        return torch.stack([nearest.log(), -energy.log()], dim=1)

    def score(self, outputs: Outputs) -> Tensor:
        """The sum of the terms."""
        return self.terms(outputs).sum(dim=1)
