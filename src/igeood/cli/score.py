"""`igeood score`: a guard's verdict on each sample."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import click

from igeood.cli import _shared
from igeood.cli._shared import Options, check_out, is_folder, load_guard, open_samples
from igeood.errors import InputError
from igeood.terminal import progress_bars, show

ON_ERROR = click.Choice(["raise", "refuse"])
_ON_ERROR = """Refuse a row that cannot be read, or stop with an error (raise). Default: refuse; raise if there is only
one row."""
_OUT = "A .parquet, .jsonl or .csv file; or a folder, whose name ends with /. Default: CSV on stdout."


@click.command()
@click.argument("guard", type=click.Path())
@click.argument("data", metavar="DATA...", nargs=-1, required=True, type=click.Path())
@click.option("--out", type=click.Path(), help=_OUT)
@click.option("--on-error", type=ON_ERROR, help=_ON_ERROR)
@_shared.engine_options
@_shared.guard_options
def score(guard: str, data: tuple[str, ...], out: str | None, **options: Any) -> None:
    """Judge each row of DATA by its score.

    DATA has the formats of `igeood fit`: files, folders or patterns; or a folder of images.

    Columns of the result: id (the file's own, or the row's number from 0), score (higher is more out-of-distribution),
    p_value, is_ood, label (the classifier's answer), class (its name, if the guard has names) and reason. A row that
    cannot be read is refused, and the reason says why. --json prints one JSON object for each row; with --out, one
    object with the counts.

    With a folder as --out, each file of DATA gets a file of the same name there; a .npz file becomes .npz.parquet.
    Existing files are kept unless their input has changed, so the same command continues after an interruption. With
    --force they are made again, and files of another guard or of inputs that no longer exist are removed. A file that
    fails does not stop the others.
    """
    is_spread = any(options[name] for name in ("engine", "workers", "address"))
    if out is not None and (is_folder(out) or (is_spread and not Path(out).suffix)):
        _score_each(guard, data, out, options)
        return
    if is_spread:
        raise InputError("one file is scored in one process", argument="out", cure="name a folder")
    if out is not None:
        check_out(out, options["force"], guard, *data, guard=False)
    from igeood.work.scoring import write_scores

    as_json = options["as_json"]
    loaded = load_guard(guard, options)
    with progress_bars() as report:
        samples = open_samples(data, loaded, options, report, "score")
        counts = write_scores(loaded, samples, out, on_error=options["on_error"], as_json=as_json)
    record = _report(counts, is_calibrated=loaded.calibration is not None)
    if out is not None:
        show(as_json, {"out": out, **record})


def _score_each(guard: str, data: tuple[str, ...], out: str, options: Options) -> None:
    """Score each file into a folder."""
    from igeood.files import record_head
    from igeood.work.scoring import load_once, score_file
    from igeood.work.units import find_units

    head = record_head(guard)
    path = os.path.abspath(guard)  # noqa: PTH100 (links stay)
    if options["model"] or head.get("model"):
        problem = "a guard with a model scores one set of images"
        raise InputError(problem, argument="out", cure="name one file, or predict in Python")
    fingerprint = str(head.get("sha256"))
    loaded = load_once(path, fingerprint)
    columns = _shared.column_names(options)
    on_error = options["on_error"]
    recipe = {"kind": "score", "guard": fingerprint, "columns": columns, "on_error": on_error}
    work = partial(score_file, path, fingerprint, columns, on_error)
    done, failed, files = _shared.do_files(find_units(data, out), out, recipe, work, options)
    counts: Options = {name: sum(each[name] for each in done.values()) for name in ("rows", "refused", "unread")}
    counts["first"] = next((f"{name}: {each['first']}" for name, each in done.items() if each["first"]), "")
    record = {"out": out, **files, **_report(counts, is_calibrated=loaded.calibration is not None)}
    _shared.show_files(options["as_json"], record, failed)


def _report(counts: Options, *, is_calibrated: bool) -> Options:
    """Print how many rows were refused; return it for the result."""
    rows, unread = counts["rows"], counts["unread"]
    if unread:
        message = f"{unread:,} of {rows:,} rows could not be read and are refused; first: {counts['first']}"
        click.echo(message, err=True)
    if not is_calibrated:
        click.echo("igeood: the guard is not calibrated: scores only; run `igeood calibrate` first", err=True)
    elif rows:
        click.echo(f"{counts['refused']:,} of {rows:,} refused", err=True)
    record = {"rows": rows, "refused": counts["refused"] if is_calibrated else None}
    return {**record, "unread": unread} if unread else record
