"""Tables of logits from any framework: Parquet or npz files, or folders of them."""

import errno
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from igeood.errors import InputError
from igeood.files import whole
from igeood.outputs import ArrayLike, Outputs, block_rows, id_keys

FEATURE = "feature."
BUFFER = 1 << 20  # bytes of a column that are read at a time
_DAMAGED = (pa.ArrowException, zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError, MemoryError)


class _Part:
    """One file, Parquet or npz by its first bytes. Parquet is read in batches; npz arrays are held in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self.npz = file.read(2) == b"PK"
        with self._open() as file:
            self.names: list[str] = file.files if self.npz else file.schema_arrow.names

    @contextmanager
    def _open(self) -> Iterator[Any]:
        """The open file; damage is an `InputError`, an error of the disk passes."""
        try:
            with self.path.open("rb") as raw:
                yield np.load(raw, allow_pickle=False) if self.npz else pq.ParquetFile(raw, buffer_size=BUFFER)
        except _DAMAGED as error:
            if getattr(error, "errno", None) not in (None, errno.EINVAL):  # EINVAL: the archive has a wrong offset
                raise
            raise InputError(f"{self.path}: is no sound Parquet or npz file ({error!r}); write it again") from None

    def choose(self, columns: list[str]) -> None:
        """Check that these columns are there once; batches have them."""
        for name in columns:
            if self.names.count(name) != 1:
                raise InputError(f"{self.path}: expected one column {name!r} among {self.names}; name another one")
        self.columns = columns
        with self._open() as file:
            self.table = pa.table({name: _arrow(file[name], name) for name in columns if self.npz})
            self.schema = self.table.schema if self.npz else file.schema_arrow
            self.rows = int(self.table.num_rows if self.npz else file.metadata.num_rows)

    def batches(self, size: int) -> Iterator[pa.RecordBatch]:
        """The chosen columns, `size` rows at a time."""
        if self.npz:
            yield from self.table.to_batches(max_chunksize=size)
            return
        with self._open() as file:
            yield from file.iter_batches(batch_size=size, columns=self.columns, use_threads=False)

    def width(self, name: str) -> int:
        """Values in each row of a column of vectors; where the type does not say it, in the first row."""
        kind = self.schema.field(name).type
        if pa.types.is_fixed_size_list(kind):
            return int(kind.list_size)
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            raise InputError(f"{self.path}: {name}: expected a list of numbers in each row, got {kind}; write lists")
        batch = next(self.batches(1), None)
        return len(batch[name][0].as_py() or ()) if batch else 0


class LogitsFile:
    """Logits of one or several files as an iterable of `Outputs`; open one with `read_logits`.

    It can be iterated again, and given to a guard in place of an array. Parquet is read block by block; the arrays of
    an npz file are held in memory.

    Attributes
    ----------
    rows : int
        Number of rows.
    layers : list of str
        The layers whose features are read.
    """

    def __init__(
        self, paths: list[Path], logits: str, label: str | None, identity: str | None, layers: Sequence[str] | None,
        labelled: bool,
    ) -> None:  # fmt: skip
        self._parts = [_Part(path) for path in paths]
        names = self._parts[0].names
        self._logits, self._asked = logits, identity is not None
        self._identifies: bool | None = None  # whether samples are known by their ids: once the first block is read
        self._label = (label or next((n for n in ("label", "labels") if n in names), None)) if labelled else None
        self._id = identity or ("id" if "id" in names else None)
        there = [name.removeprefix(FEATURE) for name in names if name.startswith(FEATURE)]
        self.layers = there if layers is None else list(layers)
        matrices = [logits, *(FEATURE + layer for layer in self.layers)]
        for part in self._parts:
            part.choose([*matrices, *filter(None, [self._label, self._id])])
        self._widths = {name: max(part.width(name) for part in self._parts) for name in matrices}
        self.rows = sum(part.rows for part in self._parts)

    def __iter__(self) -> Iterator[Outputs]:
        return (outputs for outputs, _ in self.blocks())

    def blocks(self, *, ids: bool = False) -> Iterator[tuple[Outputs, Any]]:
        """Blocks in order, each with its ids if they are wanted and there are any, else with the rows' numbers."""
        n_classes = self._widths[self._logits]
        size = block_rows(n_classes, sum(self._widths.values()) - n_classes)
        number = 0
        for part in self._parts:
            first = 0
            empty = [] if self.rows else [pa.RecordBatch.from_pylist([], part.schema)]  # a block without rows
            for batch in empty or part.batches(size):
                try:
                    outputs = self._outputs(batch, first)
                    names = self._ids(batch) if ids and self._id else np.arange(number, number + len(batch))
                except InputError as error:
                    raise InputError(f"{part.path}: {error}") from None
                yield outputs, names
                first, number = first + len(batch), number + len(batch)
            if first != part.rows:
                raise InputError(f"{part.path}: has {first:,} rows, but its header says {part.rows:,}; write it again")

    def _outputs(self, batch: pa.RecordBatch, first: int) -> Outputs:
        arrays = {name: _matrix(batch[name], name, width, first) for name, width in self._widths.items()}
        features = {layer: arrays[FEATURE + layer] for layer in self.layers}
        labels, keys = None if self._label is None else batch[self._label], None
        if labels is not None and labels.null_count:
            raise InputError(f"{self._label}: row {first + labels.is_null().index(True).as_py()} is null; remove it")
        if self._id is not None and self._identifies is not False:
            ids = self._ids(batch)
            keys = id_keys(ids)
            is_unique = len(np.unique(keys)) == len(keys)
            if self._asked and not is_unique:
                raise InputError(f"{self._id}: rows share an id; name a column of unique ids, or none")
            if self._identifies is None and len(batch):
                self._identifies = self._asked or (is_unique and not _numbers(ids, self.rows))
            keys = keys if self._identifies else None
        return Outputs(arrays[self._logits], features, labels, keys=keys, name=self._logits, first=first)

    def _ids(self, batch: pa.RecordBatch) -> pa.Array:
        column = batch[self._id]
        if pa.types.is_nested(column.type):
            raise InputError(f"{self._id}: {column.type} does not name rows; name another --id-column")
        return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _numbers(ids: pa.Array, rows: int) -> bool:
    """Whether ids only number the rows, such as 0, 1, 2 or "image 1", "image 2": other files have the same ones."""
    digits = ["".join(filter(str.isdecimal, str(one))) for one in ids.to_pylist()]
    return all(0 < len(text) < 16 and int(text) <= rows for text in digits)


def _matrix(column: pa.Array, name: str, width: int, first: int) -> NDArray[Any]:
    """A column of vectors as an array (n, width); a null among the values is NaN."""
    lengths = np.asarray(pc.list_value_length(column).fill_null(0))
    if (lengths != width).any():
        at = int(np.argmax(lengths != width))
        raise InputError(f"{name}: row {first + at} has {lengths[at]} values, expected {width}; fix that row")
    return np.asarray(column.flatten()).reshape(len(column), width)


def read_logits(
    path: str | os.PathLike[str], *, logits: str = "logits", label: str | None = None, identity: str | None = None,
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
        logits that were computed twice, and differ by rounding). Without it the column `id` serves, unless its first
        ids repeat, or only number the rows: then it names rows in results.
    layers : sequence of str, optional
        Read the features of these layers only; by default of all.
    labelled : bool
        Read the labels, if there are any. Only `fit` needs them, and those of OOD samples may be no classes.
    """
    source = Path(path)
    paths = sorted(p for p in source.iterdir() if p.suffix in (".parquet", ".npz")) if source.is_dir() else [source]
    if not paths:
        raise InputError(f"{source}: no .parquet or .npz file in this folder; give a file, or a folder of such files")
    return LogitsFile(paths, logits, label, identity, layers, labelled)


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
        For each layer (N, k); by default those of the `Outputs`.
    """
    outputs = Outputs.of(logits, labels)
    if features is not None:
        outputs = Outputs(outputs.logits, features, outputs.labels)
    npz = Path(path).suffix == ".npz"
    columns: dict[str, Any] = {"logits": outputs.logits.detach().cpu().numpy()}
    if outputs.labels is not None:
        columns["labels" if npz else "label"] = outputs.labels.cpu().numpy()
    if ids is not None:
        columns["id"] = names = np.asarray(ids)
        if names.shape != (len(outputs),) or names.dtype.kind not in "iufU":  # nothing that npz would pickle
            given = f"{names.dtype} of shape {names.shape}"
            raise InputError(f"ids: expected {len(outputs)} names or numbers, got {given}; convert each with str")
    columns |= {FEATURE + layer: value.detach().cpu().numpy() for layer, value in outputs.features.items()}
    with whole(path) as file:
        if npz:
            np.savez(file, **columns)
        else:
            pq.write_table(pa.table({name: _arrow(values, name) for name, values in columns.items()}), file)
