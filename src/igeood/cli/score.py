"""`igeood score`: what a guard says of each sample."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from igeood.cli._guards import Sources, check_new, force_option, load_guard, source_options
from igeood.cli._shared import json_option, tell
from igeood.cli.progress import progress_bars
from igeood.errors import InputError

if TYPE_CHECKING:
    from pyarrow import Table

    from igeood.guard import Guard

SUFFIXES = (".parquet", ".pq", ".csv", ".jsonl")


@click.command()
@click.argument("guard", type=click.Path())
@click.argument("data", type=click.Path())
@click.option(
    "--out", type=click.Path(dir_okay=False), help="A .parquet, .csv or .jsonl file; otherwise CSV goes to stdout."
)
@force_option
@source_options
@json_option
def score(guard: str, data: str, out: str | None, force: bool, sources: Sources, as_json: bool) -> None:
    """Judge each row of DATA: id, score, p_value, is_ood and label.

    The id is the file's own, or the row's number from 0; the label is the classifier's answer. A higher score is more
    out-of-distribution. With --json, lines of JSON go to stdout; with --out too, one object that tells what was done.
    """
    check_new(out, force, guard, data)
    if out is not None and Path(out).suffix not in SUFFIXES:
        raise InputError(f"out: {out} ends in none of {', '.join(SUFFIXES)}; name one of these formats")
    loaded = load_guard(guard, sources, data)
    source = sources.open(data, loaded)
    if loaded.calibration is None:
        click.echo(
            "igeood: the guard is not calibrated: scores only; `igeood calibrate` gives it a threshold", err=True
        )
    done = refused = 0
    with progress_bars() as report, _sink(out, as_json) as write:
        for block, ids in source.blocks(ids=True):
            columns = _judge(loaded, block)
            write({"id": ids, **columns})
            done += len(columns["score"])
            refused += int(columns["is_ood"].sum()) if "is_ood" in columns else 0
            report("score", done, source.rows)
    told = f"{refused:,} of {done:,} refused" if loaded.calibration else f"{done:,} scored"
    click.echo(told, err=True)
    if out is not None:
        record = {"rows": done, "refused": refused if loaded.calibration else None, "out": out}
        tell(as_json, record, out)


def _judge(guard: "Guard", block: Any) -> dict[str, Any]:
    """Columns of one block, as NumPy arrays."""
    import torch

    from igeood.outputs import as_kind

    if guard.calibration is not None:
        verdict = guard.predict(block)
        found = {name: getattr(verdict, name) for name in ("score", "p_value", "is_ood", "label")}
    else:
        _, scores, labels, _ = guard._judge(block)
        found = {"score": scores, "label": labels}
    return {name: as_kind(torch.as_tensor(value), True) for name, value in found.items()}


@contextmanager
def _sink(out: str | None, as_json: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Takes columns, block by block: for stdout, or for a file that appears whole or not at all."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    from igeood.files import whole

    if out is None and sys.stdout is None:
        raise InputError("stdout: is closed; name a file for the verdicts: --out")
    kind = Path(out).suffix if out else ".jsonl" if as_json else ".csv"
    parquet: ParquetWriter | None = None
    head = True

    def write(columns: dict[str, Any]) -> None:
        nonlocal parquet, head
        table = pa.table(columns)
        if kind in (".csv", ".jsonl"):
            file.write(_csv(table, head=head) if kind == ".csv" else _json_lines(table))
            file.flush()
        else:
            parquet = parquet or ParquetWriter(file, table.schema)
            parquet.write_table(table)
        head = False

    with whole(out) if out else nullcontext(sys.stdout.buffer) as file:
        try:
            yield write
            if parquet is not None:
                parquet.close()
        except BaseException:
            if parquet is not None:
                parquet.is_open = False  # its end is not wanted any more, and might fail as well
            raise


def _csv(table: "Table", *, head: bool) -> bytes:
    import pyarrow as pa
    from pyarrow import csv

    buffer = pa.BufferOutputStream()
    csv.write_csv(table, buffer, csv.WriteOptions(include_header=False))
    first = f"{','.join(table.column_names)}\n" if head else ""  # pyarrow's own has quotes
    return first.encode() + bytes(buffer.getvalue())


def _json_lines(table: "Table") -> bytes:
    return "".join(f"{json.dumps(row, default=str)}\n" for row in table.to_pylist()).encode()
