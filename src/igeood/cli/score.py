"""`igeood score`: what a guard says of each sample."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from igeood.cli._guards import Sources, check_new, force_option, json_option, load_guard, progress, source_options, tell
from igeood.errors import InputError

if TYPE_CHECKING:
    from igeood.guard import Guard

Write = Callable[[Any], None]  # takes one table
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
    loaded = load_guard(guard, sources)
    source = sources.open(data, loaded)
    if loaded.calibration is None:
        click.echo(
            "igeood: the guard is not calibrated: scores only; `igeood calibrate` gives it a threshold", err=True
        )
    done = refused = 0
    with progress() as report, _sink(out, as_json) as write:
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
def _sink(out: str | None, as_json: bool) -> Iterator[Write]:
    """Where the rows go: stdout, or a file that appears whole or not at all."""
    from igeood.files import whole

    if out is None:
        yield _text(sys.stdout.buffer, lines=as_json)
        return
    with whole(out) as file:
        if Path(out).suffix in (".csv", ".jsonl"):
            yield _text(file, lines=Path(out).suffix == ".jsonl")
            return
        with _parquet(file) as write:
            yield write


def _text(file: IO[bytes], *, lines: bool) -> Write:
    """CSV with a head, or lines of JSON."""
    import pyarrow as pa
    from pyarrow import csv

    head: list[str] = []

    def write(columns: dict[str, Any]) -> None:
        table = pa.table(columns)
        if lines:
            file.write("".join(f"{json.dumps(row, default=str)}\n" for row in table.to_pylist()).encode())
        else:
            if not head:
                head.extend(table.column_names)
                file.write((",".join(head) + "\n").encode())
            buffer = pa.BufferOutputStream()
            csv.write_csv(table, buffer, csv.WriteOptions(include_header=False))
            file.write(buffer.getvalue())
        file.flush()

    return write


@contextmanager
def _parquet(file: IO[bytes]) -> Iterator[Write]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    writers: list[Any] = []

    def write(columns: dict[str, Any]) -> None:
        table = pa.table(columns)
        if not writers:
            writers.append(pq.ParquetWriter(file, table.schema))
        writers[0].write_table(table)

    try:
        yield write
        for writer in writers:
            writer.close()
    except BaseException:
        for writer in writers:
            writer.is_open = False  # its end is not wanted any more, and might fail as well
        raise
