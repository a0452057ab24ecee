"""Scores of logits files, block by block, in files that appear whole."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import csv, parquet

from igeood.errors import InputError
from igeood.files import record_head, whole
from igeood.guard import Guard, load
from igeood.guard.verdict import Verdict, reasons
from igeood.outputs import Outputs
from igeood.tables import LogitsFile, read_logits
from igeood.terminal import Progress

COLUMNS = ("score", "p_value", "is_ood", "label")
Columns = Mapping[str, str | None]  # arguments of `read_logits`: the names of `logits`, `label` and `identity`


def open_logits(guard: Guard, names: Sequence[str], columns: Columns, *, labelled: bool = False) -> LogitsFile:
    """Logits files with the features that a guard reads."""
    layers = guard.layers or (None if guard.access == "white box" or guard.detector.needs.returns else ())
    given: dict[str, Any] = dict(columns)
    return read_logits(names, layers=layers, labelled=labelled, **given)


def write_scores(
    guard: Guard, source: Any, out: str | None, report: Progress, *, on_error: str | None, as_json: bool = False
) -> dict[str, Any]:
    """Write what a guard says of each row; return the numbers of `rows`, `refused`, `unread`, and the `first` unread.

    Parameters
    ----------
    guard : Guard
        Without a threshold, it gives scores only.
    source : LogitsFile or Images
        The samples.
    out : str, optional
        A .parquet or .jsonl file, or else CSV; by default stdout.
    report : callable
        Gets what is done.
    on_error : {"raise", "refuse"}, optional
        At a row that cannot be read; by default refuse, of one row raise.
    as_json : bool
        Lines of JSON on stdout.
    """
    source.on_error = on_error or ("raise" if source.rows == 1 else "refuse")
    rows = refused = unread = 0
    first = ""
    with _sink(out, as_json) as write:
        for block, ids in source.blocks(ids=True):
            columns, bad = _judged(guard, block, source.on_error)
            write({"id": ids, **columns})
            first = first or next((f"row {ids[row]}: {bad[row]}" for row in sorted(bad)), "")
            rows, unread = rows + len(ids), unread + len(bad)
            refused += int(columns["is_ood"].sum()) if guard.calibration else 0
            report("score", rows, source.rows)
    return {"rows": rows, "refused": refused, "unread": unread, "first": first}


def score_file(guard: str, fingerprint: str, columns: Columns, on_error: str | None, name: str, out: str) -> Any:
    """Score one logits file with the guard of another; for workers, so all arguments are plain."""
    loaded = load_once(guard, fingerprint)
    return write_scores(loaded, open_logits(loaded, [name], columns), out, lambda *_: None, on_error=on_error)


@lru_cache(maxsize=1)
def load_once(path: str, fingerprint: str) -> Guard:
    """The guard of a file, read once by each process."""
    guard = load(path)
    if record_head(path).get("sha256") != fingerprint:
        raise InputError(f"guard: {path} was replaced while files were scored; give the command again")
    return guard


def _judged(guard: Guard, block: Any, on_error: str) -> tuple[dict[str, Any], dict[int, str]]:
    """Columns of a block, of scores alone where the guard has no threshold; reasons of its bad rows by number."""
    refused: dict[int, str] | None = {} if on_error == "refuse" else None
    if len(block) == 0:  # nothing tells how wide it would be
        widths, n_classes = guard.detector.widths_, guard.detector.n_classes_
        block = Outputs.checked(
            torch.empty(0, n_classes), {name: torch.empty(0, k) for name, k in widths.items()}, None
        )
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
