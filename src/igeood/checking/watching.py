"""What a monitor says of verdict files: the evidence that the inputs have changed, as a curve."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from igeood.calibration import Calibration
from igeood.monitor import Monitor
from igeood.work.verdicts import watch

POINTS = 400  # of the curve
WIDTH, HEIGHT = 560, 220
EDGE = 40


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
    peaks = np.log(np.maximum.reduceat(evidence, starts).clip(min=1.0))
    limit = float(np.log(monitor.run_length))
    top = 1.1 * max(limit, float(peaks.max()), 1.0)
    x = EDGE + starts / max(1, len(evidence) - 1) * (WIDTH - 2 * EDGE)
    *y, alarm = HEIGHT - EDGE - np.append(peaks, limit) / top * (HEIGHT - 2 * EDGE)
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    curve = {"line": line, "limit": alarm, "width": WIDTH, "height": HEIGHT, "edge": EDGE}
    return {"monitor": monitor, "names": names, "peak": evidence.max(), "curve": curve}
