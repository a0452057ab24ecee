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
from igeood.summary import Needs, Sample, Summary, unit_rows


def class_bank(sample: Sample, per_class: int, k: int | Literal["auto"], most: int) -> tuple[Outputs, int]:
    """A bank of up to so many rows of each class, and k: by default a third of the smallest class's, at most `most`.

    k must stay below the rows that a class has in the bank: with more, other classes' rows decide.
    """
    bank, _ = sample.outputs(per_class)
    fewest = int(np.minimum(sample.kept[sample.kept > 0], per_class).min())
    chosen = max(1, min(most, fewest // 3)) if k == "auto" else k
    if chosen > len(bank):
        raise InputError(f"{chosen} neighbours of {len(bank)} rows", argument="k", cure="give more, or a smaller k")
    return bank, chosen


def middle_ranks(likeness: Tensor, k: int) -> tuple[Tensor, int]:
    """Columns (N, 3) of the ranks k − 1, k and k + 1, the largest first, as far as there are such; and the place of k.

    float32 puts columns that are alike in any order: who needs the k-th compares these three exactly.
    """
    first = max(1, k - 1)
    last = min(k + 1, likeness.shape[1])
    return likeness.topk(last, dim=1).indices[:, first - 1 :], k - first


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
        bank, k = class_bank(sample, max(1, self.rows // sample.strata), self.k, self.most)
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

        def distance(rows: Tensor) -> Tensor:
            unit = unit_rows(rows)
            with torch.no_grad():
                near, place = middle_ranks(unit.float() @ bank.T, k)
            # by the difference itself: of near rows, the inner product has lost the digits
            length: Tensor = torch.linalg.vector_norm(unit[:, None] - bank[near].double(), dim=2)
            return length.sort(dim=1).values[:, place]

        return by_rows(distance, self.last_features(outputs), max(bank.shape))
