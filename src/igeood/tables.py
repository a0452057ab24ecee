"""Tables of logits from any framework: Parquet, npz, CSV or JSON lines, in one file, in several, or from a pipe."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from igeood.errors import InputError
from igeood.files import whole
from igeood.outputs import ArrayLike, Outputs, Refused, block_rows, id_keys, recut, take_over
from igeood.parts import Part, as_column, as_numbers, find_sources, row_values, some

FEATURE = "feature."


class LogitsFile:
    """Logits of one or several files as an iterable of `Outputs`; open one with `read_logits`.

    It can be iterated again, and given to a guard in place of an array. Files are read block by block; the arrays of an
    npz file are held in memory.

    Attributes
    ----------
    rows : int or None
        Number of rows; of text it is known once everything was read.
    layers : list of str
        The layers whose features are read.
    on_error : {"raise", "refuse"}
        What a row with NaN or of another width is: an error, or noted in its block's `refused`.
    """

    on_error = "raise"

    def __init__(
        self, sources: Sequence[Path | IO[bytes]], logits: str, label: str | None, identity: str | None,
        layers: Sequence[str] | None, labelled: bool,
    ) -> None:  # fmt: skip
        self._parts = [Part(source) for source in sources]
        names = self._parts[0].names
        self._logits, self._asked = logits, identity is not None
        self._identifies: bool | None = None  # whether samples are known by their ids: once the first block is read
        found = label or next((n for n in ("label", "labels") if n in names), None)
        self._label = found if labelled else None
        self._id = identity or ("id" if "id" in names else None)
        there = [name.removeprefix(FEATURE) for name in names if name.startswith(FEATURE)]
        self.layers = there if layers is None else list(layers)
        features = {FEATURE + layer: [FEATURE + layer] for layer in self.layers}
        self._columns = {logits: _matching(self._parts[0], logits, {found, self._id}), **features}
        for part in self._parts:
            if sorted(_matching(part, logits, {found, self._id})) != sorted(self._columns[logits]):
                problem = f"has other columns {logits!r} than {self._parts[0].path}"
                raise InputError(f"{part.path}: {problem}; write the same")
            part.choose(self._columns, [*filter(None, [self._label, self._id])])
        self._shape_up(logits)
        rows = [part.rows for part in self._parts]
        self.rows = None if None in rows else sum(filter(None, rows))

    def _shape_up(self, logits: str) -> None:
        """Find how wide the matrices are, of which type, and whether ids have to become text to be of one type."""
        shapes = [part.shapes(self._columns) for part in self._parts]
        self._widths = {name: max(shape[name][0] for shape in shapes) for name in self._columns}
        kinds = {name: [shape[name][1] for shape in shapes if shape[name][1]] for name in self._columns}
        types = {name: np.result_type(*found) if found else np.float32 for name, found in kinds.items()}
        self._types = {name: kind if np.issubdtype(kind, np.floating) else np.float64 for name, kind in types.items()}
        if not any(kinds.values()):  # no row shows how wide a list is
            self._widths = {name: width or 2 for name, width in self._widths.items()}
        if self._widths[logits] < 2:
            problem = "has one value in each row" if self._widths[logits] else "has no value in its first rows"
            cure = "write all logits of a sample, as a list or in columns of a pattern such as 'logit_*'"
            raise InputError(f"{self._parts[0].path}: {logits}: {problem}; {cure}")
        self._id_types = {part.schema.field(self._id).type for part in self._parts} if self._id else set()

    def __iter__(self) -> Iterator[Outputs]:
        return (outputs for outputs, _ in self.blocks())

    def blocks(self, *, ids: bool = False) -> Iterator[tuple[Outputs, Any]]:
        """Blocks in order, each with its ids if they are wanted and there are any, else with the rows' numbers.

        They have as many rows as a guard scores together, whatever the files have.
        """
        waiting: list[Any] = []  # ids of rows that no block has yet
        refused: Refused | None = {} if self.on_error == "refuse" else None  # of all files, numbered through them

        def outputs() -> Iterator[Outputs]:
            number = 0
            for part, batch, first in self._batches():
                with part.named():
                    block = self._outputs(batch, first, keyed=not ids)  # who names rows knows none again
                    waiting.extend([self._ids(batch)] if ids and self._id else [])
                if refused is not None:
                    take_over(block, number, refused)
                yield block.replace(first=number, refused=refused)
                number += len(block)

        number = 0
        for block in recut(outputs()):
            names: Any = np.arange(number, number + len(block))
            if waiting:
                joined = pa.chunked_array(waiting)
                names, waiting[:] = joined[: len(block)], joined[len(block) :].chunks
            number += len(block)
            yield block, names

    def _batches(self) -> Iterator[tuple[Part, pa.RecordBatch, int]]:
        """Batches of all files, each with its file and the number of its first row there; an empty one without rows."""
        n_classes, total = self._widths[self._logits], 0
        size = block_rows(n_classes, sum(self._widths.values()) - n_classes)
        for part in self._parts:
            first = 0
            for batch in part.batches(size):
                yield part, batch, first
                first += len(batch)
            total += first
            if part.rows not in (None, first):
                raise InputError(f"{part.path}: has {first:,} rows, but its header says {part.rows:,}; write it again")
        self.rows = total
        if not total:
            yield part, pa.RecordBatch.from_pylist([], part.schema), 0

    def _outputs(self, batch: pa.RecordBatch, first: int, *, keyed: bool) -> Outputs:
        refused: Refused | None = {} if self.on_error == "refuse" else None
        arrays = {name: self._matrix(batch, name, first, refused) for name in self._columns}
        features = {layer: arrays[FEATURE + layer] for layer in self.layers}
        labels, keys = None if self._label is None else batch[self._label], None
        if labels is not None and labels.null_count:
            raise InputError(f"{self._label}: row {first + labels.is_null().index(True).as_py()} is null; remove it")
        if labels is not None and pa.types.is_string(labels.type):
            labels = _classes(labels, self._label or "", np.arange(first, first + len(batch)))
        if keyed and self._id is not None and self._identifies is not False:
            ids = self._ids(batch)
            keys = id_keys(ids)
            is_unique = len(np.unique(keys)) == len(keys)
            if self._asked and not is_unique:
                raise InputError(f"{self._id}: rows share an id; name a column of unique ids, or none")
            if self._identifies is None and len(batch):
                self._identifies = self._asked or (is_unique and _are_names(ids))
            keys = keys if self._identifies else None
        given: dict[str, Any] = {"keys": keys, "name": self._logits, "first": first, "refused": refused}
        return Outputs(arrays[self._logits], features, labels, **given)

    def _matrix(self, batch: pa.RecordBatch, name: str, first: int, refused: Refused | None) -> NDArray[Any]:
        """A matrix (n, width) from its columns; a null among the values is NaN, and so is a row that is refused."""
        values, lengths = row_values(batch, self._columns[name], first)
        width, kind = self._widths[name], self._types[name]
        fits = lengths == width
        if fits.all():
            return values.astype(kind, copy=False).reshape(len(batch), width)
        if refused is None:
            at = int(np.argmin(fits))
            raise InputError(f"{name}: row {first + at} has {lengths[at]} values, expected {width}; fix that row")
        for row in np.flatnonzero(~fits).tolist():
            refused.setdefault(first + row, f"{name}: {lengths[row]} values, expected {width}")
        whole = np.full((len(batch), width), np.nan, kind)
        whole[fits] = values[np.repeat(fits, lengths)].reshape(-1, width)
        return whole

    def _ids(self, batch: pa.RecordBatch) -> pa.Array:
        column = batch[self._id]
        if pa.types.is_nested(column.type):
            raise InputError(f"{self._id}: {column.type} does not name rows; name another --id-column")
        column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        return column if len(self._id_types) == 1 else column.cast(pa.string())


def _matching(part: Part, logits: str, others: set[str | None]) -> list[str]:
    """The columns of the logits: one, or those of a pattern, by the numbers in their names if each has one."""
    if "*" not in logits:
        return [logits]
    pattern = re.compile(re.escape(logits).replace(r"\*", ".*"), re.DOTALL)
    candidates = (name for name in part.names if name not in others and not name.startswith(FEATURE))
    names = [name for name in candidates if pattern.fullmatch(name)]
    if not names:
        raise InputError(f"{part.path}: no column is called {logits!r} among {some(part.names)}; name others")
    numbers = {name: [int(digits) for digits in re.findall(r"\d+", name)] for name in names}
    return sorted(names, key=lambda name: numbers[name]) if all(numbers.values()) else names


def _classes(texts: pa.Array, name: str, rows: NDArray[Any]) -> NDArray[Any]:
    """Labels that were text as integers."""
    numbers = as_numbers(texts, name, rows)
    fails = ~(numbers % 1 == 0)  # NaN too
    if fails.any():
        at = int(np.argmax(fails))
        problem = f"row {rows[at]} has {texts[at].as_py()!r}, which is no class"
        raise InputError(f"{name}: {problem}; number the classes from 0")
    return numbers.astype(np.int64)


def _are_names(ids: pa.Array) -> bool:
    """Whether ids may name samples across files: text, neither plain numbers nor a count, such as "row 0", "row 1"."""
    if not (pa.types.is_string(ids.type) or pa.types.is_large_string(ids.type)):
        return False
    digits = pc.replace_substring_regex(ids, r"\D", "")
    if pc.all(pc.equal(digits, ids)).as_py():
        return False
    try:
        numbers = np.sort(np.asarray(digits.cast(pa.int64())))
    except pa.ArrowInvalid:  # no digits, or too many
        return True
    return not (numbers[0] in (0, 1) and np.array_equal(numbers, np.arange(len(ids)) + numbers[0]))


def read_logits(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, logits: str = "logits",
    label: str | None = None, identity: str | None = None, layers: Sequence[str] | None = None, labelled: bool = True,
) -> LogitsFile:  # fmt: skip
    """Open logits in Parquet, npz, CSV or JSON lines files: one, several, a folder or a pattern of them, or a pipe.

    Parameters
    ----------
    path : path, or sequence of paths
        Parquet with a column `logits` (a list of numbers in each row), and optional columns `label` (integers), `id`
        and `feature.<layer>`; or npz with arrays `logits` (N, C), `labels`, `id` and `feature.<layer>`. CSV (lists are
        text, "[0.5, 2]") and JSON lines have the columns of Parquet, and may be zipped by gzip. Several files are read
        in the order given; those of a folder and below it, or of a pattern such as "parts/*.parquet", in the order of
        their names, without names that start with `_` or `.`. "-" is standard input.
    logits, label : str, optional
        Other names of those columns. A pattern such as "logit_*" takes one column for each class, in the order of the
        numbers in their names if each has one, else in the file's order.
    identity : str, optional
        A column of ids that are unique across all files: a sample is then recognised by its id, not by its row (for
        logits that were computed twice, and differ by rounding). Without it the column `id` serves, unless its first
        ids repeat, are plain numbers, or count the rows: then it names rows in results.
    layers : sequence of str, optional
        Read the features of these layers only; by default of all.
    labelled : bool
        Read the labels, if there are any. Only `fit` needs them, and those of OOD samples may be no classes.
    """
    names = [path] if isinstance(path, (str, os.PathLike)) else path
    sources = [source for name in names for source in find_sources(os.fspath(name))]
    if not sources:
        raise InputError("path: no file; give one at least")
    return LogitsFile(sources, logits, label, identity, layers, labelled)


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
            pq.write_table(pa.table({name: as_column(values, name) for name, values in columns.items()}), file)
