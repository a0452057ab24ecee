"""The entropy of the softmax output."""

from torch import Tensor

from igeood.detectors.logits import LogitsDetector
from igeood.detectors.registry import register
from igeood.geometry import categorical
from igeood.geometry.precision import by_rows
from igeood.outputs import Outputs


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Entropy :math:`-\sum_y q_y \log q_y` at temperature T, (N,).

    >>> entropy(Tensor([[0.0, 0.0]])).item()
    0.69314...
    """

    def of_rows(f: Tensor) -> Tensor:
        log_q = categorical.log_softmax(f, temperature)
        return -(log_q.exp() * log_q.clamp(min=-1e4)).sum(dim=-1)  # a class that is masked adds 0

    return by_rows(of_rows, logits, logits.shape[-1])


@register("entropy", title="Entropy", style=("#000000", "--", "2"))
class Entropy(LogitsDetector):
    """The entropy of the softmax output.

    Parameters
    ----------
    temperature : float
        Of the softmax.
    probabilities : bool
        See `Detector`.
    """

    def _score(self, batch: Outputs) -> Tensor:
        return entropy(batch.logits, self.temperature)
