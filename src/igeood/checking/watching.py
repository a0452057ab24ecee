"""What a monitor says of verdict files: the evidence that the inputs have changed, as a curve."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from igeood.calibration import Calibration
from igeood.monitor import ENOUGH, Monitor
from igeood.work.verdicts import watch

POINTS = 400  # of the curve
SHOWN = 3  # alarms in words
WIDTH, HEIGHT = 560, 220
EDGE = 40


@dataclass(frozen=True, eq=False)
class Watched:
    """A monitor after all inputs, the ids of those that matter by their number, and the evidence (N,) after each."""

    monitor: Monitor
    names: dict[int, Any]
    evidence: NDArray[np.float64]

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

    def curve(self) -> dict[str, Any]:
        """The largest evidence in each of at most 400 runs of inputs, on a logarithmic axis."""
        starts = np.unique(np.linspace(0, len(self.evidence), POINTS, endpoint=False).astype(int))
        peaks = np.log(np.maximum.reduceat(self.evidence, starts).clip(min=1.0))
        limit = float(np.log(self.monitor.run_length))
        top = 1.1 * max(limit, float(peaks.max()), 1.0)
        x = EDGE + starts / max(1, len(self.evidence) - 1) * (WIDTH - 2 * EDGE)
        y = HEIGHT - EDGE - peaks / top * (HEIGHT - 2 * EDGE)
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
        alarm = HEIGHT - EDGE - limit / top * (HEIGHT - 2 * EDGE)
        return {"line": line, "limit": alarm, "width": WIDTH, "height": HEIGHT, "edge": EDGE}

    def _input(self, number: int) -> str:
        name = self.names.get(number, number)
        return f"input {number:,}" + (f" ({name})" if str(name) != str(number) else "")


def watched(files: Sequence[str], calibration: Calibration) -> Watched:
    """Let a monitor see verdict files, in the order of their rows."""
    monitor = Monitor(calibration)
    trace: list[NDArray[np.float64]] = []
    names = watch(monitor, files, lambda *_: None, trace.append)
    return Watched(monitor, names, np.concatenate(trace))
