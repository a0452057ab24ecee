"""`igeood calibrate`: a guard's threshold, with its promise."""

import click

from igeood.cli._guards import Sources, Watched, check_new, load_guard, replacing, source_options
from igeood.cli._shared import json_option, tell
from igeood.cli.progress import progress_bars


@click.command()
@click.argument("guard", type=click.Path())
@click.argument("id_data", metavar="ID", type=click.Path())
@click.option("--tpr", default=0.95, show_default=True, help="Share of in-distribution samples to keep.")
@click.option(
    "--guarantee", type=click.Choice(["marginal", "tolerance"]), default="marginal", show_default=True,
    help="On average over calibration sets, or for this one with --confidence.",
)  # fmt: skip
@click.option("--confidence", default=0.95, show_default=True, help="Of the tolerance.")
@replacing
@source_options
@json_option
def calibrate(
    guard: str, id_data: str, tpr: float, guarantee: str, confidence: float, out: str | None, force: bool,
    sources: Sources, as_json: bool,
) -> None:  # fmt: skip
    """Set GUARD's threshold from ID, in-distribution samples that training has not seen.

    Samples that `igeood tune` has used are left out.
    """
    check_new(out, force, id_data)
    loaded = load_guard(guard, sources)
    with progress_bars() as report:
        samples = Watched(sources.open(id_data, loaded), "calibrate", report)
        loaded.calibrate(samples, tpr, guarantee=guarantee, confidence=confidence)  # type: ignore[arg-type]
    loaded.save(out or guard)
    n = 0 if loaded.calibration is None else len(loaded.calibration.scores)
    record = {"threshold": loaded.threshold, "promise": loaded.promise, "n": n, "out": out or guard}
    tell(as_json, record, f"{out or guard}: threshold {loaded.threshold:.6g} from {n:,} samples: {loaded.promise}")
