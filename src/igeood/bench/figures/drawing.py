"""What every figure shares: sizes, colours of data sets, labels, and how it becomes a file.

The colour of a method is in its detector's file: `@igeood.register(..., style=...)`.
"""

import io
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np

from igeood.detectors import METHODS
from igeood.errors import import_extra
from igeood.files import write_whole

if TYPE_CHECKING:  # an optional extra
    import matplotlib.axes
    import matplotlib.figure

Axes: TypeAlias = "matplotlib.axes.Axes"
Figure: TypeAlias = "matplotlib.figure.Figure"
WIDTH = 6.3  # inches
NARROW = 3.6
SMALL = 8  # points
TITLE = 9
DPI = 200
ID_LABEL = "in-distribution"
OOD_LABEL = "out-of-distribution"
DELTA = "threshold δ"
ID_COLOUR = "#0072B2"
OOD_COLOURS: Mapping[str, str] = {  # of the paper's sets, by name in small letters and digits
    "tinyimagenet": "#E69F00",
    "svhn": "#CC79A7",
    "textures": "#009E73",
    "lsun": "#56B4E9",
    "isun": "#D55E00",
    "gaussian": "#000000",
    "places365": "#999999",
    "cifar10": "#882255",
    "cifar100": "#999933",
    "chars74k": "#F0E442",
}
Values = np.ndarray[Any, np.dtype[np.float64]]


class Look(NamedTuple):
    """How a method is drawn."""

    title: str
    colour: str
    line: str
    marker: str


def look_of(method: str) -> Look:
    """The look that the registry gives a method; grey for one that is not registered."""
    known = METHODS.get(method)
    return Look(known.title, *known.style) if known else Look(method, "#7F7F7F", "-", ".")


def blank(height: float, width: float = WIDTH) -> Figure:
    """An empty figure of a column's width, laid out without overlaps and independent of pyplot."""
    matplotlib = import_extra("matplotlib.figure", "report")
    return cast("Figure", matplotlib.Figure(figsize=(width, height), layout="constrained"))


def shape(count: int, most: int) -> tuple[int, int]:
    """Rows and columns for some panels, evenly spread, at most so many side by side: they must stay readable."""
    rows = math.ceil(count / most)
    return rows, math.ceil(count / rows)


def grid_of(count: int, *, most: int, height: float, width: float = WIDTH) -> tuple[Figure, list[Axes]]:
    """A figure, and its panels in rows."""
    rows, columns = shape(count, most)
    figure = blank(0.6 + height * rows, width)
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(count)]


def label(axes: Axes, *, title: str = "", x: str = "", y: str = "") -> None:
    """Title and labels in this module's sizes; no frame above and on the right."""
    axes.set_title(title, fontsize=TITLE)
    axes.set_xlabel(x, fontsize=SMALL)
    axes.set_ylabel(y, fontsize=SMALL)
    axes.tick_params(labelsize=SMALL)
    axes.spines[["top", "right"]].set_visible(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_offset_text().set_fontsize(SMALL)


def legend(figure: Figure, axes: Iterable[Axes]) -> None:
    """One legend above the panels, unique labels, a threshold after the sets."""
    handles = {name: handle for one in axes for handle, name in zip(*one.get_legend_handles_labels(), strict=True)}
    names = sorted(handles, key=DELTA.__eq__)
    columns = shape(len(names) or 1, int(figure.get_figwidth() / 1.25))[1]
    shown = [handles[name] for name in names]
    figure.legend(shown, names, loc="outside upper center", ncols=columns, frameon=False, fontsize=SMALL)


def ood_colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each OOD set: the paper's sets have their own, others those that are left, in order.

    >>> ood_colours(["SVHN", "mine"])
    {'SVHN': '#CC79A7', 'mine': '#E69F00'}
    """
    colours = {name: OOD_COLOURS.get("".join(filter(str.isalnum, name.casefold()))) for name in names}
    left = [colour for colour in OOD_COLOURS.values() if colour not in colours.values()] or list(OOD_COLOURS.values())
    others = [name for name, colour in colours.items() if colour is None]
    return {name: colour or left[others.index(name) % len(left)] for name, colour in colours.items()}


def render(figure: Figure, kind: str, *, letters: bool = False) -> bytes:
    """A figure's file, a PNG or an SVG: the same figure gives the same bytes.

    With `letters`, an SVG's text is text, not outlines, and nothing is behind the drawing: a page can colour both.
    """
    from matplotlib import rc_context  # noqa: PLC0415 (an optional extra)

    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # settled; laid out anew at each drawing, it would shift a little
    content = io.BytesIO()
    fonts = "none" if letters else "path"
    with rc_context({"svg.hashsalt": "igeood", "svg.fonttype": fonts}):  # else the identifiers in a drawing are random
        metadata = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
        figure.savefig(content, format=kind, dpi=DPI, metadata=metadata, transparent=letters)
    return content.getvalue()


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure as `.png` or `.svg`: whole or not at all, and the same figure as the same bytes."""
    write_whole(path, render(figure, Path(path).suffix[1:]))
