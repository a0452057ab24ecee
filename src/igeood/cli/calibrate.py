"""`igeood calibrate`: a guard's threshold, with its promise."""

import click

from igeood.cli._guards import Sources, Watched, check_out, force_option, out_option, source_options
from igeood.cli._shared import json_option, show
from igeood.cli.progress import progress_bars

GUARANTEE = click.Choice(["marginal", "tolerance"])


@click.command()
@click.argument("guard", type=click.Path())
@click.argument("id_data", metavar="ID", type=click.Path())
@click.option("--tpr", default=0.95, show_default=True, help="Share of in-distribution samples to keep.")
@click.option("--guarantee", type=GUARANTEE, default="marginal", show_default=True, help="On average, or for this set.")
@click.option("--confidence", default=0.95, show_default=True, help="Of the tolerance.")
@out_option
@force_option
@source_options
@json_option
def calibrate(
    guard: str, id_data: str, tpr: float, guarantee: str, confidence: float, out: str | None, force: bool,
    sources: Sources, as_json: bool,
) -> None:  # fmt: skip
    """Set GUARD's threshold from ID, in-distribution samples that training has not seen.

    Samples that `igeood tune` has used are left out.
    """
    target = check_out(out, force, id_data, replaced=guard)
    loaded = sources.guard(guard)
    with progress_bars() as report:
        samples = Watched(sources.open(id_data, loaded), "calibrate", report)
        loaded.calibrate(samples, tpr, guarantee=guarantee, confidence=confidence)  # type: ignore[arg-type]
    loaded.save(target)
    calibration = loaded.calibration
    assert calibration is not None  # noqa: S101 (for the type checker)
    promise = calibration.promise
    holds = {"promise": None, "warning": promise} if calibration.trained_on else {"promise": promise}
    show(as_json, {"out": target, "threshold": loaded.threshold, "samples": len(calibration.scores), **holds})
