r"""Class centroids of softmax outputs (the paper's Eq. 3): Weiszfeld's iteration with Anderson's acceleration.

The Fisher–Rao centroid minimises the *mean distance* to its class's outputs: a geometric median on the sphere. All
classes are solved at once. A pass is a sum over samples, so it streams. With θ the angle between a sample and its
class's centre and u the unit tangent at the centre towards it, Weiszfeld's step is :math:`\sum wu / \sum w/\theta`; it
never raises :math:`\sum w\theta`, but can crawl. Anderson's acceleration combines the last few steps, and takes a third
of the passes.

*Certificate.* The problem is convex along geodesics of the sphere's positive part, so :math:`f(\mu)-f^* \le
\|g\|\,d(\mu,\mu^*)` with the smallest subgradient g, and the optimum is no farther than twice the mean of θ. Samples on
the centre contribute any tangent of length ≤ 1, so they cancel as much of the pull (Vardi, Zhang).
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, normalize

from igeood.errors import IgeoodWarning, InputError
from igeood.geometry.precision import chunk_rows, wide
from igeood.geometry.sphere import check_temperature, sphere
from igeood.outputs import Outputs

_COINCIDENT = 1e-12  # an angle below this is a sample on the centre itself
_LONGEST = 0.5  # radians, at most, in one step
_MEMORY = 3  # steps that are combined
_ROUNDING = 4.0  # times the resolution of floats: no step is shorter

Piece = tuple[Tensor, Tensor, Tensor]
Chunks = Callable[[], Iterable[Piece]]


def centroids(
    logits: Tensor,
    labels: Tensor,
    n_classes: int,
    temperature: float = 1.0,
    *,
    tolerance: float = 1e-11,
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
    tolerance : float
        Stop when each class's objective is within this relative distance of its optimum, or rounding prevents it.
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
    check_temperature(temperature)
    outputs = Outputs(logits.detach(), labels=labels)
    if outputs.n_classes != n_classes or outputs.labels is None:
        raise InputError(f"expected shape (N, {n_classes}), got {tuple(logits.shape)}", argument="logits")
    missing = (torch.bincount(outputs.labels, minlength=n_classes) == 0).nonzero()[:, 0].tolist()
    if missing:
        raise InputError(f"{len(missing)} classes have no sample: {missing[0]}, …", argument="labels", cure="add some")
    piece = (outputs.logits, outputs.labels, torch.ones_like(outputs.labels))
    return solve(lambda: [piece], n_classes, temperature, tolerance=tolerance, max_passes=max_passes)


class _Sums(NamedTuple):
    """Result of one pass, for each class."""

    step: Tensor  # (C, C) Weiszfeld's step, a tangent at the centre
    angle: Tensor  # (C,) Σ wθ: half the objective of Eq. 3, times the class's weight
    gap: Tensor  # (C,) bound on the objective's relative distance to its optimum


def solve(
    chunks: Chunks,
    n_classes: int,
    temperature: float = 1.0,
    *,
    start: Tensor | None = None,
    tolerance: float = 1e-11,
    max_passes: int = 500,
) -> Tensor:
    """Fisher–Rao centroids (Eq. 3) of weighted samples that are read again in each pass; see `centroids`.

    Parameters
    ----------
    chunks : callable
        Returns an iterable of (logits (n, C), labels (n,), weights (n,)); called once a pass. Nothing is checked:
        every class needs a sample.
    n_classes : int
        K, the classes that the labels tell apart.
    temperature, tolerance, max_passes
        As in `centroids`.
    start : Tensor, optional
        (K, C) log-probabilities to start from; by default the normalised mean of each class's points.

    Returns
    -------
    Tensor
        (K, C) log-probabilities.
    """
    mean, counts = _means(_points(chunks, n_classes, temperature), n_classes)
    centre = mean if start is None else sphere(start)
    here = _sums(_points(chunks, n_classes, temperature), centre, counts)
    moves = turns = centre.new_empty(n_classes, 0, centre.shape[1])  # (K, m, C)
    is_plain = torch.ones_like(counts, dtype=torch.bool)  # classes whose next step is Weiszfeld's own, stretched
    stretch = torch.ones_like(counts)
    shortest = _ROUNDING * torch.finfo(centre.dtype).eps
    for _ in range(max_passes):
        unfinished = (here.gap > tolerance) & (torch.linalg.vector_norm(here.step, dim=1) > shortest)
        if not bool(unfinished.any()):
            return 2.0 * centre.log()
        step = _where(is_plain, stretch[:, None] * here.step, _accelerated(here.step, moves, turns))
        trial = _where(unfinished, _moved(centre, step), centre)
        there = _sums(_points(chunks, n_classes, temperature, unfinished), trial, counts)
        taken = unfinished & ((there.angle <= here.angle * (1.0 + 1e-12)) | (there.gap < 0.5 * here.gap))
        moves = torch.cat([moves, (trial - centre)[:, None]], dim=1)[:, -_MEMORY:]
        turns = torch.cat([turns, (there.step - here.step)[:, None]], dim=1)[:, -_MEMORY:]
        stretch = torch.where(is_plain, torch.where(taken, 2.0 * stretch, 1.0), stretch)
        is_plain = ~taken
        centre = _where(taken, trial, centre)
        here = _Sums(*(_where(taken, new, old) for new, old in zip(there, here, strict=True)))
    worst = int(here.gap.argmax())
    gap = float(here.gap[worst])
    if gap > tolerance > 0.0:  # with 0, the passes are all that was asked for
        state = f"within {gap:.1e} (relative) of its optimum after {max_passes} passes, not {tolerance:.0e}"
        message = f"centroids: class {worst} is {state}; raise max_passes or tolerance"
        warnings.warn(message, IgeoodWarning, stacklevel=3)
    return 2.0 * centre.log()


def _points(chunks: Chunks, n_classes: int, temperature: float, wanted: Tensor | None = None) -> Iterator[Piece]:
    """The samples of the wanted classes, (C,) bool: points on the sphere, labels and weights, sorted by class."""
    size = max(chunk_rows(n_classes), n_classes)  # sums over classes cost C rows themselves
    for chunk in chunks():
        for logits, labels, weights in zip(*(torch.split(column, size) for column in chunk), strict=True):
            order = labels.argsort(stable=True)
            if wanted is not None:
                order = order[wanted[labels[order].long()]]
            if len(order):
                yield sphere(logits[order], temperature), labels[order].long(), wide(weights[order])


def _means(pieces: Iterator[Piece], n_classes: int) -> tuple[Tensor, Tensor]:
    """The normalised mean of each class's points (C, C), and the sum of its weights (C,)."""
    total = counts = torch.zeros(())
    for points, labels, weights in pieces:
        total = total + _class_sums(points, labels, n_classes, weights)
        counts = counts + torch.bincount(labels, weights, n_classes)
    return normalize(total, dim=1), counts


def _sums(pieces: Iterable[Piece], centre: Tensor, counts: Tensor) -> _Sums:
    """One pass at the centres (C, C) of classes with the total weights (C,)."""
    pull = torch.zeros_like(centre)
    weight, angle, coincident = centre.new_zeros(3, len(centre))
    for points, labels, weights in pieces:
        diff = points - centre[labels]
        half = (0.5 * torch.linalg.vector_norm(diff, dim=1)).clamp(max=1.0)
        sine = 2.0 * half * (1.0 - half * half).sqrt()
        theta = 2.0 * torch.asin(half)
        on_centre = theta <= _COINCIDENT
        away = weights.masked_fill(on_centre, 0.0)
        pull += _class_sums(diff, labels, len(centre), away / sine.masked_fill(on_centre, 1.0))
        weight += torch.bincount(labels, away / theta.clamp(min=_COINCIDENT), len(centre))
        angle += torch.bincount(labels, weights * theta, len(centre))
        coincident += torch.bincount(labels, weights - away, len(centre))
    tangent = pull - (pull * centre).sum(dim=1, keepdim=True) * centre
    length = torch.linalg.vector_norm(tangent, dim=1)
    slope = (length - coincident).clamp(min=0.0)  # of the smallest subgradient
    scale = slope / length.clamp(min=_COINCIDENT) / weight.clamp(min=_COINCIDENT)
    return _Sums(tangent * scale[:, None], angle, 2.0 * slope / counts)


def _class_sums(rows: Tensor, labels: Tensor, n_classes: int, weights: Tensor) -> Tensor:
    """Sums (C, k) of the rows (n, k) of each class, times weights (n,); the rows are sorted by their labels (n,)."""
    numbers = torch.arange(len(labels), device=labels.device)
    starts = torch.searchsorted(labels, torch.arange(n_classes, device=labels.device))
    return embedding_bag(numbers, rows, starts, mode="sum", per_sample_weights=weights)


def _where(classes: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`a` for some classes, (C,) bool, and `b` for the others: (C,) or (C, C)."""
    return torch.where(classes if a.ndim == 1 else classes[:, None], a, b)


def _accelerated(step: Tensor, moves: Tensor, turns: Tensor) -> Tensor:
    """Anderson's step (C, C): the last moves (C, m, C) combined such that the turns they led to cancel this step."""
    size = torch.linalg.vector_norm(turns, dim=2).clamp(min=1e-150)  # (C, m)
    gram = turns @ turns.mT / (size[:, :, None] * size[:, None]) + 1e-14 * torch.eye(turns.shape[1]).to(turns)
    shares = torch.linalg.solve(gram, (turns @ step[:, :, None])[:, :, 0] / size) / size
    combined = step - (shares[:, None] @ (moves + turns))[:, 0]
    # steps that grow put the point where they would vanish behind: the valley goes on ahead
    return torch.where((combined * step).sum(dim=1, keepdim=True) < 0.0, -combined, combined)


def _moved(centre: Tensor, step: Tensor) -> Tensor:
    """Where the geodesics from the centres (C, C) along the steps end, in the sphere's positive part."""
    step = step - (step * centre).sum(dim=1, keepdim=True) * centre
    size = torch.linalg.vector_norm(step, dim=1, keepdim=True)
    step = step * (_LONGEST / size.clamp(min=_LONGEST))
    size = size.clamp(max=_LONGEST)
    moved = torch.cos(size) * centre + torch.sinc(size / torch.pi) * step
    return normalize(moved.clamp(min=0.0), dim=1)
