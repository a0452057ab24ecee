"""Neighbours among training rows: a bank of them, and the distance to the k-th nearest."""

from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from igeood.detectors.base import Detector
from igeood.detectors.options import options
from igeood.detectors.registry import register
from igeood.errors import InputError
from igeood.geometry.precision import by_rows
from igeood.outputs import Outputs
from igeood.summary import Needs, Summary, unit_rows


@register("knn", title="KNN", style=("#0072B2", "-", "*"), tunes=False)
@options
class KNN(Detector):
    r"""Distance to the k-th nearest training row on the last layer, among rows of length 1 (Sun et al., 2022).

    :math:`\lVert z/\lVert z\rVert - z_{(k)}/\lVert z_{(k)}\rVert \rVert`.

    Parameters
    ----------
    k : int or "auto"
        "auto" is a third of the rows that the smallest class has in the bank, between 1 and 50.
    rows : int
        Most rows in the bank, of every class alike.

    Attributes
    ----------
    bank_ : Tensor
        (n, d) training rows of length 1, float32.
    k_ : Tensor
        The k in use.
    """

    needs = Needs(layers="last", samples=("features",))
    k: int | Literal["auto"] = "auto"
    rows: int = 20_000
    most: ClassVar[int] = 50  # k by default

    def learn(self, summary: Summary) -> Self:
        """Keep a bank of rows."""
        super().learn(summary)
        sample = summary.samples["features"]
        per_class = max(1, self.rows // sample.strata)
        bank, _ = sample.outputs(per_class)
        # k stays below the rows that a class has in the bank: with more, other classes' rows decide
        fewest = int(np.minimum(sample.kept[sample.kept > 0], per_class).min())
        k = max(1, min(self.most, fewest // 3)) if self.k == "auto" else self.k
        if k > len(bank):
            raise InputError(f"{k} neighbours of {len(bank)} rows", argument="k", cure="give more, or a smaller k")
        self.bank_ = self.bank_rows(bank).float()
        self.k_ = torch.tensor(k)
        return self

    def bank_rows(self, bank: Outputs) -> Tensor:
        """What is kept of the bank's rows, (n, d)."""
        return unit_rows(self.last_features(bank))

    def score(self, outputs: Outputs) -> Tensor:
        """The distance to the k-th nearest row."""
        bank = self.bank_.to(outputs.logits.device)
        k = int(self.k_)
        first = max(1, k - 1)

        def distance(rows: Tensor) -> Tensor:
            unit = unit_rows(rows)
            with torch.no_grad():  # the ranks about k: float32 puts rows that are alike in any order
                near = (unit.float() @ bank.T).topk(min(k + 1, len(bank)), dim=1).indices[:, first - 1 :]
            # by the difference itself: of near rows, the inner product has lost the digits
            length: Tensor = torch.linalg.vector_norm(unit[:, None] - bank[near].double(), dim=2)
            return length.sort(dim=1).values[:, k - first]

        return by_rows(distance, self.last_features(outputs), max(bank.shape))
