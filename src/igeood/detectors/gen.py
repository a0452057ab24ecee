"""GEN: a generalised entropy of the largest probabilities."""

import torch
from torch import Tensor

from igeood.detectors.logits import LogitsDetector
from igeood.detectors.options import options
from igeood.detectors.registry import register
from igeood.geometry import categorical
from igeood.geometry.precision import by_rows
from igeood.outputs import Outputs


def generalised_entropy(logits: Tensor, gamma: float = 0.1, largest: int = 100, temperature: float = 1.0) -> Tensor:
    r""":math:`\sum_{m \le M} q_{(m)}^\gamma (1 - q_{(m)})^\gamma` over the M largest probabilities, (N,).

    In logarithms: 1 − q of a confident class is the sum of the others, which 1 − q itself would round to 0.

    >>> generalised_entropy(torch.zeros(1, 2), gamma=1.0).item()
    0.5
    """

    def of_rows(f: Tensor) -> Tensor:
        log_q = categorical.log_softmax(f, temperature).sort(dim=-1, descending=True).values
        rest = torch.logsumexp(log_q[..., 1:], dim=-1, keepdim=True)  # of the first; of others q is at most a half
        log_p = log_q[..., :largest]
        others = torch.cat([rest, torch.log1p(-log_p[..., 1:].exp())], dim=-1)
        return (gamma * (log_p + others).clamp(min=-1e30)).exp().sum(dim=-1)

    return by_rows(of_rows, logits, logits.shape[-1])


@register("gen", title="GEN", style=("#CC79A7", ":", "3"))
@options
class Gen(LogitsDetector):
    """Generalised entropy (Liu et al., 2023).

    Parameters
    ----------
    gamma : float
        The power.
    largest : int
        M, how many of the largest probabilities are summed.
    temperature : float
        Of the softmax.
    probabilities : bool
        The arrays hold probabilities, not logits.
    """

    gamma: float = 0.1
    largest: int = 100

    def score(self, outputs: Outputs) -> Tensor:
        """The generalised entropy."""
        return generalised_entropy(outputs.logits, self.gamma, self.largest, self.temperature)
