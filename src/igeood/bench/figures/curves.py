"""Curves over a parameter or a threshold, and what a score is made of."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike
from sklearn.metrics import precision_recall_curve, roc_curve

from igeood.bench.figures import drawing
from igeood.bench.figures.drawing import ID_COLOUR, ID_LABEL, NARROW, OOD_LABEL, WIDTH, Figure, Values, look_of

Scores = Mapping[str, tuple[Values, Values]]  # by method, of in-distribution and of OOD samples
# by method: values that tuning tried, the TNR at TPR-95% (a fraction) of each, and the choice
Searches = Mapping[str, tuple[ArrayLike, ArrayLike, float]]
TuningPanel = tuple[str, str, Searches]  # a title, the parameter, and what was tried
PARAMETERS = {"temperature": "temperature $T$", "epsilon": r"step $\varepsilon$ (pixel units)"}
THRESHOLDS = {  # what is drawn across and up
    "ROC": ("OOD inputs kept (FPR)", "known inputs kept (TPR)"),
    "precision–recall": ("recall: known inputs kept", "precision: known among kept"),
}


def tuning_curves(panels: Sequence[TuningPanel], width: float = WIDTH) -> Figure:
    """TNR at TPR-95% against temperature or ε, a panel each, two in a row; the choice is marked."""
    figure, grid = drawing.grid_of(len(panels), most=2, height=2.0, width=width)
    for axes, (title, parameter, searches) in zip(grid, panels, strict=True):
        for method, (values, rates, chosen) in searches.items():
            look = look_of(method)
            x, y = np.array([values, rates])[:, np.argsort(values, kind="stable")]
            line = axes.plot(x, y, look.line, color=look.colour, linewidth=1.2, label=look.title)[0]
            line.set(marker=look.marker, markevery=[int(np.abs(x - chosen).argmin())], markeredgecolor="black")
        is_log = parameter == "temperature"
        axes.set_xscale("log" if is_log else "linear")
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.locator_params(axis="y" if is_log else "both", nbins=5)
        drawing.label(axes, title=title, x=PARAMETERS[parameter], y="TNR at TPR-95%")
    drawing.legend(figure, grid)
    return figure


def threshold_curves(kind: str, methods: Scores) -> Figure:
    """ROC or precision–recall curves by method, in-distribution being the positive class, narrow.

    Of many points, some 200 are drawn.
    """
    figure, (axes,) = drawing.grid_of(1, most=1, height=2.6, width=NARROW)
    for method, scores in methods.items():
        labels = np.repeat([1, 0], [len(part) for part in scores])
        ordered = -np.concatenate(scores)
        if kind == "ROC":
            x, y, _ = roc_curve(labels, ordered, drop_intermediate=False)
        else:
            y, x = (values[-2::-1] for values in precision_recall_curve(labels, ordered)[:2])  # [-1] is no point
        look = look_of(method)
        some = np.unique(np.linspace(0, len(x) - 1, 200).round().astype(int))
        axes.plot(x[some], y[some], look.line, color=look.colour, linewidth=1.3, label=look.title)
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    axes.grid(alpha=0.25, linewidth=0.6)
    drawing.label(axes, **dict(zip("xy", THRESHOLDS[kind], strict=True)))
    drawing.legend(figure, [axes])
    return figure


def contributions(columns: Sequence[str], id_means: ArrayLike, ood_means: ArrayLike) -> Figure:
    """What each column adds to the score on average, in-distribution and OOD side by side, narrow."""
    figure, (axes,) = drawing.grid_of(1, most=1, height=0.4 + 0.36 * len(columns), width=NARROW)
    places = np.arange(len(columns))
    colours = {ID_LABEL: ID_COLOUR, **drawing.ood_colours([OOD_LABEL])}
    for (name, colour), shift, means in zip(colours.items(), (-0.19, 0.19), (id_means, ood_means), strict=True):
        axes.barh(places + shift, means, height=0.36, label=name, facecolor=(colour, 0.5), edgecolor=colour)
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_yticks(places, [name.replace("$", r"\$") for name in columns])
    axes.invert_yaxis()
    axes.locator_params(axis="x", nbins=5)
    drawing.label(axes, x="mean contribution to the score")
    drawing.legend(figure, [axes])
    return figure
