"""Evidence: every layer's Fisher–Rao distance and the output's, each as a surprise, added by Fisher's method."""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from igeood.detectors.base import Detector
from igeood.detectors.gaussians import Whitened, channel_reasons, inverse_root, shrunk_covariance
from igeood.detectors.logits import centred_energy
from igeood.detectors.options import options
from igeood.detectors.registry import register
from igeood.errors import Finding
from igeood.geometry import categorical
from igeood.geometry.centroids import Piece, solve
from igeood.geometry.precision import chunk_rows, exporting, wide
from igeood.geometry.sphere import chord_distance, sphere
from igeood.outputs import HEAD, Outputs
from igeood.summary import LengthSums, Needs, Sample, Summary, by_label, by_unheld_label, held_back, unit_rows

TEMPERATURE = 5.0  # of the softmax whose distance to the nearest centroid is taken
FLOOR = 1e-12  # of a distance or an energy, before its logarithm
MOST = 3000  # rows that say what is usual
FEWEST = 20  # such rows: fewer say too little
KNOTS = 128  # of a term's quantiles, at most
TAIL = 0.1  # the share of rows beyond the last knot
LEAST = 1e-2  # of a term's deviation: its tail falls off no faster
ALIKE = 1e-3  # what half precision may make of a feature
MASKED = -103.0  # the logarithm of a probability that float32 has for 0
CONSTANT = 1e-9  # a term that varies by no more is the same for all rows:
ZERO = math.log(2 * FLOOR)  # one that is 0 for all is left out,
STEEPEST = 0.05  # and of others another value is a surprise, by so much a nat


@register("evidence", title="Evidence", style=("#D55E00", "-", "*"), tunes=False)
@options
class Evidence(Detector):
    r""":math:`S = \overline{s(\log M_\ell)} + \overline{s(\log U_\ell)} + \tfrac12 s(-\log E) + \tfrac12 s(\log F)`.

    M is the Mahalanobis distance of a layer ℓ to the nearest class: the Fisher–Rao distance of Gaussians that share a
    covariance. U is the same of rows of length 1. Both are means over all layers that are read; of logits alone there
    are none. E is the centred energy, F the Fisher–Rao distance to the nearest centroid (Eq. 2–3) at temperature 5.
    s(t) = −log P(T ≥ t) is the *surprise* of a term: how rare a known input with such a value, or a greater one, is.
    Beyond the 90th percentile of known inputs it grows linearly. It is never negative, so one layer can convict, and
    none can acquit. No OOD sample is needed, and nothing is tuned.

    A tenth of the training rows, by their keys, stays out of means, covariances and centroids, and says what is usual.

    Parameters
    ----------
    probabilities : bool
        The arrays hold probabilities, not logits.

    Attributes
    ----------
    classes_ : Tensor
        (C',) the classes that have rows.
    mean_, whitening_, unit_mean_, unit_whitening_ : dict of Tensor
        For each layer the means (C', k) of the classes and the covariance's inverse root (k, k); of features as they
        are, and of rows of length 1.
    centroids_ : Tensor
        (C', C) log-probabilities, at temperature 5.
    knots_, surprises_ : Tensor
        (P, 128) values of the terms, and their surprises: linear between them.
    excess_ : Tensor
        (P,) the mean excess over the last knot.
    weights_ : Tensor
        (P,) of the surprises in the score; 0 for a term that is 0 for all rows, such as a dead layer's.
    """

    needs = Needs(layers="any", head=True, labels=True, sums=LengthSums, group=by_unheld_label, samples=("features",))
    probabilities: bool = False

    def learn(self, summary: Summary) -> Self:
        """Whiten each layer, seek the centroids, and see what is usual."""
        super().learn(summary)
        sample = summary.samples["features"]
        is_split = self._can_split(summary)
        sums = dict(summary.sums) if is_split else all_sums(summary)
        self.classes_ = self._kept_classes(summary, is_split)
        if HEAD in self.widths_ and any(alike(sums[HEAD], sums[layer]) for layer in list(self.widths_)[:-1]):
            del self.widths_[HEAD]  # a block ends in the head's input: once is enough
        raw = {layer: sums[layer].raw for layer in self.widths_}
        unit = {layer: sums[layer].unit for layer in self.widths_}
        self.mean_ = {layer: each.mean[self.classes_] for layer, each in raw.items()}
        self.whitening_ = {layer: inverse_root(shrunk_covariance(each)) for layer, each in raw.items()}
        self.unit_mean_ = {layer: each.mean[self.classes_] for layer, each in unit.items()}
        self.unit_whitening_ = {layer: inverse_root(shrunk_covariance(each)) for layer, each in unit.items()}
        self.centroids_ = solve(lambda: pieces(sample, self.classes_, is_split), len(self.classes_), TEMPERATURE)
        self._learn_surprises(*usual_rows(sample, is_split))
        return self

    def _can_split(self, summary: Summary) -> bool:
        """Whether a tenth of the rows can be held back."""
        held = sum(len(part) for part, _ in split(summary.samples["features"], held=True, features=False))
        distinct = len(summary.samples["features"])
        if summary.rows >= FEWEST / TAIL and FEWEST / 2 <= held < distinct:
            return True
        message = (
            f"{summary.rows} training rows, {distinct} of them distinct: all say what is usual, and are learnt from"
        )
        cure = f"give {FEWEST / TAIL:.0f} or more: of fewer, new inputs look too surprising"
        self.findings_.append(Finding("few-rows", "info", message, cure))
        return False

    def _kept_classes(self, summary: Summary, is_split: bool) -> Tensor:
        """Classes with rows that are not held back, (C',)."""
        counts = torch.zeros_like(summary.counts)
        for part, _ in split(summary.samples["features"], held=False if is_split else None, features=False):
            counts += torch.bincount(by_label(part), minlength=len(counts))
        lost = ((counts == 0) & (summary.counts > 0)).nonzero()[:, 0].tolist()
        if lost:
            message = f"labels: all rows of {len(lost)} classes are held back, to say what is usual: {lost[0]}, …"
            cure = "give more rows of each class: no input counts as near to these"
            self.findings_.append(Finding("class-held-back", "info", message, cure))
        return counts.nonzero()[:, 0]

    def _learn_surprises(self, rows: Outputs, weights: Tensor) -> None:
        """Knots, excesses and weights of the terms, from the rows that say what is usual."""
        values = self.values(rows)  # (n, P)
        tails = [tail(column, weights) for column in values.T]
        self.knots_, self.surprises_, self.excess_ = (torch.stack(each) for each in zip(*tails, strict=True))
        is_constant = values.amax(dim=0) - values.amin(dim=0) <= CONSTANT
        is_kept = (~is_constant | (values[0] > ZERO)).double()
        layers = len(self.widths_)
        distances, directions, output = torch.split(is_kept, [layers, layers, 2])
        means = [part / part.sum().clamp(min=1.0) for part in (distances, directions)]
        self.weights_ = torch.cat([*means, 0.5 * output])
        for name, weight, is_same in zip(self.term_names, self.weights_, is_constant, strict=True):
            if is_same:
                message = f"{name}: the same for all training rows"
                cure = "any other value is a surprise" if weight else "it is left out of the score"
                self.findings_.append(Finding("constant-term", "info", message, cure))

    @cached_property
    def _layers(self) -> list[tuple[str, Whitened, Whitened]]:
        """Each layer with its classes, as they are and of rows of length 1."""
        return [
            (
                layer,
                Whitened(self.mean_[layer], self.whitening_[layer]),
                Whitened(self.unit_mean_[layer], self.unit_whitening_[layer]),
            )
            for layer in self.widths_
        ]

    @cached_property
    def _roots(self) -> Tensor:
        return categorical.prepare(self.centroids_)

    @cached_property
    def _slopes(self) -> Tensor:
        """(P, 128) of the surprises after each knot."""
        run = self.knots_.diff(dim=1)
        slopes = self.surprises_.diff(dim=1) / run.clamp(min=torch.finfo(run.dtype).tiny)
        slopes = torch.cat([torch.where(run.isfinite(), slopes, 0.0), torch.zeros_like(self.excess_)[:, None]], dim=1)
        last = self.knots_.isfinite().sum(dim=1, keepdim=True) - 1
        return slopes.scatter(1, last, 1.0 / self.excess_[:, None])

    @property
    def term_names(self) -> list[str]:
        """Each layer's distance and direction, and the output's energy and nearest centroid."""
        layers = [layer.removeprefix("|") for layer in self.widths_]
        named = [f"{layer}: {reading}" for reading in ("distance", "direction") for layer in layers]
        return [*named, "output: energy", "output: centroid"]

    def values(self, outputs: Outputs) -> Tensor:
        """Logarithms: log M of each layer, log U of each layer, −log E and log F, (N, P)."""
        features = {layer: wide(outputs.features[layer]) for layer in self.widths_}
        columns = [raw.distance(features[layer])[0] for layer, raw, _ in self._layers]
        columns += [unit.distance(unit_rows(features[layer]))[0] for layer, _, unit in self._layers]
        logits = outputs.logits.clamp(min=MASKED) if self.probabilities else outputs.logits
        roots = self._roots.to(logits.device)
        points = sphere(logits, TEMPERATURE)
        with torch.no_grad():
            nearest = (points @ roots.T).argmax(dim=1)
        columns += [centred_energy(logits).pow(-2), chord_distance(points, roots[nearest]).square()]
        return 0.5 * torch.stack(columns, dim=1).clamp(min=FLOOR**2, max=FLOOR**-2).log()

    def surprises(self, outputs: Outputs) -> Tensor:
        """−log of the share of known inputs whose terms are at least as large, (N, P): at least 0."""
        columns = self.values(outputs).T.contiguous()
        knots, surprises, slopes = (t.to(columns) for t in (self.knots_, self.surprises_, self._slopes))
        with torch.no_grad():
            if exporting.get():
                reached = (columns[:, :, None] >= knots[:, None]).sum(dim=2)
            else:
                reached = torch.searchsorted(knots, columns, right=True)
            place = (reached - 1).clamp(min=0)
        beyond = (columns - knots.gather(1, place)).clamp(min=0.0)
        return (surprises.gather(1, place) + slopes.gather(1, place) * beyond).T

    def terms(self, outputs: Outputs) -> Tensor:
        """The weighted surprises."""
        step = chunk_rows(max([self.n_classes_, *self.widths_.values()]))
        if exporting.get() or len(outputs) <= step:
            return self.weights_.to(outputs.logits.device) * self.surprises(outputs)
        return torch.cat([self.terms(outputs[start : start + step]) for start in range(0, len(outputs), step)])

    def explain(self, outputs: Outputs, top: int) -> dict[str, Any]:
        """How rare each term is, the nearest class of each layer, and the channels that stand out."""
        nearest: dict[str, Tensor] = {}
        parts: dict[str, Tensor] = {}
        for layer, raw, _ in self._layers:
            at = raw.distance(outputs.features[layer])[1]
            parts[layer] = raw.parts(outputs.features[layer], at)
            nearest[layer] = self.classes_.to(at.device)[at]
        return {"rarity": torch.exp(-self.surprises(outputs)), **channel_reasons(nearest, parts, top)}


def split(sample: Sample, held: bool | None, *, features: bool = True) -> Iterator[tuple[Outputs, Tensor]]:
    """The rows of a sample that are held back, or are not, or all of them (None); with their weights."""
    for part, weights in sample.batches(features=features):
        rows = torch.ones(len(part), dtype=torch.bool) if held is None else held_back(part) == held
        yield part[rows], weights[rows]


def pieces(sample: Sample, classes: Tensor, is_split: bool) -> Iterator[Piece]:
    """Logits, places of the labels among these classes, and weights of the rows that are not held back."""
    for part, weights in split(sample, held=False if is_split else None, features=False):
        yield part.logits, torch.searchsorted(classes, by_label(part)), weights


def usual_rows(sample: Sample, is_split: bool) -> tuple[Outputs, Tensor]:
    """Rows that are held back, at most 3,000 of them, and their weights."""
    parts, weights = zip(*split(sample, held=True if is_split else None), strict=True)
    rows = Outputs.concat(parts)
    first = torch.from_numpy(rows.keys.argsort(kind="stable")[:MOST])
    return rows[first], torch.cat(weights)[first]


def all_sums(summary: Summary) -> dict[str, LengthSums]:
    """Sums of all rows, where the sample has those that were held back."""
    sums = dict(summary.sums)
    for part, counts in split(summary.samples["features"], held=True):
        repeats = counts.round().long()
        labels = by_label(part).repeat_interleave(repeats)
        for layer, features in part.features.items():
            rows = features.repeat_interleave(repeats, dim=0)
            sums[layer] = sums[layer] + LengthSums.of(rows, labels, len(sums[layer].count))
    return sums


def alike(one: LengthSums, other: LengthSums) -> bool:
    """Whether sums are of the same features, but for rounding."""
    if one.shift.shape != other.shift.shape:
        return False
    present = one.raw.present
    std = one.raw.variance.sqrt()
    apart = (one.raw.mean - other.raw.mean)[present].abs()
    is_near = apart <= ALIKE * (std + one.raw.mean[present].abs())
    return bool(is_near.all()) and torch.allclose(std, other.raw.variance.sqrt(), rtol=10 * ALIKE, atol=1e-6)


def tail(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How rare large values are among rows (n,) of these weights (n,).

    Returns
    -------
    knots : Tensor
        (128,) distinct quantiles up to the 90th percentile, then infinities.
    surprises : Tensor
        (128,) −log of the share of rows that are at least as large as a knot.
    excess : Tensor
        The mean excess of the other rows over the last knot.
    """
    order = values.argsort(stable=True)
    ordered = values[order]
    shares = weights[order].double() / weights.double().sum()
    below = shares.cumsum(dim=0)
    levels = torch.linspace(0.0, 1.0 - TAIL, KNOTS, dtype=torch.float64)
    quantiles = ordered[torch.searchsorted(below, levels - 1e-12).clamp(max=len(values) - 1)]
    distinct = torch.unique_consecutive(quantiles)
    before = torch.cat([below.new_zeros(1), below])[torch.searchsorted(ordered, distinct)]
    padding = KNOTS - len(distinct)
    knots = torch.cat([distinct, distinct.new_full((padding,), torch.inf)])
    surprises = torch.cat([-torch.log1p(-before), before.new_zeros(padding)])
    over = (ordered - distinct[-1]).clamp(min=0.0)
    excess = (shares * over).sum() / shares[over > 0].sum().clamp(min=1e-300)
    spread = (shares * (ordered - (shares * ordered).sum()).square()).sum().sqrt()
    if spread <= CONSTANT:
        return knots + CONSTANT, surprises, excess.new_tensor(STEEPEST)
    return knots, surprises, torch.maximum(excess, LEAST * spread)
