"""Batch-norm statistics: each sample's means and deviations against those that the network keeps of its training."""

import math
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from typing_extensions import Self

import igeood
from igeood.bench.methods.gram import maps
from igeood.detectors import Weighted
from igeood.errors import InputError, UnsuitedError
from igeood.geometry import gaussian
from igeood.geometry.precision import by_rows, row_chunks, wide
from igeood.model.layers import Call, Trace
from igeood.outputs import Outputs
from igeood.summary import Summary

Columns = Literal["channels", "layers", "fisher-rao"]
LEAST = 0.01  # of a deviation, in units of the running one
STRENGTH = 1e-4  # of the regression on channels: there are more of them than samples


def running_statistics(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """A batch norm's running mean and deviation, each (k,); None for a module that keeps none."""
    centre = getattr(module, "running_mean", None)
    variance = getattr(module, "running_var", None)
    if not isinstance(centre, Tensor) or not isinstance(variance, Tensor):
        return None
    return centre, (variance + float(getattr(module, "eps", 0.0))).sqrt()


def norms(trace: Trace) -> list[str]:
    """The modules that keep running statistics."""
    return [trace.names[module] for module in trace.calls if running_statistics(module) is not None]


def moments(call: Call) -> Tensor:
    r"""Mean and deviation of a batch norm's input as its running statistics see them, (N, 2 k): all means first.

    For channel i, :math:`m_i = (\bar a_i - \mu_i)/\sqrt{v_i + \epsilon}` and
    :math:`s_i = \operatorname{std}(a_i)/\sqrt{v_i + \epsilon}` over positions (1/S). A single position, as after
    pooling, has no deviation: s is left out there by being 1, as the running statistics expect.
    """
    running = running_statistics(call.module)
    if running is None or call.input is None:
        problem = f"{type(call.module).__name__} keeps no running statistics"
        raise UnsuitedError(problem, argument="layers", cure="name batch norms that do")
    x = call.input.to(call.output.dtype)  # float32 at least
    centre, scale = (value.to(x) for value in running)  # (k,)
    return by_rows(lambda rows: _moment_rows((maps(rows, call.layout) - centre) / scale), x, x[:1].numel())


def _moment_rows(maps: Tensor) -> Tensor:
    middle = maps.mean(dim=1)
    # a vector norm: unlike std, its gradient at a constant channel is 0, not NaN
    spread = torch.linalg.vector_norm(maps - middle[:, None], dim=1) / maps.shape[1] ** 0.5
    return torch.cat([middle, spread if maps.shape[1] > 1 else torch.ones_like(spread)], dim=1)


@igeood.options
class Moments(igeood.Detector):
    """Columns made of the means m and deviations s of each batch norm's channels: see `BatchNorm`."""

    needs = igeood.Needs(layers=norms, pool=moments)
    columns: Columns = "fisher-rao"

    def learn(self, summary: Summary) -> Self:
        """Check that there is a mean and a deviation for each channel."""
        super().learn(summary)
        for layer, width in self.widths_.items():
            if width % 2:
                problem = f"{width} columns, not a mean and a deviation for each channel"
                raise InputError(problem, argument=f"features[{layer!r}]", cure="extract them with pool=moments")
        return self

    @property
    def places(self) -> Tensor:
        """The layer's number of each column, (P,)."""
        layers = torch.arange(len(self.widths_))
        if self.columns == "channels":
            return layers.repeat_interleave(torch.tensor(list(self.widths_.values())))
        return layers.repeat_interleave(2 if self.columns == "layers" else 1)

    def terms(self, outputs: Outputs) -> Tensor:
        """The columns of all layers."""
        return torch.cat([self._of_layer(wide(outputs.features[layer])) for layer in self.widths_], dim=1)

    def _of_layer(self, x: Tensor) -> Tensor:
        if self.columns == "channels":
            return x
        m, s = x.chunk(2, dim=1)  # (N, k) each
        if self.columns == "layers":
            return torch.stack([m.mean(dim=1), s.mean(dim=1)], dim=1)
        zero = m.new_zeros(m.shape[1])
        distance: Tensor = gaussian.distance(m, s.clamp(min=LEAST), zero, zero + 1.0)
        return distance[:, None] / math.sqrt(m.shape[1])


@igeood.register("batch-norm", title="Batch norm", style=("#CC79A7", "--", "^"))
@igeood.options
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

    needs = igeood.Needs(layers=norms, pool=moments, samples=("features",))
    strengths = tuple(10.0**power for power in range(-2, 3))
    columns: Columns = "channels"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.columns == "channels":
            self.strengths = (STRENGTH,)  # type: ignore[misc]

    def make_parts(self) -> dict[str, igeood.Detector]:
        """The distances, and the columns of the regression."""
        return {name: Moments(columns=name) for name in dict.fromkeys(("fisher-rao", self.columns))}

    @property
    def term_names(self) -> list[str]:
        """The layers."""
        return [layer.removesuffix(self.needs.ending) for layer in self.widths_]

    @cached_property
    def _places(self) -> Tensor:
        """The layer's number of each part's columns, (P,)."""
        return torch.cat([part.places for part in self.parts.values() if isinstance(part, Moments)])

    def standardise(self, summary: Summary) -> None:
        """Standardise the distances: the regression's columns have no weight yet."""
        if self.columns == "fisher-rao":
            super().standardise(summary)
            return
        distances = BatchNorm(columns="fisher-rao").learn(summary)
        others = (0, len(self._places) - len(distances.weights_))
        self.centre_ = pad(distances.centre_, others)
        self.scale_ = pad(distances.scale_, others, value=1.0)
        self.weights_ = pad(distances.weights_, others)

    def terms(self, outputs: Outputs) -> Tensor:
        """What each layer adds: the sum over its columns, of which there may be many."""
        places = self._places.to(outputs.logits.device)

        def of_layers(rows: slice) -> Tensor:
            columns = super(BatchNorm, self).terms(outputs[rows])
            return columns.new_zeros(columns.shape[0], len(self.widths_)).index_add(1, places, columns)

        chunks = row_chunks(outputs.logits.shape[0], len(places) // 16)  # a few rows are as much work as many
        return torch.cat([of_layers(rows) for rows in chunks])

    def shown(self, pair: tuple[Outputs, Outputs], fixed: list[Tensor], rows: Any) -> tuple[Self, list[Any]]:
        """As `Weighted` has it; where the regression is on other columns, the distances get no weight."""
        shown, tables = super().shown(pair, fixed, rows)
        if self.columns != "fisher-rao":
            for table in tables:
                table[:, : len(self.widths_)] = 0.0
        return shown, tables
