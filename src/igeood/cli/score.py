"""`igeood score`: what a guard says of each sample."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from igeood.cli._shared import check_out, guard_options, load_guard, open_samples
from igeood.terminal import FILE, progress_bars, show

if TYPE_CHECKING:
    from igeood.guard import Guard

COLUMNS = ("score", "p_value", "is_ood", "label")
ON_ERROR = click.Choice(["raise", "refuse"])


@click.command()
@click.argument("guard", type=click.Path())
@click.argument("data", metavar="DATA...", nargs=-1, required=True, type=click.Path())
@click.option("--out", type=FILE, help="A .parquet or .jsonl file, or else CSV; by default CSV goes to stdout.")
@click.option("--on-error", type=ON_ERROR, help="At a row that cannot be read; by default refuse, of one row raise.")
@guard_options
def score(
    guard: str, data: tuple[str, ...], out: str | None, on_error: str | None, force: bool, as_json: bool, **options: Any
) -> None:
    """Judge each row of DATA: id, score, p_value, is_ood, label, class and reason.

    DATA is as in `igeood fit`: files, folders, patterns, - for standard input; or images.

    The id is the file's own, or the row's number from 0; the label is the classifier's answer, and the class its name
    if the guard has names. A higher score is more out-of-distribution. A row that cannot be read is refused, and the
    reason says why. With --json, lines of JSON go to stdout; with --out too, one object that says what was done.
    """
    if out is not None:
        check_out(out, force, guard, *data, guard=False)
    loaded = load_guard(guard, options)
    source = open_samples(data, loaded, options)
    if loaded.calibration is None:
        click.echo("igeood: the guard is not calibrated: scores only; run `igeood calibrate` first", err=True)
    source.on_error = on_error or ("raise" if source.rows == 1 else "refuse")
    done = refused = unread = 0
    first = ""  # of the rows that cannot be read
    with progress_bars() as report, _sink(out, as_json) as write:
        for block, ids in source.blocks(ids=True):
            columns, bad = _judged(loaded, block, source.on_error)
            write({"id": ids, **columns})
            first = first or next((f"row {ids[row]}: {bad[row]}" for row in sorted(bad)), "")
            done, unread = done + len(ids), unread + len(bad)
            refused += int(columns["is_ood"].sum()) if loaded.calibration else 0
            report("score", done, source.rows)
    if unread:
        click.echo(f"{unread:,} of {done:,} rows could not be read and are refused; first: {first}", err=True)
    click.echo(f"{refused:,} of {done:,} refused" if loaded.calibration else f"{done:,} scored", err=True)
    if out is not None:
        record = {"out": out, "rows": done, "refused": refused if loaded.calibration else None}
        show(as_json, {**record, **({"unread": unread} if unread else {})})


def _judged(guard: "Guard", block: Any, on_error: Any) -> tuple[dict[str, Any], dict[int, str]]:
    """Columns of a block, of scores alone where the guard has no threshold; reasons of its bad rows by number."""
    import pyarrow as pa

    from igeood.guard.verdict import Verdict, reasons

    refused: dict[int, str] | None = {} if on_error == "refuse" else None
    score, label, _ = guard._judge(block, refused=refused)
    columns: dict[str, Any] = {"score": score.cpu().numpy()}
    if guard.calibration is not None:
        verdict = Verdict.of(score, label, guard.calibration, refused, guard.classes, to_numpy=True)
        columns = {name: getattr(verdict, name) for name in COLUMNS}
        if verdict.classes is not None:
            columns["class"] = pa.array(verdict.name, pa.string())
    why = reasons(refused, len(score))
    columns["reason"] = pa.nulls(len(score), pa.string()) if why is None else pa.array(why, pa.string())
    return columns, refused or {}


@contextmanager
def _sink(out: str | None, as_json: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Writes columns, block by block: to stdout, or to a file that appears whole or not at all."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import csv, parquet

    from igeood.files import whole

    kind = Path(out).suffix if out else ".jsonl" if as_json else ".csv"
    plain = partial(csv.CSVWriter, write_options=csv.WriteOptions(quoting_header="none"))
    open_writer = parquet.ParquetWriter if kind == ".parquet" else plain
    writer: Any = None
    with whole(out) if out else nullcontext(sys.stdout.buffer) as file, ExitStack() as stack:

        def write(columns: dict[str, Any]) -> None:
            nonlocal writer
            table = pa.table(columns)
            if kind == ".jsonl":  # JSON has no infinity
                scores = pa.array(columns["score"], mask=np.isinf(columns["score"]))
                table = table.set_column(1, "score", scores)
                file.write("".join(f"{json.dumps(row, default=str)}\n" for row in table.to_pylist()).encode())
            else:
                writer = writer or stack.enter_context(open_writer(file, table.schema))
                writer.write(table)
            file.flush()

        yield write
