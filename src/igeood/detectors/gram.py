"""Gram matrices: how far a sample's correlations of channels leave the range of its predicted class."""

import torch
from torch import Tensor

from igeood.detectors.base import ColumnDetector
from igeood.detectors.registry import register
from igeood.errors import InputError
from igeood.geometry.precision import by_rows, wide
from igeood.outputs import Outputs
from igeood.summary import Needs, Summary
from igeood.summary.total import HOLDOUT

FEW = 10  # held-out rows below which a note says so


def deviation(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """How far rows x (n, m) leave their ranges (n, m), δ of a layer: (n,)."""
    x, low, high = wide(x), wide(low), wide(high)
    apart = (low - x).clamp(min=0) / (low + 1e-6).abs() + (x - high).clamp(min=0) / (high + 1e-6).abs()
    return apart.sum(dim=1)


@register("gram", title="Gram", style=("#56B4E9", "--", "v"), tunes=False)
class Gram(ColumnDetector):
    r"""Deviation from the ranges of Gram matrices of many orders, at every convolution (Sastry & Oore, 2020).

    Of the statistics g of a layer, c the predicted class, [lo, hi] its range in training:

    .. math:: \delta_\ell = \sum_i \frac{(lo_i - g_i)_+}{|lo_i + 10^{-6}|} + \frac{(g_i - hi_i)_+}{|hi_i + 10^{-6}|}

    The score is :math:`\sum_\ell \delta_\ell / (E[\delta_\ell] + 10^{-7})` over the largest softmax. The means are over
    a tenth of the training rows, which are held out of the ranges; a made-up row is added to them, which deviates as
    the median layer does: a layer whose few rows stay inside is not weighted without limit. A class that is never
    predicted in training has the range of all classes.

    Attributes
    ----------
    low_, high_ : dict of Tensor
        For each layer (C, m) ranges of the predicted classes.
    usual_ : Tensor
        (L,) mean deviation of in-distribution rows.
    """

    needs = Needs(
        layers="convolutions", statistic="gram", group="predicted", ranges=True, holdout=True, samples=("statistics",)
    )

    def _learn(self, summary: Summary) -> None:
        missed = torch.stack([sums.low.isinf().any(dim=1) for sums in summary.sums.values()]).any(dim=0)  # (C,)
        if bool(missed.all()):
            raise InputError("data: every training row is held out to scale the layers; give more rows")
        fill = missed[:, None]
        self.low_ = {k: torch.where(fill, sums.low.amin(dim=0), sums.low) for k, sums in summary.sums.items()}
        self.high_ = {k: torch.where(fill, sums.high.amax(dim=0), sums.high) for k, sums in summary.sums.items()}
        if bool(missed.any()):
            first, n = int(missed.nonzero()[0]), int(missed.sum())
            which = f"{n} of {len(missed)} classes are never predicted, the first is {first}"
            self.notes_ += (f"data: {which}; the range of all classes stands for theirs",)
        self.usual_ = self._usual_deviations(summary)

    def _usual_deviations(self, summary: Summary) -> Tensor:
        """Mean deviation of each layer over held-out rows and a made-up one, (L,)."""
        channels, held = wide(torch.tensor(list(self.widths_.values()))), 0
        total, weight = torch.zeros_like(channels), 0.0
        for batch, weights in summary.samples["statistics"].batches():
            rows = torch.from_numpy(batch.keys < HOLDOUT)
            total += weights[rows].to(total) @ self._deviations(batch[rows])
            weight, held = weight + float(weights[rows].sum()), held + int(rows.sum())
        if held < FEW:
            problem = f"{held} of {summary.rows} training rows are held out to scale the layers"
            self.notes_ += (f"data: {problem}; give more for scores that are less rough",)
        means = total / max(weight, 1.0)
        rates = (means / channels)[means > 0]
        prior = channels * (rates.median() if len(rates) else 1.0)
        return (means * held + prior) / (held + 1)

    def _deviations(self, batch: Outputs) -> Tensor:
        """How far each layer leaves the range of the predicted class, δ, (N, L)."""
        predicted, device = batch.logits.argmax(dim=1), batch.logits.device
        ends = {layer: (self.low_[layer].to(device), self.high_[layer].to(device)) for layer in self.widths_}

        def of_rows(rows: Tensor) -> Tensor:
            own = predicted[rows]
            parts = [deviation(batch.features[layer][rows], lo[own], hi[own]) for layer, (lo, hi) in ends.items()]
            return torch.stack(parts, dim=1)

        return by_rows(of_rows, torch.arange(batch.logits.shape[0], device=device), max(self.widths_.values()))

    def _columns(self, batch: Outputs) -> Tensor:
        confidence = torch.log_softmax(wide(batch.logits), dim=1).amax(dim=1, keepdim=True).exp()
        return self._deviations(batch) / (self.usual_.to(batch.logits.device) + 1e-7) / confidence
