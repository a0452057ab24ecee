"""Gram matrices: how far a sample's correlations of channels leave the range of its predicted class."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Self

import igeood
from igeood.errors import Finding, InputError
from igeood.geometry.precision import by_rows, wide
from igeood.model.layers import Call, Trace
from igeood.outputs import Outputs
from igeood.summary import Summary, by_prediction

ORDERS = 10
HOLDOUT = np.uint64(2**64 // 10)  # rows with smaller keys are held out of the ranges
FEW = 10  # held-out rows below which a finding says so
TINY = torch.finfo(torch.float64).tiny


def convolutions(trace: Trace) -> list[str]:
    """Every convolution but the first, and the network's parts that hold several of them, in the order of their ends.

    Of DenseNet-BC: two for each dense layer, that of each transition, and the dense blocks; of ResNets, the stages.
    """

    def is_convolution(module: nn.Module) -> bool:
        return isinstance(module, nn.modules.conv._ConvNd)

    parts = [call.module for call in trace.parts()]
    blocks = {part for part in parts if sum(map(is_convolution, part.modules())) > 1}
    later = [module for module in trace.calls if is_convolution(module)][1:]
    return [trace.names[module] for module in trace.calls if module in blocks or module in later]


def gram(call: Call) -> Tensor:
    r"""Row sums of Gram matrices of the orders 1 to 10, (N, 10 k): those of order 1 first (Sastry & Oore, 2020).

    For a map F (k, S), :math:`g_i^p = \sqrt[p]{\sum_s F_{is}^p R_s}` with :math:`R_s = \sum_j F_{js}^p` and a root that
    keeps the sign: no matrix (k, k) is formed. Powers are those of F over its largest value in the sample, in float64,
    so that they neither overflow nor vanish.
    """
    return by_rows(lambda rows: _gram_rows(maps(rows, call.layout)), call.output, call.output[:1].numel())


def maps(features: Tensor, layout: str) -> Tensor:
    """Features as (n, S, k), in whose memory channels stand side by side; of two axes S is 1."""
    if features.ndim == 2:
        return features[:, None]
    return (features if layout == "last" else features.movedim(1, -1)).flatten(1, -2).contiguous()


def _gram_rows(maps: Tensor) -> Tensor:
    wide_maps = wide(maps)
    largest = wide_maps.detach().abs().amax(dim=(1, 2), keepdim=True).clamp(min=TINY)  # (n, 1, 1)
    unit = wide_maps / largest
    power = torch.ones_like(unit)
    roots = []
    for order in range(1, ORDERS + 1):
        power = power * unit
        total = (power.sum(dim=2)[:, None] @ power)[:, 0]  # (n, k)
        roots.append(total.sign() * total.abs().clamp(min=TINY) ** (1 / order))  # without the clamp 0 has no gradient
    return (torch.cat(roots, dim=1) * largest[:, 0].square()).to(maps.dtype)


@dataclass(frozen=True)
class Ranges:
    """Least and greatest values of each group's rows; those of batches and shards add with ``+``."""

    low: Tensor  # (G, m), inf for a group without rows
    high: Tensor  # (G, m), −inf

    @classmethod
    def of(cls, features: Tensor, groups: Tensor, n_groups: int) -> "Ranges":
        """Ranges of one batch: features (N, m) and groups (N,)."""
        empty = features.new_full((n_groups, features.shape[1]), torch.inf)
        at = groups[:, None].expand_as(features)
        return cls(empty.scatter_reduce(0, at, features, "amin"), (-empty).scatter_reduce(0, at, features, "amax"))

    def __add__(self, other: "Ranges") -> "Ranges":
        return Ranges(torch.minimum(self.low, other.low), torch.maximum(self.high, other.high))


def is_held_out(outputs: Outputs) -> Tensor:
    """Which rows are held out of the ranges: a tenth, those with the smallest keys, (N,) bool."""
    return torch.from_numpy(outputs.keys < HOLDOUT)


def predicted_or_held_out(outputs: Outputs) -> Tensor:
    """The predicted class of each row, −1 for a row that is held out, (N,)."""
    return by_prediction(outputs).masked_fill(is_held_out(outputs), -1)


def deviation(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """How far rows x (n, m) leave their ranges (n, m), δ of a layer: (n,)."""
    below = (wide(low) - wide(x)).clamp(min=0) / (wide(low) + 1e-6).abs()
    above = (wide(x) - wide(high)).clamp(min=0) / (wide(high) + 1e-6).abs()
    return (below + above).sum(dim=1)


@igeood.register("gram", title="Gram", style=("#56B4E9", "--", "v"), tunes=False)
class Gram(igeood.Detector):
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

    needs = igeood.Needs(
        layers=convolutions, pool=gram, sums=Ranges, group=predicted_or_held_out, samples=("features",)
    )

    def learn(self, summary: Summary) -> Self:
        """Take over the ranges, and scale the layers."""
        super().learn(summary)
        ranges = {layer: summary.sums[layer] for layer in self.widths_}
        is_missed = torch.stack([each.low.isinf().any(dim=1) for each in ranges.values()]).any(dim=0)  # (C,)
        if bool(is_missed.all()):
            problem = "every training row is held out to scale the layers"
            raise InputError(problem, argument="data", cure="give more rows")
        if bool(is_missed.any()):
            message = f"classes {is_missed.nonzero()[:, 0].tolist()} are never predicted on training rows"
            self.findings_.append(Finding("unpredicted-classes", "info", message, "the range of all stands for theirs"))
        fill = is_missed[:, None]
        self.low_ = {layer: torch.where(fill, each.low.amin(dim=0), each.low) for layer, each in ranges.items()}
        self.high_ = {layer: torch.where(fill, each.high.amax(dim=0), each.high) for layer, each in ranges.items()}
        self.usual_ = self._usual_deviations(summary)
        return self

    def _usual_deviations(self, summary: Summary) -> Tensor:
        """Mean deviation of each layer over held-out rows and a made-up one, (L,)."""
        channels = wide(torch.tensor(list(self.widths_.values())))
        total = torch.zeros_like(channels)
        weight = 0.0
        n_held = 0
        for batch, weights in summary.samples["features"].batches():
            rows = is_held_out(batch)
            total += weights[rows].to(total) @ self.deviations(batch[rows])
            weight += float(weights[rows].sum())
            n_held += int(rows.sum())
        if n_held < FEW:
            message = f"{n_held} of {summary.rows} training rows are held out to scale the layers"
            self.findings_.append(Finding("few-held-out", "info", message, "give more for scores that are less rough"))
        means = total / max(weight, 1.0)
        rates = (means / channels)[means > 0]
        prior = channels * (rates.median() if len(rates) else 1.0)
        return (means * n_held + prior) / (n_held + 1)

    def deviations(self, outputs: Outputs) -> Tensor:
        """How far each layer leaves the range of the predicted class, δ, (N, L)."""
        device = outputs.logits.device
        predicted = outputs.logits.argmax(dim=1)
        ends = {layer: (self.low_[layer].to(device), self.high_[layer].to(device)) for layer in self.widths_}

        def of_rows(rows: Tensor) -> Tensor:
            own = predicted[rows]
            layers = [deviation(outputs.features[k][rows], low[own], high[own]) for k, (low, high) in ends.items()]
            return torch.stack(layers, dim=1)

        return by_rows(of_rows, torch.arange(outputs.logits.shape[0], device=device), max(self.widths_.values()))

    def terms(self, outputs: Outputs) -> Tensor:
        """Deviations in units of their means, over the confidence."""
        confidence = torch.log_softmax(wide(outputs.logits), dim=1).amax(dim=1, keepdim=True).exp()
        return self.deviations(outputs) / (self.usual_.to(outputs.logits.device) + 1e-7) / confidence

    @property
    def term_names(self) -> list[str]:
        """The layers."""
        return [layer.removesuffix(self.needs.ending) for layer in self.widths_]
