"""A picture of a monitor's evidence."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from igeood.errors import InputError, import_extra
from igeood.files import whole
from igeood.work.verdicts import peaks

if TYPE_CHECKING:
    from igeood.monitor import Monitor

POINTS = 2000  # of the curve
_LINE, _ALARM = "#0072B2", "#D55E00"


def check_picture(path: str) -> None:
    """Raise if no picture of this name can be drawn."""
    if Path(path).suffix not in (".png", ".svg"):
        raise InputError(f"expected a name that ends with .png or .svg, got {path}", argument="picture")
    import_extra("matplotlib.figure", "report")


def draw(monitor: "Monitor", evidence: NDArray[np.float64], path: str) -> None:
    """Write a picture of the evidence after each of the latest inputs, with the alarms among them."""
    figure = import_extra("matplotlib.figure", "report").Figure(figsize=(7.5, 3.4), layout="constrained")
    axes = figure.subplots()
    first = monitor.inputs - len(evidence)
    starts, largest = peaks(evidence, POINTS)
    numbers = first + starts
    limit = monitor.run_length
    is_alarm = largest >= limit
    axes.plot(numbers, largest.clip(min=1.0), color=_LINE, linewidth=1.0)
    axes.plot(numbers[is_alarm], largest[is_alarm], "o", color=_ALARM, markersize=3)
    axes.axhline(limit, color=_ALARM, linewidth=1.0, linestyle="--", label=f"alarm at {limit:,.0f}")
    title = f"{'Alarms' if is_alarm.any() else 'No alarm'} in {len(evidence):,} inputs"
    alarms = [alarm for alarm in monitor.alarms if alarm.at >= first]  # it keeps the first hundred
    if alarms:
        at, since, _ = alarms[0]
        title = f"Alarm at input {at:,}: the inputs have changed since about input {since:,}"
        axes.axvspan(max(since, first), alarms[-1].at, color=_ALARM, alpha=0.15)
    axes.set(yscale="log", xlabel="input", ylabel="evidence of a change", ylim=(1.0, 10 * max(limit, largest.max())))
    axes.set_title(title, fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    with whole(path) as file:
        figure.savefig(file, format=Path(path).suffix[1:], dpi=150)
