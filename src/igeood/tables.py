"""Tables of logits from any framework: Parquet or npz files, or folders of them."""

import errno
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from igeood.errors import InputError
from igeood.files import whole
from igeood.outputs import ArrayLike, Keys, Outputs, block_rows

FEATURE = "feature."
BUFFER = 1 << 20  # bytes of a column that are read at a time
_NAMES_ROWS = (pa.types.is_primitive, pa.types.is_string, pa.types.is_large_string, pa.types.is_decimal)
_DAMAGED = (pa.ArrowException, zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError, MemoryError)


def id_keys(ids: Any) -> Keys:
    """(N,) uint64: a hash of each id as text, so 7, np.int32(7) and "7" have one key, in every process."""
    texts = (str(one).encode(errors="surrogatepass") for one in (ids.tolist() if hasattr(ids, "tolist") else ids))
    return np.array([int.from_bytes(blake2b(text, digest_size=8).digest(), "big") for text in texts], dtype=np.uint64)


class _Part:
    """One file, Parquet or npz by its first bytes. Parquet is read in batches; npz arrays are held in memory."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            magic = file.read(4)
        if not magic.startswith((b"PAR1", b"PK")):
            raise InputError(f"{path}: {'is neither Parquet nor npz' if magic else 'is empty'}; use write_logits")
        self.path, self.npz = path, magic.startswith(b"PK")
        with self._open() as file:
            self.names: list[str] = file.files if self.npz else file.schema_arrow.names

    @contextmanager
    def _open(self) -> Iterator[Any]:
        """The open file; damage is an `InputError`, an error of the disk passes."""
        try:
            with self.path.open("rb") as raw:
                if self.npz:
                    yield np.load(raw, allow_pickle=False)
                else:
                    yield pq.ParquetFile(raw, buffer_size=BUFFER)
        except _DAMAGED as error:
            if getattr(error, "errno", None) not in (None, errno.EINVAL):  # EINVAL: the archive has a wrong offset
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            problem = f"cannot be read as {'npz' if self.npz else 'Parquet'} ({reason})"
            raise InputError(f"{self.path}: {problem}; write it again, or fetch a whole copy") from None

    def choose(self, columns: list[str]) -> None:
        """Check that these columns are there once; batches have them."""
        for name in columns:
            if (count := self.names.count(name)) != 1:
                problem = f"{count or 'no'} column {name!r} among {', '.join(self.names) or 'none'}"
                raise InputError(
                    f"{self.path}: {problem}; write one, or name another (--logits-column, --label-column)"
                )
        self.columns = columns
        with self._open() as file:
            self.table = pa.table({name: _arrow(file[name], name) for name in columns}) if self.npz else None
            self.schema = self.table.schema if self.table is not None else file.schema_arrow
            self.rows = int(self.table.num_rows if self.table is not None else file.metadata.num_rows)

    def batches(self, size: int) -> Iterator[pa.RecordBatch]:
        """The chosen columns, `size` rows at a time."""
        if self.table is not None:
            yield from self.table.to_batches(max_chunksize=size)
            return
        with self._open() as file:
            yield from file.iter_batches(batch_size=size, columns=self.columns, use_threads=False)

    def width(self, name: str) -> int:
        """Values in each row of a column of vectors; where the type does not say it, in the first row."""
        kind = self.schema.field(name).type
        value = getattr(kind, "value_type", None)
        if value is None or not (pa.types.is_floating(value) or pa.types.is_integer(value)):
            raise self.error(name, f"expected a list of numbers in each row, got {kind}; use igeood.write_logits")
        if pa.types.is_fixed_size_list(kind):
            return int(kind.list_size)
        batch = next(self.batches(1), None)
        return len(batch.column(name)[0] or ()) if batch is not None and batch.num_rows else 0

    def matrix(self, batch: pa.RecordBatch, name: str, width: int, first: int) -> NDArray[Any]:
        """A column of vectors as an array (n, width)."""
        column = self.filled(batch, name, first)
        if not pa.types.is_fixed_size_list(column.type):
            lengths = np.diff(column.offsets.to_numpy())
            if (lengths != width).any():
                at = int(np.argmax(lengths != width))
                raise self.error(name, f"row {first + at} has {lengths[at]} values, the first row {width}; fix it")
        return np.asarray(column.flatten()).reshape(len(column), width)  # a null among them is NaN

    def filled(self, batch: pa.RecordBatch, name: str, first: int) -> pa.Array:
        """A column without nulls."""
        column = batch.column(name)
        if column.null_count:
            row = first + int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            raise self.error(name, f"row {row} is null; remove that row")
        return column

    def ids(self, batch: pa.RecordBatch, name: str) -> pa.Array:
        """A column of names or numbers."""
        column = batch.column(name)
        column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        if not any(suits(column.type) for suits in _NAMES_ROWS):
            raise self.error(name, f"{column.type} does not name rows; name another --id-column")
        return column

    def error(self, name: str, problem: str) -> InputError:
        """An error that names file and column."""
        return InputError(f"{self.path}: {name}: {problem}")


class LogitsFile:
    """Logits of a file, or of all files of a folder, as an iterable of `Outputs`; open one with `read_logits`.

    It can be iterated again, and given to a guard in place of an array. Parquet is read block by block; the arrays of
    an npz file are held in memory.

    Attributes
    ----------
    path : Path
        The file or folder.
    rows : int
        Number of rows.
    names : list of str
        All columns of the (first) file.
    layers : list of str
        The layers whose features are read.
    """

    def __init__(
        self, path: Path, parts: list[_Part], logits: str | None, label: str | None, identity: str | None,
        layers: Sequence[str] | None, labelled: bool,
    ) -> None:  # fmt: skip
        self.path, self._parts, self.names = path, parts, parts[0].names
        self._logits, self._keyed = logits or "logits", identity is not None
        self._label = (label or next((n for n in ("label", "labels") if n in self.names), None)) if labelled else None
        self._id = identity or ("id" if "id" in self.names else None)
        found = [name.removeprefix(FEATURE) for name in self.names if name.startswith(FEATURE)]
        self.layers = found if layers is None else list(layers)
        matrices = [self._logits, *(FEATURE + layer for layer in self.layers)]
        for part in parts:
            part.choose([*matrices, *filter(None, [self._label, self._id])])
            widths = {name: part.width(name) for name in matrices}
            if part is parts[0]:
                self._widths = widths
            elif widths != self._widths:
                raise InputError(f"{part.path}: widths are {widths}, in {parts[0].path} {self._widths}; remove one")
        self.rows = sum(part.rows for part in parts)

    @property
    def n_classes(self) -> int:
        """Width of the logits."""
        return self._widths[self._logits]

    def need_labels(self) -> None:
        """Raise unless there are labels."""
        if self._label is None:
            self._parts[0].choose(["label"])

    def __iter__(self) -> Iterator[Outputs]:
        return (outputs for outputs, _ in self.blocks())

    def blocks(self, *, ids: bool = False) -> Iterator[tuple[Outputs, Any]]:
        """Blocks in order, each with its ids if they are wanted and there are any, else with the rows' numbers."""
        size = block_rows(self.n_classes, sum(self._widths.values()) - self.n_classes)
        number = 0
        for part in self._parts:
            first = 0
            empty = [] if self.rows else [pa.RecordBatch.from_pylist([], part.schema)]  # a block without rows
            for batch in empty or part.batches(size):
                outputs = self._outputs(part, batch, first)
                numbers = np.arange(number, number + len(outputs))
                yield outputs, numbers if self._id is None or not ids else part.ids(batch, self._id)
                first, number = first + len(outputs), number + len(outputs)
            if first != part.rows:
                raise InputError(f"{part.path}: has {first:,} rows, but its header says {part.rows:,}; write it again")

    def _outputs(self, part: _Part, batch: pa.RecordBatch, first: int) -> Outputs:
        arrays = {name: part.matrix(batch, name, width, first) for name, width in self._widths.items()}
        logits, features = arrays[self._logits], {layer: arrays[FEATURE + layer] for layer in self.layers}
        labels = None if self._label is None else np.asarray(part.filled(batch, self._label, first))
        keys = None
        if self._keyed and self._id is not None:
            keys = id_keys(part.ids(batch, self._id))
            if len(np.unique(keys)) < len(keys):
                raise part.error(self._id, "rows share an id; name a column of unique ids, or none")
        try:
            return Outputs(logits, features, labels, keys=keys, name=self._logits, first=first)
        except InputError as error:
            raise InputError(f"{part.path}: {error}") from None


def read_logits(
    path: str | os.PathLike[str], *, logits: str | None = None, label: str | None = None, identity: str | None = None,
    layers: Sequence[str] | None = None, labelled: bool = True,
) -> LogitsFile:  # fmt: skip
    """Open logits in a Parquet or npz file, or in a folder of them.

    Parameters
    ----------
    path : path
        Parquet with a column `logits` (a list of numbers in each row), and optional columns `label` (integers), `id`
        and `feature.<layer>`; or npz with arrays `logits` (N, C), `labels`, `id` and `feature.<layer>`. The files of a
        folder are read in the order of their names.
    logits, label : str, optional
        Other names of those columns.
    identity : str, optional
        A column of ids that are unique across all files: a sample is then recognised by its id, not by its row (for
        logits that were computed twice, and differ by rounding). Without it, `id` only names rows in results.
    layers : sequence of str, optional
        Read the features of these layers only; by default of all.
    labelled : bool
        Read the labels, if there are any. Only `fit` needs them, and those of OOD samples may be no classes.
    """
    source = Path(path)
    if not source.exists():
        raise InputError(f"{source}: there is no such file; check the path")
    paths = sorted(p for p in source.iterdir() if p.suffix in (".parquet", ".npz")) if source.is_dir() else [source]
    if not paths:
        raise InputError(f"{source}: no .parquet or .npz file in this folder; give a file, or a folder of such files")
    return LogitsFile(source, [_Part(each) for each in paths], logits, label, identity, layers, labelled)


def _arrow(values: NDArray[Any], name: str) -> pa.Array:
    """A vector, or a matrix as a list of fixed size in each row."""
    if values.ndim not in (1, 2) or not all(values.shape[1:]):
        raise ValueError(f"{name}: expected shape (N,) or (N, C), got {values.shape}")
    plain = pa.array(np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("=")).reshape(-1))
    return plain if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(plain, values.shape[1])


def write_logits(
    path: str | os.PathLike[str], logits: Outputs | ArrayLike, labels: ArrayLike | None = None, *,
    ids: Sequence[Any] | NDArray[Any] | None = None, features: Mapping[str, ArrayLike] | None = None,
) -> None:  # fmt: skip
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
        For each layer (N, k).
    """
    if isinstance(logits, Outputs) and features is not None:
        raise InputError("features: Outputs have their own; leave them out, or give logits as an array")
    outputs = Outputs.of(logits, labels) if isinstance(logits, Outputs) else Outputs(logits, features, labels)
    npz = Path(path).suffix == ".npz"
    columns: dict[str, Any] = {"logits": outputs.logits.detach().cpu().numpy()}
    if outputs.labels is not None:
        columns["labels" if npz else "label"] = outputs.labels.cpu().numpy()
    if ids is not None:
        columns["id"] = _id_array(ids, len(outputs))
    columns |= {FEATURE + layer: value.detach().cpu().numpy() for layer, value in outputs.features.items()}
    with whole(path) as file:
        if npz:
            np.savez(file, **columns)
        else:
            pq.write_table(pa.table({name: _arrow(values, name) for name, values in columns.items()}), file)


def _id_array(ids: Any, n: int) -> NDArray[Any]:
    """Names or numbers that both formats hold; nothing that would be pickled."""
    array = np.asarray(ids)
    if array.shape != (n,) or array.dtype.kind not in "iufU":
        problem = f"expected {n} names or numbers, got {array.dtype} of shape {array.shape}"
        raise InputError(f"ids: {problem}; give one for each sample, and convert each with str")
    return array
