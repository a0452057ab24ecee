"""Batch-norm statistics: each sample's means and deviations against those that the network keeps of its training."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from igeood.detectors.base import ColumnDetector, Detector
from igeood.detectors.registry import register
from igeood.detectors.weighted import Rows, Table, Weighted
from igeood.errors import InputError
from igeood.geometry import gaussian
from igeood.geometry.plain import is_plain
from igeood.geometry.precision import row_chunks, wide
from igeood.outputs import Outputs
from igeood.summary import Needs, Summary

Columns = Literal["channels", "layers", "fisher-rao"]
LEAST = 0.01  # of a deviation, in units of the running one
STRENGTH = 1e-4  # of the regression on channels: there are more of them than samples


class Moments(ColumnDetector):
    """Columns made of the means m and deviations s of each batch norm's channels: see `BatchNorm`."""

    needs = Needs(layers="norms", statistic="moments")
    columns: Columns = "fisher-rao"

    def _learn(self, summary: Summary) -> None:
        del summary
        for layer, width in self.widths_.items():
            if width % 2:
                problem = f"{width} columns, not a mean and a deviation for each channel"
                raise InputError(f"features[{layer!r}]: {problem}; extract them with statistic='moments'")

    @property
    def places(self) -> Tensor:
        """The layer's number of each column, (P,)."""
        each = {"fisher-rao": [1] * len(self.widths_), "layers": [2] * len(self.widths_)}
        sizes = torch.tensor(each.get(self.columns, list(self.widths_.values())))
        return torch.arange(len(sizes)).repeat_interleave(sizes)

    def _columns(self, batch: Outputs) -> Tensor:
        return torch.cat([self._of_layer(wide(batch.features[layer])) for layer in self.widths_], dim=1)

    def _of_layer(self, x: Tensor) -> Tensor:
        if self.columns == "channels":
            return x
        m, s = x.chunk(2, dim=1)  # (N, k) each
        if self.columns == "layers":
            return torch.stack([m.mean(dim=1), s.mean(dim=1)], dim=1)
        zero, one = m.new_zeros(m.shape[1]), m.new_ones(m.shape[1])
        distance: Tensor = gaussian.distance(m, s.clamp(min=LEAST), zero, one)[:, None] / m.shape[1] ** 0.5
        return distance


@register("batch-norm", title="Batch norm", style=("#CC79A7", "--", "^"))
class BatchNorm(Weighted):
    r"""Means m and deviations s of each batch norm's input, in units of its running statistics (Quintanilha et al.).

    Before `learn_weights` the score is the Fisher–Rao distance of (m, s) to (0, 1), with s at least 0.01: the root of
    the mean of ρ² (Eq. 9) over a layer's channels, standardised on training rows and summed over layers. Afterwards it
    is a logistic regression, which learns the kind of OOD sample that it is shown, and knows other kinds less well.

    Parameters
    ----------
    columns : {"channels", "layers", "fisher-rao"}
        What the regression is on: every m and s, with a strong penalty; their means over each layer's channels, which
        is less work and refuses less; or the layers' Fisher–Rao distances.
    """

    needs = Needs(layers="norms", statistic="moments", samples=("statistics",))
    columns: Columns = "channels"

    strengths = tuple(float(c) for c in np.logspace(-2, 2, 5))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.columns == "channels":
            vars(self)["strengths"] = (STRENGTH,)

    def _make_parts(self) -> dict[str, Detector]:
        return {name: Moments(columns=name) for name in dict.fromkeys(("fisher-rao", self.columns))}

    columns_ = ColumnDetector.columns_  # the layers

    def _standardise(self, summary: Summary) -> None:
        """The Fisher–Rao columns: the others do not count yet."""
        parts, self.parts_ = self.parts_, {"fisher-rao": self.parts_["fisher-rao"]}
        super()._standardise(summary)
        self.parts_ = parts
        others = (0, len(self._places()) - len(self.weights_))
        self.centre_, self.weights_ = pad(self.centre_, others), pad(self.weights_, others)
        self.scale_ = pad(self.scale_, others, value=1.0)

    def _prepare(self) -> None:
        self._layer_of = self._places()

    def _places(self) -> Tensor:
        """The layer's number of each part's columns, (P,)."""
        return torch.cat([part.places for part in self.parts_.values() if isinstance(part, Moments)])

    def _contributions(self, batch: Outputs) -> Tensor:
        """What each layer adds: the sum over its columns, of which there may be many."""
        places = self._layer_of.to(batch.logits.device)

        def of_layers(rows: Outputs) -> Tensor:
            columns = super(BatchNorm, self)._contributions(rows)
            return columns.new_zeros(columns.shape[0], len(self.widths_)).index_add(1, places, columns)

        if is_plain():
            return of_layers(batch)
        # a few rows are as much work as many
        return torch.cat([of_layers(batch[rows]) for rows in row_chunks(max(1, len(batch)), len(places) // 16)])

    def _shown(self, pair: tuple[Outputs, Outputs], fixed: list[Tensor], rows: Rows) -> tuple["BatchNorm", list[Table]]:
        """As `Weighted` has it; where the regression is on other columns, those before it get no weight."""
        shown, tables = super()._shown(pair, fixed, rows)
        for table in tables if self.columns != "fisher-rao" else ():
            table[:, : len(self.widths_)] = 0.0
        return shown, tables
