"""Curves over a parameter or a threshold, and what a score is made of."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from sklearn.metrics import precision_recall_curve, roc_curve

from igeood.errors import InputError
from igeood.figures import drawing
from igeood.figures.drawing import ID_LABEL, NARROW, OOD_LABEL, SMALL, Values

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Curve(NamedTuple):
    """TNR at TPR-95% (fractions) against a parameter, and the value that was chosen; by default the best's."""

    x: ArrayLike
    y: ArrayLike
    chosen: float | None = None


Curves = Mapping[str, Curve]
Scores = Mapping[str, tuple[ArrayLike, ArrayLike]]  # by method, of in-distribution and of OOD samples


class CurvePanel(NamedTuple):
    """One network's tuning: by method, TNR at TPR-95% (a fraction) against temperature, and against ε."""

    title: str
    temperature: Curves
    epsilon: Curves


def tuning_curves(panels: Sequence[CurvePanel]) -> "Figure":
    """TNR at TPR-95% against temperature on the left and ε on the right, a row for each network, the choice marked."""
    figure, grid = drawing.grid_of(2 * len(panels), most=2, height=1.9)
    for left, right, panel in zip(grid[::2], grid[1::2], panels, strict=True):
        _tuning(left, panel.title, panel.temperature, log=True)
        _tuning(right, panel.title, panel.epsilon, log=False)
    drawing.legend(figure, grid)
    return figure


def tuning_curve(curves: Curves, *, log: bool) -> "Figure":
    """One panel of `tuning_curves`, narrow: over temperature if `log`, else over ε."""
    figure, grid = drawing.grid_of(1, most=1, height=2.2, width=NARROW)
    _tuning(grid[0], "", curves, log=log)
    drawing.legend(figure, grid)
    return figure


def roc_curves(methods: Scores) -> "Figure":
    """Share of in-distribution samples kept (TPR) against that of OOD samples kept (FPR), by method, narrow."""
    return _threshold_curves(methods, "OOD inputs kept (FPR)", "known inputs kept (TPR)", _roc)


def precision_recall_curves(methods: Scores) -> "Figure":
    """Precision against recall, in-distribution being the positive class, by method, narrow."""
    return _threshold_curves(methods, "recall: known inputs kept", "precision: known among kept", _precision_recall)


def contributions(columns: Sequence[str], id_means: ArrayLike, ood_means: ArrayLike) -> "Figure":
    """What each column adds to the score on average, in-distribution and OOD side by side, narrow."""
    figure, (axes,) = drawing.grid_of(1, most=1, height=0.4 + 0.36 * len(columns), width=NARROW)
    places = np.arange(len(columns))
    for name, shift, means in ((ID_LABEL, -0.19, id_means), (OOD_LABEL, 0.19, ood_means)):
        values, colour = (
            drawing.finite(means, name),
            {**drawing.ood_colours([OOD_LABEL]), ID_LABEL: drawing.ID_COLOUR}[name],
        )
        axes.barh(places + shift, values, height=0.36, label=name, facecolor=(colour, 0.5), edgecolor=colour)
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_yticks(places, [name.replace("$", r"\$") for name in columns])
    axes.invert_yaxis()
    axes.locator_params(axis="x", nbins=5)
    drawing.label(axes, x="mean contribution to the score")
    drawing.legend(figure, [axes])
    return figure


def _threshold_curves(
    methods: Scores, x: str, y: str, points: Callable[[Values, Values], tuple[Values, Values]]
) -> "Figure":
    """A curve for each method, over all thresholds; of many points, some 200 are drawn."""
    figure, (axes,) = drawing.grid_of(1, most=1, height=2.6, width=NARROW)
    for method, (first, second) in methods.items():
        style, inside, outside = drawing.style_of(method), drawing.finite(first, method), drawing.finite(second, method)
        across, up = points(np.repeat([1, 0], [len(inside), len(outside)]), -np.concatenate([inside, outside]))
        some = np.unique(np.linspace(0, len(across) - 1, 200).round().astype(int))
        axes.plot(across[some], up[some], style.line, color=style.colour, linewidth=1.3, label=style.title)
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    axes.grid(alpha=0.25, linewidth=0.6)
    drawing.label(axes, x=x, y=y)
    drawing.legend(figure, [axes])
    return figure


def _roc(known: Values, kept: Values) -> tuple[Values, Values]:
    across, up, _ = roc_curve(known, kept, drop_intermediate=False)
    return across, up


def _precision_recall(known: Values, kept: Values) -> tuple[Values, Values]:
    precision, recall, _ = precision_recall_curve(known, kept)
    return recall[-2::-1], precision[-2::-1]  # the last point is made up


def _tuning(axes: "Axes", title: str, curves: Curves, *, log: bool) -> None:
    name = "temperature $T$" if log else r"step $\varepsilon$ (pixel units)"
    drawing.label(axes, title=title, x=name, y="TNR at TPR-95%")
    if not curves:
        axes.set(xticks=[], yticks=[])
        axes.annotate("not tuned here", (0.5, 0.5), xycoords="axes fraction", ha="center", fontsize=SMALL)
        return
    for method, (first, second, *chosen) in curves.items():
        style, x, y = (
            drawing.style_of(method),
            drawing.finite(first, f"{method}: x"),
            drawing.finite(second, f"{method}: y"),
        )
        if len(x) != len(y) or (log and x.min() <= 0):
            raise InputError(f"{method}: expected as many x as y, temperatures positive; got {len(x)} and {len(y)}")
        x, y = np.stack([x, y])[:, np.argsort(x, kind="stable")]
        line = axes.plot(x, y, style.line, color=style.colour, linewidth=1.2, label=style.title)[0]
        at = y.argmax() if not chosen or chosen[0] is None else np.abs(x - float(chosen[0])).argmin()
        line.set(marker=style.marker, markevery=[int(at)], markeredgecolor="black")
    axes.set_xscale("log" if log else "linear")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.locator_params(axis="y" if log else "both", nbins=5)
