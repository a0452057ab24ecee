"""The plots that reports and the paper's figures share: plain arrays in, a matplotlib figure out, and `save`.

Every figure is 6.3 inches wide, a page's column, with letters of 8 points or more. A method has one colour everywhere.
"""

import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from igeood.errors import InputError, MissingExtraError
from igeood.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

WIDTH, SMALL, TITLE, DPI = 6.3, 8, 9, 200  # inches; points; points; dots an inch
ID_LABEL, OOD_LABEL, DELTA = "in-distribution", "out-of-distribution", "threshold δ"
Sets = Mapping[str, ArrayLike]
Limits = tuple[float, float]
Values = np.ndarray[Any, np.dtype[np.float64]]


class Style(NamedTuple):
    """How a method is drawn."""

    title: str
    colour: str
    line: str
    marker: str


STYLE: Mapping[str, Style] = {  # Okabe and Ito's colours: a family shares one, and differs in line and marker
    "msp": Style("Baseline (MSP)", "#000000", ":", "X"),
    "odin": Style("ODIN", "#56B4E9", "-", "s"),
    "energy": Style("Energy", "#E69F00", "-", "^"),
    "kl-sum": Style("KL (sum)", "#CC79A7", "-", "v"),
    "kl-min": Style("KL (min)", "#CC79A7", "--", "<"),
    "igeood-logits": Style("IGEOOD", "#D55E00", "-", "o"),
    "igeood-logits-min": Style("IGEOOD (min)", "#D55E00", "--", "p"),
    "mahalanobis": Style("Mahalanobis", "#009E73", "-", "D"),
    "igeood": Style("IGEOOD", "#D55E00", "-", "h"),
    "igeood+": Style("IGEOOD+", "#D55E00", "-.", "P"),
}
ID_COLOUR = "#0072B2"
# fmt: off
OOD_COLOURS: Mapping[str, str] = {  # of the paper's sets, by name in small letters and digits
    "tinyimagenet": "#E69F00", "svhn": "#CC79A7", "textures": "#009E73", "lsun": "#56B4E9", "isun": "#D55E00",
    "gaussian": "#000000", "places365": "#999999", "cifar10": "#882255", "cifar100": "#999933", "chars74k": "#F0E442",
}
# fmt: on


class HistogramPanel(NamedTuple):
    """Scores of one detector: in-distribution, and of OOD sets by name; `threshold` is drawn when given."""

    title: str
    id_scores: ArrayLike
    ood_scores: Sets
    threshold: float | None = None


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


class GaussianPanel(NamedTuple):
    """One layer's first channel, and Shapiro–Wilk's W, averaged over the layer's channels."""

    layer: str
    id_values: ArrayLike
    ood_values: ArrayLike
    shapiro_w: float


class LayerPanel(NamedTuple):
    """One layer's scores, and their TNR at TPR-95% (a fraction)."""

    layer: str
    id_scores: ArrayLike
    ood_scores: ArrayLike
    tnr: float


class LayerRow(NamedTuple):
    """A method's layers, and what the regression makes of them: `combined` scores, and a weight for each column."""

    method: str
    layers: Sequence[LayerPanel]
    combined: LayerPanel
    weights: Sequence[float]


def blank(height: float) -> "Figure":
    """An empty figure of a column's width, laid out without overlaps and independent of pyplot."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (an optional extra)
    except ImportError as error:
        raise MissingExtraError("figures need matplotlib; pip install 'igeood[report]'") from error
    return Figure(figsize=(WIDTH, height), layout="constrained")


def label(axes: "Axes", *, title: str = "", x: str = "", y: str = "") -> None:
    """Title and labels in this module's sizes; no frame above and on the right."""
    axes.set_title(title, fontsize=TITLE)
    axes.set_xlabel(x, fontsize=SMALL)
    axes.set_ylabel(y, fontsize=SMALL)
    axes.tick_params(labelsize=SMALL)
    axes.spines[["top", "right"]].set_visible(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_offset_text().set_fontsize(SMALL)


def legend(figure: "FigureBase", axes: Iterable["Axes"]) -> None:
    """One legend above the panels, each label once, a threshold after the sets."""
    found = [pair for one in axes for pair in zip(*one.get_legend_handles_labels(), strict=True)]
    handles = {name: handle for handle, name in found}
    names = sorted(handles, key=DELTA.__eq__)
    look: dict[str, Any] = {"ncols": _shape(len(names) or 1, 5)[1], "frameon": False, "fontsize": SMALL}
    figure.legend([handles[name] for name in names], names, loc="outside upper center", **look)


def ood_colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each OOD set: the paper's sets have their own, others those that are left, in order.

    >>> ood_colours(["SVHN", "mine"])
    {'SVHN': '#CC79A7', 'mine': '#E69F00'}
    """
    found = {name: OOD_COLOURS.get("".join(filter(str.isalnum, name.casefold()))) for name in names}
    left = [colour for colour in OOD_COLOURS.values() if colour not in found.values()] or list(OOD_COLOURS.values())
    others = [name for name, colour in found.items() if colour is None]
    return {name: colour or left[others.index(name) % len(left)] for name, colour in found.items()}


def histogram(
    axes: "Axes", id_values: ArrayLike, ood_values: Sets, colours: Mapping[str, str], limits: Limits | None = None
) -> bool:
    """Draw densities of in-distribution and OOD values on common bins.

    `colours` are those of the OOD sets: `ood_colours` has some. Far outliers lie outside the axis, unless `limits`
    say what it shows; they count in the densities, and the answer is whether there are any.
    """
    colours = {**colours, ID_LABEL: ID_COLOUR}
    sets = {name: _values(values, name) for name, values in {ID_LABEL: id_values, **ood_values}.items()}
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


def score_histograms(panels: Sequence[HistogramPanel]) -> "Figure":
    """Densities of scores, a panel each, three in a row; far outliers are left out, and the axis says so."""
    figure, grid = _grid(len(panels), most=3, height=2.0)
    colours = ood_colours(name for panel in panels for name in panel.ood_scores)
    for axes, panel in zip(grid, panels, strict=True):
        clipped = histogram(axes, panel.id_scores, panel.ood_scores, colours)
        label(axes, title=panel.title, x="axis cut at 0.1 and 99.9%" if clipped else "", y="density")
        if panel.threshold is not None:
            _threshold(axes, panel.threshold)
    figure.supxlabel("score (higher is more out-of-distribution)", fontsize=SMALL)
    legend(figure, grid)
    return figure


def tuning_curves(panels: Sequence[CurvePanel]) -> "Figure":
    """TNR at TPR-95% against temperature on the left and ε on the right, a row for each network, the choice marked."""
    figure, grid = _grid(2 * len(panels), most=2, height=1.9)
    for left, right, panel in zip(grid[::2], grid[1::2], panels, strict=True):
        label(left, title=panel.title, x="temperature $T$", y="TNR at TPR-95%")
        label(right, title=panel.title, x=r"step $\varepsilon$ (pixel units)", y="TNR at TPR-95%")
        _curves(left, panel.temperature, log=True)
        _curves(right, panel.epsilon, log=False)
    legend(figure, grid)
    return figure


def gaussianity(layers: Sequence[GaussianPanel]) -> "Figure":
    """Each layer's first channel, each set standardised by itself, against the standard normal density; and W."""
    figure, grid = _grid(len(layers), most=4, height=1.8)
    x = np.linspace(-4.0, 4.0, 201)
    normal = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    for axes, panel in zip(grid, layers, strict=True):
        inside, outside = (_values(values, panel.layer) for values in (panel.id_values, panel.ood_values))
        inside, outside = ((values - values.mean()) / (values.std() or 1.0) for values in (inside, outside))
        histogram(axes, inside, {OOD_LABEL: outside}, ood_colours([OOD_LABEL]), (-4.0, 4.0))
        axes.plot(x, normal, color="black", linewidth=1.2, label="standard normal")
        w = "$W$ undefined" if math.isnan(panel.shapiro_w) else f"$W$ = {panel.shapiro_w:.3f}"
        label(axes, title=f"{panel.layer}\n{w}", y="density")
    figure.supxlabel("first channel, standardised", fontsize=SMALL)
    legend(figure, grid)
    return figure


def layer_histograms(rows: Sequence[LayerRow]) -> "Figure":
    """Scores of each layer, with their TNR at TPR-95%, then the regression's score with its weights; by method."""
    shapes = [_shape(len(row.layers) + 1, 4) for row in rows]
    heights = [1.7 * n + 0.4 for n, _ in shapes]
    figure = blank(0.5 + sum(heights))
    parts = figure.subfigures(*_shape(len(rows), 1), squeeze=False, height_ratios=heights)[:, 0]
    for part, row, (n, columns) in zip(parts, rows, shapes, strict=True):
        part.suptitle(_style(row.method).title, fontsize=TITLE + 1, fontweight="bold")
        for i, panel in enumerate([*row.layers, row.combined]):
            axes = part.add_subplot(n, columns, i + 1)
            cut = histogram(axes, panel.id_scores, {OOD_LABEL: panel.ood_scores}, ood_colours([OOD_LABEL]))
            title = f"{panel.layer}\nTNR {100 * panel.tnr:.1f}%"
            label(axes, title=title, x="score (axis cut)" if cut else "score", y="density")
        weights = ", ".join(f"{w:.2g}".replace("-", "−") for w in row.weights)
        lines = textwrap.wrap(f"α = ({weights})", 72 // columns)  # as many letters as fit below a panel
        axes.set_xlabel("\n".join([axes.get_xlabel(), *lines]), fontsize=SMALL)
    legend(figure, figure.subfigs[0].axes)
    return figure


def save(figure: "Figure", path: str | Path) -> None:
    """Write a figure as `.png` or `.svg`: whole or not at all, and the same figure as the same bytes."""
    from matplotlib import rc_context  # noqa: PLC0415 (an optional extra)

    target = Path(path)
    if target.suffix not in (".png", ".svg"):
        raise InputError(f"path: {target.name!r} must end in .png or .svg")
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # settled; laid out anew at each drawing, it would shift a little
    content = io.BytesIO()
    with rc_context({"svg.hashsalt": "igeood"}):  # else the identifiers in a drawing are random
        metadata = {"Software": None} if target.suffix == ".png" else {"Date": None, "Creator": None}
        figure.savefig(content, format=target.suffix[1:], dpi=DPI, metadata=metadata)
    try:
        write_whole(target, content.getvalue())
    except OSError as error:
        raise InputError(f"path: cannot write {target} ({error.strerror}); name a file you may write") from error


def _style(method: str) -> Style:
    return STYLE.get(method, Style(method, "#7F7F7F", "-", "."))  # grey: a method of the reader's own


def _values(values: ArrayLike, name: str) -> Values:
    array = np.asarray(values, dtype=np.float64).ravel()
    if len(array) == 0 or not np.isfinite(array).all():
        raise InputError(f"{name}: empty, or has NaN or infinity; give finite values, at least one")
    return array


def _shown_range(sets: Sequence[Values]) -> tuple[Limits, bool]:
    """Limits of the axis, and whether they leave outliers out: only when these would squeeze the rest."""
    first, last = min(values.min() for values in sets), max(values.max() for values in sets)
    small = [len(values) < 20 for values in sets]  # of few samples, none is an outlier
    low = min(np.percentile(v, 0.0 if few else 0.1, method="higher") for v, few in zip(sets, small, strict=True))
    high = max(np.percentile(v, 100.0 if few else 99.9, method="lower") for v, few in zip(sets, small, strict=True))
    clipped = bool(last - first > 1.5 * (high - low) > 0)
    low, high = (low, high) if clipped else (first, last)
    middle, width = (low + high) / 2, high - low
    half = 0.53 * width if width > 1e-9 * abs(middle) else 0.05 * abs(middle) or 0.5  # constant scores have a bar too
    return (middle - half, middle + half), clipped


def _shape(count: int, most: int) -> tuple[int, int]:
    """Rows and columns for some panels, evenly spread, at most so many side by side: they must stay readable."""
    if count == 0:
        raise InputError("panels: empty; a figure needs at least one")
    rows = math.ceil(count / most)
    return rows, math.ceil(count / rows)


def _grid(count: int, *, most: int, height: float) -> tuple["Figure", list["Axes"]]:
    rows, columns = _shape(count, most)
    figure = blank(0.6 + height * rows)
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(count)]


def _threshold(axes: "Axes", value: float) -> None:
    axes.axvline(value, color="black", linestyle="--", linewidth=1.0, label=DELTA)
    low, high = axes.get_xlim()
    top = 1.22 * axes.get_ylim()[1]  # room for the text above the bars
    axes.set(xlim=(min(low, value), max(high, value)), ylim=(0.0, top))
    side = "left" if value < (low + high) / 2 else "right"
    text = f" δ = {value:.3g} ".replace("-", "−")
    axes.text(value, 0.99, text, transform=axes.get_xaxis_transform(), ha=side, va="top", fontsize=SMALL)


def _curves(axes: "Axes", curves: Curves, *, log: bool) -> None:
    if not curves:
        axes.set(xticks=[], yticks=[])
        axes.annotate("not tuned here", (0.5, 0.5), xycoords="axes fraction", ha="center", fontsize=SMALL)
        return
    for method, (first, second, *chosen) in curves.items():
        style, x, y = _style(method), _values(first, f"{method}: x"), _values(second, f"{method}: y")
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
