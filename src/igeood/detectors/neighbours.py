"""Neighbours among training rows: the distance to the k-th nearest of them."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from igeood.detectors.base import Detector
from igeood.detectors.registry import register
from igeood.errors import InputError
from igeood.geometry.precision import by_rows
from igeood.outputs import Outputs
from igeood.summary import Needs, Summary


@register("knn", title="KNN", style=("#0072B2", "-", "*"))
class KNN(Detector):
    """Distance to the k-th nearest training row on the last layer, among rows of length 1 (Sun et al., 2022).

    k must stay below the rows that a class has in the bank: with more, other classes' rows decide.

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

    def _learn(self, summary: Summary) -> None:
        sample = summary.samples["features"]
        per_class = max(1, self.rows // sample.strata)
        bank, _ = sample.outputs(per_class)
        fewest = int(np.minimum(sample.kept[sample.kept > 0], per_class).min())
        k = max(1, min(50, fewest // 3)) if self.k == "auto" else self.k
        if k > len(bank):
            raise InputError(f"k: {k} neighbours, but the bank has {len(bank)} rows; give more rows, or a smaller k")
        self.bank_ = normalize(self._last_features(bank).double(), dim=1).float()
        self.k_ = torch.tensor(k)

    def _score(self, batch: Outputs) -> Tensor:
        bank, k = self.bank_.to(batch.logits.device), int(self.k_)

        def distance(rows: Tensor) -> Tensor:
            inner = normalize(rows.double(), dim=1).float() @ bank.T  # (n, bank)
            with torch.no_grad():
                nearest = inner.topk(k, dim=1).indices[:, -1]
            # by the difference itself: of near rows, the inner product has lost the digits
            apart = normalize(rows.double(), dim=1) - bank[nearest].double()
            length: Tensor = torch.linalg.vector_norm(apart, dim=1)
            return length

        return by_rows(distance, self._last_features(batch), max(bank.shape))
