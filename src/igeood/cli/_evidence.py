"""A picture of a monitor's evidence."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from igeood.errors import InputError, MissingExtraError
from igeood.files import write_whole

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
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("matplotlib is needed", cure="pip install 'igeood[report]'") from error


def draw(monitor: "Monitor", trace: Trace, path: str) -> None:
    """Write a picture of the evidence, with the alarms since the trace began."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.4), layout="constrained")
    axes = figure.subplots()
    numbers, evidence = trace.points()
    start = trace.first
    end = start + max(trace.inputs - 1, 1)
    is_alarm = evidence >= monitor.run_length
    axes.plot(numbers, evidence.clip(min=1.0), color=_LINE, linewidth=1.0)
    axes.plot(numbers[is_alarm], evidence[is_alarm], "o", color=_ALARM, markersize=3)
    axes.axhline(monitor.run_length, color=_ALARM, linewidth=1.0, linestyle="--")
    title = f"No alarm in {trace.inputs:,} inputs"
    side = "left"
    if is_alarm.any():
        alarms = [alarm for alarm in monitor.alarms if alarm.at >= start]  # all, or the first ones
        at, since = alarms[0][:2] if alarms else (int(numbers[is_alarm][0]), int(numbers[is_alarm][0]))
        title = f"Alarm at input {at:,}: the inputs have changed"
        side = "right" if 2 * since < start + end else "left"
        axes.axvspan(max(since, start), numbers[is_alarm][-1], facecolor=_ALARM, edgecolor=_ALARM, alpha=0.15)
        where = {"va": "bottom", "ha": "left" if side == "right" else "right", "color": _ALARM, "fontsize": 8}
        axes.text(max(since, start), 1.2, f" since about input {since:,} ", where)
    axes.set(yscale="log", xlabel="input", ylabel="evidence of a change", xlim=(start, end))
    axes.set_ylim(1.0, 10 * max(monitor.run_length, evidence.max()))
    axes.annotate(
        f" alarm at {monitor.run_length:,.0f} ",
        (float(side == "right"), 1.2 * monitor.run_length),
        xycoords=("axes fraction", "data"),
        ha=side,
        color=_ALARM,
        fontsize=8,
    )
    axes.set_title(title, fontsize=10, loc="left")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    content = io.BytesIO()
    kind = Path(path).suffix[1:]
    with rc_context({"svg.hashsalt": "igeood"}):  # the same picture is the same bytes
        metadata = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
        figure.savefig(content, format=kind, dpi=150, metadata=metadata)
    write_whole(path, content.getvalue())
