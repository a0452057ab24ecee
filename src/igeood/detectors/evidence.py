"""Evidence: every layer's Fisher–Rao distance and the output's, each as a surprise, added by Fisher's method."""

import math
from collections.abc import Iterator, Mapping
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
from igeood.summary.sample import quota

TEMPERATURE = 5.0  # of the softmax whose distance to the nearest centroid is taken
FLOOR = 1e-12  # of a distance or an energy, before its logarithm
MOST = 3000  # rows that say what is usual
FEWEST = 2  # such rows: with fewer, all rows are learnt from and say what is usual
ENOUGH = 20  # such rows say it well
KNOTS = 128  # of a term's quantiles, at most
TAIL = 0.1  # the share of rows beyond the last knot
PRIOR = 5  # rows beyond the last knot that half the deviation, a Gaussian's mean excess, counts for: a few say little
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
        (P,) the mean excess over the last knot, by which surprises grow beyond it.
    weights_ : Tensor
        (P,) of the surprises in the score; 0 for a term that is 0 for all rows, such as a dead layer's.
    """

    needs = Needs(layers="any", head=True, labels=True, sums=LengthSums, group=by_unheld_label, samples=("features",))
    probabilities: bool = False

    def learn(self, summary: Summary) -> Self:
        """Whiten each layer, seek the centroids, and see what is usual."""
        super().learn(summary)
        sample = summary.samples["features"]
        kept, held = class_counts(sample)
        # of outputs with few values, as a tree's, a few distinct rows may stand for all that are held back
        are_few = int(held.sum()) < ENOUGH and 2 * len(sample) < summary.rows
        is_split = int(held.sum()) >= FEWEST and bool(kept.any()) and not are_few
        summed = next(iter(summary.sums.values())).count > 0 if self.widths_ else kept > 0
        alone = ~summed & (held > 0)  # classes whose rows are all held back
        sums = dict(summary.sums) if is_split else sums_with(summary, held > 0)
        if HEAD in self.widths_ and any(alike(sums[HEAD], sums[layer]) for layer in list(self.widths_)[:-1]):
            del self.widths_[HEAD]  # a block ends in the head's input: once is enough
        self.whitening_ = {layer: inverse_root(shrunk_covariance(sums[layer].raw)) for layer in self.widths_}
        self.unit_whitening_ = {layer: inverse_root(shrunk_covariance(sums[layer].unit)) for layer in self.widths_}
        # where the sample has no other row of a class, a held one stands for its centroid
        self._learn_classes(sample, sums, summed if is_split else summed | alone, (kept == 0) | (not is_split))
        self._learn_surprises(*usual_rows(sample, is_split))
        if is_split and bool(alone.any()):  # they are known by their held rows, once those have said what is usual
            self._learn_classes(sample, sums_with(summary, alone), summed | alone, kept == 0)
        few = int(held.sum()) if is_split else len(sample)
        if few < ENOUGH or not is_split:
            where = "" if is_split else ", and the classes are learnt from the same rows"
            message = f"{few} different rows of {summary.rows} training rows say what is usual{where}"
            cure = f"give more, if there are: {10 * ENOUGH} different rows are enough"
            self.findings_.append(Finding("few-rows", "info", message, cure))
        single = int((next(iter(sums.values())).count == 1).sum()) if sums else 0
        if single:
            message = f"{single} classes are learnt from a single training row, which is their mean"
            self.findings_.append(Finding("single-sample", "info", message, "give more rows"))
        return self

    def _learn_classes(self, sample: Sample, sums: dict[str, LengthSums], present: Tensor, both: Tensor) -> None:
        """Means and centroids of the classes that are present, (C,) bool; of some, held rows count for centroids."""
        self.classes_ = present.nonzero()[:, 0]
        self.mean_ = {layer: sums[layer].raw.mean[self.classes_] for layer in self.widths_}
        self.unit_mean_ = {layer: sums[layer].unit.mean[self.classes_] for layer in self.widths_}
        self.centroids_ = solve(lambda: self._pieces(sample, present, both), len(self.classes_), TEMPERATURE)
        for derived in ("_layers", "_roots"):
            vars(self).pop(derived, None)

    def _pieces(self, sample: Sample, present: Tensor, both: Tensor) -> Iterator[Piece]:
        """Logits, places of the labels among the classes that are present, and weights of the rows to learn from."""
        for part, weights in sample.batches(features=False):
            labels = by_label(part)
            rows = present[labels] & (~held_back(part) | both[labels])
            yield self._finite(part.logits[rows]), torch.searchsorted(self.classes_, labels[rows]), weights[rows]

    def _finite(self, logits: Tensor) -> Tensor:
        """Logits; of probabilities, none below what float32 has for 0."""
        return logits.clamp(min=MASKED) if self.probabilities else logits

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
                cure = "a larger value is a surprise" if weight else "it is left out of the score"
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
        logits = self._finite(outputs.logits)
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

    def load_state(self, state: Mapping[str, Tensor], n_classes: int, widths: Mapping[str, int]) -> Self:
        """Take over what `state` returned, in place of `fit`."""
        learnt = {layer: width for layer, width in widths.items() if f"mean_:{layer}" in state}
        return super().load_state(state, n_classes, learnt)

    def explain(self, outputs: Outputs, top: int) -> dict[str, Any]:
        """How rare each term is, the nearest class of each layer, and the channels that stand out."""
        nearest: dict[str, Tensor] = {}
        parts: dict[str, Tensor] = {}
        for layer, raw, _ in self._layers:
            at = raw.distance(outputs.features[layer])[1]
            parts[layer] = raw.parts(outputs.features[layer], at)
            nearest[layer] = self.classes_.to(at.device)[at]
        is_used = (self.weights_ > 0).to(outputs.logits.device)  # what is left out says nothing
        surprises = self.surprises(outputs) * is_used
        return {"rarity": torch.exp(-surprises), **channel_reasons(nearest, parts, top)}


def class_counts(sample: Sample) -> Tensor:
    """Distinct rows of each class that are not held back, and that are, (2, C)."""
    counts = torch.zeros(2, max(sample.strata, sample.n_classes), dtype=torch.int64)
    for part, _ in sample.batches(features=False):
        counts.index_put_((held_back(part).long(), by_label(part)), torch.tensor(1), accumulate=True)
    return counts


def usual_rows(sample: Sample, is_split: bool) -> tuple[Outputs, Tensor]:
    """Rows that are held back, or all, at most 3,000 of them, of each class alike; and their weights."""
    parts: list[Outputs] = []
    weights: list[Tensor] = []
    for part, counts in sample.batches():
        rows = held_back(part) | (not is_split)
        parts.append(part[rows])
        weights.append(counts[rows])
    usual = Outputs.concat(parts)
    labels = by_label(usual)
    sizes = torch.bincount(labels)
    taken = sizes.clamp(max=max(1, quota(sizes.numpy(), MOST)))
    ranks = torch.arange(len(usual)) - (sizes.cumsum(dim=0) - sizes)[labels]  # rows are sorted by class, then by key
    first = ranks < taken[labels]
    return usual[first], (torch.cat(weights) * (sizes / taken.clamp(min=1))[labels])[first]


def sums_with(summary: Summary, classes: Tensor) -> dict[str, LengthSums]:
    """Sums with the held rows of some classes, (C,) bool, as far as the sample has them; equal rows count once."""
    sums = dict(summary.sums)
    for part, _ in summary.samples["features"].batches():
        labels = by_label(part)
        rows = held_back(part) & classes[labels]
        for layer, features in part.features.items():
            sums[layer] = sums[layer] + LengthSums.of(features[rows], labels[rows], len(sums[layer].count))
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
        The mean excess of the other rows over the last knot, with five rows' worth of what a Gaussian would have.
    """
    order = values.argsort(stable=True)
    ordered = values[order]
    shares = weights[order].double() / weights.double().sum()
    below = shares.cumsum(dim=0)
    levels = torch.linspace(0.0, 1.0 - TAIL, KNOTS, dtype=torch.float64)
    quantiles = ordered[torch.searchsorted(below, levels - 1e-12).clamp(max=len(values) - 1)]
    distinct = quantiles[quantiles.diff(prepend=quantiles[:1] - 1.0) > CONSTANT]
    before = torch.cat([below.new_zeros(1), below])[torch.searchsorted(ordered, distinct - CONSTANT)]
    padding = KNOTS - len(distinct)
    knots = torch.cat([distinct, distinct.new_full((padding,), torch.inf)])
    surprises = torch.cat([-torch.log1p(-before), before.new_zeros(padding)])
    over = (ordered - distinct[-1]).clamp(min=0.0)
    mean = (shares * over).sum() / shares[over > CONSTANT].sum().clamp(min=1e-300)
    spread = (shares * (ordered - (shares * ordered).sum()).square()).sum().sqrt()
    if spread <= CONSTANT:
        return knots + CONSTANT, surprises, mean.new_tensor(STEEPEST)
    n = (over > CONSTANT).sum()
    return knots, surprises, (n * mean + PRIOR * 0.5 * spread) / (n + PRIOR)
