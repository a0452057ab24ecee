"""Verdict files, which `igeood score` writes, read back block by block for a monitor."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from igeood.calibration import Calibration
from igeood.errors import InputError
from igeood.guard.verdict import Verdict
from igeood.monitor import Kind, Monitor
from igeood.parts import Part, as_numbers, find_sources, some
from igeood.scale.units import MANIFEST
from igeood.terminal import Progress

ROWS = 1 << 16  # read at a time
_CURES = {
    "score": "give files that `igeood score` wrote",
    "is_ood": "score again with a calibrated guard, or watch kind='p-values'",
}


def open_verdicts(names: Sequence[str], kind: Kind) -> list[Part]:
    """The files of these names, with the columns that a monitor of this kind reads.

    Parameters
    ----------
    names : sequence of str
        Files, folders or patterns of files in Parquet, CSV or JSON lines; "-" is standard input.
    kind : {"p-values", "flags"}
        Flags need the column `is_ood` beside `score`. `reason` and `id` are read where they are.
    """
    results = [name for name in names if not name.endswith(MANIFEST)]  # what `igeood score` keeps beside them
    parts = [Part(source) for name in results or names for source in find_sources(name)]
    for part in parts:
        for column in ("score", "is_ood") if kind == "flags" else ("score",):
            if column not in part.names:
                problem = f"no column {column!r} among {some(part.names)}"
                raise InputError(f"{part.path}: {problem}; {_CURES[column]}")
        others = ("is_ood", "p_value", "reason", "id")
        part.choose({"score": ["score"]}, [name for name in others if name in part.names])
        if "reason" in part.types:  # of JSON lines that start without one, it is text all the same
            part.types["reason"] = pa.string()
    return parts


def read_verdicts(parts: Sequence[Part], calibration: Calibration, kind: Kind) -> Iterator[tuple[Verdict, Any]]:
    """Verdicts of open files in blocks, in order; each with its ids, None without any."""
    for part in parts:
        first = 0
        for batch in part.batches(ROWS):
            with part.named():
                verdict = _verdict(batch, first, calibration, kind, is_json=part.kind == "JSON lines")
            yield verdict, batch["id"] if "id" in part.names else None
            first += len(batch)


def _verdict(batch: pa.RecordBatch, first: int, calibration: Calibration, kind: Kind, *, is_json: bool) -> Verdict:
    """What rows from number `first` on say; a row with a reason was not read."""
    rows = np.arange(first, first + len(batch))
    scores = as_numbers(batch["score"], "score", rows).astype(np.float64)
    flags = _flags(batch["is_ood"]) if "is_ood" in batch.schema.names else None
    reasons = batch["reason"].to_pylist() if "reason" in batch.schema.names else []
    refused = {row: str(why) for row, why in enumerate(reasons) if why}
    scores[[*refused]] = np.inf
    is_lost = np.isnan(scores)
    if flags is not None and is_json:  # JSON has no infinity: `igeood score` writes null
        scores = np.where(is_lost, np.where(flags, np.inf, -np.inf), scores)
    elif is_lost.any():
        raise InputError(f"score: row {rows[is_lost][0]} has neither a score nor a reason; score that file again")
    label = torch.full((len(batch),), -1)
    verdict = Verdict.of(torch.from_numpy(scores), label, calibration, refused, None, to_numpy=True)
    is_wrong = np.zeros(len(batch), bool) if flags is None or kind != "flags" else flags != verdict.is_ood
    if "p_value" in batch.schema.names:
        is_wrong |= np.abs(as_numbers(batch["p_value"], "p_value", rows) - verdict.p_value) > 1e-6
    if is_wrong.any():
        problem = f"row {rows[is_wrong][0]} was judged by another guard, or after another calibration"
        raise InputError(f"verdicts: {problem}; score that file again with this guard")
    return verdict


def _flags(column: pa.Array) -> NDArray[np.bool_]:
    try:
        return np.asarray(column.cast(pa.bool_()).fill_null(False))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise InputError("is_ood: expected true or false in each row; score that file again") from None


def watch(
    monitor: Monitor, parts: Sequence[Part], report: Progress, see: Callable[[NDArray[np.float64]], None]
) -> dict[int, Any]:
    """Let a monitor see the verdicts of open files; `see` gets the evidence after each row.

    Returns the ids of the rows in which alarms were, and in which changes began, by the input's number, where the files
    have them.
    """
    counts, names = [part.rows for part in parts], dict[int, Any]()
    total = None if None in counts else sum(filter(None, counts))
    start = monitor.inputs
    for verdict, ids in read_verdicts(parts, monitor.calibration, monitor.kind):
        first = monitor.inputs
        see(monitor.update(verdict))
        wanted = {number for alarm in monitor.alarms for number in (alarm.at, alarm.since)}
        if ids is not None:  # those at which a change may have begun that later rows will show, too
            wanted |= monitor.likely_starts
            names |= {number: ids[number - first].as_py() for number in wanted if number >= first}
        names = {number: name for number, name in names.items() if number in wanted}
        report("monitor", monitor.inputs - start, total)
    if monitor.inputs == start:
        raise InputError(f"{parts[0].path}: no row in it, nor in others; give files that `igeood score` wrote")
    return names
