"""Curves over a parameter or a threshold, and what a score is made of."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from igeood.errors import InputError
from igeood.figures.drawing import (
    ID_COLOUR,
    ID_LABEL,
    NARROW,
    OOD_LABEL,
    SMALL,
    Values,
    finite,
    grid_of,
    label,
    legend,
    ood_colours,
    style_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Curve(NamedTuple):
    """TNR at TPR-95% (fractions) against a parameter, and the value that was chosen; by default the best's."""

    x: ArrayLike
    y: ArrayLike
    chosen: float | None = None


Curves = Mapping[str, Curve]


class CurvePanel(NamedTuple):
    """One network's tuning: by method, TNR at TPR-95% (a fraction) against temperature, and against ε."""

    title: str
    temperature: Curves
    epsilon: Curves


class ScoresOf(NamedTuple):
    """A method's scores of in-distribution and of OOD samples."""

    id_scores: ArrayLike
    ood_scores: ArrayLike


def tuning_curves(panels: Sequence[CurvePanel]) -> "Figure":
    """TNR at TPR-95% against temperature on the left and ε on the right, a row for each network, the choice marked."""
    figure, grid = grid_of(2 * len(panels), most=2, height=1.9)
    for left, right, panel in zip(grid[::2], grid[1::2], panels, strict=True):
        _tuning(left, panel.title, panel.temperature, log=True)
        _tuning(right, panel.title, panel.epsilon, log=False)
    legend(figure, grid)
    return figure


def tuning_curve(curves: Curves, parameter: Literal["temperature", "epsilon"]) -> "Figure":
    """One panel of `tuning_curves`, narrow."""
    figure, grid = grid_of(1, most=1, height=2.2, width=NARROW)
    _tuning(grid[0], "", curves, log=parameter == "temperature")
    legend(figure, grid)
    return figure


def roc_curves(methods: Mapping[str, ScoresOf]) -> "Figure":
    """Share of in-distribution samples kept (TPR) against that of OOD samples kept (FPR), by method, narrow."""
    return _threshold_curves(methods, "OOD inputs kept (FPR)", "known inputs kept (TPR)", _roc)


def precision_recall_curves(methods: Mapping[str, ScoresOf]) -> "Figure":
    """Precision against recall, in-distribution being the positive class, by method, narrow."""
    return _threshold_curves(methods, "recall: known inputs kept", "precision: known among kept", _precision_recall)


def contributions(columns: Sequence[str], id_means: ArrayLike, ood_means: ArrayLike) -> "Figure":
    """What each column adds to the score on average, in-distribution and OOD side by side, narrow."""
    figure, (axes,) = grid_of(1, most=1, height=0.4 + 0.36 * len(columns), width=NARROW)
    places = np.arange(len(columns))
    for name, shift, means in ((ID_LABEL, -0.19, id_means), (OOD_LABEL, 0.19, ood_means)):
        values, colour = finite(means, name), {**ood_colours([OOD_LABEL]), ID_LABEL: ID_COLOUR}[name]
        axes.barh(places + shift, values, height=0.36, label=name, facecolor=(colour, 0.5), edgecolor=colour)
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_yticks(places, [name.replace("$", r"\$") for name in columns])
    axes.invert_yaxis()
    axes.locator_params(axis="x", nbins=5)
    label(axes, x="mean contribution to the score")
    legend(figure, [axes])
    return figure


def _threshold_curves(
    methods: Mapping[str, ScoresOf], x: str, y: str, points: Callable[[Values, Values], tuple[Values, Values]]
) -> "Figure":
    """A curve for each method, over all thresholds; of many points, some 200 are drawn."""
    figure, (axes,) = grid_of(1, most=1, height=2.6, width=NARROW)
    for method, (first, second) in methods.items():
        style, inside, outside = style_of(method), finite(first, method), finite(second, method)
        across, up = points(np.sort(inside), np.sort(outside))
        some = np.unique(np.linspace(0, len(across) - 1, 200).round().astype(int))
        axes.plot(across[some], up[some], style.line, color=style.colour, linewidth=1.3, label=style.title)
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    axes.grid(alpha=0.25, linewidth=0.6)
    label(axes, x=x, y=y)
    legend(figure, [axes])
    return figure


def _kept(inside: Values, outside: Values) -> tuple[Values, Values]:
    """Numbers of in-distribution and OOD scores at or below each threshold, both sorted; the last of ties."""
    thresholds = np.unique(np.concatenate([inside, outside]))
    id_kept, ood_kept = (np.searchsorted(scores, thresholds, "right") for scores in (inside, outside))
    return id_kept.astype(np.float64), ood_kept.astype(np.float64)


def _roc(inside: Values, outside: Values) -> tuple[Values, Values]:
    id_kept, ood_kept = _kept(inside, outside)
    return np.append(0.0, ood_kept / len(outside)), np.append(0.0, id_kept / len(inside))


def _precision_recall(inside: Values, outside: Values) -> tuple[Values, Values]:
    id_kept, ood_kept = _kept(inside, outside)
    return id_kept / len(inside), id_kept / (id_kept + ood_kept)


def _tuning(axes: "Axes", title: str, curves: Curves, *, log: bool) -> None:
    name = "temperature $T$" if log else r"step $\varepsilon$ (pixel units)"
    label(axes, title=title, x=name, y="TNR at TPR-95%")
    _curves(axes, curves, log=log)


def _curves(axes: "Axes", curves: Curves, *, log: bool) -> None:
    if not curves:
        axes.set(xticks=[], yticks=[])
        axes.annotate("not tuned here", (0.5, 0.5), xycoords="axes fraction", ha="center", fontsize=SMALL)
        return
    for method, (first, second, *chosen) in curves.items():
        style, x, y = style_of(method), finite(first, f"{method}: x"), finite(second, f"{method}: y")
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
