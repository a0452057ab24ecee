"""`igeood score`: a guard's verdict on each sample."""

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from igeood.cli import _shared
from igeood.cli._shared import Options, check_out, guard_options, load_guard, open_samples
from igeood.errors import IgeoodError, InputError
from igeood.terminal import progress_bars, show

if TYPE_CHECKING:
    from igeood.guard import Guard

ON_ERROR = click.Choice(["raise", "refuse"])
_OUT = "A .parquet or .jsonl file, or else CSV; a folder (with / at its end) gets a file for each one of DATA."


@click.command()
@click.argument("guard", type=click.Path())
@click.argument("data", metavar="DATA...", nargs=-1, required=True, type=click.Path())
@click.option("--out", type=click.Path(), help=f"{_OUT} By default CSV goes to stdout.")
@click.option("--on-error", type=ON_ERROR, help="What to do with a bad row; default: refuse, raise for a single row.")
@_shared.engine_options
@guard_options
def score(
    guard: str, data: tuple[str, ...], out: str | None, on_error: Any, force: bool, as_json: bool, **options: Any
) -> None:
    """Judge each row of DATA: id, score, p_value, is_ood, label, class and reason.

    DATA is as in `igeood fit`: files, folders or patterns; or a folder of images.

    The id is the file's own, or the row's number from 0; the label is the classifier's answer, and the class its name
    if the guard has names. A higher score is more out-of-distribution. A row that cannot be read is refused, and the
    reason says why. With --json, lines of JSON go to stdout; with --out too, one object that says what was done.

    With a folder as --out, each file of DATA becomes a file of the same name there. Files that are there are left as
    they are unless their input has changed, so the same command goes on after a stop; --force makes those of DATA
    again, and removes what another guard made, or what was made of inputs that are gone. A file that fails does not
    stop others.
    """
    if out is not None and _shared.is_folder(out):
        _score_each(guard, data, out, on_error, force, as_json, options)
        return
    if any(options[name] for name in ("engine", "workers", "address")):
        raise InputError("one file is scored in one process", argument="out", cure="name a folder, with / at its end")
    if out is not None:
        check_out(out, force, guard, *data, guard=False)
    from igeood.work.scoring import write_scores

    loaded = load_guard(guard, options)
    source = open_samples(data, loaded, options)
    _warn_uncalibrated(loaded)
    with progress_bars() as report:
        counts = write_scores(loaded, source, out, report, on_error=on_error, as_json=as_json)
    record = _report(loaded, counts)
    if out is not None:
        show(as_json, {"out": out, **record})


def _score_each(
    guard: str, data: tuple[str, ...], out: str, on_error: Any, force: bool, as_json: bool, options: Options
) -> None:
    """Score each file into a folder."""
    from igeood.files import record_head
    from igeood.work.engines import choose
    from igeood.work.scoring import load_once, score_file
    from igeood.work.units import do_units, find_units

    about = record_head(guard)
    path = os.path.abspath(guard)  # noqa: PTH100 (links stay)
    if options["model"] or about.get("model"):
        problem = "a guard with a model scores one set of images"
        raise InputError(problem, argument="out", cure="name one file, or predict in Python")
    fingerprint = str(about.get("sha256"))
    columns = _shared.column_names(options)
    loaded = load_once(path, fingerprint)
    units = find_units(data, out)
    engine = choose(options["engine"], options["workers"], options["address"])
    _warn_uncalibrated(loaded)
    recipe = {"kind": "score", "guard": fingerprint, "columns": columns, "on_error": on_error}
    work = partial(score_file, path, fingerprint, columns, on_error)
    with progress_bars() as report:
        outcomes = do_units(units, out, recipe, engine, work, report, force)
    failed = {units[unit]: end for unit, end in outcomes.items() if isinstance(end, IgeoodError)}
    scored = {units[unit]: end for unit, end in outcomes.items() if not isinstance(end, IgeoodError)}
    counts: Options = {name: sum(end[name] for end in scored.values()) for name in ("rows", "refused", "unread")}
    counts["first"] = next((f"{name}: {end['first']}" for name, end in scored.items() if end["first"]), "")
    files = {"files": len(units), "done": len(scored), "skipped": len(units) - len(outcomes)}
    _shared.show_units(as_json, {"out": out, **files, **_report(loaded, counts)}, failed)


def _warn_uncalibrated(guard: "Guard") -> None:
    if guard.calibration is None:
        click.echo("igeood: the guard is not calibrated: scores only; run `igeood calibrate` first", err=True)


def _report(guard: "Guard", counts: Options) -> Options:
    """Say how many rows were refused; return it for the result."""
    rows = counts["rows"]
    unread = counts["unread"]
    if unread:
        message = f"{unread:,} of {rows:,} rows could not be read and are refused; first: {counts['first']}"
        click.echo(message, err=True)
    click.echo(f"{counts['refused']:,} of {rows:,} refused" if guard.calibration else f"{rows:,} scored", err=True)
    record = {"rows": rows, "refused": counts["refused"] if guard.calibration else None}
    return {**record, "unread": unread} if unread else record
