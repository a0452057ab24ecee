"""What a threshold promises: that of a calibrated guard, and that of the test images themselves."""

from pathlib import Path

from igeood import storage
from igeood.benchmark.summary import Key
from igeood.calibration import Calibration
from igeood.errors import GuardFileError
from igeood.figures import STYLE
from igeood.guard import CALIBRATION_FIELDS

OWN = (
    "The figures above use a threshold that was read from the in-distribution test images themselves: it keeps {tpr}% "
    "of just these, and promises nothing for new data."
)
GET_ONE = (
    "There is no calibrated guard here. `guard.calibrate(held_out)` in Python, or `igeood calibrate`, makes a "
    "threshold with a guarantee from images that neither training nor tuning has seen."
)
LIMITS = (
    "The promise holds for inputs that are drawn as the calibration images were. It is about known inputs only: how "
    "many foreign ones are refused is measured, in the table, and not promised."
)


def promises(guard: Path | None, keys: list[Key], tpr: float) -> list[str]:
    """Sentences: what a guard's threshold promises, if there is a guard, and what the test images' own does not."""
    own = OWN.format(tpr=f"{100 * tpr:g}")
    if guard is None:
        return [own, GET_ONE]
    record, tensors = storage.read(guard)
    try:
        method, access, kept = record["method"], record["access"], record["calibration"]
        networks = {key.weights: str(key) for key in keys}
        whose = networks.get(record["model"], "a network that is not in this report")
        who = f"The guard in {guard.name} ({STYLE[method].title}, {access}, of {whose})"
        if kept is None:
            return [f"{who} is not calibrated.", own, GET_ONE]
        scores = tensors["calibration.scores"]
        kept = {"trained_on": 0, **kept}  # earlier files do not tell
        calibration = Calibration(scores, **{name: kept[name] for name in CALIBRATION_FIELDS})
        above = f"{calibration.threshold:.4g}".replace("-", "−")
        start = f"{who} refuses scores above {above}; it is tuned by itself, so its scores have a scale of their own."
        left = f" ({calibration.left_out:,} more were left out, which tuning had seen)" if calibration.left_out else ""
        told = f"{start} Its promise, from {len(scores):,} calibration images{left}: {calibration.promise}."
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise GuardFileError(
            f"guard: {guard} does not describe a guard ({' '.join(str(error).split())}); save it again"
        ) from None
    return [told, LIMITS, own]
