"""Histograms: of scores, of features against the normal density, of each layer's scores."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from igeood.bench.figures import drawing
from igeood.bench.figures.drawing import ID_LABEL, OOD_LABEL, SMALL, WIDTH, Axes, Figure, Values

Sets = Mapping[str, ArrayLike]
Limits = tuple[float, float]


class HistogramPanel(NamedTuple):
    """Scores of one detector: in-distribution, and of OOD sets by name; and the threshold."""

    title: str
    id_scores: ArrayLike
    ood_scores: Sets
    threshold: float


class LayerPanel(NamedTuple):
    """One layer's values, and the number of its title: Shapiro–Wilk's mean W, or the TNR at TPR-95% (a fraction)."""

    layer: str
    id_values: ArrayLike
    ood_values: ArrayLike
    number: float


# a method, its columns, the regression's own score last, and the regression's weight for each column
LayerRow = tuple[str, Sequence[LayerPanel], Sequence[float]]


def histogram(
    axes: Axes, id_values: ArrayLike, ood_values: Sets, colours: Mapping[str, str], limits: Limits | None = None
) -> bool:
    """Draw densities of in-distribution and OOD values on common bins; returns whether outliers lie outside the axis.

    `colours` are those of the OOD sets, by name. Outliers count in the densities; `limits` fix what the axis shows.
    """
    colours = {**colours, ID_LABEL: drawing.ID_COLOUR}
    sets = {name: np.asarray(values, np.float64) for name, values in {ID_LABEL: id_values, **ood_values}.items()}
    (low, high), clipped = (limits, False) if limits else _shown_range(list(sets.values()))
    bins = int(np.clip(math.sqrt(max(map(len, sets.values()))), 10, 50)) | 1  # odd: a constant falls in the middle
    edges = np.linspace(low, high, bins + 1)
    for name, values in sets.items():
        density = np.histogram(values, edges)[0] / (len(values) * (edges[1] - edges[0]))
        fill = (colours[name], 0.3 if len(sets) == 2 or name == ID_LABEL else 0.12)
        axes.stairs(density, edges, fill=True, facecolor=fill, edgecolor=colours[name], linewidth=1.1, label=name)
    axes.set(xlim=(low, high), ylim=(0.0, None))
    axes.locator_params(axis="y", nbins=4)
    axes.locator_params(axis="x", nbins=3)
    axes.ticklabel_format(scilimits=(-3, 4), useMathText=True)
    return clipped


def score_histograms(panels: Sequence[HistogramPanel], width: float = WIDTH) -> Figure:
    """Densities of scores, a panel each, three in a row; far outliers are left out, and the axis says so."""
    figure, grid = drawing.grid_of(len(panels), most=3, height=2.0, width=width)
    colours = drawing.ood_colours(name for panel in panels for name in panel.ood_scores)
    for axes, (title, known, foreign, delta) in zip(grid, panels, strict=True):
        clipped = histogram(axes, known, foreign, colours)
        drawing.label(axes, title=title, x="axis cut at 0.1 and 99.9%" if clipped else "", y="density")
        axes.axvline(delta, color="black", linestyle="--", linewidth=1.0, label=drawing.DELTA)
        low, high = axes.get_xlim()
        top = 1.22 * axes.get_ylim()[1]  # room for the text above the bars
        axes.set(xlim=(min(low, delta), max(high, delta)), ylim=(0.0, top))
        side = "left" if delta < (low + high) / 2 else "right"
        text = f"\u00a0δ = {delta:.3g}\u00a0".replace("-", "−")  # a browser drops other spaces at the ends
        axes.text(delta, 0.99, text, transform=axes.get_xaxis_transform(), ha=side, va="top", fontsize=SMALL)
    figure.supxlabel("score (higher is more out-of-distribution)", fontsize=SMALL)
    drawing.legend(figure, grid)
    return figure


def gaussianity(layers: Sequence[LayerPanel]) -> Figure:
    """Each layer's first channel, each set standardised by itself, against the standard normal density; and W."""
    figure, grid = drawing.grid_of(len(layers), most=4, height=1.8)
    x = np.linspace(-4.0, 4.0, 201)
    normal = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    for axes, panel in zip(grid, layers, strict=True):
        pair = (np.asarray(values, np.float64) for values in (panel.id_values, panel.ood_values))
        inside, outside = ((values - values.mean()) / (values.std() or 1.0) for values in pair)
        histogram(axes, inside, {OOD_LABEL: outside}, drawing.ood_colours([OOD_LABEL]), (-4.0, 4.0))
        axes.plot(x, normal, color="black", linewidth=1.2, label="standard normal")
        w = "$W$ undefined" if math.isnan(panel.number) else f"$W$ = {panel.number:.3f}"
        drawing.label(axes, title=f"{panel.layer}\n{w}", y="density")
    figure.supxlabel("first channel, each set standardised by itself", fontsize=SMALL)
    drawing.legend(figure, grid)
    return figure


def layer_histograms(rows: Sequence[LayerRow], theirs: Mapping[str, Sequence[float]] | None = None) -> Figure:
    """Scores of each layer, with their TNR at TPR-95%, then the regression's score with its weights; by method.

    `theirs` are the paper's weights by method, for the text.
    """
    shapes = [drawing.shape(len(panels), 4) for _, panels, _ in rows]
    heights = [1.7 * n + 0.4 for n, _ in shapes]
    figure = drawing.blank(0.5 + sum(heights))
    parts = figure.subfigures(*drawing.shape(len(rows), 1), squeeze=False, height_ratios=heights)[:, 0]
    for part, (method, panels, alphas), (n, columns) in zip(parts, rows, shapes, strict=True):
        part.suptitle(drawing.look_of(method).title, fontsize=drawing.TITLE + 1, fontweight="bold")
        for i, panel in enumerate(panels):
            axes = part.add_subplot(n, columns, i + 1)
            cut = histogram(axes, panel.id_values, {OOD_LABEL: panel.ood_values}, drawing.ood_colours([OOD_LABEL]))
            title = f"{panel.layer}\nTNR {100 * panel.number:.1f}%"
            drawing.label(axes, title=title, x="score (axis cut)" if cut else "score", y="density")
        texts = [f"α = {_vector(alphas)}", *(f"paper: {_vector(w)}" for w in [(theirs or {}).get(method)] if w)]
        lines = [line for text in texts for line in textwrap.wrap(text, 72 // columns)]  # what fits below a panel
        axes.set_xlabel("\n".join([axes.get_xlabel(), *lines]), fontsize=SMALL)
    drawing.legend(figure, figure.subfigs[0].axes)
    return figure


def _vector(values: Sequence[float]) -> str:
    return f"({', '.join(f'{value:.2g}' for value in values)})".replace("-", "−")


def _shown_range(sets: Sequence[Values]) -> tuple[Limits, bool]:
    """Limits of the axis, and whether they leave outliers out: only when these would squeeze the rest."""
    first, last = min(values.min() for values in sets), max(values.max() for values in sets)
    cuts = [0.0 if len(values) < 20 else 0.1 for values in sets]  # of few samples, none is an outlier
    low = min(np.percentile(v, cut, method="higher") for v, cut in zip(sets, cuts, strict=True))
    high = max(np.percentile(v, 100.0 - cut, method="lower") for v, cut in zip(sets, cuts, strict=True))
    clipped = bool(last - first > 1.5 * (high - low) > 0)
    low, high = (low, high) if clipped else (first, last)
    middle, width = (low + high) / 2, high - low
    half = 0.53 * width if width > 1e-9 * abs(middle) else 0.05 * abs(middle) or 0.5  # constant scores have a bar too
    return (middle - half, middle + half), clipped
