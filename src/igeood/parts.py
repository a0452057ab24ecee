"""Files of numbers, one at a time: Parquet, npz, CSV or JSON lines, by name, by pattern or from a pipe."""

import errno
import gzip
import os
import shutil
import sys
import weakref
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from glob import glob
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import csv
from pyarrow import json as json_lines

from igeood.errors import InputError

Columns = Mapping[str, list[str]]  # of each matrix: one column of vectors, or one column for each value
BUFFER = 1 << 20  # bytes of a column of Parquet that are read at a time
LONGEST = 1 << 22  # bytes of text that are parsed at a time; a row may not be longer
FIRST = 100  # rows that show how wide the others are, and whether text holds float32
_ENDINGS = ((".parquet", ".npz"), (".csv", ".csv.gz", ".jsonl", ".jsonl.gz"))  # in a folder, the first that are there
_DAMAGED = (pa.ArrowException, zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError, MemoryError)
_NUMBER = r"(?i)^[+-]?(\d+\.?\d*(e[+-]?\d+)?|\.\d+(e[+-]?\d+)?|nan|inf|infinity)$"


def find_sources(name: str) -> list[Path | IO[bytes]]:
    """The files that a name stands for: itself, those of a folder or a pattern in order, or a copy of a pipe ("-")."""
    path = Path(name)
    if name == "-" or path.is_fifo():
        with nullcontext(sys.stdin.buffer) if name == "-" else path.open("rb") as pipe:
            copy = TemporaryFile()  # noqa: SIM115 (without a name: nobody has to remove it)
            shutil.copyfileobj(pipe, copy)
            copy.flush()
            return [copy]
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and not _is_hidden(file, path)]
        chosen = ([file for file in files if file.name.endswith(endings)] for endings in _ENDINGS)
        found: list[Path | IO[bytes]] = [*next(filter(None, chosen), [])]
        problem = "no .parquet, .npz, .csv or .jsonl file in this folder; give a file, or a folder of such files"
    elif path.exists() or not set("*?[") & set(name):
        return [path] * (path.name != "_SUCCESS")  # a shell has put it where `parts/*` was
    else:
        folder = folder_of(name)
        hits = (hit for hit in sorted(glob(name, recursive=True)) if not _is_hidden(Path(hit), folder))  # noqa: PTH207
        found = [source for hit in hits for source in find_sources(hit)]
        problem = "no file has such a name; check the pattern"
    if not found:
        raise InputError(f"{name}: {problem}")
    return found


def folder_of(name: str) -> Path:
    """The folder below which the files that a name stands for are: itself, a file's, or the part without a pattern."""
    path = Path(name)
    if path.exists() or not set("*?[") & set(name):
        return path if path.is_dir() else path.parent
    return Path(*takewhile(lambda step: not set("*?[") & set(step), path.parts))


def _is_hidden(file: Path, folder: Path) -> bool:
    """Whether it is no part of the data, such as Spark's `_SUCCESS`: a name below the folder starts with `_` or `.`."""
    inner = file.parts[len(folder.parts) :]
    return any(name.startswith(("_", ".")) for name in inner)


class Part:
    """One file, whose first bytes tell its kind. npz arrays are held in memory; the other kinds are read in batches."""

    def __init__(self, source: Path | IO[bytes]) -> None:
        self.source = source
        self.path = source if isinstance(source, Path) else "standard input"
        if not isinstance(source, Path):
            weakref.finalize(self, source.close)
        self.kind, self.zipped, self.columns, self.types = "gzip", False, list[str](), dict[str, Any]()
        with self._open() as file:
            self.zipped = file.read(2) == b"\x1f\x8b"
        with self._open() as file:
            head = file.read(512)
        if not head:
            raise InputError(f"{self.path}: is empty; write it again (a pipe can be read once: name - once)")
        is_text = b"\0" not in head and head[:4] != b"PAR1"
        text = "JSON lines" if head.lstrip()[:1] == b"{" else "CSV"
        self.kind = "npz" if head[:2] == b"PK" else text if is_text else "Parquet"
        with self._open() as file:
            schema = file.schema_arrow if self.kind == "Parquet" else getattr(file, "schema", None)
            self.names: list[str] = file.files if schema is None else schema.names

    @contextmanager
    def named(self) -> Iterator[None]:
        """Errors in it name the file."""
        try:
            yield
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from None

    def _raw(self) -> IO[bytes]:
        """The file from its start, for this reader alone."""
        if isinstance(self.source, Path):
            return self.source.open("rb")
        self.source.seek(0)  # the descriptors share their place
        return os.fdopen(os.dup(self.source.fileno()), "rb")

    @contextmanager
    def _open(self) -> Iterator[Any]:
        """The open file; damage is an `InputError`, an error of the disk passes."""
        try:
            with self._raw() as raw:
                yield self._reader(gzip.open(raw) if self.zipped else raw)  # noqa: SIM115
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from None
        except _DAMAGED as error:
            if getattr(error, "errno", None) not in (None, errno.EINVAL):  # EINVAL: the archive has a wrong offset
                raise
            raise InputError(f"{self.path}: is no sound {self.kind} file ({error!r}); write it again") from None

    def _reader(self, raw: Any) -> Any:
        """What reads a file of this kind; of an unknown kind, its bytes."""
        if self.kind == "npz":
            return np.load(raw, allow_pickle=False)
        if self.kind == "Parquet":
            return pq.ParquetFile(raw, buffer_size=BUFFER, pre_buffer=False)  # else it holds all that was read
        if self.kind == "CSV":
            convert = csv.ConvertOptions(include_columns=self.columns, column_types=self.types)
            lines = csv.ParseOptions(newlines_in_values=True)
            return csv.open_csv(raw, csv.ReadOptions(use_threads=False, block_size=LONGEST), lines, convert)
        if self.kind == "JSON lines":
            known = {"explicit_schema": pa.schema(self.types), "unexpected_field_behavior": "ignore"}
            lines = json_lines.ParseOptions(**known if self.types else {})
            return json_lines.open_json(raw, json_lines.ReadOptions(use_threads=False, block_size=LONGEST), lines)
        return raw

    def choose(self, matrices: Columns, others: list[str]) -> None:
        """Check that the columns of these matrices, and these others, are there once; batches have them."""
        numbers = [name for names in matrices.values() for name in names]
        columns = [*numbers, *others]
        for name in columns:
            if self.names.count(name) != 1:
                cure = "name another one, or several by a pattern such as 'logit_*'"
                raise InputError(f"{self.path}: expected one column {name!r} among {some(self.names)}; {cure}")
        self.columns, self.rows = columns, None
        with self._open() as file:
            if self.kind == "npz":
                self.table = pa.table({name: as_column(file[name], name) for name in columns})
                self.schema, self.rows = self.table.schema, self.table.num_rows
            elif self.kind == "Parquet":
                self.schema, self.rows = file.schema_arrow, file.metadata.num_rows
            elif self.kind == "CSV":  # text is converted here: errors name the row, and ids stay as they are written
                self.types = dict.fromkeys(columns, pa.string())
            else:  # the first rows do not decide for the others
                self.types = {name: _text_type(file.schema.field(name).type, name in numbers) for name in columns}
        if self.types:
            self.schema = pa.schema(self.types)

    def batches(self, size: int) -> Iterator[pa.RecordBatch]:
        """The chosen columns, `size` rows at a time; of text, as many as there are in `LONGEST` bytes."""
        if self.kind == "npz":
            yield from self.table.to_batches(max_chunksize=size)
            return
        with self._open() as file:
            options = {"batch_size": size, "columns": self.columns, "use_threads": False}
            yield from file.iter_batches(**options) if self.kind == "Parquet" else file

    def shapes(self, matrices: Columns) -> dict[str, tuple[int, Any]]:
        """How many values most of the first rows of each matrix have, and of which type; no type without rows."""
        batch = next(self.batches(FIRST), pa.RecordBatch.from_pylist([], self.schema)).slice(0, FIRST)
        found: dict[str, tuple[int, Any]] = {}
        for name, columns in matrices.items():
            with self.named():
                values, lengths = row_values(batch, columns, 0)
            declared = getattr(self.schema.field(columns[0]).type, "list_size", len(columns) * (len(columns) > 1))
            width = int(np.bincount(lengths[lengths > 0]).argmax()) if lengths.any() else declared
            is_single = self.types and _are_single(values)
            found[name] = width, (np.float32 if is_single else values.dtype) if len(batch) else None
        return found


def some(names: list[str]) -> str:
    """Names for a message, which need not be all."""
    return str(names) if len(names) <= 12 else f"{str(names[:12])[:-1]}, …] ({len(names)} columns)"


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _text_type(kind: Any, is_number: bool) -> Any:
    """The type in which a column of JSON is read: numbers as float64; a date is the text that it was."""
    if _is_list(kind):
        return pa.list_(_text_type(kind.value_type, is_number))
    if is_number and not pa.types.is_string(kind):
        return pa.float64()
    return pa.string() if pa.types.is_temporal(kind) else kind


def _are_single(values: NDArray[Any]) -> bool:
    """Whether numbers that were written as text are float32: they are in its range, or what its shortest texts say."""
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    written = single.astype(str).astype(np.float64)
    return bool(((single == values) | (written == values) | np.isnan(values)).all())


def row_values(batch: pa.RecordBatch, columns: list[str], first: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """All values of a matrix in one array, and how many of them each row has, (n,).

    A null among the values is NaN. The rows of one column are lists, text such as "[0.5, 2]", or lists of one list.
    """
    rows = np.arange(first, first + len(batch))
    if len(columns) > 1:
        stacked = np.column_stack([as_numbers(batch[name], name, rows) for name in columns])
        return stacked.reshape(-1), np.full(len(batch), len(columns))
    (name,), column = columns, batch[columns[0]]
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = pc.split_pattern_regex(pc.utf8_trim(column, "[]() \t\r\n"), r"[,\s]+")
    if not _is_list(column.type):
        cure = "write lists, or name one column for each value by a pattern such as 'logit_*'"
        raise InputError(f"{name}: expected a list of numbers in each row, got {column.type}; {cure}")
    lengths = np.array(pc.list_value_length(column).fill_null(0))
    column = column.flatten()
    while _is_list(column.type):
        if (lengths > 1).any():
            at = int(np.argmax(lengths > 1))
            raise InputError(f"{name}: row {rows[at]} has {lengths[at]} lists, expected one; write one list of numbers")
        lengths[lengths == 1] = np.asarray(pc.list_value_length(column).fill_null(0))
        column = column.flatten()
    return as_numbers(column, name, np.repeat(rows, lengths)), lengths


def as_numbers(column: pa.Array, name: str, rows: NDArray[Any]) -> NDArray[Any]:
    """A column of numbers, or of text that holds them, as an array; `rows` has the row of each, for errors."""
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.asarray(column)
    try:
        return np.asarray(column.cast(pa.float64()))
    except pa.ArrowNotImplementedError:
        raise InputError(f"{name}: expected numbers, got {kind}; write numbers") from None
    except pa.ArrowInvalid:  # spaces, or one of the usual signs of a missing value
        texts = pc.replace_substring_regex(pc.utf8_trim_whitespace(column), "^(|NA|N/A|null|None)$", "nan")
    try:
        return np.asarray(texts.cast(pa.float64()))
    except pa.ArrowInvalid:
        at = max(0, pc.index(pc.match_substring_regex(texts, _NUMBER), False).as_py())
        raise InputError(f"{name}: row {rows[at]} has {texts[at].as_py()!r}, which is no number; fix it") from None


def as_column(values: NDArray[Any], name: str) -> pa.Array:
    """A vector, or a matrix (N, C) or (N, 1, C) as a list of fixed size in each row."""
    if values.ndim == 3 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim not in (1, 2) or not all(values.shape[1:]):
        raise InputError(f"{name}: expected shape (N,), (N, C) or (N, 1, C), got {values.shape}; write such an array")
    plain = pa.array(np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("=")).reshape(-1))
    return plain if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(plain, values.shape[1])
