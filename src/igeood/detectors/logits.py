r"""The black-box family: detectors that need the logits only.

A function for each score, as its paper writes it, and a thin class above it that has the common orientation.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from igeood.detectors.base import Detector, Samples
from igeood.detectors.registry import register
from igeood.errors import InputError
from igeood.geometry import categorical
from igeood.geometry.centroids import solve
from igeood.geometry.precision import by_rows, wide
from igeood.geometry.sphere import chord_distance, sphere
from igeood.outputs import Array, ArrayLike, Outputs
from igeood.summary import Needs, Sample

Reduce = Literal["sum", "min"]
Solver = Literal["weiszfeld", "sgd"]


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


def fr0(logits: Tensor, centroids: Tensor, temperature: float = 1.0) -> Tensor:
    r"""The paper's :math:`\mathrm{FR}_0(x) = \sum_y d(q(x), \mu_y)` (Eq. 5), (N,): higher is **in**-distribution.

    >>> fr0(torch.zeros(1, 2), torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]])).item()
    3.14159...
    """
    return categorical.distances(logits, categorical.prepare(centroids), temperature, lambda d: d.sum(dim=1))


ROUGH_ROWS, ROUGH_VALUES = 20_000, 5_000_000  # that a rough fit reads at most, but 4 rows of each class at least


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
        See `Detector`.
    """

    def _score(self, batch: Outputs) -> Tensor:
        return -confidence(batch.logits, self.temperature)


@register("odin", title="ODIN", style=("#56B4E9", "-", "s"))
class Odin(MaxSoftmax):
    """ODIN without its input step: minus the maximum softmax at a high temperature.

    Parameters
    ----------
    temperature : float
        1,000 in its paper.
    probabilities : bool
        See `Detector`.
    """

    temperature: float = 1000.0


@register("energy", title="Energy", style=("#E69F00", "-", "^"))
class Energy(LogitsDetector):
    """The free energy of the logits. Probabilities have lost it, so they are refused.

    Parameters
    ----------
    temperature : float
        Of the logarithm of the summed exponentials.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.probabilities:
            raise InputError("probabilities: energy needs logits, softmax removes it; use another method such as 'msp'")

    def _score(self, batch: Outputs) -> Tensor:
        return energy(batch.logits, self.temperature)


class CentroidDetector(LogitsDetector):
    """Compares the softmax output with one centroid of each class.

    Attributes
    ----------
    centroids_ : Tensor
        (C, C) log-probabilities, at `temperature`.
    """

    needs = Needs(labels=True, samples=("logits",))
    reduce: Reduce = "sum"

    _geometry: ClassVar[tuple[Callable[..., Tensor], Callable[..., Tensor]]]  # prepares centroids, compares with them

    def _prepare(self) -> None:
        self.reduce_ = self.reduce
        self._prepared = self._geometry[0](self.centroids_)  # type: ignore[attr-defined]  # subclasses learn them

    def _compare(self, batch: Outputs, reduce: Callable[[Tensor], Tensor] | None) -> Tensor:
        """What `reduce` makes of the distances or divergences of rows and centroids, (N, C)."""
        return self._geometry[1](batch.logits, self._prepared.to(batch.logits.device), self.temperature, reduce)

    def _score(self, batch: Outputs) -> Tensor:
        if self.reduce_ == "sum":
            return -self._compare(batch, lambda values: values.sum(dim=1))
        return self._compare(batch, lambda values: values.amin(dim=1))


@register("kl-min", title="KL (min)", fixed={"reduce": "min"}, style=("#CC79A7", "--", "<"))
@register("kl-sum", title="KL (sum)", fixed={"reduce": "sum"}, style=("#CC79A7", "-", "v"))
class KLDivergence(CentroidDetector):
    """Eq. 5 with Kullback–Leibler divergences from the classes' mean softmax outputs, as in the paper's comparison.

    Parameters
    ----------
    reduce : {"sum", "min"}
        Sum over the classes (negated: it is higher for in-distribution), or the nearest class alone.
    temperature : float
        Of the softmax, for centroids and samples alike.
    probabilities : bool
        See `Detector`.
    """

    def _prepare(self) -> None:
        from igeood.bench.kl import prepare_kl

        self.reduce_ = self.reduce
        self._prepared = prepare_kl(self.centroids_)

    def _compare(self, batch: Outputs, reduce: Callable[[Tensor], Tensor] | None) -> Tensor:
        from igeood.bench.kl import kl_divergences

        return kl_divergences(batch.logits, self._prepared.to(batch.logits.device), self.temperature, reduce)

    def _learn_softmax(self, samples: Samples, near: Any, *, roughly: bool) -> None:  # noqa: ARG002
        from igeood.bench.kl import solve_kl

        sample = samples["logits"]
        self.centroids_ = solve_kl(chunks(sample, roughly), sample.n_classes, self.temperature)


@register("igeood-logits-min", title="IGEOOD (min)", fixed={"reduce": "min"}, style=("#D55E00", "--", "p"))
@register("igeood-logits", title="IGEOOD", fixed={"reduce": "sum"}, style=("#D55E00", "-", "o"))
class IgeoodLogits(CentroidDetector):
    """IGEOOD on logits: Fisher–Rao distances from the softmax output to the class centroids (Eq. 3–5).

    Parameters
    ----------
    reduce : {"sum", "min"}
        `"sum"` is −FR₀, the paper's; `"min"` the distance to the nearest centroid. With two classes FR₀ is constant
        between the centroids: `"min"` is used then, and `notes_` says so.
    temperature : float
        Of the softmax.
    centroid_temperature : float, optional
        Fit the centroids at this temperature and rescale them, in place of fitting them at `temperature`; 1 is what
        the paper's authors' code does.
    solver : {"weiszfeld", "sgd"}
        How the centroids are found: see `igeood.geometry.centroids.centroids`.
    probabilities : bool
        See `Detector`.

    Attributes
    ----------
    centroids_ : Tensor
        (C, C) log-probabilities, at `temperature`.
    usual_ : Tensor
        (C,) mean distance of the training samples of each class to its centroid.
    reduce_ : str
        The reduction in use.

    Examples
    --------
    >>> logits = torch.tensor([[4.0, 0, 0], [0, 5.0, 0], [0, 0, 3.0]])
    >>> detector = IgeoodLogits().fit(logits, [0, 1, 2])
    >>> confident, unsure = detector.score(torch.tensor([[6.0, 0, 0], [0.1, 0, 0]]))
    >>> bool(unsure > confident)
    True
    """

    _geometry = (categorical.prepare, categorical.distances)
    centroid_temperature: float | None = None
    solver: Solver = "weiszfeld"

    def _learn_softmax(self, samples: Samples, near: Any, *, roughly: bool) -> None:
        if self.n_classes_ == 2 and self.reduce == "sum":
            self.notes_ = ("two classes: FR₀ is constant between the centroids, so the minimum distance is used",)
        sample, fitted_at = samples["logits"], self.centroid_temperature or self.temperature
        start = None if near is None else categorical.retemper(near.centroids_, near.temperature, fitted_at)
        effort: dict[str, Any] = {"tolerance": 0.0, "max_passes": 2} if roughly else {}
        if self.solver == "sgd":
            from igeood.bench.sgd import descend

            centroids = descend(chunks(sample, roughly), sample.n_classes, fitted_at)
        else:
            centroids = solve(chunks(sample, roughly), sample.n_classes, fitted_at, start=start, **effort)
        self.centroids_ = categorical.retemper(centroids, fitted_at, self.temperature)
        if not roughly:
            self.usual_ = self._usual(sample)

    def _usual(self, sample: Sample) -> Tensor:
        """Mean distance of each class's samples to its centroid, (C,)."""
        roots, total = categorical.prepare(self.centroids_), torch.zeros(2, sample.n_classes, dtype=torch.float64)
        for logits, labels, weights in chunks(sample, roughly=False)():
            distances = chord_distance(sphere(logits, self.temperature), roots[labels])
            total.index_add_(1, labels, torch.stack([weights * distances, weights.double()]))
        return total[0] / total[1]

    def _prepare(self) -> None:
        super()._prepare()
        self.reduce_ = "min" if self.n_classes_ == 2 else self.reduce

    def _explain(self, batch: Outputs, top: int) -> dict[str, Any]:  # noqa: ARG002
        usual = {"centroid_usual": self.usual_} if hasattr(self, "usual_") else {}  # older files have none
        return {"centroid_distance": self._compare(batch, None), **usual}

    def predict_class(self, outputs: Outputs | ArrayLike) -> Array:
        r"""Class that the distance induces (Eq. 4), :math:`\arg\min_y d(q(x), \mu_y)`: (N,) int64."""
        batch = self._scorable(Outputs.of(outputs))
        return batch.like(self._compare(batch, lambda distances: distances.argmin(dim=1)))


def chunks(sample: Sample, roughly: bool) -> Callable[[], Iterator[Any]]:
    """Logits, labels and weights of a sample, chunk by chunk, as often as they are asked for."""
    rows = min(ROUGH_ROWS, ROUGH_VALUES // sample.n_classes)
    per_class = max(4, rows // sample.n_classes) if roughly else None
    return lambda: ((part.logits, part.labels, weights) for part, weights in sample.batches(per_class))
