"""`igeood calibrate`: a guard's threshold, with its promise."""

from typing import Any

import click

from igeood.cli import _shared
from igeood.cli._shared import check_out, load_guard, open_samples
from igeood.terminal import progress_bars, show

KIND = click.Choice(["marginal", "tolerance"])
_GUARANTEE = "marginal: the share is kept on average over calibration sets; tolerance: by this set, with --confidence."


@click.command()
@click.argument("guard", type=click.Path())
@click.argument("id_data", metavar="ID...", nargs=-1, required=True, type=click.Path())
@_shared.tpr_option
@click.option("--guarantee", type=KIND, default="marginal", help=_GUARANTEE)
@click.option("--confidence", default=0.95, help="Confidence of the tolerance guarantee.")
@click.option("--per-class", is_flag=True, help="Keep the share of each predicted class, by its own threshold.")
@_shared.out_option
@_shared.guard_options
def calibrate(guard: str, id_data: tuple[str, ...], out: str | None, as_json: bool, **options: Any) -> None:
    """Set GUARD's threshold on held-out in-distribution samples.

    ID names samples kept apart from training, in the formats of `igeood fit`; labels are not needed. Samples that
    training or `igeood tune` has seen are left out.
    """
    target = check_out(out, options["force"], *id_data, replaced=guard)
    loaded = load_guard(guard, options)
    with progress_bars() as report:
        samples = open_samples(id_data, loaded, options, report, "calibrate")
        promised = {name: options[name] for name in ("tpr", "guarantee", "confidence", "per_class")}
        loaded.calibrate(samples, **promised).save(target)
    calibration: Any = loaded.calibration
    promise = {"promise": calibration.promise}
    if calibration.trained_on:
        promise = {"promise": None, "warning": calibration.promise}
    record = {"out": target, "threshold": loaded.threshold, "samples": len(calibration.scores), **promise}
    if as_json:
        record |= {"left_out": calibration.left_out.tolist(), "classes": [s._asdict() for s in calibration.by_class()]}
    show(as_json, {**record, **_shared.health(loaded, as_json)})
