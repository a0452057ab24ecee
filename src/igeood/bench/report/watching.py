"""What a monitor says of verdict files: the evidence that the inputs have changed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from igeood.bench.figures import drawing
from igeood.bench.figures.drawing import Figure, Values
from igeood.bench.report.drawing import Drawing, draw
from igeood.guard.file import load_calibration
from igeood.monitor import ENOUGH, Monitor
from igeood.work.verdicts import watch

POINTS = 400  # of the curve
SHOWN = 3  # alarms in words
LINE = drawing.ID_COLOUR
ALARM = "#D55E00"


@dataclass(frozen=True, eq=False)
class Watched:
    """A monitor after all inputs, the ids of those that matter by their number, and the evidence (N,) after each."""

    monitor: Monitor
    names: dict[int, Any]
    evidence: Values

    def headline(self) -> str:
        """Whether there was an alarm, in a sentence."""
        inputs = f"{self.monitor.inputs:,}"
        if not self.monitor.alarms:
            return f"No alarm in {inputs} inputs: there is no strong evidence that they have changed."
        since = self._input(self.monitor.alarms[0].since)
        return f"Alarm: strong evidence that the inputs have changed, since about {since} of {inputs}."

    def alarms(self) -> list[str]:
        """The first alarms, a line each, and how many there are beside them."""
        lines = [
            f"Alarm at {self._input(alarm.at)}, evidence {alarm.evidence:,.0f}; "
            f"changed since about {self._input(alarm.since)}."
            for alarm in self.monitor.alarms[:SHOWN]
        ]
        more = self.monitor.alarm_count - len(lines)
        return [*lines, f"{more:,} more {'alarm' if more == 1 else 'alarms'} after these."] if more else lines

    def notes(self) -> list[str]:
        """What an alarm promises, and what few calibration samples mean for it."""
        n = len(self.monitor.calibration.scores)
        promise = self.monitor.promise
        few = f"With {n:,} calibration samples, drift from the first input on is partly learnt as normal"
        notes = [f"{promise[0].upper()}{promise[1:]}."]
        return notes if n >= ENOUGH else [*notes, f"{few}; calibrate with {ENOUGH:,} or more."]

    def drawing(self) -> Drawing:
        """The evidence over the inputs."""
        where = "".join(f" {line}" for line in self.alarms())
        levels = f"at most {self.evidence.max():,.0f}, at last {self.evidence[-1]:,.0f}"
        alt = f"Evidence over {len(self.evidence):,} inputs: {levels}.{where}"
        return draw(_curve(self), alt, "Evidence of a change after each input")

    def _input(self, number: int) -> str:
        name = self.names.get(number, number)
        return f"input {number:,}" + (f" ({name})" if str(name) != str(number) else "")


def watched(files: Sequence[str], guard: Path) -> Watched:
    """Let a monitor of a guard's file see verdict files, in the order of their rows."""
    monitor = Monitor(load_calibration(guard))
    trace: list[Values] = []
    names = watch(monitor, files, lambda *_: None, trace.append)
    return Watched(monitor, names, np.concatenate(trace))


def _curve(seen: Watched) -> Figure:
    """The largest evidence in each of at most 400 runs of inputs, on a logarithmic axis; changes are shaded."""
    starts = np.unique(np.linspace(0, len(seen.evidence), POINTS, endpoint=False).astype(int))
    numbers = np.append(starts[1:], len(seen.evidence)) - 1
    peaks = np.maximum.reduceat(seen.evidence, starts).clip(min=1.0)
    length = seen.monitor.run_length
    last = max(len(seen.evidence) - 1, 1)
    figure, (axes,) = drawing.grid_of(1, most=1, height=1.9, width=drawing.NARROW)
    if seen.monitor.alarms:
        ends = numbers[peaks >= length]
        axes.axvspan(seen.monitor.alarms[0].since, ends[-1], facecolor=(ALARM, 0.15), label="since the alarm's change")
    axes.plot(numbers, peaks, color=LINE, linewidth=1.1, label="evidence")
    axes.axhline(length, color=ALARM, linewidth=1.1, linestyle="--", label=f"alarm at {length:,.0f}")
    axes.set(yscale="log", xlim=(0, last), ylim=(1.0, 10 * max(length, peaks.max())))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="x", nbins=4)
    drawing.label(axes, x="input", y="evidence of a change")
    drawing.legend(figure, [axes])
    return figure
