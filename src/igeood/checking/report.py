"""The page of a check: one HTML file that needs no other and asks nothing of any network."""

import math
import os
import re
from collections.abc import Callable, Sequence
from datetime import date
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape
from numpy.typing import NDArray

from igeood.calibration import Calibration
from igeood.checking.result import SILENT, Check, Example, FaultResult, percent
from igeood.errors import InputError
from igeood.files import write_whole
from igeood.images import as_pixels, picture
from igeood.monitor import ENOUGH, Monitor
from igeood.version import __version__
from igeood.work.verdicts import watch

WORDS = 200  # characters of a text
FIRST_CLASSES = 12  # bars before the page is unfolded
WIDTH, EDGE = 560, 46  # of a drawing, and its margin
CHART, CURVE = 380, 220  # heights
GAP = 18  # between two labels
POINTS = 400  # of the curve


def write(check: Check, path: str | os.PathLike[str], verdicts: Sequence[str]) -> None:
    """Write the page; see `Check.report`."""
    target = Path(path)
    if target.is_dir() or not target.parent.is_dir():
        problem = "is a folder" if target.is_dir() else "its folder does not exist"
        raise InputError(f"{path}: {problem}", argument="path", cure="name a file, such as report.html")
    seen = watched(verdicts, check.calibration) if verdicts else None
    write_whole(target, page(check, seen).encode())


def page(check: Check, seen: Any = None) -> str:
    """The page's HTML."""
    sizes = {"width": WIDTH, "edge": EDGE, "chart_height": CHART, "curve_height": CURVE}
    shown = {"look": lambda example: look(example, check), "dots": dots(check.faults), "watched": seen}
    numbers = {"first": FIRST_CLASSES, "enough": ENOUGH, "made_on": date.today()}
    return render("igeood.checking", {}, check=check, **shown, **numbers, **sizes)


def render(package: str, filters: dict[str, Callable[..., Any]], **content: Any) -> str:
    """Fill a package's `template.html`, in the style of all pages."""
    template, style = (
        resources.files(each).joinpath(name).read_text(encoding="utf-8")
        for each, name in ((package, "template.html"), ("igeood.checking", "style.css"))
    )
    pages = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages.filters |= {"percent": percent, "count": "{:,}".format, "strong": strong, **filters}
    own = {"style": Markup(style), "version": __version__}  # noqa: S704 (our own file)
    return pages.from_string(template).render(**own, **content)


def strong(text: str) -> Markup:
    """A sentence with its percentages in bold."""
    return Markup(re.sub(r"(\d[\d.]*%)", r"<strong>\1</strong>", str(escape(text))))  # noqa: S704 (it is escaped)


def look(example: Example, check: Check) -> Markup:
    """A sample as the page shows it: a picture, or a text."""
    x = example.x
    if x.ndim == 3 and check.usual is not None:
        alt = f"taken for {example.answer}, {'refused' if example.is_ood else 'kept'}"
        pixels = as_pixels(x, check.usual.low[0].cpu(), check.usual.high[0].cpu())
        return Markup('<img src="{}" alt="{}">').format(picture(pixels), alt)
    if x.is_floating_point():
        text = ", ".join(f"{float(value):.3g}" for value in x.flatten()[:8]) + (", …" if x.numel() > 8 else "")
    else:
        text = " ".join(map(str, x.flatten().tolist())) if check.decode is None else check.decode(x)
    return Markup("<q>{}</q>").format(text[:WORDS] + ("…" if len(text) > WORDS else ""))


def placed(x: Any, y: Any, height: int) -> tuple[Any, Any]:
    """Where points of the unit square lie in a drawing, within its margins."""
    return EDGE + x * (WIDTH - 2 * EDGE), height - EDGE - y * (height - 2 * EDGE)


def dots(faults: Sequence[FaultResult]) -> list[dict[str, Any]]:
    """Where each fault lies: refused to the right, changed upwards, silent failures as area; labels do not overlap."""
    places: list[dict[str, Any]] = [
        {
            **dict(zip("xy", placed(one.refused, one.changed, CHART), strict=True)),
            "r": max(3.0, 30.0 * math.sqrt(one.silent)),
            "name": one.name,
            "is_silent": one.silent >= SILENT,
            "title": f"{one.name}: {percent(one.refused)} refused, {percent(one.changed)} changed, "
            f"{percent(one.silent)} silent",
        }
        for one in faults
        if not one.problem
    ]
    above = -math.inf
    for dot in sorted((dot for dot in places if dot["is_silent"]), key=lambda dot: dot["y"]):
        above = dot["label"] = max(dot["y"] + 4, above + GAP)
    return sorted(places, key=lambda dot: -dot["r"])


def watched(files: Sequence[str], calibration: Calibration) -> dict[str, Any]:
    """A monitor after all inputs of verdict files, in the order of their rows, and its evidence as a curve.

    `names` are the ids of the inputs that matter, by their number. The curve has the largest evidence in each of at
    most 400 runs of inputs, on a logarithmic axis.
    """
    monitor = Monitor(calibration)
    trace: list[NDArray[np.float64]] = []
    names = watch(monitor, files, lambda *_: None, trace.append)
    evidence = np.concatenate(trace)
    starts = np.unique(np.linspace(0, len(evidence), POINTS, endpoint=False).astype(int))
    heights = np.log(np.maximum.reduceat(evidence, starts).clip(min=1.0))
    limit = float(np.log(monitor.run_length))
    top = 1.1 * max(limit, float(heights.max()), 1.0)
    x, y = placed(starts / max(1, len(evidence) - 1), heights / top, CURVE)
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    alarm = placed(0.0, limit / top, CURVE)[1]
    return {"monitor": monitor, "names": names, "peak": evidence.max(), "line": line, "limit": alarm}
