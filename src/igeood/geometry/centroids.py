r"""Class centroids of softmax outputs (the paper's Eq. 3), for Fisher–Rao and for Kullback–Leibler.

The Fisher–Rao centroid minimises the *mean distance* to its class's outputs: a geometric median on the sphere.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from igeood.errors import IgeoodWarning, InputError
from igeood.geometry.precision import row_chunks, wide
from igeood.geometry.sphere import check_temperature, chord_distance, log_softmax, sphere
from igeood.geometry.weiszfeld import Batches, Points, Search, chunks, class_sums, polish
from igeood.outputs import check_logits

_PATIENCE = 60  # passes after which unfinished classes are finished another way
_A_DECADE = 8  # temperatures that a path is fitted at
_FEWEST_INTERPOLATED = 8  # samples in a class
_MOST_INTERPOLATED = 256  # classes: 30 temperatures are 16 MB
_SNAPS = frozenset([4, 8, *range(16, 10_000, 16)])  # passes at which the nearest sample is tried as the centre


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
    return stream_centroids(
        [(logits.detach(), labels)], n_classes, temperature, start=start, tolerance=tolerance, max_passes=max_passes
    )


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
    points = Points.of(batches, temperature, int(_class_counts(batches, n_classes).sum()), n_classes)
    trial = _mean_direction(points, n_classes) if start is None else _start_points(start, n_classes)
    search = Search(trial, points.sums(trial))
    for number in range(1, max_passes + 1):
        unfinished = search.gap > tolerance
        if not bool(unfinished.any()):
            return _log_probabilities(search.best)
        points.only(unfinished)
        if number % _PATIENCE == 0:
            trial = polish(points, search, unfinished)
        else:
            trial = points.nearest(search.centre) if number in _SNAPS else search.propose()
        sums = points.sums(trial)
        search.note(trial, sums.gap(trial))
        if number not in _SNAPS:
            search.move(trial, sums)
    if float(search.gap.max()) > 10.0 * tolerance:  # below that, rounding is all that is left to blame
        _warn_unfinished(search.gap, tolerance, max_passes)
    return _log_probabilities(search.best)


def _start_points(start: Tensor, n_classes: int) -> Tensor:
    if tuple(start.shape) != (n_classes, n_classes):
        raise InputError(f"start: expected log-probabilities ({n_classes}, {n_classes}), got {tuple(start.shape)}")
    check_logits(start, "start")
    return sphere(start)


def _mean_direction(points: Points, n_classes: int) -> Tensor:
    """Normalised mean of the class's points on the sphere, (C, C): where Weiszfeld starts."""
    total = sum(class_sums(part, labels, n_classes) for part, labels in points)
    return torch.nn.functional.normalize(torch.as_tensor(total), dim=1)


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
    count = _class_counts([(logits, labels)], n_classes)
    peak = torch.full((n_classes, n_classes), -torch.inf, dtype=count.dtype, device=logits.device)
    total = torch.zeros_like(peak)
    for chunk, classes in chunks([(logits.detach(), labels)]):  # log Σ exp, so that no small probability is lost
        log_q = log_softmax(chunk, temperature)
        highest = peak.scatter_reduce(0, classes[:, None].expand_as(log_q), log_q, "amax")
        finite = highest.clamp(min=torch.finfo(peak.dtype).min)  # −inf: a class masked in every sample
        total = total * torch.exp(peak - finite)
        total.index_add_(0, classes, torch.exp(log_q - finite[classes]))
        peak = highest
    return total.log() + peak.clamp(min=torch.finfo(peak.dtype).min) - count.log()[:, None]


def retemper(centroids: Tensor, fitted_at: float, temperature: float) -> Tensor:
    """Centroids of one temperature rescaled to another: log-probabilities read as logits, as the authors' code does."""
    if temperature == fitted_at:
        return centroids
    return log_softmax(centroids * fitted_at, temperature)


class CentroidPath:
    """Centroids (Eq. 3) of the same samples at one temperature after another: each fit makes the next ones cheaper.

    From temperature 1 to a million they are interpolated, as logits and in log T, between six fitted temperatures,
    eight a decade. Others are fitted, from where the one before was found: below 1 a class's centroid can be a vertex
    of the simplex, a few samples may have no unique one, and those of many classes would fill the memory.

    Parameters
    ----------
    logits, labels, n_classes
        As in `centroids`.
    """

    def __init__(self, logits: Tensor, labels: Tensor, n_classes: int) -> None:
        self._data = (logits, labels, n_classes)
        fewest = int(torch.bincount(labels.long(), minlength=n_classes).min())
        self._smooth = fewest >= _FEWEST_INTERPOLATED and n_classes <= _MOST_INTERPOLATED
        self._fitted: dict[int, Tensor] = {}  # (C, C) logits, at 10^(i/8)
        self._latest: Tensor | None = None

    def __call__(self, temperature: float) -> Tensor:
        """Centroids at a temperature, (C, C) log-probabilities."""
        check_temperature(temperature)
        place = _A_DECADE * math.log10(temperature)
        if self._smooth and 0 <= place <= _A_DECADE * 6:
            around = range(math.floor(place) - 2, math.floor(place) + 4)
            for i in around:
                self._reach(i)
            logits = self._between(around, place)
            if bool(logits.isfinite().all()):
                return log_softmax(logits, temperature)
        return self._fit(temperature, self._latest)

    def _reach(self, i: int) -> None:
        """See that the i-th temperature is fitted, from where its neighbours lead."""
        if i not in self._fitted:
            nearest = sorted(self._fitted, key=lambda j: abs(i - j))[:4]
            temperature = 10.0 ** (i / _A_DECADE)
            found = self._fit(temperature, self._between(nearest, i) if nearest else self._latest)
            self._fitted[i] = found * temperature

    def _between(self, places: Sequence[int], place: float) -> Tensor:
        """The polynomial through fitted logits, by Lagrange's formula."""
        shares = [math.prod((place - j) / (i - j) for j in places if j != i) for i in places]
        return sum((share * self._fitted[i] for share, i in zip(shares, places, strict=True)), start=torch.zeros(()))

    def _fit(self, temperature: float, start: Tensor | None) -> Tensor:
        """Centroids at a temperature, sought from logits (C, C) where there are any."""
        if start is not None:
            start = log_softmax(start, temperature) if bool(start.isfinite().all()) else None
        found = centroids(*self._data, temperature, start=start)
        self._latest = found * temperature
        return found


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
                classes = labels[rows].long()
                apart = chord_distance(sphere(logits[rows].detach(), temperature), sphere(centre)[classes])
                loss = (apart / count[classes]).sum()
                gradient += torch.autograd.grad(loss, centre)[0]
            centre = (centre - learning_rate * gradient).detach().requires_grad_()
    return log_softmax(centre.detach())


def _class_counts(batches: Batches, n_classes: int) -> Tensor:
    """Samples in each class, (C,); a class without one is an error that names it."""
    total: Tensor | None = None
    for logits, labels in batches:
        _check_batch(logits, labels, n_classes)
        counts = torch.bincount(labels.long(), minlength=n_classes)
        total = counts if total is None else total + counts
    if total is None:
        raise InputError("batches: empty; centroids need at least one sample of each class")
    missing = (total == 0).nonzero()[:, 0].tolist()
    if missing:
        raise InputError(
            f"labels: no sample of class {missing[0]} ({len(missing)} of {n_classes} classes have none); "
            f"give every class at least one, to have a centroid"
        )
    return wide(total)


def _check_batch(logits: Tensor, labels: Tensor, n_classes: int) -> None:
    if logits.ndim != 2 or logits.shape[1] != n_classes:
        raise InputError(f"logits: expected shape (N, {n_classes}), got {tuple(logits.shape)}")
    if labels.shape != logits.shape[:1] or labels.is_floating_point() or labels.dtype == torch.bool:
        raise InputError(f"labels: expected {len(logits)} integers, got {labels.dtype} of shape {tuple(labels.shape)}")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < n_classes:
        raise InputError(f"labels: must lie in 0…{n_classes - 1}, got {int(labels.min())}…{int(labels.max())}")
    check_logits(logits)


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
