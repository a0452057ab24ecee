"""A picture of a monitor's evidence."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from igeood.errors import InputError, import_extra
from igeood.files import whole

if TYPE_CHECKING:
    from igeood.monitor import Monitor

POINTS = 2000
_LINE, _ALARM = "#0072B2", "#D55E00"


class Trace:
    """The largest evidence in each of at most 2,000 equally long runs of inputs, however many there are."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.inputs = 0
        self._length = 1
        self._peaks = np.zeros(POINTS)

    def add(self, evidence: NDArray[np.float64]) -> None:
        """Take in the evidence after each of some inputs."""
        before = self.inputs
        self.inputs += len(evidence)
        while self.inputs > POINTS * self._length:
            halved = self._peaks.reshape(-1, 2).max(axis=1)
            self._peaks = np.append(halved, np.zeros(len(halved)))
            self._length *= 2
        np.maximum.at(self._peaks, np.arange(before, self.inputs) // self._length, evidence)

    def points(self) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """The number of each run's last input, and the largest evidence in it."""
        ends = np.append(np.arange(self._length, self.inputs, self._length), self.inputs)
        return self.first + ends - 1, self._peaks[: len(ends)]


def check_picture(path: str) -> None:
    """Raise if no picture of this name can be drawn."""
    if Path(path).suffix not in (".png", ".svg"):
        raise InputError(f"expected a name that ends with .png or .svg, got {path}", argument="picture")
    import_extra("matplotlib.figure", "report")


def draw(monitor: "Monitor", trace: Trace, path: str) -> None:
    """Write a picture of the evidence, with the alarms since the trace began."""
    figure = import_extra("matplotlib.figure", "report").Figure(figsize=(7.5, 3.4), layout="constrained")
    axes = figure.subplots()
    numbers, evidence = trace.points()
    limit = monitor.run_length
    is_alarm = evidence >= limit
    axes.plot(numbers, evidence.clip(min=1.0), color=_LINE, linewidth=1.0)
    axes.plot(numbers[is_alarm], evidence[is_alarm], "o", color=_ALARM, markersize=3)
    axes.axhline(limit, color=_ALARM, linewidth=1.0, linestyle="--", label=f"alarm at {limit:,.0f}")
    title = f"Alarms in {trace.inputs:,} inputs" if is_alarm.any() else f"No alarm in {trace.inputs:,} inputs"
    alarms = [alarm for alarm in monitor.alarms if alarm.at >= trace.first]  # it keeps the first hundred
    if alarms:
        at, since, _ = alarms[0]
        title = f"Alarm at input {at:,}: the inputs have changed since about input {since:,}"
        axes.axvspan(max(since, trace.first), alarms[-1].at, color=_ALARM, alpha=0.15)
    axes.set(yscale="log", xlabel="input", ylabel="evidence of a change", ylim=(1.0, 10 * max(limit, evidence.max())))
    axes.set_title(title, fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    with whole(path) as file:
        figure.savefig(file, format=Path(path).suffix[1:], dpi=150)
