"""`igeood calibrate`: a guard's threshold, with its promise."""

from typing import Any

import click

from igeood.cli import _shared
from igeood.cli._shared import Watched, check_out, load_guard, open_samples
from igeood.terminal import progress_bars, show

GUARANTEE = click.Choice(["marginal", "tolerance"])


@click.command()
@click.argument("guard", type=click.Path())
@click.argument("id_data", metavar="ID...", nargs=-1, required=True, type=click.Path())
@_shared.tpr_option
@click.option("--guarantee", type=GUARANTEE, default="marginal", show_default=True, help="On average, or for this set.")
@click.option("--confidence", default=0.95, show_default=True, help="Of the tolerance.")
@_shared.distinct_option
@_shared.out_option
@_shared.guard_options
def calibrate(
    guard: str, id_data: tuple[str, ...], tpr: float, guarantee: Any, confidence: float, distinct: bool,
    out: str | None, force: bool, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Set GUARD's threshold from ID, in-distribution samples that training has not seen.

    Samples that `igeood tune` has used are left out.
    """
    target = check_out(out, force, *id_data, replaced=guard)
    loaded = load_guard(guard, options)
    with progress_bars() as report:
        samples = Watched(open_samples(id_data, loaded, options), "calibrate", report)
        loaded.calibrate(samples, tpr, guarantee=guarantee, confidence=confidence, distinct=distinct).save(target)
    calibration: Any = loaded.calibration
    promise = calibration.promise
    holds = {"promise": None, "warning": promise} if calibration.trained_on else {"promise": promise}
    record = {"out": target, "threshold": loaded.threshold, "samples": len(calibration.scores), **holds}
    show(as_json, {**record, **_shared.health(loaded, as_json)})
