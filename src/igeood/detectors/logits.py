r"""The black-box family: detectors that need the logits only.

A function for each score, as its paper writes it, and a thin class above it that has the common orientation.
"""

from collections.abc import Callable, Iterable
from typing import ClassVar, Literal

import torch
from torch import Tensor

from igeood.detectors.base import Detector
from igeood.errors import InputError
from igeood.geometry import categorical
from igeood.geometry.precision import by_rows, wide
from igeood.outputs import Array, ArrayLike, Outputs

Reduce = Literal["sum", "min"]


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
    categorical.check_temperature(temperature)

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
    return categorical.distance_sum(logits, centroids, temperature)


def fr_min(logits: Tensor, centroids: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Distance to the nearest centroid, :math:`\min_y d(q(x), \mu_y)`, (N,): higher is out-of-distribution."""
    return categorical.pairwise_distance(logits, centroids, temperature, _min)


def kl_sum(logits: Tensor, centroids: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Eq. 5 with divergences, :math:`\sum_y \mathrm{KL}(q(x)\|\mu_y)`, (N,): higher is **in**-distribution."""
    return categorical.pairwise_kl_divergence(logits, centroids, temperature, _sum)


def kl_min(logits: Tensor, centroids: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Divergence from the nearest centroid, :math:`\min_y \mathrm{KL}(q(x)\|\mu_y)`, (N,): higher is OOD."""
    return categorical.pairwise_kl_divergence(logits, centroids, temperature, _min)


def _sum(values: Tensor) -> Tensor:
    return values.sum(dim=1)


def _min(values: Tensor) -> Tensor:
    return values.amin(dim=1)


class LogitsDetector(Detector):
    """Scores rows of logits at a temperature."""

    def __init__(self, *, temperature: float = 1.0, probabilities: bool = False) -> None:
        categorical.check_temperature(temperature)
        super().__init__(probabilities=probabilities)
        self.temperature = float(temperature)

    def _fit(self, batches: Iterable[Outputs]) -> None:
        """Nothing to learn but the number of classes, which `fit_batches` sees to; reading the batches checks them."""
        for _ in batches:
            pass


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


class Odin(MaxSoftmax):
    """ODIN without its input step: minus the maximum softmax at a high temperature.

    Parameters
    ----------
    temperature : float
        1,000 in its paper.
    probabilities : bool
        See `Detector`.
    """

    def __init__(self, *, temperature: float = 1000.0, probabilities: bool = False) -> None:
        super().__init__(temperature=temperature, probabilities=probabilities)


class Energy(LogitsDetector):
    """The free energy of the logits. Probabilities have lost it, so they are refused.

    Parameters
    ----------
    temperature : float
        Of the logarithm of the summed exponentials.
    """

    def __init__(self, *, temperature: float = 1.0, probabilities: bool = False) -> None:
        if probabilities:
            raise InputError("probabilities: energy needs logits, softmax removes it; use another method such as 'msp'")
        super().__init__(temperature=temperature)

    def _score(self, batch: Outputs) -> Tensor:
        return energy(batch.logits, self.temperature)


class KLDivergence(LogitsDetector):
    """Eq. 5 with Kullback–Leibler divergences from the classes' mean softmax outputs, as in the paper's comparison.

    Parameters
    ----------
    reduce : {"sum", "min"}
        Sum over the classes (negated: it is higher for in-distribution), or the nearest class alone.
    temperature : float
        Of the softmax, for centroids and samples alike.
    probabilities : bool
        See `Detector`.

    Attributes
    ----------
    centroids_ : Tensor
        (C, C) log-probabilities.
    """

    needs_labels: ClassVar[bool] = True
    state_names: ClassVar[tuple[str, ...]] = ("centroids_",)
    centroids_: Tensor

    def __init__(self, *, reduce: Reduce = "sum", temperature: float = 1.0, probabilities: bool = False) -> None:
        super().__init__(temperature=temperature, probabilities=probabilities)
        self.reduce = check_reduce(reduce)

    def _fit(self, batches: Iterable[Outputs]) -> None:
        logits, labels = gather(batches)
        self.centroids_ = categorical.kl_centroids(logits, labels, logits.shape[1], self.temperature)

    def _score(self, batch: Outputs) -> Tensor:
        logits, centroids = batch.logits, self.centroids_.to(batch.logits.device)
        if self.reduce == "sum":
            return -kl_sum(logits, centroids, self.temperature)
        return kl_min(logits, centroids, self.temperature)


class IgeoodLogits(LogitsDetector):
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
    probabilities : bool
        See `Detector`.

    Attributes
    ----------
    centroids_ : Tensor
        (C, C) log-probabilities, at `temperature`.
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

    needs_labels: ClassVar[bool] = True
    state_names: ClassVar[tuple[str, ...]] = ("centroids_",)
    centroids_: Tensor

    def __init__(
        self,
        *,
        reduce: Reduce = "sum",
        temperature: float = 1.0,
        centroid_temperature: float | None = None,
        probabilities: bool = False,
    ) -> None:
        super().__init__(temperature=temperature, probabilities=probabilities)
        if centroid_temperature is not None:
            categorical.check_temperature(centroid_temperature, "centroid_temperature")
        self.reduce = check_reduce(reduce)
        self.centroid_temperature = centroid_temperature

    @property
    def reduce_(self) -> Reduce:
        """The reduction in use: with two classes `"min"`."""
        self.check_fitted()
        return "min" if self.n_classes_ == 2 else self.reduce

    def _notes(self, n_classes: int) -> tuple[str, ...]:
        if n_classes == 2 and self.reduce == "sum":
            return ("two classes: FR₀ is constant between the centroids, so the minimum distance is used",)
        return ()

    def _fit(self, batches: Iterable[Outputs]) -> None:
        logits, labels = gather(batches)
        fitted_at = self.temperature if self.centroid_temperature is None else self.centroid_temperature
        centroids = categorical.centroids(logits, labels, logits.shape[1], fitted_at)
        self.centroids_ = categorical.retemper(centroids, fitted_at, self.temperature)

    def over_temperatures(self, train: Outputs) -> Callable[[float], "IgeoodLogits"]:
        """See `Detector.over_temperatures`: fits that start from each other, and interpolation between them."""
        if self.centroid_temperature is not None:
            return super().over_temperatures(train)
        logits, labels = gather(self._readable([train]))
        path = categorical.CentroidPath(logits, labels, train.n_classes)

        def at(temperature: float) -> IgeoodLogits:
            other = self._with_temperature(temperature)
            other.centroids_ = path(temperature)
            return other._fitted(train.n_classes)

        return at

    def _score(self, batch: Outputs) -> Tensor:
        logits, centroids = batch.logits, self.centroids_.to(batch.logits.device)
        if self.reduce_ == "sum":
            return -fr0(logits, centroids, self.temperature)
        return fr_min(logits, centroids, self.temperature)

    def predict_class(self, outputs: Outputs | ArrayLike) -> Array:
        r"""Class that the distance induces (Eq. 4), :math:`\arg\min_y d(q(x), \mu_y)`: (N,) int64."""
        batch = self._scorable(outputs)
        centroids = self.centroids_.to(batch.logits.device)
        nearest = categorical.pairwise_distance(batch.logits, centroids, self.temperature, lambda d: d.argmin(dim=1))
        return batch.like(nearest)


def gather(batches: Iterable[Outputs]) -> tuple[Tensor, Tensor]:
    """Logits (N, C) and labels (N,) of all batches, without gradients."""
    parts = [(batch.logits.detach(), batch.labels) for batch in batches]
    labels = [labels for _, labels in parts if labels is not None]
    return torch.cat([logits for logits, _ in parts]), torch.cat(labels)


def check_reduce(reduce: str) -> Reduce:
    """`reduce` if it is one of the two."""
    if reduce == "sum":
        return "sum"
    if reduce == "min":
        return "min"
    raise InputError(f"reduce: expected 'sum' or 'min', got {reduce!r}")
