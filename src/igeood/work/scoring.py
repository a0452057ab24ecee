"""Scores of logits files, block by block, in files that appear whole."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

from igeood.errors import InputError
from igeood.files import record_head, whole
from igeood.guard import Guard, load
from igeood.logits_files import LOGITS, LogitsFile, read_logits
from igeood.outputs import OnError, Outputs
from igeood.tables import FEATURE

COLUMNS = ("score", "p_value", "is_ood", "label")
Columns = Mapping[str, str | None]  # arguments of `read_logits`: the names of `logits`, `label` and `identity`


def open_logits(guard: Guard, names: Sequence[str], columns: Columns, *, labelled: bool = False) -> LogitsFile:
    """Logits files with the features that a guard reads, of the widths that it was fitted on."""
    is_white = guard.detector.needs.reads_layers and guard.source.wanted != []
    layers = guard.layers or (None if is_white else ())
    options: dict[str, Any] = dict(columns)
    file = read_logits(names, layers=layers, labelled=labelled, **options)
    file.columns = guard.columns
    if hasattr(guard.detector, "n_classes_"):
        widths = {FEATURE + layer: width for layer, width in guard.detector.widths_.items()}
        file.widths = {LOGITS: guard.detector.n_classes_, **widths}
    return file


def write_scores(
    guard: Guard, source: Any, out: str | None, *, on_error: OnError | None, as_json: bool = False
) -> dict[str, Any]:
    """Write the verdict on each row; return the numbers of `rows`, `refused`, `unread`, and the `first` unread.

    Parameters
    ----------
    guard : Guard
        Without a threshold, it gives scores only.
    source : LogitsFile or Images
        The samples.
    out : str, optional
        A .parquet or .jsonl file, or else CSV; by default stdout.
    on_error : {"raise", "refuse"}, optional
        At a row that cannot be read; default: refuse, raise for a single row.
    as_json : bool
        Lines of JSON on stdout.
    """
    source.on_error = on_error or "refuse"
    counts: dict[str, Any] = {"rows": 0, "refused": 0, "unread": 0, "first": ""}

    def tables() -> Iterator[pa.Table]:
        for block, ids in source.blocks(ids=True):
            columns, reasons = _verdicts(guard, block, source.on_error)
            unread = [f"row {ids[row]}: {reason}" for row, reason in enumerate(reasons) if reason]
            if unread and on_error is None and source.rows == 1:
                raise InputError(unread[0], cure="correct it, or give {on_error=refuse}")
            counts["first"] = counts["first"] or next(iter(unread), "")
            counts["rows"] += len(block)
            counts["unread"] += len(unread)
            counts["refused"] += int(np.sum(columns.get("is_ood", 0)))
            yield pa.table({"id": ids, **columns, "reason": pa.array(reasons, pa.string())})

    with whole(out) if out else nullcontext(sys.stdout.buffer) as file:
        _write(file, Path(out).suffix if out else ".jsonl" if as_json else ".csv", tables())
    return counts


def _verdicts(guard: Guard, block: Any, on_error: OnError) -> tuple[dict[str, Any], list[str | None]]:
    """Columns of a block, of its scores alone where the guard has no threshold; and why rows could not be read."""
    if guard.calibration is None:
        scores = np.asarray(guard.score(block, on_error=on_error))
        read = guard.source.read(block, on_error=on_error) if isinstance(block, Outputs) else block
        return {"score": scores}, [read.reasons.get(row) for row in range(len(block))]
    verdict = guard.predict(block, on_error=on_error)
    columns: dict[str, Any] = {name: np.asarray(getattr(verdict, name)) for name in COLUMNS}
    if verdict.classes is not None:
        columns["class"] = pa.array(verdict.name, pa.string())
    return columns, [None] * len(block) if verdict.reason is None else verdict.reason.tolist()


def _write(file: IO[bytes], ending: str, tables: Iterable[pa.Table]) -> None:
    """Write tables of the same columns to a Parquet, JSON lines or CSV file, each as it comes."""
    plain = partial(csv.CSVWriter, write_options=csv.WriteOptions(quoting_header="none"))
    open_writer = parquet.ParquetWriter if ending == ".parquet" else plain
    writer: Any = None
    for table in tables:
        if ending == ".jsonl":
            for row in table.to_pylist():
                row["score"] = row["score"] if np.isfinite(row["score"]) else None  # JSON has no infinity
                file.write(f"{json.dumps(row, default=str)}\n".encode())
        else:
            writer = writer or open_writer(file, table.schema)
            writer.write(table)
        file.flush()
    if writer:
        writer.close()


def score_file(guard: str, fingerprint: str, columns: Columns, on_error: OnError | None, name: str, out: str) -> Any:
    """Score one logits file with the guard of another; for workers, so all arguments are plain."""
    loaded = load_once(guard, fingerprint)
    return write_scores(loaded, open_logits(loaded, [name], columns), out, on_error=on_error)


@lru_cache(maxsize=1)
def load_once(path: str, fingerprint: str) -> Guard:
    """The guard of a file, read once by each process."""
    guard = load(path)
    if record_head(path).get("sha256") != fingerprint:
        problem = f"{path} was replaced while files were scored"
        raise InputError(problem, argument="guard", cure="give the command again")
    return guard
