"""Logits files from any framework: Parquet, npz or CSV; a file, several, a folder or a pattern of them."""

import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from igeood.errors import InputError
from igeood.files import PathLike, whole
from igeood.outputs import NUMERAL, ArrayLike, OnError, Outputs, class_places
from igeood.tables import FEATURE, Table, as_column, check_columns, find_files, open_table

Matrices = dict[str, list[str]]  # columns by matrix: of the logits, and of each layer
LOGITS = "logits"
_PATTERN = "logit*"  # of columns where none is named
_NAME_THEM = '{logits="prefix_*"}, with the prefix of the columns of logits'


@dataclass(eq=False)
class LogitsFile:
    """Logits of one or several files as an iterable of `Outputs`; open one with `read_logits`.

    It can be iterated again, and given to a guard in place of an array.

    Attributes
    ----------
    rows : int or None
        Number of rows; None until it is known, which is when the last file is opened, or read if it is text.
    on_error : {"raise", "refuse"}
        Whether a row with NaN, null or of another width is an error, or a row that is not valid.
    widths : dict of int
        Expected values in a row, by the name of the matrix; those of the first block where nothing else is expected.
    report : callable
        Gets the number of rows that are done, and `rows`, after each block.
    columns : dict, optional
        What a guard remembers: `logits`, its columns' names in their order, or None; `id`, the id column's, or None.
    classes : sequence of str, optional
        Labels are names, of these classes; numbers if there are none.
    """

    paths: Sequence[Path]
    logits: str | None
    label: str | None
    identity: str | None
    layers: Sequence[str] | None
    labelled: bool
    on_error: OnError = "raise"
    rows: int | None = None
    widths: dict[str, int] = field(default_factory=dict)
    report: Callable[[int, int | None], None] = lambda *_: None
    columns: dict[str, Any] | None = None
    classes: Sequence[str] | None = None
    identifies: bool | None = None  # whether ids identify samples, where the guard knows

    def __iter__(self) -> Iterator[Outputs]:
        return (block for block, _ in self.blocks())

    def settled(self, classes: Sequence[str] | None = None) -> "LogitsFile":
        """The same files with `columns` from the first of them, and with `classes`.

        Labels are names if the first file's are not all whole numbers, or are names that are given. Names are those
        given, else those in the columns' names, else the sorted labels of all files.
        """
        file = copy.copy(self)
        with open_table(self.paths[0]) as table:
            logits = self._choose(table)[0][LOGITS]
        identity = self.identity or (self.columns or {}).get("id")
        if logits != [LOGITS] or self.identity is not None:
            file.columns = {"logits": None if logits == [LOGITS] else logits, "id": identity}
        if self.classes is None:
            others = map(self._labels, self.paths)
            labels = next(filter(None, others), set[str]())
            file.classes = self._names_in(logits) if classes is None else list(classes)
            if all(map(NUMERAL.fullmatch, labels)) and not labels <= {*(file.classes or ())}:
                file.classes = ()
            elif file.classes is None:
                file.classes = sorted(labels.union(*others))
        return file

    def _labels(self, path: Path) -> set[str]:
        """The labels in a file, as texts; "-1" stands for a column of numbers, which is not read."""
        with open_table(path) as table:
            label = self._choose(table)[1].get("label")
            if label is None:
                return set()
            check_columns(table, [label])
            if pa.types.is_integer(table.type_of(label)) or pa.types.is_floating(table.type_of(label)):
                return {"-1"}
            columns = (batch[label].unique().cast(pa.string()) for batch in table.batches({label: pa.string()}))
            return {text for column in columns for text in column.to_pylist() if text}

    def _names_in(self, columns: list[str]) -> list[str] | None:
        """What the `*` of the pattern stands for in the columns' names, unless one of them is a number."""
        start, _, end = (self.logits or _PATTERN).partition("*")
        names = [column.removeprefix(start).removesuffix(end).strip("_") for column in columns]
        return names if len(names) > 1 and not any(map(NUMERAL.fullmatch, names)) else None

    def blocks(self, *, ids: bool = False) -> Iterator[tuple[Outputs, Any]]:
        """Blocks in order, each with the rows' ids (as text if there are several files), or else their numbers.

        Where `ids` are wanted, samples are not identified by them. Files without a row are one block without rows.
        """
        matrices: Matrices = {}
        number = 0
        for path in self.paths:
            start = number
            with open_table(path) as table:
                matrices, others = self._choose(table, matrices)
                types = dict.fromkeys([column for columns in matrices.values() for column in columns], pa.float64())
                own_types = {"label": pa.string() if self.classes else pa.int64(), "id": pa.string()}
                types |= {column: own_types[role] for role, column in others.items()}
                check_columns(table, types)
                if path == self.paths[-1]:
                    self.rows = None if table.rows is None else start + table.rows
                for batch in table.batches(types):
                    names = batch[others["id"]] if "id" in others else None
                    labels = batch[others["label"]] if "label" in others else None
                    keys = None if ids or names is None else self._identifying(names, others["id"])
                    block = self._outputs(batch, matrices, labels, keys, number - start)
                    if not ids or names is None:
                        names = np.arange(number, number + len(batch))
                    elif len(self.paths) > 1:
                        names = names.cast(pa.string())
                    yield block, names
                    number += len(batch)
                    self.report(number, self.rows)
        self.rows = number
        if not number:
            empty = {name.removeprefix(FEATURE): np.empty((0, width)) for name, width in self.widths.items()}
            yield Outputs(empty.pop(LOGITS, np.empty((0, 2))), empty), np.arange(0)

    def _choose(self, table: Table, before: Matrices | None = None) -> tuple[Matrices, dict[str, str]]:
        """The columns of each matrix, those of the files `before` in any order, and those of the label and the id."""
        names = table.names
        label = self.label or next((name for name in ("label", "labels") if name in names), None)
        remembered = (self.columns or {}).get("id")
        identity = self.identity or next((name for name in (remembered, "id") if name in names), None)
        features = [name for name in names if name.startswith(FEATURE)]
        candidates = [name for name in names if name not in (label, identity, *features)]
        if self.layers is not None:
            features = [FEATURE + layer for layer in self.layers]
        others = {"label": label if self.labelled else None, "id": identity}
        matrices = before or {LOGITS: [], **{name: [name] for name in features}}
        logits = self._logits_columns(candidates, matrices[LOGITS])
        return {**matrices, LOGITS: logits}, {role: name for role, name in others.items() if name is not None}

    def _logits_columns(self, names: list[str], before: list[str]) -> list[str]:
        """The columns of the logits: those asked for, else those remembered, else `logits` or `logit*`."""
        expected = before or (self.columns or {}).get("logits") or []
        if before or (expected and self.logits is None):
            missing = [name for name in expected if name not in names]
            if missing and (before or LOGITS not in names):
                problem = f"no columns {missing[:12]} among {names[:12]}"
                raise InputError(problem, argument=LOGITS, cure=f"rename the columns, or give {_NAME_THEM}")
            return [LOGITS] if missing else expected  # an array has no names
        pattern = self.logits or (LOGITS if LOGITS in names else _PATTERN)
        if "*" not in pattern:
            return [pattern]
        columns = [name for name in names if fnmatchcase(name, pattern)]
        columns.sort(key=lambda name: [int(digits) for digits in re.findall(r"\d+", name)])
        if not columns:
            problem = f"no {pattern!r} among the columns {names[:12]}"
            raise InputError(problem, argument=LOGITS, cure=f"give {_NAME_THEM}")
        return expected if {*expected} == {*columns} else columns

    def _outputs(self, batch: pa.RecordBatch, matrices: Matrices, labels: Any, ids: Any, first: int) -> Outputs:
        reasons: dict[int, str] = {}
        features = {name: self._matrix(batch, name, columns, reasons, first) for name, columns in matrices.items()}
        logits = features.pop(LOGITS)
        features = {name.removeprefix(FEATURE): matrix for name, matrix in features.items()}
        if labels is not None and self.classes:
            labels = class_places(labels.cast(pa.string()).to_pylist(), self.classes, logits.shape[1], first)
        elif labels is not None:
            is_text = not pa.types.is_primitive(labels.type)
            labels = (labels.cast(pa.string()).cast(pa.int64()) if is_text else labels).fill_null(-1)
        outputs = Outputs(logits, features, labels, ids=ids, on_error="refuse", reasons=reasons, first=first)
        if self.on_error == "raise":
            outputs.check_valid(first)  # the first bad row, whatever is wrong with it
        return outputs

    def _identifying(self, ids: pa.Array, column: str) -> pa.Array | None:
        """These ids, if they identify samples: where asked for, or if they are unique names."""
        is_unique = len(ids.unique()) == len(ids)
        is_asked_for = column in (self.identity, (self.columns or {}).get("id"))
        if is_asked_for and not is_unique:
            raise InputError("rows share an id", argument=column, cure="name a column of unique ids, or none")
        are_names = is_unique and _are_names(ids) if self.identifies is None else self.identifies
        return ids if is_asked_for or are_names else None

    def _matrix(
        self, batch: pa.RecordBatch, name: str, columns: list[str], reasons: dict[int, str], first: int
    ) -> NDArray[Any]:
        """A matrix (n, width) from one column of lists, or from several columns; rows of another width are bad."""
        if len(columns) > 1:
            self._width(name, len(columns), first)
            return np.column_stack([batch[column] for column in columns])
        column = batch[columns[0]]
        if not hasattr(column.type, "value_type"):
            problem = f"expected lists of numbers, got {column.type}"
            raise InputError(problem, argument=name, cure=f"for one column for each class give {_NAME_THEM}")
        lengths = np.asarray(pc.list_value_length(column).fill_null(0))
        values = np.asarray(column.flatten())
        width = self._width(name, int(np.bincount(lengths[lengths > 0], minlength=1).argmax()), first)
        is_whole = lengths == width
        for row in np.flatnonzero(~is_whole).tolist():
            reasons.setdefault(row, f"{name}: {lengths[row]} values, expected {width}")
        matrix = np.zeros((len(batch), width), values.dtype)
        matrix[is_whole] = values[np.repeat(is_whole, lengths)].reshape(is_whole.sum(), width)
        return matrix

    def _width(self, name: str, usual: int, first: int) -> int:
        """The expected width of a matrix; raise if that is not the usual one (0 for nulls) of a file's first rows."""
        width = self.widths.setdefault(name, usual) if usual else self.widths.get(name, 0)
        if first == 0 and usual not in (0, width):
            problem = f"{usual} values in row 0 and others, expected {width}"
            raise InputError(problem, argument=name, cure="give outputs of the same classifier")
        return width


def _are_names(ids: pa.Array) -> bool:
    """Whether ids may name samples across files: texts that are neither numbers nor a count such as "row 7"."""
    if not pa.types.is_string(ids.type):
        return False
    texts = ids.fill_null("").to_pylist()
    numbers = sorted(int(f"0{re.sub(r'[^0-9]', '', text)[:18]}") for text in texts)
    is_count = len(numbers) > 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return not is_count and not all(text.isdecimal() for text in texts)


def read_logits(
    path: PathLike | Sequence[PathLike],
    *,
    logits: str | None = None,
    label: str | None = None,
    identity: str | None = None,
    layers: Sequence[str] | None = None,
    labelled: bool = True,
) -> LogitsFile:
    """Read logits from Parquet, npz or CSV files: one, several, a folder or a pattern of them.

    Parameters
    ----------
    path : path, or sequence of paths
        Parquet with a column `logits` (a list of numbers in each row), and optional columns `label` (numbers or names
        of classes), `id` and `feature.<layer>`; npz with arrays `logits` (N, C), `labels`, `id` and `feature.<layer>`;
        or CSV, with one column for each logit. Several files are read in the order given; those of a folder and below
        it, or of a pattern such as "parts/*.parquet", in the order of their names, without names that start with `_`
        or `.`.
    logits : str, optional
        The column of logits. A pattern such as "p_*" takes one column for each class, in the order of the numbers in
        their names if each has one, else in the first file's order. By default the columns of the files that the guard
        was fitted on; else `logits`, or those that begin with `logit`.
    label : str, optional
        The column of true classes; by default `label` or `labels`.
    identity : str, optional
        A column of unique ids: a sample is then recognised by its id, not by its row. Without it the column `id`
        serves if it has unique texts that are neither numbers nor a count of rows.
    layers : sequence of str, optional
        Read the features of these layers only; by default of all.
    labelled : bool
        Read the labels, if there are any. Only `fit` needs them, and those of OOD samples may be no classes. Where
        they are names, `fit` numbers them; to iterate yourself, take `read_logits(path).settled(classes)`.
    """
    names = [path] if isinstance(path, (str, os.PathLike)) else path
    paths = [file for name in names for file in find_files(os.fspath(name))[1]]
    if not paths:
        raise InputError("no file", argument="path", cure="give one at least")
    return LogitsFile(paths, logits, label, identity, layers, labelled)


def write_logits(
    path: PathLike,
    logits: Outputs | ArrayLike,
    labels: ArrayLike | None = None,
    *,
    ids: Sequence[Any] | NDArray[Any] | None = None,
    features: Mapping[str, ArrayLike] | None = None,
) -> None:
    """Write logits to a file that the command line reads: Parquet, or npz where the name ends so.

    Parameters
    ----------
    path : path
        Replaced once everything is on disk.
    logits : Outputs or array
        (N, C).
    labels : array of int, optional
        (N,) true classes.
    ids : sequence, optional
        (N,) a name or a number for each sample.
    features : mapping of str to array, optional
        For each layer (N, k); by default those of the `Outputs`.
    """
    outputs = Outputs.of(logits, labels, ids=ids)
    outputs.check_valid()
    if features is not None:
        outputs = Outputs(outputs.logits, features, outputs.labels)
    is_npz = Path(path).suffix == ".npz"
    tensors = {"logits": outputs.logits, "labels" if is_npz else "label": outputs.labels}
    tensors |= {FEATURE + layer: values for layer, values in outputs.features.items()}
    columns: dict[str, Any] = {k: values.numpy(force=True) for k, values in tensors.items() if values is not None}
    if ids is not None:
        names = np.asarray(ids)
        columns["id"] = names if names.dtype.kind in "iuf" else names.astype(str)
    with whole(path) as file:
        if is_npz:
            np.savez(file, **columns)
        else:
            pq.write_table(pa.table({name: as_column(values) for name, values in columns.items()}), file)
