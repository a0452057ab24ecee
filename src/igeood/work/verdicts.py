"""Verdict files, which `igeood score` writes, read back block by block for a monitor."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from igeood.errors import InputError
from igeood.guard import Verdict
from igeood.monitor import Monitor
from igeood.tables import check_columns, find_files, open_table
from igeood.terminal import Progress

_NUMBER = pa.float64()
_TYPES = {"score": _NUMBER, "is_ood": pa.bool_(), "p_value": _NUMBER, "label": pa.int64()}
_TYPES |= {"reason": pa.string(), "id": pa.string()}


def watch(
    monitor: Monitor, names: Sequence[str], report: Progress, see: Callable[[NDArray[np.float64]], object]
) -> dict[int, Any]:
    """Let a monitor see the verdicts of files, folders or patterns of files; `see` gets the evidence after each row.

    Files need a column `score`, and `is_ood` to watch flags; `p_value`, `reason` and `id` are read where they are.
    Returns the ids of the rows in which alarms were, and in which changes began, by the input's number, where the files
    have them.
    """
    paths = [path for name in names for path in find_files(name)[1]]
    start = monitor.inputs
    row_ids: dict[int, Any] = {}
    for verdict, ids in _read(paths, monitor):
        first = monitor.inputs
        see(monitor.update(verdict))
        wanted = {number for alarm in monitor.alarms for number in (alarm.at, alarm.since)}
        if ids is not None:  # those at which a change may have begun that later rows will show, too
            wanted |= monitor.likely_starts
            row_ids |= {number: ids[number - first].as_py() for number in wanted if number >= first}
        row_ids = {number: row_id for number, row_id in row_ids.items() if number in wanted}
        report("monitor", monitor.inputs - start, None)
    if monitor.inputs == start:
        raise InputError("no row in these files", argument="verdicts", cure="give files that `igeood score` wrote")
    return row_ids


def _read(paths: Sequence[Path], monitor: Monitor) -> Iterator[tuple[Verdict, Any]]:
    """Verdicts of files in blocks, in order; each with its ids, None without any."""
    for path in paths:
        first = 0
        with open_table(path) as table:
            is_needed = {"score": True, "label": monitor.calibration.per_class, "is_ood": monitor.kind == "flags"}
            check_columns(table, [name for name in is_needed if is_needed[name]])
            unread = set() if is_needed["label"] else {"label"}
            types = {name: kind for name, kind in _TYPES.items() if name in {*table.names} - unread}
            for batch in table.batches(types):
                columns = {name: batch[name].cast(types[name]) for name in types if name != "id"}
                yield _verdict(columns, first, monitor), batch["id"] if "id" in types else None
                first += len(batch)


def _verdict(columns: dict[str, pa.Array], first: int, monitor: Monitor) -> Verdict:
    """What rows from number `first` on say; a row with a reason was not read."""
    scores = np.array(columns["score"])
    flags = np.array(columns["is_ood"].fill_null(False)) if "is_ood" in columns else None
    if flags is not None:  # JSON has no infinity: `igeood score` writes null
        scores = np.where(np.isnan(scores), np.where(flags, np.inf, -np.inf), scores)
    texts = columns["reason"].to_pylist() if "reason" in columns else []
    reasons = {row: text for row, text in enumerate(texts) if text}
    scores[list(reasons)] = np.inf
    labels = torch.full((len(scores),), -1)
    if monitor.calibration.per_class:
        labels = torch.from_numpy(np.array(columns["label"].fill_null(-1)))
        if bool(((labels < -1) | (labels >= monitor.calibration.n_classes)).any()):
            raise InputError("some are no class of the guard", argument="label", cure="score that file with this guard")
    verdict = Verdict.of(torch.from_numpy(scores), labels, monitor.calibration, reasons, to_numpy=True)
    is_other = np.isnan(scores)
    if monitor.kind == "flags":
        is_other |= flags != verdict.is_ood
    if "p_value" in columns:
        is_other |= ~(np.abs(np.array(columns["p_value"]) - verdict.p_value) <= 1e-6)
    is_other[list(reasons)] = False
    if is_other.any():
        problem = f"row {first + int(is_other.argmax())} has no score, or one of another guard or calibration"
        raise InputError(problem, argument="verdicts", cure="score that file again with this guard")
    return verdict
