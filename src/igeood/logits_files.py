"""Logits in files, from any framework: Parquet or npz, read a block at a time."""

import errno
import math
import os
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.lib import format as npy
from numpy.typing import NDArray

from igeood.errors import InputError
from igeood.files import whole
from igeood.outputs import ArrayLike, Outputs, block_rows

FEATURE = "feature."
BUFFER = 1 << 20  # bytes of a column that are read at a time
WIDEST = 1 << 22  # values in a row: more are no classes or features, but a small file that would fill the memory
_PRIMITIVE = pa.types.is_primitive  # numbers, booleans and dates
_NAMES_ROWS = (_PRIMITIVE, pa.types.is_string, pa.types.is_large_string, pa.types.is_decimal, pa.types.is_null)
Columns = dict[str, Any]  # name → rows of that column: an array, for ids pyarrow's


class LogitsFile(ABC):
    """A file of logits, as an iterable of `Outputs`; open one with `read_logits`.

    Reading holds one block in memory; a guard's `fit` and `tune` keep the N × C logits. Blocks have the same number of
    rows however the file is laid out. It can be iterated again, and given to a guard in place of an array.

    Attributes
    ----------
    path : Path
        The file.
    rows : int
        How many there are.
    layers : list of str
        The features that are read.
    """

    labels_name = "label"
    rows: int

    def __init__(
        self, path: Path, logits: str | None, label: str | None, identity: str | None, layers: Sequence[str] | None,
        labelled: bool,
    ) -> None:  # fmt: skip
        self.path = path
        self.names = self._read_names()
        for name in self.names:
            if self.names.count(name) > 1:
                raise InputError(f"{path}: two columns are called {name!r}; rename one")
        self.logits = self._column(logits or "logits", "the logits", "logits")
        self.label = self._named(label, (self.labels_name, "label", "labels"), "label") if labelled else None
        self.identity = self._named(identity, ("id",), "id")
        found = [name.removeprefix(FEATURE) for name in self.names if name.startswith(FEATURE)]
        self.layers = found if layers is None else list(layers)
        for layer in self.layers:
            self._column(FEATURE + layer, f"the features of layer {layer!r}", None)
        self.widths = {name: self._width(name) for name in self._matrices}
        for name, width in self.widths.items():
            if width > WIDEST:
                raise InputError(f"{path}: {name}: {width:,} values in a row, at most {WIDEST:,} fit; cut them")

    @property
    def n_classes(self) -> int:
        """Width of the logits."""
        return self.widths[self.logits]

    @property
    def _matrices(self) -> list[str]:
        return [self.logits, *(FEATURE + layer for layer in self.layers)]

    def _named(self, given: str | None, usual: Sequence[str], option: str) -> str | None:
        """The column that was named, or the first of the usual ones that is there."""
        if given is None:
            return next((name for name in usual if name in self.names), None)
        return self._column(given, f"the {option}s", option)

    def _column(self, name: str, what: str, option: str | None) -> str:
        if name not in self.names:
            cure = f"; name another with --{option}-column" if option else "; name a layer that it has"
            have = ", ".join(self.names) or "none"
            raise InputError(f"{self.path}: no column {name!r} with {what}; it has {have}{cure}")
        return name

    def need_labels(self) -> None:
        """Raise unless there are labels."""
        self._column(self.label or self.labels_name, "the true classes", "label")

    def __iter__(self) -> Iterator[Outputs]:
        return (outputs for outputs, _ in self.blocks())

    def blocks(self, *, ids: bool = False) -> Iterator[tuple[Outputs, Any]]:
        """Blocks in order; with the ids, if they are wanted and there are any, else with the rows' numbers."""
        wanted = [*self._matrices, *filter(None, [self.label, self.identity if ids else None])]
        size = block_rows(self.n_classes, sum(self.widths[name] for name in self._matrices[1:]))
        first = 0
        for columns in self._stream(wanted, size):
            n = len(columns[self.logits])
            features = {layer: columns[FEATURE + layer] for layer in self.layers}
            classes = columns.get(self.label or "")
            try:
                outputs = Outputs(columns[self.logits], features, classes, name=self.logits, first=first)
            except InputError as error:
                raise InputError(f"{self.path}: {error}") from None
            yield outputs, self._ids(columns) if ids and self.identity else np.arange(first, first + n)
            first += n
        if first != self.rows:
            raise InputError(f"{self.path}: has {first:,} rows, but says {self.rows:,}; write it again")

    def _ids(self, columns: Columns) -> pa.Array:
        """Names of rows, of a type that every output format has."""
        column = columns[self.identity or ""]
        try:
            array = pa.array(column)
            array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
            if any(suits(array.type) for suits in _NAMES_ROWS):
                return array
        except (pa.ArrowException, NotImplementedError, TypeError, ValueError):
            pass
        kind = getattr(column, "type", getattr(column, "dtype", None))
        raise InputError(f"{self.path}: {self.identity}: {kind} does not name rows; name another --id-column")

    @abstractmethod
    def _read_names(self) -> list[str]:
        """The file's columns."""

    @abstractmethod
    def _width(self, name: str) -> int:
        """Values in the first row of a column of vectors; that of the logits tells `rows` too."""

    @abstractmethod
    def _stream(self, names: list[str], size: int) -> Iterator[Columns]:
        """These columns, `size` rows at a time; the last block may be shorter."""

    def _fail(self, name: str, row: int, problem: str) -> InputError:
        return InputError(f"{self.path}: {name}: row {row} {problem}")


class _Parquet(LogitsFile):
    """Columns of lists, of fixed or equal length."""

    def _read_names(self) -> list[str]:
        with self._opened() as file:
            self.schema, self.rows = file.schema_arrow, int(file.metadata.num_rows)
        return list(self.schema.names)

    def _width(self, name: str) -> int:
        kind = self.schema.field(name).type
        value = getattr(kind, "value_type", None)
        if value is None or not (pa.types.is_floating(value) or pa.types.is_integer(value)):
            told = f"expected a list of numbers in each row, got {kind}"
            raise InputError(f"{self.path}: {name}: {told}; write it with igeood.write_logits")
        if pa.types.is_fixed_size_list(kind):
            return int(kind.list_size)
        with self._opened() as file:
            rows = next(file.iter_batches(batch_size=1, columns=[name], use_threads=False), None)
        return len(rows.column(name)[0] or ()) if rows is not None and rows.num_rows else 0

    def _stream(self, names: list[str], size: int) -> Iterator[Columns]:
        first = 0
        for table in self._tables(names, size):
            arrays = {name: table.column(name).combine_chunks() for name in names}
            yield {n: a if n == self.identity else self._numbers(a, n, first) for n, a in arrays.items()}
            first += table.num_rows

    def _tables(self, names: list[str], size: int) -> Iterator[pa.Table]:
        """Tables of `size` rows, whatever the row groups are."""
        held: list[pa.RecordBatch] = []
        count = 0
        with self._opened() as file:
            for batch in file.iter_batches(batch_size=size, columns=names, use_threads=False):
                start = 0
                while count + batch.num_rows - start >= size:
                    cut = size - count
                    yield pa.Table.from_batches([*held, batch.slice(start, cut)])
                    held, count, start = [], 0, start + cut
                if start < batch.num_rows:
                    held.append(batch.slice(start))
                    count += batch.num_rows - start
        if held or not self.rows:
            yield pa.Table.from_batches(held) if held else self.schema.empty_table().select(names)

    def _numbers(self, array: pa.Array, name: str, first: int) -> NDArray[Any]:
        """A column as an array: (n,) of labels, or (n, width)."""
        if array.null_count:
            row = first + int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
            raise self._fail(name, row, f"is null ({array.null_count} of {len(array)} read together are); remove it")
        if name == self.label:
            if not pa.types.is_integer(array.type):
                raise InputError(f"{self.path}: {name}: expected integers, got {array.type}; convert them to int64")
            return np.asarray(array)
        width = self.widths[name]
        if not pa.types.is_fixed_size_list(array.type):
            lengths = np.diff(array.offsets.to_numpy())
            if (lengths != width).any():
                at = int(np.argmax(lengths != width))
                raise self._fail(name, first + at, f"has {lengths[at]} values, the first row {width}; mend that row")
        values = array.flatten()
        if values.null_count:
            at = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False))) // max(1, width)
            raise self._fail(name, first + at, "has a null among its values; remove that row")
        return np.asarray(values).reshape(len(array), width)

    @contextmanager
    def _opened(self) -> Iterator[pq.ParquetFile]:
        try:
            with self.path.open("rb") as raw, pq.ParquetFile(raw, buffer_size=BUFFER) as file:
                yield file
        except (pa.ArrowException, EOFError, OSError, UnicodeDecodeError) as error:
            if getattr(error, "errno", None) is not None or isinstance(error, MemoryError):
                raise
            raise _damaged(self.path, "Parquet", error) from None


class _Npz(LogitsFile):
    """Arrays in a zip archive, plain or compressed; read as streams, so that none is larger than it says."""

    labels_name = "labels"

    def _read_names(self) -> list[str]:
        with self._opened() as archive:
            return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]

    def _width(self, name: str) -> int:
        with self._opened() as archive, archive.open(f"{name}.npy") as member:
            shape, kind = self._head(name, member)
        if len(shape) != 2 or min(shape) < 0 or kind.kind not in "fiu":
            raise InputError(
                f"{self.path}: {name}: expected numbers of shape (N, C), got {kind} of shape {shape}; save those"
            )
        self.rows = shape[0] if name == self.logits else self.rows
        return shape[1]

    def _head(self, name: str, member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and type, as the array's own header says; its values come next."""
        try:
            read = {(1, 0): npy.read_array_header_1_0}[npy.read_magic(member)]  # others may claim headers of gigabytes
            shape, fortran, kind = read(member)
        except Exception as error:  # noqa: BLE001 (a header is read as Python's literals, which fail in many ways)
            raise _damaged(self.path, "npz", error) from None
        if kind.hasobject:
            raise InputError(f"{self.path}: {name}: holds Python objects, which are never read; save a plain array")
        if fortran and len(shape) > 1:
            raise InputError(f"{self.path}: {name}: is stored by columns; save np.ascontiguousarray of it")
        return shape, kind

    def _stream(self, names: list[str], size: int) -> Iterator[Columns]:
        with self._opened() as archive, ExitStack() as stack:
            members = {name: stack.enter_context(archive.open(f"{name}.npy")) for name in names}
            heads = {name: self._head(name, member) for name, member in members.items()}
            for name, (shape, kind) in heads.items():
                if shape[:1] != (self.rows,) or len(shape) != 1 + (name in self.widths):
                    given = f"{name}: shape {shape} for {self.rows} rows of logits"
                    raise InputError(f"{self.path}: {given}; save one for each row")
                if name == self.label and kind.kind not in "iu":
                    raise InputError(f"{self.path}: {name}: expected integers, got {kind}; convert them to int64")
            for start in range(0, max(1, self.rows), size):
                rows = min(size, self.rows - start)
                yield {name: self._take(member, name, rows, heads[name][1]) for name, member in members.items()}

    def _take(self, member: IO[bytes], name: str, rows: int, kind: np.dtype[Any]) -> NDArray[Any]:
        shape = (rows, self.widths[name]) if name in self.widths else (rows,)
        content = member.read(size := kind.itemsize * math.prod(shape))
        if len(content) != size:
            raise InputError(f"{self.path}: {name}: ends before all of its rows; save it again")
        return np.frombuffer(content, kind).reshape(shape)

    @contextmanager
    def _opened(self) -> Iterator[zipfile.ZipFile]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                yield archive
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError) as error:
            if getattr(error, "errno", errno.EINVAL) != errno.EINVAL:  # that is a wrong offset, not the disk
                raise
            raise _damaged(self.path, "npz", error) from None


def _damaged(path: Path, kind: str, error: Exception) -> InputError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return InputError(f"{path}: is damaged, or no {kind} file ({reason}); write it again, or fetch a whole copy")


def read_logits(
    path: str | os.PathLike[str],
    *,
    logits: str | None = None,
    label: str | None = None,
    identity: str | None = None,
    layers: Sequence[str] | None = None,
    labelled: bool = True,
) -> LogitsFile:
    """Open a file of logits, Parquet or npz; what it is, its first bytes tell.

    Parameters
    ----------
    path : path
        Parquet with a column `logits` (a list of numbers in each row), and where there are any `label` (integers),
        `id` and `feature.<layer>`; or npz with `logits` (N, C), `labels`, `id` and `feature.<layer>`.
    logits, label, identity : str, optional
        Other names of those columns.
    layers : sequence of str, optional
        Read the features of these layers only; by default of all.
    labelled : bool
        Read the labels, if there are any. Only `fit` needs them, and those of OOD samples may be no classes.
    """
    source = Path(path)
    if source.is_dir():
        raise InputError(f"{source}: is a folder; give a Parquet or npz file")
    if not source.is_file():
        raise InputError(f"{source}: there is no such file; check the path")
    try:
        with source.open("rb") as file:
            magic = file.read(6)
    except OSError as error:
        raise InputError(f"{source}: cannot be read ({error.strerror}); mend its permissions, or its disk") from None
    kinds: dict[bytes, type[_Parquet | _Npz]] = {b"PAR1": _Parquet, b"PK\x03\x04": _Npz, b"PK\x05\x06": _Npz}
    if magic[:4] not in kinds:
        what = "is empty" if not magic else "is neither Parquet nor npz"
        cure = "save it with np.savez(path, logits=...)" if magic == b"\x93NUMPY" else "use igeood.write_logits"
        raise InputError(f"{source}: {what}; {cure}")
    return kinds[magic[:4]](source, logits, label, identity, layers, labelled)


def write_logits(
    path: str | os.PathLike[str],
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
        It is replaced once all is on disk.
    logits : Outputs or array
        (N, C), or what `igeood.extract` gave.
    labels : array of int, optional
        (N,) true classes.
    ids : sequence, optional
        (N,) a name or a number for each sample.
    features : mapping of str to array, optional
        For each layer (N, k).
    """
    if isinstance(logits, Outputs) and features is not None:
        raise InputError("features: Outputs have their own; leave them out, or give logits as an array")
    given = Outputs.of(logits, labels) if isinstance(logits, Outputs) else Outputs(logits, features, labels)
    npz = Path(path).suffix == ".npz"
    columns: dict[str, Any] = {"logits": given.logits.detach().cpu().numpy()}
    if given.labels is not None:
        columns["labels" if npz else "label"] = given.labels.cpu().numpy()
    if ids is not None:
        columns["id"] = _id_array(ids, len(given))
    columns |= {FEATURE + layer: value.detach().cpu().numpy() for layer, value in given.features.items()}
    with whole(path) as file:
        if npz:
            np.savez(file, **columns)
        else:
            pq.write_table(pa.table({name: _arrow(value) for name, value in columns.items()}), file)


def _id_array(ids: Any, n: int) -> NDArray[Any]:
    """Names or numbers that both formats hold as they are; nothing that would be pickled."""
    try:
        array = np.asarray(ids)
    except ValueError as error:
        told = f"cannot be read as an array ({error})"
        raise InputError(f"ids: {told}; give one name or number for each sample") from None
    if array.shape != (n,):
        raise InputError(f"ids: expected {n} of them, one a sample; got shape {array.shape}")
    if array.dtype.kind not in "biufU" or array.dtype == np.longdouble:
        kinds = sorted({type(item).__name__ for item in array})
        raise InputError(f"ids: expected names or numbers, got {', '.join(kinds)}; convert each with str")
    return array.astype(array.dtype.newbyteorder("="))


def _arrow(values: NDArray[Any]) -> pa.Array:
    if values.ndim == 1:
        return pa.array(values)
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), values.shape[1])
