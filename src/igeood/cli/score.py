"""`igeood score`: what a guard says of each sample."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import click

from igeood.cli._shared import check_out, guard_options, load_guard, open_samples
from igeood.terminal import FILE, progress_bars, show

COLUMNS = ("score", "p_value", "is_ood", "label")


@click.command()
@click.argument("guard", type=click.Path())
@click.argument("data", metavar="DATA...", nargs=-1, required=True, type=click.Path())
@click.option("--out", type=FILE, help="A .parquet or .jsonl file, or else CSV; by default CSV goes to stdout.")
@guard_options
def score(guard: str, data: tuple[str, ...], out: str | None, force: bool, as_json: bool, **options: Any) -> None:
    """Judge each row of DATA: id, score, p_value, is_ood and label.

    DATA is as in `igeood fit`: files, folders, patterns, - for standard input; or images.

    The id is the file's own, or the row's number from 0; the label is the classifier's answer. A higher score is more
    out-of-distribution. With --json, lines of JSON go to stdout; with --out too, one object that says what was done.
    """
    import torch

    if out is not None:
        check_out(out, force, guard, *data)
    loaded = load_guard(guard, options)
    source = open_samples(data, loaded, options)
    if loaded.calibration is None:
        click.echo("igeood: the guard is not calibrated: scores only; run `igeood calibrate` first", err=True)
    done = refused = 0
    with progress_bars() as report, _sink(out, as_json) as write:
        for block, ids in source.blocks(ids=True):
            verdict = {"score": loaded.score(block)} if loaded.calibration is None else vars(loaded.predict(block))
            columns = {name: torch.as_tensor(verdict[name]).cpu().numpy() for name in COLUMNS if name in verdict}
            write({"id": ids, **columns})
            done += len(ids)
            refused += int(columns["is_ood"].sum()) if loaded.calibration else 0
            report("score", done, source.rows)
    click.echo(f"{refused:,} of {done:,} refused" if loaded.calibration else f"{done:,} scored", err=True)
    if out is not None:
        show(as_json, {"out": out, "rows": done, "refused": refused if loaded.calibration else None})


@contextmanager
def _sink(out: str | None, as_json: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Writes columns, block by block: to stdout, or to a file that appears whole or not at all."""
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
            if kind == ".jsonl":
                file.write("".join(f"{json.dumps(row, default=str)}\n" for row in table.to_pylist()).encode())
            else:
                writer = writer or stack.enter_context(open_writer(file, table.schema))
                writer.write(table)
            file.flush()

        yield write
