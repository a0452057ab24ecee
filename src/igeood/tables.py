"""Tables of logits from any framework: Parquet, npz, CSV or JSON lines; a file, several, a folder or a pattern of them.

A file is opened once for each reading, and read in blocks of about a million values; the arrays of an npz file are held
in memory. Parquet is not read by `pyarrow.dataset`, which holds a whole row group.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from glob import glob, has_magic
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import csv, json

from igeood.errors import InputError, is_of_disk
from igeood.files import PathLike, whole
from igeood.keys import BLOCK_VALUES
from igeood.outputs import ArrayLike, OnError, Outputs

FEATURE = "feature."
LONGEST = 1 << 22  # bytes of text that are parsed at a time; a row may not be longer
Types = Mapping[str, pa.DataType]  # columns to read, and their types where the file is text
_TYPES = {"label": pa.int64(), "id": pa.string()}
_ENDINGS = (".parquet", ".npz", ".csv", ".jsonl")


def find_files(name: str) -> tuple[Path, list[Path]]:
    """The files that a file's, a folder's or a pattern's name stands for, in order, and the folder that they are below.

    Names below it that start with `_` or `.`, such as Spark's `_SUCCESS`, or that end otherwise, are no data; text
    in a folder is read only where there is no Parquet and no npz file.
    """
    path = Path(name)
    if path.is_dir():
        folder, hits = path, [path]
    elif path.exists() or not has_magic(name):
        is_mark = path.name.startswith("_") and path.suffix not in _ENDINGS  # a shell wrote it for `parts/*`
        return path.parent, [] if is_mark else [path]
    else:
        folder = next(parent for parent in path.parents if not has_magic(str(parent)))
        hits = [Path(hit) for hit in sorted(glob(name, recursive=True))]  # noqa: PTH207 (a pattern may be absolute)
    files = [file for hit in hits for file in (sorted(hit.rglob("*")) if hit.is_dir() else [hit])]
    tables = [file for file in dict.fromkeys(files) if file.suffix in _ENDINGS]
    tables = [file for file in tables if not re.search(r"(^|/)[_.]", file.relative_to(folder).as_posix())]
    if not tables:
        raise InputError(f"no file there ({', '.join(_ENDINGS)})", cure="check the folder or the pattern", place=name)
    if path.is_dir():
        tables = [file for file in tables if file.suffix in (".parquet", ".npz")] or tables
    return folder, tables


class Table(NamedTuple):
    """An open file of columns. `batches` reads some of them in blocks; `rows` counts the rows, None for text."""

    names: list[str]
    rows: int | None
    batches: Callable[[Types], Iterator[pa.RecordBatch]]


@contextmanager
def open_table(path: Path) -> Iterator[Table]:
    """Open a file whose first bytes say what it is; errors name it, and damage is an `InputError`."""
    try:
        with path.open("rb") as file:
            head = file.read(512)
            file.seek(0)
            if head[:2] == b"PK":
                yield _npz(file)
            elif b"\0" in head or head[:4] == b"PAR1":
                yield _parquet(file)
            else:
                yield _text(file, _open_json if head.lstrip()[:1] == b"{" else _open_csv)
    except InputError as error:
        raise error.within(str(path)) from None
    except Exception as error:
        if is_of_disk(error):
            raise
        problem = f"cannot be read ({' '.join(str(error).split())})"
        raise InputError(problem, cure="check it, or write it again", place=str(path)) from error


def _parquet(file: IO[bytes]) -> Table:
    reader = pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)  # a pre-buffer holds all that was read

    def batches(types: Types) -> Iterator[pa.RecordBatch]:
        if reader.metadata.num_rows:
            group = reader.metadata.row_group(0)
            size = _block_rows(group.num_rows, sum(group.column(i).num_values for i in range(group.num_columns)))
            yield from reader.iter_batches(size, columns=list(types), use_threads=False)

    return Table(reader.schema_arrow.names, reader.metadata.num_rows, batches)


def _npz(file: IO[bytes]) -> Table:
    arrays = np.load(file, allow_pickle=False)

    def batches(types: Types) -> Iterator[pa.RecordBatch]:
        table = pa.table({name: _as_column(arrays[name]) for name in types})
        yield from table.to_batches(max_chunksize=_block_rows(table.num_rows, table.nbytes // 4))

    return Table(arrays.files, len(arrays[arrays.files[0]]) if arrays.files else 0, batches)


def _block_rows(rows: int, values: int) -> int:
    """Rows of a block of about a million values, where `rows` have so many `values`."""
    return max(1, BLOCK_VALUES * rows // max(1, values))


def _text(file: IO[bytes], open_reader: Callable[[IO[bytes], Types], Any]) -> Table:
    schema = open_reader(file, {}).schema

    def chosen(inferred: pa.DataType, wanted: pa.DataType) -> pa.DataType:
        if pa.types.is_list(inferred):
            return pa.list_(wanted)
        is_number_of_json = open_reader is _open_json and pa.types.is_integer(inferred)
        return inferred if is_number_of_json and wanted == pa.string() else wanted  # an id

    def batches(types: Types) -> Iterator[pa.RecordBatch]:
        file.seek(0)
        yield from open_reader(file, {name: chosen(schema.field(name).type, wanted) for name, wanted in types.items()})

    return Table(schema.names, None, batches)


def _open_csv(file: IO[bytes], types: Types) -> Any:
    read = csv.ReadOptions(use_threads=False, block_size=LONGEST)
    convert = csv.ConvertOptions(include_columns=list(types), column_types=types)
    return csv.open_csv(file, read, csv.ParseOptions(newlines_in_values=True), convert)


def _open_json(file: IO[bytes], types: Types) -> Any:
    others = "ignore" if types else "infer"
    parse = json.ParseOptions(explicit_schema=pa.schema(types), unexpected_field_behavior=others)
    return json.open_json(file, json.ReadOptions(use_threads=False, block_size=LONGEST), parse)


def check_columns(table: Table, names: Iterable[str]) -> None:
    """Raise unless each of these columns is there, once."""
    for name in names:
        if table.names.count(name) != 1:
            raise InputError(f"expected one such column in {table.names[:12]}", argument=name, cure="name another")


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
        Expected values in a row, by the name of the column; those of the first block where nothing else is expected.
    report : callable
        Gets the number of rows that are done, and `rows`, after each block.
    """

    paths: Sequence[Path]
    logits: str
    label: str | None
    identity: str | None
    layers: Sequence[str] | None
    labelled: bool
    on_error: OnError = "raise"
    rows: int | None = None
    widths: dict[str, int] = field(default_factory=dict)
    report: Callable[[int, int | None], None] = lambda *_: None

    def __iter__(self) -> Iterator[Outputs]:
        return (block for block, _ in self.blocks())

    def blocks(self, *, ids: bool = False) -> Iterator[tuple[Outputs, Any]]:
        """Blocks in order, each with the rows' ids (as text if there are several files), or else their numbers.

        Where `ids` are wanted, samples are not identified by them. Files without a row are one block without rows.
        """
        matrices: dict[str, list[str]] = {}
        number = 0
        for path in self.paths:
            start = number
            with open_table(path) as table:
                matrices, others = self._choose(table, matrices)
                types = dict.fromkeys([column for columns in matrices.values() for column in columns], pa.float64())
                types |= {column: _TYPES[role] for role, column in others.items()}
                check_columns(table, types)
                if path == self.paths[-1]:
                    self.rows = None if table.rows is None else start + table.rows
                for batch in table.batches(types):
                    names = batch[others["id"]] if "id" in others else None
                    labels = batch[others["label"]].fill_null(-1) if "label" in others else None
                    block = self._outputs(batch, matrices, labels, None if ids else names, number - start)
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
            yield Outputs(empty.pop(self.logits, np.empty((0, 2))), empty), np.arange(0)

    def _choose(self, table: Table, before: dict[str, list[str]]) -> tuple[dict[str, list[str]], dict[str, str]]:
        """The columns of each matrix, in the first file's order, and those of the label and the id."""
        names = table.names
        label = self.label or next((name for name in ("label", "labels") if name in names), None)
        identity = self.identity or ("id" if "id" in names else None)
        logits = [self.logits]
        if "*" in self.logits:
            candidates = [name for name in names if name not in (label, identity) and not name.startswith(FEATURE)]
            logits = [name for name in candidates if fnmatchcase(name, self.logits)]
            logits.sort(key=lambda name: [int(digits) for digits in re.findall(r"\d+", name)])
            if not logits or {*logits} != {*before.get(self.logits, logits)}:
                problem = f"no such columns among {names[:12]}, or others than in {self.paths[0]}"
                raise InputError(problem, argument=self.logits, cure="name others")
        features = [name for name in names if name.startswith(FEATURE)]
        if self.layers is not None:
            features = [FEATURE + layer for layer in self.layers]
        others = {"label": label if self.labelled else None, "id": identity}
        matrices = {self.logits: logits, **{name: [name] for name in features}}
        return before or matrices, {role: name for role, name in others.items() if name is not None}

    def _outputs(
        self, batch: pa.RecordBatch, matrices: dict[str, list[str]], labels: Any, ids: Any, first: int
    ) -> Outputs:
        reasons: dict[int, str] = {}
        features = {name: self._matrix(batch, name, columns, reasons, first) for name, columns in matrices.items()}
        logits = features.pop(self.logits)
        features = {name.removeprefix(FEATURE): matrix for name, matrix in features.items()}
        ids = ids if ids is not None and self._identify(ids) else None
        options: dict[str, Any] = {"name": self.logits, "reasons": reasons, "first": first}
        outputs = Outputs(logits, features, labels, ids=ids, on_error="refuse", **options)
        if self.on_error == "raise":
            outputs.check_valid(first)  # the first bad row, whatever is wrong with it
        return outputs

    def _identify(self, ids: pa.Array) -> bool:
        """Whether these ids identify samples: where asked for, or if they are unique names."""
        is_unique = len(ids.unique()) == len(ids)
        if self.identity is not None and not is_unique:
            raise InputError("rows share an id", argument=self.identity, cure="name a column of unique ids, or none")
        return self.identity is not None or (is_unique and _are_names(ids))

    def _matrix(
        self, batch: pa.RecordBatch, name: str, columns: list[str], reasons: dict[int, str], first: int
    ) -> NDArray[Any]:
        """A matrix (n, width) from one column of lists, or from several columns; rows of another width are bad."""
        if len(columns) > 1:
            self._width(name, len(columns), first)
            return np.column_stack([batch[column] for column in columns])
        column = batch[columns[0]]
        if not hasattr(column.type, "value_type"):
            raise InputError(f"expected lists of numbers, got {column.type}", argument=name, cure="try 'logit_*'")
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
    logits: str = "logits",
    label: str | None = None,
    identity: str | None = None,
    layers: Sequence[str] | None = None,
    labelled: bool = True,
) -> LogitsFile:
    """Read logits from Parquet, npz, CSV or JSON lines files: one, several, a folder or a pattern of them.

    Parameters
    ----------
    path : path, or sequence of paths
        Parquet or JSON lines with a column `logits` (a list of numbers in each row), and optional columns `label`
        (integers), `id` and `feature.<layer>`; npz with arrays `logits` (N, C), `labels`, `id` and `feature.<layer>`;
        or CSV, with one column for each logit. Several files are read in the order given; those of a folder and below
        it, or of a pattern such as "parts/*.parquet", in the order of their names, without names that start with `_`
        or `.`.
    logits, label : str, optional
        Other names of those columns. A pattern such as "logit_*" takes one column for each class, in the order of the
        numbers in their names if each has one, else in the file's order.
    identity : str, optional
        A column of unique ids: a sample is then recognised by its id, not by its row. Without it the column `id`
        serves if it has unique texts that are neither numbers nor a count of rows.
    layers : sequence of str, optional
        Read the features of these layers only; by default of all.
    labelled : bool
        Read the labels, if there are any. Only `fit` needs them, and those of OOD samples may be no classes.
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
            pq.write_table(pa.table({name: _as_column(values) for name, values in columns.items()}), file)


def _as_column(values: NDArray[Any]) -> pa.Array:
    """A vector, or an array (N, ...) as a list of fixed size in each row."""
    plain = pa.array(values.astype(values.dtype.newbyteorder("="), copy=False).reshape(-1))
    return plain if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(plain, math.prod(values.shape[1:]))
