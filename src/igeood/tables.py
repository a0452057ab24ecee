"""Files of columns, read block by block: Parquet, npz, CSV, and JSON lines, which verdicts may be.

Blocks have about a million values; the arrays of an npz file are held in memory. Parquet is not read by
`pyarrow.dataset`, which holds a whole row group.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from glob import glob, has_magic
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import csv, json

from igeood.errors import InputError, is_of_disk
from igeood.keys import BLOCK_VALUES

FEATURE = "feature."
LONGEST = 1 << 22  # bytes of text that are parsed at a time; a row may not be longer
Types = Mapping[str, pa.DataType]  # columns to read, and their types where the file is text
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
    """An open file of columns. `batches` reads some of them in blocks; `rows` counts the rows, None for text.

    `type_of` says what a column holds; of text, what its beginning holds.
    """

    names: list[str]
    rows: int | None
    type_of: Callable[[str], pa.DataType]
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

    schema = reader.schema_arrow
    return Table(schema.names, reader.metadata.num_rows, lambda name: schema.field(name).type, batches)


def _npz(file: IO[bytes]) -> Table:
    arrays = np.load(file, allow_pickle=False)

    def batches(types: Types) -> Iterator[pa.RecordBatch]:
        table = pa.table({name: as_column(arrays[name]) for name in types})
        yield from table.to_batches(max_chunksize=_block_rows(table.num_rows, table.nbytes // 4))

    rows = len(arrays[arrays.files[0]]) if arrays.files else 0
    return Table(arrays.files, rows, lambda name: as_column(arrays[name]).type, batches)


def _block_rows(rows: int, values: int) -> int:
    """Rows of a block of about a million values, where `rows` have so many `values`."""
    return max(1, BLOCK_VALUES * rows // max(1, values))


def _text(file: IO[bytes], open_reader: Callable[[IO[bytes], Types], Any]) -> Table:
    schema = open_reader(file, {}).schema

    def chosen(inferred: pa.DataType, wanted: pa.DataType) -> pa.DataType:
        if pa.types.is_list(inferred):
            raise InputError("JSON lines with lists are not read", cure="write Parquet or npz")
        is_number_of_json = open_reader is _open_json and pa.types.is_integer(inferred)
        return inferred if is_number_of_json and wanted == pa.string() else wanted  # an id

    def batches(types: Types) -> Iterator[pa.RecordBatch]:
        file.seek(0)
        yield from open_reader(file, {name: chosen(schema.field(name).type, wanted) for name, wanted in types.items()})

    return Table(schema.names, None, lambda name: schema.field(name).type, batches)


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


def as_column(values: NDArray[Any]) -> pa.Array:
    """A vector, or an array (N, ...) as a list of fixed size in each row."""
    plain = pa.array(values.astype(values.dtype.newbyteorder("="), copy=False).reshape(-1))
    return plain if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(plain, math.prod(values.shape[1:]))
