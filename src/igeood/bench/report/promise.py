"""What a threshold promises: that of a calibrated guard, and that of the test images themselves."""

from pathlib import Path

from igeood.bench.figures.drawing import look_of
from igeood.bench.runs.averages import Key
from igeood.bench.runs.plan import TPR
from igeood.calibration import Calibration
from igeood.files import read_record
from igeood.guard.file import CALIBRATION_FIELDS

OWN = (
    "The figures above use a threshold that was read from the in-distribution test images themselves: it keeps "
    f"{100 * TPR:g}% of just these, and promises nothing for new data."
)
GET_ONE = (
    "There is no calibrated guard here. `guard.calibrate(held_out)` in Python, or `igeood calibrate`, makes a "
    "threshold with a guarantee from images that neither training nor tuning has seen."
)
LIMITS = (
    "The promise holds for inputs that are drawn as the calibration images were. It is about known inputs only: how "
    "many foreign ones are refused is measured, in the table, and not promised."
)


def promises(guard: Path | None, keys: list[Key]) -> list[str]:
    """Sentences: what a guard's threshold promises, if there is a guard, and what the test images' own does not."""
    if guard is None:
        return [OWN, GET_ONE]
    record, tensors = read_record(guard, "guard")
    whose = {key.weights: str(key) for key in keys}.get(record["model"], "a network that is not in this report")
    who = f"The guard in {guard.name} ({look_of(record['method']).title}, {record['access']}, of {whose})"
    if record["calibration"] is None:
        return [f"{who} is not calibrated.", OWN, GET_ONE]
    fields = {name: record["calibration"][name] for name in CALIBRATION_FIELDS}
    calibration = Calibration(tensors["calibration.scores"], **fields)
    above = f"{calibration.threshold:.4g}".replace("-", "−")
    left = f" ({calibration.left_out:,} more were left out, which tuning had seen)" if calibration.left_out else ""
    start = f"{who} refuses scores above {above}; it is tuned by itself, so its scores have a scale of their own."
    n = len(calibration.scores)
    return [f"{start} Its promise, from {n:,} calibration images{left}: {calibration.promise}.", LIMITS, OWN]
