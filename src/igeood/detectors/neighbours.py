"""Neighbours among training rows: the distance to the k-th nearest of them."""

from typing import ClassVar, Literal

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

    needs: ClassVar[Needs] = Needs(layers="last", samples=("features",))
    state_names: ClassVar[tuple[str, ...]] = ("bank_", "k_")
    bank_: dict[str, Tensor]
    k_: Tensor

    def __init__(self, *, k: int | Literal["auto"] = "auto", rows: int = 20_000) -> None:
        for name, value in (("k", 1 if k == "auto" else k), ("rows", rows)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name}: expected a whole number, at least 1; got {value!r}")
        super().__init__()
        self.k, self.rows = k, rows

    def _learn(self, summary: Summary) -> None:
        sample = summary.samples["features"]
        bank, _ = sample.outputs(max(1, self.rows // sample.strata))
        (layer,) = self.needs.blocks(bank.features)
        fewest = int(np.minimum(sample.kept[sample.kept > 0], self.rows // sample.strata).min())
        k = max(1, min(50, fewest // 3)) if self.k == "auto" else self.k
        if k > len(bank):
            raise InputError(f"k: {k} neighbours, but the bank has {len(bank)} rows; give more rows, or a smaller k")
        self.bank_ = {layer: normalize(bank.features[layer].float(), dim=1)}
        self.k_ = torch.tensor(k)

    @property
    def widths_(self) -> dict[str, int]:
        """The layer that is read, and its width."""
        return {layer: bank.shape[1] for layer, bank in self.bank_.items()}

    def _score(self, batch: Outputs) -> Tensor:
        (layer, bank), k = next(iter(self.bank_.items())), int(self.k_)
        bank = bank.to(batch.logits.device)

        def distance(rows: Tensor) -> Tensor:
            inner = normalize(rows.float(), dim=1) @ bank.T  # (n, bank)
            with torch.no_grad():
                nearest = inner.topk(k, dim=1).indices[:, -1]
            # by the difference itself: of near rows, the inner product has lost the digits
            apart = normalize(rows.double(), dim=1) - bank[nearest].double()
            length: Tensor = torch.linalg.vector_norm(apart, dim=1)
            return length

        return by_rows(distance, batch.features[layer], max(bank.shape))
