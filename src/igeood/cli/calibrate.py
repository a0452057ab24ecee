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
@click.option("--confidence", default=0.95, show_default=True, help="Confidence of the tolerance guarantee.")
@_shared.out_option
@_shared.guard_options
def calibrate(guard: str, id_data: tuple[str, ...], out: str | None, as_json: bool, **options: Any) -> None:
    """Set GUARD's threshold from ID, in-distribution samples that training has not seen.

    Samples that `igeood tune` has used are left out.
    """
    target = check_out(out, options["force"], *id_data, replaced=guard)
    loaded = load_guard(guard, options)
    with progress_bars() as report:
        samples = Watched(open_samples(id_data, loaded, options), "calibrate", report)
        promised = {name: options[name] for name in ("tpr", "guarantee", "confidence")}
        loaded.calibrate(samples, **promised).save(target)
    calibration: Any = loaded.calibration
    promise = {"promise": calibration.promise}
    if calibration.trained_on:
        promise = {"promise": None, "warning": calibration.promise}
    record = {"out": target, "threshold": loaded.threshold, "samples": len(calibration.scores), **promise}
    show(as_json, {**record, **_shared.health(loaded, as_json)})
