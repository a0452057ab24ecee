"""Readers of the official array files: CIFAR's binary records, SVHN's .mat, the idx files of the MNIST family."""

import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from igeood.bench.datasets.images import SIDE, Images, Rows, Source, one_line
from igeood.errors import InputError

PIXELS = 3 * SIDE * SIDE
MAX_MAT = 1_000_000  # images; the largest official SVHN file has 604,388
# fmt: off
MAT_TYPES = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
# fmt: on
FREE_BYTES, RATIO = 1 << 26, 16  # no file of images unpacks to more than so many times its size, and a little

Labels = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Records(Source):
    """Files of fixed-size records: label bytes, then the R, G and B planes of 32 x 32. Mapped only while reading."""

    paths: tuple[Path, ...]
    header: int
    starts: tuple[int, ...]  # number of records before each file, and of all

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, rows: Rows) -> Images:
        """The images of these rows."""
        images = np.empty((len(rows), 3, SIDE, SIDE), np.uint8)
        for path, start, end in zip(self.paths, self.starts, self.starts[1:], strict=False):
            inside = (rows >= start) & (rows < end)
            if inside.any():
                records = _mapped(path, self.header)
                if len(records) != end - start:
                    raise InputError(f"{path}: has changed since it was opened; load the set again")
                images[inside] = records[rows[inside] - start, self.header :].reshape(-1, 3, SIDE, SIDE)
        return images


def _mapped(path: Path, header: int) -> Images:
    record = header + PIXELS
    try:
        size = path.stat().st_size
        if size == 0 or size % record:
            told = f"{size:,} bytes is no whole number of {record}-byte records: truncated"
            raise InputError(f"{path}: {told}; fetch the set again")
        return np.memmap(path, np.uint8, "r", shape=(size // record, record))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); fetch the set again") from None


def read_cifar(paths: tuple[Path, ...], *, classes: int) -> tuple[Records, Labels]:
    """CIFAR's binary files: the source and the labels. With 100 classes the second label byte, the fine one, counts."""
    header = 2 if classes == 100 else 1
    parts = [np.array(_mapped(path, header)[:, header - 1], dtype=np.int64) for path in paths]
    for path, labels in zip(paths, parts, strict=True):
        check_labels(path, labels, classes)
    starts = tuple(int(start) for start in np.cumsum([0, *map(len, parts)]))
    return Records(paths, header, starts), np.concatenate(parts)


def check_labels(path: Path, labels: Labels, classes: int) -> None:
    """Labels must be 0 … classes − 1."""
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        at = int(wrong.argmax())
        told = f"record {at} has label {labels[at]}, expected 0 to {classes - 1}"
        raise InputError(f"{path}: {told}; the file is damaged, or of another set: fetch the set again")


def read_mat(path: Path, *, limit: int | None) -> tuple[Images, Labels]:
    """SVHN's cropped digits: X (32, 32, 3, N), y (N, 1) with 10 for the digit 0. Gives (N, 3, 32, 32) and digits."""
    try:
        with path.open("rb") as file:
            found = dict(_matrices(file, path.stat().st_size))
    except (OSError, ValueError, LookupError, zlib.error, struct.error) as error:
        raise InputError(f"{path}: damaged, or no MATLAB file ({one_line(error)}); fetch the set again") from None
    x, y = (found.get(name, np.empty(0)) for name in ("X", "y"))
    fits = x.dtype == np.uint8 and x.ndim == 4 and x.shape[:3] == (SIDE, SIDE, 3) and 0 < x.shape[3] <= MAX_MAT
    if not fits or y.shape not in {(x.shape[3], 1), (1, x.shape[3])} or not np.isfinite(y).all():
        shapes = {name: value.shape for name, value in found.items()}
        raise InputError(f"{path}: expected uint8 X (32, 32, 3, N) and y (N, 1), got {shapes}; fetch the set again")
    labels = y.reshape(-1)[:limit].clip(-1, 11).astype(np.int64)
    check_labels(path, labels - 1, 10)
    return np.ascontiguousarray(x[..., :limit].transpose(3, 2, 0, 1)), labels % 10


def _matrices(file: IO[bytes], size: int) -> Iterator[tuple[str, NDArray[Any]]]:
    """The variables X and y of a MATLAB 5 file, as its format is published.

    scipy's reader takes the types and lengths that a file tells on trust, and ends the process where they are wrong.
    """
    if file.read(128)[124:] != b"\0\1IM":
        raise ValueError("not of version 5")
    while tag := file.read(8):
        kind, length = struct.unpack("<II", tag)
        end = file.tell() + length
        stream = _Inflating(file, length) if kind == 15 else None
        kind = struct.unpack("<II", stream.read(8))[0] if stream else kind
        if kind == 14:
            yield from _matrix(stream or file, FREE_BYTES + RATIO * size)
        file.seek(end)


def _matrix(stream: "IO[bytes] | _Inflating", most: int) -> Iterator[tuple[str, NDArray[Any]]]:
    flags, sides, title = (_part(stream, 512)[1] for _ in range(3))
    name, shape = title.decode("ascii"), np.frombuffer(sides, "<i4")
    if name not in {"X", "y"}:
        return
    kind, content = _part(stream, most)
    values = np.frombuffer(content, MAT_TYPES[kind])
    if isinstance(stream, _Inflating) and (stream.read(1) or not stream.engine.eof):  # with its checksum
        raise ValueError(f"{name} does not end where it should")
    if (shape < 0).any() or math.prod(shape.tolist()) != len(values) or not 6 <= flags[0] <= 13:
        raise ValueError(f"{name} has {len(values):,} values for the shape {tuple(shape.tolist())}")
    yield name, values.reshape(shape, order="F")


def _part(stream: "IO[bytes] | _Inflating", most: int) -> tuple[int, bytes]:
    """An element's type and content."""
    tag = stream.read(8)
    kind, size = struct.unpack("<II", tag)
    if kind >> 16:  # a small one, which is in the tag itself
        return kind & 0xFFFF, tag[4 : 4 + (kind >> 16)]
    if size > most:
        raise ValueError(f"an element of {size:,} bytes")
    content = stream.read(size + -size % 8)[:size]
    if len(content) != size:
        raise ValueError("ends early")
    return kind, content


class _Inflating:
    """The next `size` bytes of a file, unpacked as they are asked for."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self.file, self.left, self.engine = file, size, zlib.decompressobj()

    def read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size > 0 and not self.engine.eof:
            packed = self.engine.unconsumed_tail or self.file.read(min(1 << 16, self.left))
            self.left -= 0 if self.engine.unconsumed_tail else len(packed)
            parts.append(self.engine.decompress(packed, size))
            size -= len(parts[-1])
            if not (packed or parts[-1]):
                break
        return b"".join(parts)


def read_idx(path: Path, *, dims: int) -> NDArray[np.uint8]:
    """An idx file of bytes, plain or gzipped, with this many dimensions."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _read_idx(path, file, dims)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: truncated or damaged ({error}); fetch it again") from None


def _read_idx(path: Path, file: IO[bytes] | gzip.GzipFile, dims: int) -> NDArray[np.uint8]:
    header = file.read(4 + 4 * dims)
    if len(header) != 4 + 4 * dims or header[:4] != bytes([0, 0, 8, dims]):
        raise InputError(
            f"{path}: starts with {header[:4].hex() or 'nothing'}, expected 000008{dims:02x}, an idx file of bytes "
            f"with {dims} dimension{'s' * (dims > 1)}; give the right file"
        )
    shape = tuple(int(side) for side in np.frombuffer(header, ">u4", offset=4))
    claimed = math.prod(shape)
    # A header may claim anything; what is asked of memory stays in proportion to the file.
    size = path.stat().st_size
    size = FREE_BYTES + RATIO * size if path.suffix == ".gz" else size
    if claimed == 0:
        raise InputError(f"{path}: its header says {shape}: no data; fetch it again")
    content = file.read(claimed + 1) if claimed <= size else b""
    if len(content) != claimed:
        told = f"its header says {shape}, {claimed:,} bytes, but the file has another size"
        raise InputError(f"{path}: {told}; fetch it again")
    return np.frombuffer(content, np.uint8).reshape(shape)
