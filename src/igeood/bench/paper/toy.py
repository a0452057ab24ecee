r"""The paper's example in one dimension: what an OOD set's own mean and deviation add.

In-distribution samples follow N(μ₁, σ₁), "OOD I" N(μ₂, σ₁) and "OOD II" N(μ₂, σ₂). The paper prints no values. Here
μ₁ = 0, σ₁ = 1, μ₂ = 0.6745 and σ₂ = 0.1: μ₂ is the median of :math:`|x-\mu_1|`, so that Mahalanobis places a narrow
OOD II in the very middle of the in-distribution samples, where only the difference of deviations can tell.

What is fair in it. The in-distribution Gaussian is estimated from training draws and the OOD Gaussian from validation
draws of the same OOD set, which a user may not have; test draws are scored alone, each as a number x, and never with
the deviation of the set they came from. So each score is a function of x, and these are its means:

- ``mahalanobis``, |x − μ₁|/σ₁, and ``fisher-rao``, FR(x) of Eq. 11, see the in-distribution Gaussian only. One is an
  increasing function of the other: same AUROC, nothing further can be obtained.
- ``fisher-rao-ood``, FR(x) − FR′(x), sees the OOD Gaussian too, as IGEOOD+ does with weights (1, −1); FR′ gives the
  sample the OOD deviation, as `igeood.detectors` does.
- ``fisher-rao-ood-printed`` is the same with Eq. 12 as the paper prints it: there the sample has the in-distribution
  deviation. FR′ then orders samples alike but varies less, and weights (1, −1) are not the ones to take.
- ``mahalanobis-ood`` gives Mahalanobis the same OOD Gaussian. It does as well: in one dimension the gain over
  ``mahalanobis`` is that of the OOD statistics, not of the metric.
- ``likelihood-ratio`` of the true densities, the best that any score can do.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from igeood.bench.figures import drawing
from igeood.bench.figures.histograms import histogram
from igeood.geometry import gaussian
from igeood.metrics import Evaluation, evaluate


class Normal(NamedTuple):
    """A univariate Gaussian."""

    mean: float
    std: float


ID = "In-dist."
OOD_I = "OOD I"
OOD_II = "OOD II"
TRUTH: Mapping[str, Normal] = {ID: Normal(0.0, 1.0), OOD_I: Normal(0.6745, 1.0), OOD_II: Normal(0.6745, 0.1)}
_COLOURS = drawing.ood_colours([OOD_I, OOD_II])
VALIDATION = 1000  # draws that give each Gaussian's estimate: the paper's number of validation samples


@dataclass(frozen=True)
class Toy:
    """The example's numbers.

    Attributes
    ----------
    samples : mapping of array
        (n,) test draws of each distribution of `TRUTH`.
    estimates : mapping of Normal
        Of each distribution, from `VALIDATION` other draws.
    scores : mapping
        ``scores[name][ood]`` is the pair of (n,) scores of in-distribution and of OOD test draws: the former depend on
        the OOD set where the score knows its statistics.
    evaluations : mapping
        ``evaluations[name][ood]``, of these scores.
    """

    samples: Mapping[str, Tensor]
    estimates: Mapping[str, Normal]
    scores: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]]
    evaluations: Mapping[str, Mapping[str, Evaluation]]


def mahalanobis(x: Tensor, to: Normal) -> Tensor:
    """Mahalanobis distance |x − μ|/σ."""
    return (x - to.mean).abs() / to.std


def fisher_rao(x: Tensor, std: float | Tensor, to: Normal) -> Tensor:
    """Fisher–Rao distance (Eq. 9) of N(x, `std`) to a Gaussian."""
    return gaussian.univariate_distance(x, *(torch.as_tensor(v, dtype=torch.float64) for v in (std, *to)))


def _log_density(x: Tensor, of: Normal) -> Tensor:
    return -0.5 * ((x - of.mean) / of.std) ** 2 - math.log(of.std)


_SCORES: Mapping[str, Callable[[Tensor, Normal, Normal], Tensor]] = {  # of x, the ID and the OOD Gaussian
    "mahalanobis": lambda x, known, _: mahalanobis(x, known),
    "fisher-rao": lambda x, known, _: fisher_rao(x, known.std, known),
    "fisher-rao-ood": lambda x, known, ood: fisher_rao(x, known.std, known) - fisher_rao(x, ood.std, ood),
    "fisher-rao-ood-printed": lambda x, known, ood: fisher_rao(x, known.std, known) - fisher_rao(x, known.std, ood),
    "mahalanobis-ood": lambda x, known, ood: mahalanobis(x, known) - mahalanobis(x, ood),
    "likelihood-ratio": lambda x, known, ood: _log_density(x, ood) - _log_density(x, known),
}


def toy(seed: int = 0, n: int = 5000) -> Toy:
    """Draw, estimate, score and evaluate; the same seed gives the same numbers.

    Parameters
    ----------
    seed : int
        Of all draws.
    n : int
        Test draws of each distribution.

    Examples
    --------
    >>> found = toy(seed=0).evaluations
    >>> {name: round(found[name][OOD_II].auroc, 2) for name in ("mahalanobis", "fisher-rao", "fisher-rao-ood")}
    {'mahalanobis': 0.52, 'fisher-rao': 0.52, 'fisher-rao-ood': 0.95}
    """
    random = np.random.default_rng(seed)
    learnt = {name: random.normal(*truth, VALIDATION) for name, truth in TRUTH.items()}
    samples = {name: torch.from_numpy(random.normal(*truth, n)) for name, truth in TRUTH.items()}
    estimates = {name: Normal(float(draws.mean()), float(draws.std())) for name, draws in learnt.items()}
    scores: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
    for name, score in _SCORES.items():
        given = TRUTH if name == "likelihood-ratio" else estimates
        scores[name] = {
            ood: (score(samples[ID], given[ID], given[ood]), score(samples[ood], given[ID], given[ood]))
            for ood in (OOD_I, OOD_II)
        }
    evaluations = {name: {ood: evaluate(*pair) for ood, pair in found.items()} for name, found in scores.items()}
    return Toy(samples, estimates, scores, evaluations)


def figure(example: Toy) -> drawing.Figure:
    """Draw the paper's three panels: (a) contour lines of both distances, (b) the densities, (c) the scores."""
    whole = drawing.blank(6.6)
    top, bottom = whole.subfigures(2, 1, squeeze=False, height_ratios=[1.0, 1.35])[:, 0]
    left, right = top.subplots(1, 2)
    _contours(left)
    _densities(right)
    bottom.suptitle("(c) Scores of test draws: higher is more out-of-distribution", fontsize=drawing.TITLE)
    rows = (("mahalanobis", "Mahalanobis"), ("fisher-rao-ood", "Fisher–Rao with OOD statistics"))
    for axes_row, (name, title) in zip(bottom.subplots(2, 2), rows, strict=True):
        for axes, (ood, (inside, outside)) in zip(axes_row, example.scores[name].items(), strict=True):
            histogram(axes, inside, {ood: outside}, _COLOURS)
            auroc = example.evaluations[name][ood].auroc
            drawing.label(axes, title=f"{ood}: AUROC {auroc:.2f}", x=title, y="density")
    drawing.legend(whole, [right, left])
    return whole


def _contours(axes: drawing.Axes) -> None:
    """Contour lines of the distances to the in-distribution Gaussian, over means and deviations."""
    mean, std = map(torch.from_numpy, np.meshgrid(np.linspace(-1.6, 1.6, 161), np.linspace(0.03, 1.9, 188)))
    for values, levels, name, line, title in (
        (mahalanobis(mean, TRUTH[ID]), [0.5, 1.0, 1.5], "mahalanobis", "dashed", "Mahalanobis"),
        (fisher_rao(mean, std, TRUTH[ID]), [0.5, 1.0, 2.0, 3.0], "igeood", "solid", "Fisher–Rao"),
    ):
        look: dict[str, Any] = {"colors": drawing.look_of(name).colour, "linewidths": 1.0, "linestyles": line}
        drawn = axes.contour(mean, std, values, levels=levels, **look)
        axes.hlines([], 0, 0, label=title, **look)
    axes.clabel(drawn, fontsize=drawing.SMALL, fmt="%g")
    for name, of in TRUTH.items():
        colour = _COLOURS.get(name, drawing.ID_COLOUR)
        axes.plot(*of, "o", color=colour, markeredgecolor="black", markersize=6, clip_on=False, zorder=5)
        behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
        axes.annotate(name, of, (0, 7), textcoords="offset points", ha="center", fontsize=drawing.SMALL, bbox=behind)
    drawing.label(axes, title="(a) Distance to the in-distribution Gaussian", x="mean μ", y="deviation σ")
    axes.set_ylim(bottom=0.0)


def _densities(axes: drawing.Axes) -> None:
    x = torch.linspace(-3.0, 3.5, 651, dtype=torch.float64)
    for name, of in TRUTH.items():
        colour = _COLOURS.get(name, drawing.ID_COLOUR)
        title = drawing.ID_LABEL if name == ID else name
        density = _log_density(x, of).exp() / math.sqrt(2 * math.pi)
        axes.fill_between(x, density, facecolor=(colour, 0.3), edgecolor=colour, linewidth=1.1, label=title)
    axes.set(xlim=(-3.0, 3.5), ylim=(0.0, None))
    drawing.label(axes, title="(b) Densities", x="x", y="density")
