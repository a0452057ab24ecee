r"""The black-box family: detectors that need the logits only.

A function for each score, as its paper writes it, and a thin class above it that has the common orientation.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import Self

from igeood.detectors.base import Detector
from igeood.detectors.options import options
from igeood.detectors.registry import register
from igeood.errors import Finding, UnsuitedError
from igeood.geometry import categorical
from igeood.geometry.centroids import Chunks, Piece, solve
from igeood.geometry.precision import by_rows, exporting, wide
from igeood.geometry.sphere import chord_distance, sphere
from igeood.outputs import Outputs
from igeood.summary import Needs, Sample, Summary

ROUGH_ROWS = 20_000  # rows, and
ROUGH_VALUES = 5_000_000  # values that a rough fit reads at most, but 4 rows of each class at least


def confidence(logits: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Maximum softmax :math:`\max_y q_y(x)` at temperature T, (N,): higher is in-distribution.

    >>> confidence(torch.zeros(1, 4)).item()
    0.25
    """
    return by_rows(lambda f: categorical.log_softmax(f, temperature).amax(dim=-1).exp(), logits, logits.shape[-1])


def energy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Free energy :math:`-T\log\sum_y e^{f_y/T}`, (N,): higher is out-of-distribution.

    >>> energy(torch.zeros(1, 4)).item()
    -1.38629...
    """

    def of_rows(f: Tensor) -> Tensor:
        f = wide(f)
        peak = f.detach().amax(dim=-1, keepdim=True)  # finite: taken off before the division, which could overflow
        return -temperature * torch.logsumexp((f - peak) / temperature, dim=-1) - peak[..., 0]

    return by_rows(of_rows, logits, logits.shape[-1])


def centred_energy(logits: Tensor) -> Tensor:
    r""":math:`E = \log\sum_y e^{l_y - \bar l}` with the mean over the finite logits, (N,): at least log C.

    >>> centred_energy(torch.full((1, 4), 7.0)).item()
    1.38629...
    """

    def of_rows(f: Tensor) -> Tensor:
        f = wide(f)
        mean = f.mean(dim=-1)
        if exporting.get() or not bool(mean.isfinite().all()):
            finite = f.isfinite()
            mean = (torch.where(finite, f, 0.0) / finite.sum(dim=-1, keepdim=True)).sum(dim=-1)
        return torch.logsumexp(f, dim=-1) - mean

    return by_rows(of_rows, logits, logits.shape[-1])


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Entropy :math:`-\sum_y q_y \log q_y` at temperature T, (N,).

    >>> entropy(Tensor([[0.0, 0.0]])).item()
    0.69314...
    """

    def of_rows(f: Tensor) -> Tensor:
        log_q = categorical.log_softmax(f, temperature)
        return -(log_q.exp() * log_q.clamp(min=-1e4)).sum(dim=-1)  # a class that is masked adds 0

    return by_rows(of_rows, logits, logits.shape[-1])


def fr0(logits: Tensor, centroids: Tensor, temperature: float = 1.0) -> Tensor:
    r"""The paper's :math:`\mathrm{FR}_0(x) = \sum_y d(q(x), \mu_y)` (Eq. 5), (N,): higher is **in**-distribution.

    >>> fr0(torch.zeros(1, 2), torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]])).item()
    3.14159...
    """
    return categorical.distances(logits, categorical.prepare(centroids), temperature, lambda d: d.sum(dim=1))


@options
class LogitsDetector(Detector):
    """Scores rows of logits at a temperature."""

    temperature: float = 1.0
    probabilities: bool = False


@register("msp", title="Baseline (MSP)", style=("#000000", ":", "X"), tunes=False)
class MaxSoftmax(LogitsDetector):
    """The baseline (MSP): minus the maximum softmax.

    Parameters
    ----------
    temperature : float
        1 in the baseline.
    probabilities : bool
        The arrays hold probabilities, not logits.
    """

    def score(self, outputs: Outputs) -> Tensor:
        """Minus the confidence."""
        return -confidence(outputs.logits, self.temperature)


@register("odin", title="ODIN", style=("#56B4E9", "-", "s"))
@options
class Odin(MaxSoftmax):
    """ODIN without its input step: minus the maximum softmax at a high temperature, 1,000 in its paper."""

    temperature: float = 1000.0


@register("energy", title="Energy", style=("#E69F00", "-", "^"))
class Energy(LogitsDetector):
    """The free energy of the logits. Probabilities have lost it, so they are refused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.probabilities:
            raise UnsuitedError("softmax removes the energy", argument="probabilities", cure="use 'msp', say")

    def score(self, outputs: Outputs) -> Tensor:
        """The energy."""
        return energy(outputs.logits, self.temperature)


@register("entropy", title="Entropy", style=("#000000", "--", "2"))
class Entropy(LogitsDetector):
    """The entropy of the softmax output."""

    def score(self, outputs: Outputs) -> Tensor:
        """The entropy."""
        return entropy(outputs.logits, self.temperature)


@register("max-logit", title="Max logit", style=("#E69F00", "--", "1"), tunes=False)
class MaxLogit(Detector):
    r"""Minus the largest logit, :math:`-\max_y f_y` (Hendrycks et al., 2022)."""

    def score(self, outputs: Outputs) -> Tensor:
        """Minus the largest logit."""
        return -wide(outputs.logits.amax(dim=1))


@options
class CentroidDetector(LogitsDetector):
    """Compares the softmax output with one centroid of each class that has rows.

    Attributes
    ----------
    classes_ : Tensor
        (C',) the classes that have rows.
    centroids_ : Tensor
        (C', C) log-probabilities, at `temperature`.
    """

    needs = Needs(labels=True, samples=("logits",))
    reduce: Literal["sum", "min"] = "sum"

    @abstractmethod
    def solve_centroids(self, chunks: Chunks, near: "CentroidDetector | None", *, roughly: bool) -> Tensor:
        """Centroids (C', C) of weighted rows, sought from those of another detector on; `roughly` in few passes."""

    @abstractmethod
    def compare(self, outputs: Outputs, reduce: Callable[[Tensor], Tensor] | None) -> Tensor:
        """What `reduce` makes of the distances or divergences of rows and centroids, (N, C')."""

    def learn(self, summary: Summary) -> Self:
        """Seek the centroids."""
        return self.seek(summary, None, roughly=False)

    def at_temperature(self, temperature: float, summary: Summary, near: Any = None) -> Self:
        """The same detector at another temperature, whose centroids are sought from a neighbour's on."""
        other = type(self)(**{**self.params(), "temperature": temperature})
        return other.seek(summary, near or self, roughly=near is not None)

    def seek(self, summary: Summary, start: "CentroidDetector | None", *, roughly: bool) -> Self:
        """Learn, the centroids from those of another detector on; `roughly` from few rows, in few passes."""
        super().learn(summary)
        self.classes_ = summary.counts.nonzero()[:, 0]
        rows = chunks(summary.samples["logits"], self.classes_, roughly=roughly)
        self.centroids_ = self.solve_centroids(rows, start, roughly=roughly)
        return self

    @property
    def reduction(self) -> str:
        """The reduction in use."""
        return self.reduce

    def score(self, outputs: Outputs) -> Tensor:
        """Minus the sum over the classes, or the least of them."""
        if self.reduction == "sum":
            return -self.compare(outputs, lambda values: values.sum(dim=1))
        return self.compare(outputs, lambda values: values.amin(dim=1))


@register("igeood-logits-min", title="IGEOOD (min)", fixed={"reduce": "min"}, style=("#D55E00", "--", "p"))
@register("igeood-logits", title="IGEOOD", fixed={"reduce": "sum"}, style=("#D55E00", "-", "o"))
@options
class IgeoodLogits(CentroidDetector):
    """IGEOOD on logits: Fisher–Rao distances from the softmax output to the class centroids (Eq. 3–5).

    Parameters
    ----------
    reduce : {"sum", "min"}
        `"sum"` is −FR₀, the paper's; `"min"` the distance to the nearest centroid. With two classes FR₀ is constant
        between the centroids: `"min"` is used then, with a finding.
    temperature : float
        Of the softmax.
    centroid_temperature : float, optional
        Fit the centroids at this temperature and rescale them, in place of fitting them at `temperature`; 1 is what
        the paper's authors' code does.
    probabilities : bool
        The arrays hold probabilities, not logits.

    Attributes
    ----------
    classes_, centroids_
        As in `CentroidDetector`.
    usual_ : Tensor
        (C',) mean distance of the training samples of each class to its centroid.

    Examples
    --------
    >>> logits = torch.tensor([[4.0, 0, 0], [0, 5.0, 0], [0, 0, 3.0]])
    >>> detector = IgeoodLogits().fit(logits, [0, 1, 2])
    >>> confident, unsure = detector(torch.tensor([[6.0, 0, 0], [0.1, 0, 0]]))
    >>> bool(unsure > confident)
    True
    """

    centroid_temperature: float | None = None

    def seek(self, summary: Summary, start: CentroidDetector | None, *, roughly: bool) -> Self:
        """Seek the centroids, and how far training samples are from them."""
        super().seek(summary, start, roughly=roughly)
        if self.reduction != self.reduce:
            message = "two classes: FR₀ is constant between the centroids, so the minimum distance is used"
            self.findings_.append(Finding("two-classes", "info", message, "nothing has to be done"))
        if not roughly:
            self.usual_ = self._usual(summary.samples["logits"])
        return self

    def solve_centroids(self, chunks: Chunks, near: Any, *, roughly: bool) -> Tensor:
        """Riemannian Weiszfeld on the sphere (Eq. 3)."""
        fitted_at = self.centroid_temperature or self.temperature
        start = None if near is None else categorical.retemper(near.centroids_, near.temperature, fitted_at)
        effort: dict[str, Any] = {"tolerance": 0.0, "max_passes": 2} if roughly else {}
        centroids = solve(chunks, len(self.classes_), fitted_at, start=start, **effort)
        return categorical.retemper(centroids, fitted_at, self.temperature)

    def _usual(self, sample: Sample) -> Tensor:
        """Mean distance of each class's samples to its centroid, (C,)."""
        roots = categorical.prepare(self.centroids_)
        total = torch.zeros(2, len(roots), dtype=torch.float64)
        for logits, labels, weights in chunks(sample, self.classes_)():
            distances = chord_distance(sphere(logits, self.temperature), roots[labels])
            total.index_add_(1, labels, torch.stack([weights * distances, weights.double()]))
        return total[0] / total[1]

    @cached_property
    def _prepared(self) -> Tensor:
        return categorical.prepare(self.centroids_)

    def compare(self, outputs: Outputs, reduce: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Fisher–Rao distances of rows and centroids."""
        prepared = self._prepared.to(outputs.logits.device)
        return categorical.distances(outputs.logits, prepared, self.temperature, reduce)

    @property
    def reduction(self) -> str:
        """The reduction in use."""
        return "min" if len(self.classes_) <= 2 else self.reduce

    def explain(self, outputs: Outputs, top: int) -> dict[str, Any]:  # noqa: ARG002
        """Distances to the centroids."""
        distances = self.compare(outputs, None)
        whole = distances.new_full((len(distances), self.n_classes_), torch.inf)
        usual = distances.new_full((self.n_classes_,), torch.nan)
        whole[:, self.classes_] = distances
        usual[self.classes_] = self.usual_.to(usual)
        return {"centroid_distance": whole, "centroid_usual": usual}

    def predict_class(self, outputs: Outputs) -> Tensor:
        r"""Class that the distance induces (Eq. 4), :math:`\arg\min_y d(q(x), \mu_y)`: (N,) int64."""
        nearest = self.compare(outputs, lambda distances: distances.argmin(dim=1))
        return self.classes_.to(nearest.device)[nearest]


def chunks(sample: Sample, classes: Tensor, *, roughly: bool = False) -> Chunks:
    """Logits, places of the labels among these classes, and weights of a sample, chunk by chunk, any number of times.

    `roughly` from a part of it.
    """
    rows = min(ROUGH_ROWS, ROUGH_VALUES // sample.n_classes)
    per_class = max(4, rows // sample.n_classes) if roughly else None

    def read() -> Iterator[Piece]:
        for part, weights in sample.batches(per_class):
            labels = torch.zeros_like(weights, dtype=torch.int64) if part.labels is None else part.labels
            yield part.logits, torch.searchsorted(classes, labels), weights

    return read
