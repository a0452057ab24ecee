"""Curves over a parameter or a threshold, and what a score is made of."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from sklearn.metrics import precision_recall_curve, roc_curve

from igeood.bench.figures import drawing
from igeood.bench.figures.drawing import ID_COLOUR, ID_LABEL, NARROW, OOD_LABEL, SMALL, WIDTH, Values, finite, look_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Scores = Mapping[str, tuple[ArrayLike, ArrayLike]]  # by method, of in-distribution and of OOD samples
Searches = Mapping[str, tuple[ArrayLike, ArrayLike, float]]
PARAMETERS = {"temperature": "temperature $T$", "epsilon": r"step $\varepsilon$ (pixel units)"}


class TuningPanel(NamedTuple):
    """By method: values of a parameter that tuning tried, the TNR at TPR-95% (a fraction) of each, and the choice."""

    title: str
    parameter: str
    searches: Searches


def tuning_curves(panels: Sequence[TuningPanel], width: float = WIDTH) -> "Figure":
    """TNR at TPR-95% against temperature or ε, a panel each, two in a row; the choice is marked."""
    figure, grid = drawing.grid_of(len(panels), most=2, height=2.0, width=width)
    for axes, panel in zip(grid, panels, strict=True):
        _tuning(axes, *panel)
    drawing.legend(figure, grid)
    return figure


def _tuning(axes: "Axes", title: str, parameter: str, searches: Searches) -> None:
    drawing.label(axes, title=title, x=PARAMETERS[parameter], y="TNR at TPR-95%")
    if not searches:
        axes.set(xticks=[], yticks=[])
        axes.annotate("not tuned here", (0.5, 0.5), xycoords="axes fraction", ha="center", fontsize=SMALL)
        return
    for method, (values, rates, chosen) in searches.items():
        look, x, y = look_of(method), finite(values, method), finite(rates, method)
        x, y = np.stack([x, y])[:, np.argsort(x, kind="stable")]
        line = axes.plot(x, y, look.line, color=look.colour, linewidth=1.2, label=look.title)[0]
        line.set(marker=look.marker, markevery=[int(np.abs(x - chosen).argmin())], markeredgecolor="black")
    is_log = parameter == "temperature"
    axes.set_xscale("log" if is_log else "linear")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.locator_params(axis="y" if is_log else "both", nbins=5)


def roc_curves(methods: Scores) -> "Figure":
    """Share of in-distribution samples kept (TPR) against that of OOD samples kept (FPR), by method, narrow."""
    points = {m: roc_curve(*_labelled(m, *scores), drop_intermediate=False)[:2] for m, scores in methods.items()}
    return _over_thresholds(points, "OOD inputs kept (FPR)", "known inputs kept (TPR)")


def precision_recall_curves(methods: Scores) -> "Figure":
    """Precision against recall, in-distribution being the positive class, by method, narrow."""
    each = {m: precision_recall_curve(*_labelled(m, *scores)) for m, scores in methods.items()}
    points = {m: (recall[-2::-1], precision[-2::-1]) for m, (precision, recall, _) in each.items()}  # [-1] is no point
    return _over_thresholds(points, "recall: known inputs kept", "precision: known among kept")


def _labelled(method: str, id_scores: ArrayLike, ood_scores: ArrayLike) -> tuple[Values, Values]:
    """What scikit-learn takes: 1 for in-distribution, and scores that are higher for it."""
    known, foreign = finite(id_scores, method), finite(ood_scores, method)
    return np.repeat([1.0, 0.0], [len(known), len(foreign)]), -np.concatenate([known, foreign])


def _over_thresholds(points: Mapping[str, tuple[Values, Values]], x: str, y: str) -> "Figure":
    """A curve for each method; of many points, some 200 are drawn."""
    figure, (axes,) = drawing.grid_of(1, most=1, height=2.6, width=NARROW)
    for method, (across, up) in points.items():
        look, some = look_of(method), np.unique(np.linspace(0, len(across) - 1, 200).round().astype(int))
        axes.plot(across[some], up[some], look.line, color=look.colour, linewidth=1.3, label=look.title)
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    axes.grid(alpha=0.25, linewidth=0.6)
    drawing.label(axes, x=x, y=y)
    drawing.legend(figure, [axes])
    return figure


def contributions(columns: Sequence[str], id_means: ArrayLike, ood_means: ArrayLike) -> "Figure":
    """What each column adds to the score on average, in-distribution and OOD side by side, narrow."""
    figure, (axes,) = drawing.grid_of(1, most=1, height=0.4 + 0.36 * len(columns), width=NARROW)
    places, colours = np.arange(len(columns)), {ID_LABEL: ID_COLOUR, **drawing.ood_colours([OOD_LABEL])}
    for (name, colour), shift, means in zip(colours.items(), (-0.19, 0.19), (id_means, ood_means), strict=True):
        values = finite(means, name)
        axes.barh(places + shift, values, height=0.36, label=name, facecolor=(colour, 0.5), edgecolor=colour)
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_yticks(places, [name.replace("$", r"\$") for name in columns])
    axes.invert_yaxis()
    axes.locator_params(axis="x", nbins=5)
    drawing.label(axes, x="mean contribution to the score")
    drawing.legend(figure, [axes])
    return figure
