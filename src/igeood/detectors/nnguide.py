"""NNGuide: the energy, guided by the nearest training rows."""

import torch
from torch import Tensor

from igeood.detectors.logits import energy
from igeood.detectors.neighbours import KNN
from igeood.detectors.registry import register
from igeood.geometry.precision import by_rows
from igeood.outputs import Outputs
from igeood.summary import unit_rows


@register("nnguide", title="NNGuide", style=("#0072B2", ":", "d"), tunes=False)
class NNGuide(KNN):
    r"""Minus the energy times the guidance of the k nearest training rows (Park et al., 2023).

    :math:`-E(x)\,\frac1k\sum_{i \le k} E(x_i)\cos(z, z_i)` with :math:`E = \log\sum_y e^{f_y}`, over the k rows of the
    bank with the largest terms.

    Parameters
    ----------
    k : int or "auto"
        "auto" is a third of the rows that the smallest class has in the bank, between 1 and 10.
    rows : int
        Most rows in the bank, of every class alike.

    Attributes
    ----------
    bank_ : Tensor
        (n, d) training rows of length E(x_i), float32.
    k_ : Tensor
        The k in use.
    """

    most = 10

    def bank_rows(self, bank: Outputs) -> Tensor:
        """Rows of the length of their energy."""
        return -energy(bank.logits)[:, None] * super().bank_rows(bank)

    def score(self, outputs: Outputs) -> Tensor:
        """Minus the guided energy."""
        bank = self.bank_.to(outputs.logits.device)
        k = int(self.k_)
        z = self.last_features(outputs)

        def guidance(rows: Tensor) -> Tensor:
            unit = unit_rows(rows)
            with torch.no_grad():  # one more than k: float32 may have the last two in the wrong order
                nearest = (unit.float() @ bank.T).topk(min(k + 1, len(bank)), dim=1).indices
            return (unit[:, None] * bank[nearest].double()).sum(dim=2).topk(k, dim=1).values.mean(dim=1)

        return energy(outputs.logits) * by_rows(guidance, z, max(len(bank), k * z.shape[1]))
