"""Geometric medians on the sphere, for all classes at once: the sums of one pass, and the search they drive.

Weiszfeld's iteration is a descent whose passes are sums over samples: they stream over batches and merge over shards.
The problem is geodesically convex on the sphere's positive part, which gives a certificate: the smallest subgradient
and the reach of the optimum bound the relative distance to it (`CentroidSums.gap`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from igeood.errors import InputError
from igeood.geometry.precision import chunk_rows
from igeood.geometry.sphere import sphere

_TINY = 1e-300
_COINCIDENT = 1e-12  # an angle below this is a sample on the centre itself
_OCTAVES = 44  # bins of angles: up to 2, up to 1, up to 1/2, …
_STRETCH = 1000.0  # Weiszfeld steps, at most, in one
_LONGEST = 0.5  # radians, at most, in one
_MEMORY = 10  # objectives that a step is compared with
_KEPT = 1 << 23  # coordinates of points that are kept from pass to pass: 64 MB

Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class CentroidSums:
    """One pass of Weiszfeld's iteration: sums over samples, which add over batches and shards.

    θ is the angle between a sample and its class's centre, and u the unit tangent at the centre towards the sample.
    """

    pull: Tensor  # (C, C) Σ u, up to multiples of the centre
    weight: Tensor  # (C,) Σ 1/θ
    angle: Tensor  # (C,) Σ θ: half the objective of Eq. 3, times the class's size
    coincident: Tensor  # (C,) those on the centre itself: they are in neither `pull` nor `weight`
    octaves: Tensor  # (C, _OCTAVES) number of samples in each octave of θ, ascending

    @property
    def count(self) -> Tensor:
        """Number of samples of each class, (C,)."""
        return self.octaves.sum(dim=1).to(self.angle.dtype)

    def __add__(self, other: "CentroidSums") -> "CentroidSums":
        return CentroidSums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def _tangent(self, centre: Tensor) -> tuple[Tensor, Tensor]:
        """Σ u at the centre, and its length."""
        tangent = self.pull - (self.pull * centre).sum(dim=1, keepdim=True) * centre
        return tangent, torch.linalg.vector_norm(tangent, dim=1)

    def gap(self, centre: Tensor) -> Tensor:
        """Bound on the objective's relative distance to its optimum, (C,).

        By convexity f(μ) − f* ≤ ‖g‖·d(μ, μ*), with the smallest subgradient g: samples on the centre contribute any
        tangent of length ≤ 1, so they can cancel as much of the pull.
        """
        _, length = self._tangent(centre)
        return (length - self.coincident).clamp(min=0.0) * self._reach() / self.angle.clamp(min=_TINY)

    def _reach(self) -> Tensor:
        """Bound on the angle between centre and optimum, (C,).

        By the triangle inequality it is at most twice the mean θ. And if a share α > ½ of the samples has θ ≤ r, it is
        at most 2αr/(2α−1): farther away those samples lose more than the others can gain.
        """
        share = self.octaves.cumsum(dim=1) / self.count[:, None]
        radius = torch.exp2(torch.arange(2 - _OCTAVES, 2, dtype=share.dtype, device=share.device))
        bound = torch.where(share > 0.501, 2.0 * share * radius / (2.0 * share - 1.0), torch.inf).amin(dim=1)
        return torch.minimum(bound, 2.0 * self.angle / self.count)

    def descent(self, centre: Tensor) -> Tensor:
        """Steepest descent of Σ θ, (C, C) tangents: the pull, shortened by the coincident samples (Vardi, Zhang)."""
        tangent, length = self._tangent(centre)
        shorter = (1.0 - self.coincident / length.clamp(min=_COINCIDENT)).clamp(min=0.0)
        return tangent * shorter[:, None]

    def where(self, classes: Tensor, other: "CentroidSums") -> "CentroidSums":
        """These sums for some classes, (C,) bool, and another's for the others."""
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return CentroidSums(*(torch.where(classes if a.ndim == 1 else classes[:, None], a, b) for a, b in pairs))


class Search:
    """Where the iteration stands: a centre for each class, its sums, and the size of the next step.

    Weiszfeld's step, Σ u / Σ 1/θ, never raises the objective but can crawl. The step is lengthened by the curvature
    seen between the last two centres (Barzilai, Borwein). Such steps need freedom to go uphill for a while: one is
    taken where it is below the worst of the last few objectives; where not, the next step is Weiszfeld's.
    """

    def __init__(self, centre: Tensor, sums: CentroidSums) -> None:
        self.centre, self.sums = centre, sums  # (C, C)
        self.best = centre  # (C, C) of the smallest gap so far
        self.gap = sums.gap(centre)  # (C,) its bound
        self.recent = sums.angle.expand(_MEMORY, -1).clone()  # (_MEMORY, C) objectives
        self.memory = float(
            _MEMORY
        )  # objectives that a step is compared with: fewer and fewer, or it might go in circles
        self.stretch = torch.ones_like(sums.angle)  # (C,) length of the next step in Weiszfeld steps

    def propose(self) -> Tensor:
        """Centres to try next, (C, C): a step along the geodesic of steepest descent."""
        step = self.sums.descent(self.centre) / self.sums.weight.clamp(min=0.5)[:, None]  # Σ 1/θ ≥ 2/π
        step = step * self.stretch[:, None]
        size = torch.linalg.vector_norm(step, dim=1, keepdim=True)
        size, step = size.clamp(max=_LONGEST), step * (_LONGEST / size.clamp(min=_LONGEST))
        moved = torch.cos(size) * self.centre + torch.sinc(size / torch.pi) * step
        return torch.nn.functional.normalize(moved.clamp(min=0.0), dim=1)

    def note(self, trial: Tensor, gap: Tensor) -> None:
        """Remember the trial for those classes where its bound is the smallest yet."""
        closer = gap < self.gap
        self.best = torch.where(closer[:, None], trial, self.best)
        self.gap = torch.where(closer, gap, self.gap)

    def move(self, trial: Tensor, sums: CentroidSums) -> None:
        """Take the trial for those classes where it is good enough; the others stay where they are."""
        taken = (sums.angle <= self.recent[-max(1, round(self.memory)) :].amax(dim=0)) & (sums.count > 0)
        self.memory = self.memory * 0.95 if self.memory > 0.1 else float(_MEMORY)
        moved, turned = trial - self.centre, self.sums.descent(self.centre) - sums.descent(trial)
        curvature = (moved * turned).sum(dim=1) / (moved * moved).sum(dim=1).clamp(min=_COINCIDENT**2)  # (C,)
        stretch = (sums.weight / curvature.clamp(min=_COINCIDENT)).clamp(1.0, _STRETCH)
        self.centre = torch.where(taken[:, None], trial, self.centre)
        self.sums = sums.where(taken, self.sums)
        self.stretch = torch.where(taken, stretch, (0.2 * self.stretch).clamp(min=1.0))
        self.recent = torch.cat([self.recent[1:], self.sums.angle[None]])


def polish(points: "Points", search: Search, unfinished: Tensor) -> Tensor:
    """Centres (C, C) with those of unfinished classes replaced by what L-BFGS makes of them.

    A few samples along one geodesic make so flat a valley that steps along the gradient take thousands of passes.
    """
    from scipy.optimize import minimize  # noqa: PLC0415 (slow to import, and seldom needed)

    centres = search.best.clone()
    for label in unfinished.nonzero()[:, 0].tolist():
        own = torch.cat([part[labels == label] for part, labels in points])
        start = centres[label].cpu().numpy()
        found = minimize(
            _angle_and_gradient, start, (own,), "L-BFGS-B", jac=True, bounds=[(0.0, None)] * len(start),
            options={"maxiter": 1000, "maxcor": 30, "ftol": 0.0, "gtol": 0.0},
        ).x  # fmt: skip
        if float((found**2).sum()) > 0.01:
            centres[label] = torch.nn.functional.normalize(torch.from_numpy(found).to(centres), dim=0)
    return centres


def _angle_and_gradient(v: Any, points: Tensor) -> tuple[float, Any]:
    """Σ θ of the points (n, C) to the direction of v (C,), with its gradient."""
    vector = torch.from_numpy(v).to(points)
    length = torch.linalg.vector_norm(vector)
    centre = (vector / length)[None]
    sums = _chunk_sums(points, torch.zeros(len(points), dtype=torch.int64, device=points.device), centre)
    gradient = -sums.descent(centre)[0] / length
    return float(sums.angle), gradient.cpu().numpy()


def sphere_sums(batches: Batches, centre: Tensor, temperature: float = 1.0) -> CentroidSums:
    """One Weiszfeld pass over all batches, at the centres (C, C) of the unit sphere; sums of shards add with ``+``."""
    return Points(batches, temperature).sums(centre)


class Points:
    """The samples on the sphere, in chunks of (points, labels) sorted by class.

    Few are kept from pass to pass, many are made anew from the logits: memory stays bounded.

    Parameters
    ----------
    batches : iterable of (logits, labels)
        Read once a pass where the points are not kept.
    temperature : float
        Of the softmax.
    keep : bool
        Keep them.
    """

    def __init__(self, batches: Batches, temperature: float, keep: bool = False) -> None:
        self._batches, self._temperature = batches, temperature
        self._wanted: Tensor | None = None  # (C,) bool: classes that have not been dropped
        self._kept = list(self._made()) if keep else None

    @classmethod
    def of(cls, batches: Batches, temperature: float, n: int, n_classes: int) -> "Points":
        """Points of n samples, kept if they are few enough."""
        return cls(batches, temperature, keep=n * (n_classes + 2) <= _KEPT)  # with labels

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._made() if self._kept is None else iter(self._kept)

    def _made(self) -> Iterator[tuple[Tensor, Tensor]]:
        for logits, labels in chunks(self._batches):
            order = labels.argsort(stable=True)
            if self._wanted is not None:
                order = order[self._wanted[labels[order]]]
            if len(order):
                yield sphere(logits[order], self._temperature), labels[order]

    def only(self, classes: Tensor) -> None:
        """Drop the samples of all other classes; classes is (C,) bool."""
        if self._wanted is not None and torch.equal(self._wanted, classes):
            return
        self._wanted = classes
        for number, (points, labels) in enumerate(self._kept or ()):
            rows = classes[labels]
            if self._kept is not None and not bool(rows.all()):
                self._kept[number] = (points[rows], labels[rows])  # one at a time: two copies would be much

    def nearest(self, centre: Tensor) -> Tensor:
        """For each centre (C, C) the nearest sample of its class that is not on it; where there is none, itself."""
        found, least = centre.clone(), centre.new_full((len(centre),), torch.inf)
        for points, labels in self:
            half = _apart(points, labels, centre)[1]
            half.masked_fill_(half <= 0.5 * _COINCIDENT, torch.inf)
            closest = least.scatter_reduce(0, labels, half, "amin")
            rows = ((half == closest[labels]) & (closest < least)[labels]).nonzero()[:, 0]
            found[labels[rows]], least = points[rows], closest
        return found

    def sums(self, centre: Tensor) -> CentroidSums:
        """One Weiszfeld pass at the centres (C, C)."""
        total: CentroidSums | None = None
        for points, labels in self:
            part = _chunk_sums(points, labels, centre)
            total = part if total is None else total + part
        if total is None:
            raise InputError("batches: empty; centroids need at least one sample of each class")
        return total


def chunks(batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """The same samples cut anew, in chunks that do not depend on the batches: sums come out the same to the bit."""
    held: list[tuple[Tensor, Tensor]] = []
    room = size = 0
    for logits, given in batches:
        labels = given.long()
        size = size or max(chunk_rows(logits.shape[-1]), logits.shape[-1])  # sums over classes cost C rows themselves
        start = 0
        while len(logits) - start >= size - room:
            stop = start + size - room
            yield _join([*held, (logits[start:stop], labels[start:stop])])
            held, room, start = [], 0, stop
        if start < len(logits):
            held.append((logits[start:], labels[start:]))
            room += len(logits) - start
    if held:
        yield _join(held)


def _join(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    return torch.cat([logits for logits, _ in parts]), torch.cat([labels for _, labels in parts])


def _apart(points: Tensor, labels: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Differences (n, C) of points from their class's centre, and the sines of half their angles, (n,)."""
    diff = centre.index_select(0, labels)
    torch.sub(points, diff, out=diff)
    return diff, (0.5 * torch.linalg.vector_norm(diff, dim=1)).clamp_(max=1.0)


def _chunk_sums(points: Tensor, labels: Tensor, centre: Tensor) -> CentroidSums:
    """Sums of points (n, C) that are sorted by their labels (n,)."""
    n_classes = len(centre)
    diff, half = _apart(points, labels, centre)
    angle = 2.0 * torch.asin(half)
    on_centre = angle <= _COINCIDENT
    sine = 2.0 * half * (1.0 - half * half).sqrt_()
    safe = angle.masked_fill(on_centre, torch.inf)
    octave = torch.frexp(angle.clamp(min=_TINY)).exponent.long().add_(_OCTAVES - 2).clamp_(0, _OCTAVES - 1)
    return CentroidSums(
        pull=class_sums(diff, labels, n_classes, sine.masked_fill_(on_centre, torch.inf).reciprocal_()),
        weight=torch.bincount(labels, safe.reciprocal(), n_classes),
        angle=torch.bincount(labels, angle, n_classes),
        coincident=torch.bincount(labels[on_centre], minlength=n_classes).to(angle.dtype),
        octaves=torch.bincount(labels * _OCTAVES + octave, minlength=n_classes * _OCTAVES).view(n_classes, _OCTAVES),
    )


def class_sums(rows: Tensor, labels: Tensor, n_classes: int, weights: Tensor | None = None) -> Tensor:
    """Sums (C, k) of the rows (n, k) of each class, times weights (n,); the rows are sorted by their labels (n,)."""
    numbers = torch.arange(len(labels), device=labels.device)
    first = torch.searchsorted(labels, torch.arange(n_classes, device=labels.device))
    return torch.nn.functional.embedding_bag(numbers, rows, first, mode="sum", per_sample_weights=weights)
