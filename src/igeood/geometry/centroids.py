r"""Class centroids of softmax outputs (the paper's Eq. 3), for Fisher–Rao and for Kullback–Leibler.

The Fisher–Rao centroid minimises the *mean distance* to its class's outputs: a geometric median on the sphere.
Weiszfeld's iteration solves it: each pass is a sum over samples (`CentroidSums`), so passes stream over batches and
merge over shards. The problem is geodesically convex on the sphere's positive part, which gives a certificate: the
relative distance to the optimum is at most twice the norm of the smallest subgradient (`CentroidSums.gap`).
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from igeood.errors import IgeoodWarning, InputError
from igeood.geometry.precision import row_chunks, wide
from igeood.geometry.sphere import check_temperature, chord_distance, log_softmax, sphere

_COINCIDENT = 1e-12  # an angle below this is a sample on the centre itself
_SNAPS = frozenset(2**i for i in range(2, 12))  # passes at which the nearest sample is tried as the centre

Batches = Iterable[tuple[Tensor, Tensor]]


def centroids(
    logits: Tensor,
    labels: Tensor,
    n_classes: int,
    temperature: float = 1.0,
    solver: Literal["weiszfeld", "sgd"] = "weiszfeld",
    *,
    start: Tensor | None = None,
    tolerance: float = 1e-7,
    max_passes: int = 500,
) -> Tensor:
    r"""Fisher–Rao centroid of each class (Eq. 3): :math:`\arg\min_\mu \frac1{N_y}\sum_i d(q(x_i), \mu)`.

    Parameters
    ----------
    logits : Tensor
        (N, C) training logits.
    labels : Tensor
        (N,) class of each sample; every class needs at least one.
    n_classes : int
        C.
    temperature : float
        Temperature of the softmax; the centroids are for use at this temperature.
    solver : {"weiszfeld", "sgd"}
        `"sgd"` is the paper's recipe (see `sgd_centroids`), kept for fidelity; it does not converge.
    start : Tensor, optional
        (C, C) log-probabilities to start Weiszfeld from, such as the centroids of a neighbouring temperature.
    tolerance : float
        Stop when each class's objective is within this relative distance of its optimum.
    max_passes : int
        Passes after which to stop anyway, with a warning.

    Returns
    -------
    Tensor
        (C, C) log-probabilities, float64 where the device has it.

    Examples
    --------
    >>> logits = torch.tensor([[2.0, 0.0], [3.0, 0.0], [0.0, 3.0]])
    >>> centroids(logits, torch.tensor([0, 0, 1]), 2).exp()[1]
    tensor([0.0474, 0.9526], dtype=torch.float64)
    """
    if solver == "sgd":
        return sgd_centroids(logits, labels, n_classes, temperature)
    if solver != "weiszfeld":
        raise InputError(f"solver: expected 'weiszfeld' or 'sgd', got {solver!r}")
    batches = [(logits[rows], labels[rows]) for rows in row_chunks(len(logits), logits.shape[-1])]
    return stream_centroids(batches, n_classes, temperature, start=start, tolerance=tolerance, max_passes=max_passes)


def stream_centroids(
    batches: Batches,
    n_classes: int,
    temperature: float = 1.0,
    *,
    start: Tensor | None = None,
    tolerance: float = 1e-7,
    max_passes: int = 500,
) -> Tensor:
    """Fisher–Rao centroids (Eq. 3) of data that come in batches: the same result as `centroids` of the whole.

    Parameters
    ----------
    batches : iterable of (logits, labels)
        Read once a pass, so it must be re-iterable: a list of shards or an object with ``__iter__``, not a generator.
    n_classes, temperature, start, tolerance, max_passes
        As in `centroids`.

    Returns
    -------
    Tensor
        (C, C) log-probabilities.
    """
    check_temperature(temperature)
    if iter(batches) is batches:
        raise InputError("batches: is read many times; give a list or an object with __iter__, not a generator")
    centre = _mean_direction(batches, n_classes, temperature) if start is None else sphere(start)
    done = torch.zeros_like(centre[:, 0], dtype=torch.bool)
    for number in range(1, max_passes + 1):
        sums = sphere_sums(batches, centre, temperature)
        done |= sums.gap(centre) <= tolerance
        if number in _SNAPS and not bool(done.all()):
            at_sample = sphere_sums(batches, sums.nearest, temperature).gap(sums.nearest) <= tolerance
            centre = torch.where((at_sample & ~done)[:, None], sums.nearest, centre)
            done |= at_sample
        if bool(done.all()):
            return _log_probabilities(centre)
        centre = torch.where(done[:, None], centre, sums.step(centre))
    _warn_unfinished(sphere_sums(batches, centre, temperature).gap(centre), tolerance, max_passes)
    return _log_probabilities(centre)


@dataclass(frozen=True)
class CentroidSums:
    """One pass of Weiszfeld's iteration: sums over samples, which add over batches and shards.

    θ is the angle between a sample and its class's centre, and u the unit tangent at the centre towards the sample.
    """

    pull: Tensor  # (C, C) Σ u, up to multiples of the centre
    weight: Tensor  # (C,) Σ 1/θ
    angle: Tensor  # (C,) Σ θ: half the objective of Eq. 3, times the class's size
    count: Tensor  # (C,) number of samples
    coincident: Tensor  # (C,) those on the centre itself: they are in neither `pull` nor `weight`
    nearest_angle: Tensor  # (C,) the smallest θ that is not coincident
    nearest: Tensor  # (C, C) its sample

    def __add__(self, other: "CentroidSums") -> "CentroidSums":
        closer = other.nearest_angle < self.nearest_angle
        return CentroidSums(
            self.pull + other.pull,
            self.weight + other.weight,
            self.angle + other.angle,
            self.count + other.count,
            self.coincident + other.coincident,
            torch.where(closer, other.nearest_angle, self.nearest_angle),
            torch.where(closer[:, None], other.nearest, self.nearest),
        )

    def _tangent(self, centre: Tensor) -> tuple[Tensor, Tensor]:
        """Σ u at the centre, and its length."""
        tangent = self.pull - (self.pull * centre).sum(dim=1, keepdim=True) * centre
        return tangent, torch.linalg.vector_norm(tangent, dim=1)

    def gap(self, centre: Tensor) -> Tensor:
        """Bound on the objective's relative distance to its optimum, (C,): twice the smallest subgradient's norm.

        By convexity f(μ) − f* ≤ ‖g‖·d(μ, μ*), and by the triangle inequality d(μ, μ*) ≤ f(μ) + f* ≤ 2 f(μ).
        Samples on the centre contribute any tangent of length ≤ 1, so they can cancel as much of the pull.
        """
        _, length = self._tangent(centre)
        return 2.0 * (length - self.coincident).clamp(min=0.0) / self.count

    def step(self, centre: Tensor) -> Tensor:
        """Next centre, (C, C): a Weiszfeld step along a geodesic, shortened by coincident samples (Vardi, Zhang)."""
        tangent, length = self._tangent(centre)
        size = (length - self.coincident).clamp(min=0.0) / self.weight.clamp(min=1.0)  # Σ 1/θ ≥ 2/π where there is one
        direction = tangent / length.clamp(min=_COINCIDENT)[:, None]
        moved = torch.cos(size)[:, None] * centre + torch.sin(size)[:, None] * direction
        return torch.nn.functional.normalize(moved.clamp(min=0.0), dim=1)


def sphere_sums(batches: Batches, centre: Tensor, temperature: float = 1.0) -> CentroidSums:
    """One Weiszfeld pass over all batches, at the centres (C, C) of the unit sphere; sums of shards add with ``+``."""
    total: CentroidSums | None = None
    for logits, labels in batches:
        for rows in row_chunks(len(logits), logits.shape[-1]):
            part = _chunk_sums(sphere(logits[rows], temperature), labels[rows], centre)
            total = part if total is None else total + part
    if total is None:
        raise InputError("batches: empty; centroids need at least one sample of each class")
    return total


def _chunk_sums(points: Tensor, labels: Tensor, centre: Tensor) -> CentroidSums:
    n_classes = len(centre)
    diff = points - centre[labels]  # (n, C)
    angle = 2.0 * torch.asin((0.5 * torch.linalg.vector_norm(diff, dim=1)).clamp(max=1.0))  # (n,)
    on_centre = angle <= _COINCIDENT
    safe = angle.masked_fill(on_centre, torch.inf)

    def per_class(values: Tensor) -> Tensor:
        return values.new_zeros((n_classes, *values.shape[1:])).index_add_(0, labels, values)

    nearest_angle = safe.new_full((n_classes,), torch.inf).scatter_reduce_(0, labels, safe, "amin")
    winners = (safe == nearest_angle[labels]).nonzero(as_tuple=True)[0]
    nearest = centre.clone()
    nearest[labels[winners]] = points[winners]
    return CentroidSums(
        pull=per_class(diff * torch.sin(angle).masked_fill(on_centre, torch.inf).reciprocal()[:, None]),
        weight=per_class(safe.reciprocal()),
        angle=per_class(angle),
        count=per_class(torch.ones_like(angle)),
        coincident=per_class(on_centre.to(angle.dtype)),
        nearest_angle=nearest_angle,
        nearest=nearest,
    )


def _mean_direction(batches: Batches, n_classes: int, temperature: float) -> Tensor:
    """Normalised mean of the class's points on the sphere, (C, C): where Weiszfeld starts."""
    return torch.nn.functional.normalize(_class_sums(batches, n_classes, temperature, power=0.5), dim=1)


def kl_centroids(logits: Tensor, labels: Tensor, n_classes: int, temperature: float = 1.0) -> Tensor:
    """Kullback–Leibler centroid of each class: the arithmetic mean of its softmax outputs.

    Parameters
    ----------
    logits, labels, n_classes, temperature
        As in `centroids`.

    Returns
    -------
    Tensor
        (C, C) log-probabilities.

    Examples
    --------
    >>> kl_centroids(torch.tensor([[0.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]), 2).exp()
    tensor([[0.5000, 0.5000],
            [0.2689, 0.7311]], dtype=torch.float64)
    """
    total = _class_sums([(logits, labels)], n_classes, temperature, power=1.0)
    return total.log() - total.sum(dim=1, keepdim=True).log()


def retemper(centroids: Tensor, fitted_at: float, temperature: float) -> Tensor:
    """Centroids of one temperature rescaled to another: log-probabilities read as logits, as the authors' code does."""
    if temperature == fitted_at:
        return centroids
    return log_softmax(centroids * fitted_at, temperature)


def sgd_centroids(
    logits: Tensor,
    labels: Tensor,
    n_classes: int,
    temperature: float = 1.0,
    *,
    learning_rate: float = 0.1,
    epochs: int = 100,
) -> Tensor:
    """Eq. 3 by the paper's recipe: gradient descent on the centroids' logits, from the identity matrix.

    Each epoch is one full-batch step of the mean distance in each class. It stops far from the optimum: use it to
    reproduce, `centroids` to detect.

    Parameters
    ----------
    logits, labels, n_classes, temperature
        As in `centroids`.
    learning_rate, epochs
        The paper's values by default.

    Returns
    -------
    Tensor
        (C, C) log-probabilities.
    """
    count = _class_counts([(logits, labels)], n_classes)
    with torch.enable_grad():
        centre = torch.eye(n_classes, dtype=count.dtype, device=logits.device).requires_grad_()
        for _ in range(epochs):
            gradient = torch.zeros_like(centre)
            for rows in row_chunks(len(logits), n_classes):
                apart = chord_distance(sphere(logits[rows].detach(), temperature), sphere(centre)[labels[rows]])
                loss = (apart / count[labels[rows]]).sum()
                gradient += torch.autograd.grad(loss, centre)[0]
            centre = (centre - learning_rate * gradient).detach().requires_grad_()
    return log_softmax(centre.detach())


def _class_sums(batches: Batches, n_classes: int, temperature: float, power: float) -> Tensor:
    """Σ softmax(f/T)^power over each class's samples, (C, C); a class without a sample is an error."""
    _class_counts(batches, n_classes)
    total: Tensor | None = None
    for logits, labels in batches:
        for rows in row_chunks(len(logits), logits.shape[-1]):
            points = torch.exp(power * log_softmax(logits[rows], temperature))
            total = points.new_zeros(n_classes, points.shape[1]) if total is None else total
            total.index_add_(0, labels[rows], points)
    if total is None:
        raise InputError("batches: empty; centroids need at least one sample of each class")
    return total


def _class_counts(batches: Batches, n_classes: int) -> Tensor:
    """Samples in each class, (C,); a class without one is an error that names it."""
    total: Tensor | None = None
    for logits, labels in batches:
        _check_batch(logits, labels, n_classes)
        counts = torch.bincount(labels, minlength=n_classes)
        total = counts if total is None else total + counts
    if total is None:
        raise InputError("batches: empty; centroids need at least one sample of each class")
    missing = (total == 0).nonzero()[:, 0].tolist()
    if missing:
        raise InputError(
            f"labels: no sample of class {missing[0]} ({len(missing)} of {n_classes} classes have none); "
            f"every class needs at least one to have a centroid"
        )
    return wide(total)


def _check_batch(logits: Tensor, labels: Tensor, n_classes: int) -> None:
    if logits.ndim != 2 or logits.shape[1] != n_classes:
        raise InputError(f"logits: expected shape (N, {n_classes}), got {tuple(logits.shape)}")
    if labels.shape != logits.shape[:1] or labels.is_floating_point():
        raise InputError(f"labels: expected {len(logits)} integers, got {labels.dtype} of shape {tuple(labels.shape)}")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < n_classes:
        raise InputError(f"labels: must lie in 0…{n_classes - 1}, got {int(labels.min())}…{int(labels.max())}")
    if not bool(logits.amax(dim=1).isfinite().all()):
        raise InputError("logits: a row has NaN, +inf or nothing but −inf; remove such rows")


def _log_probabilities(point: Tensor) -> Tensor:
    return 2.0 * point.log()


def _warn_unfinished(gap: Tensor, tolerance: float, max_passes: int) -> None:
    worst = int(gap.argmax())
    warnings.warn(
        f"centroids: class {worst} is within {float(gap[worst]):.1e} (relative) of its optimum after {max_passes} "
        f"passes, not {tolerance:.0e}; raise max_passes or tolerance",
        IgeoodWarning,
        stacklevel=4,
    )
