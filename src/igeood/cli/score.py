"""`igeood score`: what a guard says of each sample."""

from typing import TYPE_CHECKING, Any

import click

from igeood.cli import _shared
from igeood.cli._shared import check_out, guard_options, load_guard, open_samples
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
@click.option("--on-error", type=ON_ERROR, help="At a row that cannot be read; by default refuse, of one row raise.")
@_shared.engine_options
@guard_options
def score(
    guard: str, data: tuple[str, ...], out: str | None, on_error: str | None, workers: int | None, engine: str | None,
    address: str | None, force: bool, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Judge each row of DATA: id, score, p_value, is_ood, label, class and reason.

    DATA is as in `igeood fit`: files, folders, patterns; or images.

    The id is the file's own, or the row's number from 0; the label is the classifier's answer, and the class its name
    if the guard has names. A higher score is more out-of-distribution. A row that cannot be read is refused, and the
    reason says why. With --json, lines of JSON go to stdout; with --out too, one object that says what was done.

    With a folder as --out, each file of DATA becomes a file of the same name there. Files that are there are left as
    they are unless their input has changed, so the same command goes on after a stop; --force makes those of DATA
    again, and removes what another guard made, or what was made of inputs that are gone. A file that fails does not
    stop others.
    """
    given = {"engine": engine, "workers": workers, "address": address}
    if out is not None and _shared.is_folder(out):
        return _score_each(guard, data, out, on_error, force, as_json, given, options)
    if any(given.values()):
        raise InputError("workers, engine, address: do many files; give --out a folder, with / at its end")
    if out is not None:
        check_out(out, force, guard, *data, guard=False)
    from igeood.work.scoring import write_scores

    loaded = load_guard(guard, options)
    source = open_samples(data, loaded, options)
    _say_uncalibrated(loaded)
    with progress_bars() as report:
        counts = write_scores(loaded, source, out, report, on_error=on_error, as_json=as_json)
    record = _said(loaded, counts)
    if out is not None:
        show(as_json, {"out": out, **record})
    return None


def _score_each(
    guard: str, data: tuple[str, ...], out: str, on_error: str | None, force: bool, as_json: bool,
    given: dict[str, Any], options: dict[str, Any],
) -> None:  # fmt: skip
    """Score each file into a folder."""
    import os
    from functools import partial

    from igeood.files import record_head
    from igeood.work.engines import choose
    from igeood.work.scoring import load_once, score_file
    from igeood.work.units import do_units, find_units

    about, path = record_head(guard), os.path.abspath(guard)  # noqa: PTH100 (links stay)
    if options["model"] or about.get("model"):
        raise InputError("out: a guard with a model scores one set of images; name one file, or predict in Python")
    fingerprint, columns = about.get("sha256"), _shared.column_names(options)
    loaded = load_once(path, fingerprint)
    units, where = find_units(data, out), choose(**given)
    _say_uncalibrated(loaded)
    recipe = {"kind": "score", "guard": fingerprint, "columns": columns, "on_error": on_error}
    work = partial(score_file, path, fingerprint, columns, on_error)
    with progress_bars() as report:
        outcomes = do_units(units, out, recipe, where, work, report, force=force)
    failed = {units[unit]: str(end) for unit, end in outcomes.items() if isinstance(end, IgeoodError)}
    scored = {units[unit]: end for unit, end in outcomes.items() if not isinstance(end, IgeoodError)}
    counts: dict[str, Any] = {name: sum(end[name] for end in scored.values()) for name in ("rows", "refused", "unread")}
    counts["first"] = next((f"{name}: {end['first']}" for name, end in scored.items() if end["first"]), "")
    files = {"files": len(units), "done": len(scored), "skipped": len(units) - len(outcomes)}
    _shared.show_units(as_json, {"out": out, **files, **_said(loaded, counts)}, failed)


def _say_uncalibrated(guard: "Guard") -> None:
    if guard.calibration is None:
        click.echo("igeood: the guard is not calibrated: scores only; run `igeood calibrate` first", err=True)


def _said(guard: "Guard", counts: dict[str, Any]) -> dict[str, Any]:
    """Say how many rows were refused; return it for the result."""
    rows, refused, unread = (counts[name] for name in ("rows", "refused", "unread"))
    if unread:
        first = counts["first"]
        click.echo(f"{unread:,} of {rows:,} rows could not be read and are refused; first: {first}", err=True)
    click.echo(f"{refused:,} of {rows:,} refused" if guard.calibration else f"{rows:,} scored", err=True)
    record = {"rows": rows, "refused": refused if guard.calibration else None}
    return {**record, **({"unread": unread} if unread else {})}
