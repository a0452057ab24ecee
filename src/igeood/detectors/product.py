"""The Fisher–Rao product: the white box that needs no OOD sample."""

from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import Self

from igeood.detectors.base import Detector, StepScores
from igeood.detectors.gaussians import IgeoodFeatures
from igeood.detectors.logits_product import FLOOR, centred_energy
from igeood.detectors.neighbours import class_bank, middle_ranks
from igeood.detectors.options import options
from igeood.detectors.registry import register
from igeood.errors import InputError
from igeood.geometry.precision import by_rows, wide
from igeood.outputs import Outputs
from igeood.summary import Needs, Sample, Summary

MOST_ROWS = 20_000  # in a bank
TINY = 1e-300
POWERS = ("1", "2")  # a, of P and of L
USUAL_ROWS = 2_000  # outside of the bank, from which the usual terms come


def signed_roots(z: Tensor, power: int) -> Tensor:
    r"""Signed roots :math:`\operatorname{sign}(z_j)\sqrt{p_j}` of :math:`p_j \propto |z_j|^a`, a = 1 or 2: (N, k).

    Rows have length 1; a row of zeros stays as it is. Positive and negative parts count as separate channels.
    """
    z = wide(z)
    if power == 1:
        z = torch.where(z == 0, 0.0, z.abs().clamp(min=TINY).sqrt().copysign(z))  # at 0 the root has no gradient
    length: Tensor = torch.linalg.vector_norm(z, dim=1, keepdim=True)
    return z / length.clamp(min=TINY**0.5)


class Bank:
    """Rows among which the k-th nearest is sought, where channels are read as a categorical distribution.

    Parameters
    ----------
    roots : Tensor
        (n, k) `signed_roots` of the rows.
    power : int
        a, 1 or 2.
    """

    def __init__(self, roots: Tensor, power: int) -> None:
        self.roots = roots
        self.power = power
        self.sizes = roots.abs() if bool((roots < 0).any()) else None

    def distance(self, z: Tensor, k: int) -> Tensor:
        r"""Fisher–Rao distance :math:`2\arccos\sum_j\sqrt{p_j q_j}` of features (N, k) to the k-th nearest row, (N,).

        It is 4 asin(chord/2), which is accurate for near rows too. A row of zeros is at distance π from every row.
        """
        return by_rows(lambda rows: self._distance(rows, k), z, max(self.roots.shape))

    def _distance(self, z: Tensor, k: int) -> Tensor:
        root = signed_roots(z, self.power)
        bank = self.roots.to(z.device)
        with torch.no_grad():
            u = root.to(bank.dtype)
            # parts of opposite sign are separate channels, so their product counts as 0: (uv + |u||v|) / 2
            inner = u.clamp(min=0) @ bank.T if self.sizes is None else u @ bank.T + u.abs() @ self.sizes.to(z.device).T
            ranks, place = middle_ranks(inner, k)
            near = bank[ranks].to(root.dtype)  # (n, 3, k)
        root = root[:, None]
        chord = ((root - near).square() + 2 * (root * near).clamp(max=0)).sum(dim=2)
        is_zero = (root.square().sum(dim=2) < 0.5) | (near.square().sum(dim=2) < 0.5)  # their length is 1, or 0
        chord = torch.where(is_zero, 2.0, chord.clamp(min=FLOOR**2, max=2.0)).sort(dim=1).values[:, place]
        return 4 * torch.asin(chord.sqrt() / 2)


def rows_of_class(bank: int | str, sample: Sample) -> int:
    """Rows of each class in a bank: by default 20, or more where that makes fewer than 1,000 in all."""
    classes = sample.strata
    if bank == "auto":
        return max(1, min(max(20, -(-1000 // classes)), MOST_ROWS // classes))
    if int(bank) > len(sample):
        problem = f"{bank} rows, but the training sample has {len(sample)}"
        raise InputError(problem, argument="bank", cure="give at most that many, or fit on more rows")
    if int(bank) < classes:
        problem = f"{bank} rows for {classes} classes"
        raise InputError(problem, argument="bank", cure="give at least one a class, or 0 for no bank")
    return int(bank) // classes


@register("fisher-rao-product", title="Fisher–Rao product", style=("#D55E00", "-", "*"), tunes=False)
@options
class FisherRaoProduct(IgeoodFeatures):
    r""":math:`S = \tfrac12\log\mathrm{FR}_P + \tfrac12\log\mathrm{FR}_L + \log d_1(z_P) + \log d_2(z_L) - \log E`.

    L is the last layer, the input of the classifier's head, and P the block before it: FR is the distance to the
    nearest class (Eq. 11), d_a that to the k-th nearest training row, whose channels are read as a distribution
    p_j ∝ |z_j|^a, and E the centred energy of the logits. A network with one layer uses it for both. No OOD sample is
    needed, and nothing is tuned.

    Parameters
    ----------
    bank : int or "auto"
        Training rows among which neighbours are sought, of every class alike. "auto": 20 of each class, or 1,000 in
        all where that is more, and at most 20,000. 0 leaves both d terms out: then no training row is kept.
    k : int or "auto"
        Which neighbour; "auto" is a third of a class's rows in the bank, between 1 and 10.

    Attributes
    ----------
    mean_, std_ : dict of Tensor
        As in `IgeoodFeatures`.
    bank_ : dict of Tensor
        (n, k) signed roots of the bank's rows, float32, with a = 1 for P ("1") and 2 for L ("2").
    k_ : Tensor
        The k in use.
    usual_ : Tensor
        (5,) mean terms of training rows that are not in the bank, as far as there are any; none without a bank.
    """

    needs = Needs(layers="last two", labels=True, sums="diagonal", samples=("features",))
    bank: int | Literal["auto", 0] = "auto"
    k: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bank == 0:  # sums alone
            self.needs = replace(type(self).needs, samples=())  # type: ignore[misc]

    @cached_property
    def _layers(self) -> list[str]:
        """P and L."""
        last = Needs(layers="last two").blocks(self.widths_)
        return [last[0], last[-1]]

    def learn(self, summary: Summary) -> Self:
        """Learn the classes, and keep a bank of rows."""
        super().learn(summary)
        self.bank_: dict[str, Tensor] = {}
        self.usual_ = torch.zeros(0)
        self.k_ = torch.tensor(0)
        if self.bank == 0:
            return self
        sample = summary.samples["features"]
        per_class = rows_of_class(self.bank, sample)
        rows, k = class_bank(sample, per_class, self.k, most=10)
        pairs = zip(POWERS, self._layers, strict=True)
        self.bank_ = {a: signed_roots(rows.features[layer], int(a)).float() for a, layer in pairs}
        self.k_ = torch.tensor(k)
        self.usual_ = self._usual(sample, per_class)
        return self

    def _usual(self, sample: Sample, per_class: int) -> Tensor:
        """Mean terms of training rows outside of the bank; if there are none, of its own, each left out in turn."""
        if (sample.kept > per_class).any():
            rows, weights = sample.outputs(per_class + max(1, USUAL_ROWS // sample.strata), skip=per_class)
            return weights @ self._terms(rows, int(self.k_)) / weights.sum()
        rows, weights = sample.outputs(per_class)
        others = min(int(self.k_) + 1, len(rows))  # the nearest is the row itself
        return weights @ self._terms(rows, others) / weights.sum()

    @cached_property
    def _banks(self) -> list[Bank]:
        rows = getattr(self, "bank_", {})  # a file has none where it is empty
        return [Bank(rows[a], int(a)) for a in POWERS if rows]

    @property
    def term_names(self) -> list[str]:
        """The terms of the score, by layer."""
        names = [layer.removeprefix("|") for layer in self._layers]
        if names[0] == names[1]:
            names[0] += " (as the block before)"
        kinds = ("classes", "neighbours") if self._banks else ("classes",)
        return [*(f"{name}: {kind}" for kind in kinds for name in names), "output: energy"]

    def terms(self, outputs: Outputs) -> Tensor:
        """The terms of S, (N, 5), or (N, 3) without a bank."""
        return self._terms(outputs, int(self.k_))

    def _terms(self, outputs: Outputs, k: int) -> Tensor:
        layers = self._layers
        all_layers = list(self.widths_)
        nearest = super().terms(outputs).clamp(min=FLOOR).log() / 2  # (N, L)
        terms = [nearest[:, all_layers.index(layer)] for layer in layers]
        for bank, layer in zip(self._banks, layers, strict=False):
            terms.append(bank.distance(outputs.features[layer], k).clamp(min=FLOOR).log())
        return torch.stack([*terms, -centred_energy(outputs.logits).clamp(min=FLOOR).log()], dim=1)

    def step_scores(self, outputs: Outputs) -> StepScores:
        """One step for all terms."""
        return Detector.step_scores(self, outputs)

    def explain(self, outputs: Outputs, top: int) -> dict[str, Any]:
        """The nearest classes and channels of the layers, and the usual terms."""
        usual = {"usual": self.usual_} if len(self.usual_) else {}
        return {**super().explain(outputs, top), **usual}
