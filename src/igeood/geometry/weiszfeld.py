r"""Geometric medians on the sphere, for all classes at once: Weiszfeld's iteration with Anderson's acceleration.

A pass is a sum over samples, so it streams. With θ the angle between a sample and its class's centre and u the unit
tangent at the centre towards it, Weiszfeld's step is :math:`\sum wu / \sum w/\theta`; it never raises :math:`\sum
w\theta`, but can crawl. Anderson's acceleration combines the last few steps, and takes a third of the passes.

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

from igeood.errors import IgeoodWarning
from igeood.geometry.precision import chunk_rows, wide
from igeood.geometry.sphere import sphere

_COINCIDENT = 1e-12  # an angle below this is a sample on the centre itself
_LONGEST = 0.5  # radians, at most, in one step
_MEMORY = 3  # steps that are combined
_ROUNDING = 4.0  # times the resolution of floats: no step is shorter

Piece = tuple[Tensor, Tensor, Tensor]
Chunks = Callable[[], Iterable[Piece]]


def solve(
    chunks: Chunks, n_classes: int, temperature: float = 1.0, *, start: Tensor | None = None, tolerance: float = 1e-11,
    max_passes: int = 500, keep_bytes: int = 16 << 20,
) -> Tensor:  # fmt: skip
    """Fisher–Rao centroids (Eq. 3) of weighted samples that are read again in each pass; see `centroids`.

    Parameters
    ----------
    chunks : callable
        Returns an iterable of (logits (n, C), labels (n,), weights (n,)); called once a pass. Nothing is checked:
        every class needs a sample.
    n_classes, temperature, start, tolerance, max_passes
        As in `centroids`.
    keep_bytes : int
        Points on the sphere are kept between passes if they are no larger than this, else computed again.

    Returns
    -------
    Tensor
        (C, C) log-probabilities.
    """
    kept, mean, counts = _first_pass(_read(chunks, n_classes, temperature), n_classes, keep_bytes)
    centre = normalize(mean, dim=1) if start is None else sphere(start)
    here = _sums(_read(chunks, n_classes, temperature) if kept is None else kept, centre, counts)
    moves = turns = centre.new_empty(n_classes, 0, n_classes)  # (C, m, C)
    plain, stretch = torch.ones_like(counts, dtype=torch.bool), torch.ones_like(counts)
    shortest = _ROUNDING * torch.finfo(centre.dtype).eps
    for _ in range(max_passes):
        unfinished = (here.gap > tolerance) & (torch.linalg.vector_norm(here.step, dim=1) > shortest)
        if not bool(unfinished.any()):
            return 2.0 * centre.log()
        kept = kept and _only(kept, unfinished)
        step = _where(plain, stretch[:, None] * here.step, _accelerated(here.step, moves, turns))
        trial = _where(unfinished, _moved(centre, step), centre)
        there = _sums(_read(chunks, n_classes, temperature, unfinished) if kept is None else kept, trial, counts)
        taken = unfinished & ((there.angle <= here.angle * (1.0 + 1e-12)) | (there.gap < 0.5 * here.gap))
        moves = torch.cat([moves, (trial - centre)[:, None]], dim=1)[:, -_MEMORY:]
        turns = torch.cat([turns, (there.step - here.step)[:, None]], dim=1)[:, -_MEMORY:]
        stretch = torch.where(plain, torch.where(taken, 2.0 * stretch, 1.0), stretch)
        centre, plain = _where(taken, trial, centre), ~taken
        here = _Sums(*(_where(taken, new, old) for new, old in zip(there, here, strict=True)))
    worst = int(here.gap.argmax())
    gap = float(here.gap[worst])
    if gap > tolerance > 0.0:  # with 0, the passes are all that was asked for
        place = f"{worst} is within {gap:.1e} (relative) of its optimum after {max_passes} passes, not {tolerance:.0e}"
        warnings.warn(f"centroids: class {place}; raise max_passes or tolerance", IgeoodWarning, stacklevel=3)
    return 2.0 * centre.log()


class _Sums(NamedTuple):
    """What one pass yields for each class."""

    step: Tensor  # (C, C) Weiszfeld's step, a tangent at the centre
    angle: Tensor  # (C,) Σ wθ: half the objective of Eq. 3, times the class's weight
    gap: Tensor  # (C,) bound on the objective's relative distance to its optimum


def _read(chunks: Chunks, n_classes: int, temperature: float, wanted: Tensor | None = None) -> Iterator[Piece]:
    """The samples of the wanted classes, (C,) bool: points on the sphere, labels and weights, sorted by class."""
    size = max(chunk_rows(n_classes), n_classes)  # sums over classes cost C rows themselves
    for chunk in chunks():
        for first in range(0, len(chunk[0]), size):
            logits, labels, weights = (part[first : first + size] for part in chunk)
            order = labels.argsort(stable=True)
            if wanted is not None:
                order = order[wanted[labels[order].long()]]
            if len(order):
                yield sphere(logits[order], temperature), labels[order].long(), wide(weights[order])


def _only(pieces: list[Piece], wanted: Tensor) -> list[Piece]:
    """The samples of the wanted classes, (C,) bool."""
    left = []
    for points, labels, weights in pieces:
        rows = wanted[labels]
        left.append((points, labels, weights) if bool(rows.all()) else (points[rows], labels[rows], weights[rows]))
    return left


def _first_pass(pieces: Iterator[Piece], n_classes: int, keep_bytes: int) -> tuple[list[Piece] | None, Tensor, Tensor]:
    """The samples if they are few, the sum of each class's points (C, C), and of its weights (C,)."""
    kept, size = list[Piece](), 0
    total, counts = torch.zeros(()), torch.zeros(n_classes)
    for points, labels, weights in pieces:
        total = total + class_sums(points, labels, n_classes, weights)
        counts = counts.to(weights) + torch.bincount(labels, weights, n_classes)
        size += points.nbytes
        kept = [*kept, (points, labels, weights)] if size <= keep_bytes else []
    return kept if size <= keep_bytes else None, total, counts


def _sums(pieces: Iterable[Piece], centre: Tensor, counts: Tensor) -> _Sums:
    """One pass at the centres (C, C) of classes with the total weights (C,)."""
    pull, scalars = torch.zeros_like(centre), centre.new_zeros(3, len(centre))
    for points, labels, weights in pieces:
        diff = centre.index_select(0, labels)
        torch.sub(points, diff, out=diff)  # new memory costs more than arithmetic
        half = (0.5 * torch.linalg.vector_norm(diff, dim=1)).clamp_(max=1.0)
        sine, theta = 2.0 * half * (1.0 - half * half).sqrt_(), 2.0 * torch.asin(half)
        on_centre = theta <= _COINCIDENT
        away = weights.masked_fill(on_centre, 0.0)
        pull += class_sums(diff, labels, len(centre), away / sine.masked_fill_(on_centre, 1.0))
        for i, values in enumerate((away / theta.clamp(min=_COINCIDENT), weights * theta, weights - away)):
            scalars[i] += torch.bincount(labels, values, len(centre))
    weight, angle, coincident = scalars
    tangent = pull - (pull * centre).sum(dim=1, keepdim=True) * centre
    length = torch.linalg.vector_norm(tangent, dim=1)
    slope = (length - coincident).clamp(min=0.0)  # of the smallest subgradient
    scale = slope / length.clamp(min=_COINCIDENT) / weight.clamp(min=_COINCIDENT)
    return _Sums(tangent * scale[:, None], angle, 2.0 * slope / counts)


def _where(classes: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`a` for some classes, (C,) bool, and `b` for the others: (C,) or (C, C)."""
    return torch.where(classes if a.ndim == 1 else classes[:, None], a, b)


def class_sums(rows: Tensor, labels: Tensor, n_classes: int, weights: Tensor) -> Tensor:
    """Sums (C, k) of the rows (n, k) of each class, times weights (n,); the rows are sorted by their labels (n,)."""
    numbers = torch.arange(len(labels), device=labels.device)
    first = torch.searchsorted(labels, torch.arange(n_classes, device=labels.device))
    return embedding_bag(numbers, rows, first, mode="sum", per_sample_weights=weights)


def _accelerated(step: Tensor, moves: Tensor, turns: Tensor) -> Tensor:
    """Anderson's step (C, C): the last moves (C, m, C) combined such that the turns they led to cancel this step."""
    size = torch.linalg.vector_norm(turns, dim=2).clamp(min=1e-150)  # (C, m)
    gram = turns @ turns.mT / (size[:, :, None] * size[:, None]) + 1e-14 * torch.eye(turns.shape[1]).to(turns)
    shares = torch.linalg.solve(gram, (turns @ step[:, :, None])[:, :, 0] / size) / size
    combined = step - (shares[:, None] @ moves + shares[:, None] @ turns)[:, 0]
    # steps that grow put the point where they would vanish behind: the valley goes on ahead
    return torch.where((combined * step).sum(dim=1, keepdim=True) < 0.0, -combined, combined)


def _moved(centre: Tensor, step: Tensor) -> Tensor:
    """Where the geodesics from the centres (C, C) along the steps end, in the sphere's positive part."""
    step = step - (step * centre).sum(dim=1, keepdim=True) * centre
    size = torch.linalg.vector_norm(step, dim=1, keepdim=True)
    step, size = step * (_LONGEST / size.clamp(min=_LONGEST)), size.clamp(max=_LONGEST)
    moved = torch.cos(size) * centre + torch.sinc(size / torch.pi) * step
    return normalize(moved.clamp(min=0.0), dim=1)
