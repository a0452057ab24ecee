"""Readers of the official array files: CIFAR's binary records, SVHN's .mat, the idx files of the MNIST family."""

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from igeood.bench.datasets.images import SIDE, Images, Labels, Rows, Source, extra
from igeood.errors import InputError

PIXELS = 3 * SIDE * SIDE


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
                images[inside] = records[rows[inside] - start, self.header :].reshape(-1, 3, SIDE, SIDE)
        return images


def _mapped(path: Path, header: int) -> Images:
    record, size = header + PIXELS, path.stat().st_size
    if size == 0 or size % record:
        wrong = f"{size:,} bytes is no whole number of {record}-byte records: truncated"
        raise InputError(f"{path}: {wrong}; fetch the set again")
    return np.memmap(path, np.uint8, "r", shape=(size // record, record))


def read_cifar(paths: tuple[Path, ...], *, classes: int) -> tuple[Records, Labels]:
    """CIFAR's binary files: the source and the labels. With 100 classes the second label byte, the fine one, counts."""
    header = 2 if classes == 100 else 1
    parts = [np.array(_mapped(path, header)[:, header - 1], dtype=np.int64) for path in paths]
    for path, labels in zip(paths, parts, strict=True):
        if labels.max() >= classes:
            row = int(labels.argmax())
            wrong = f"record {row} has label {labels[row]}, expected 0 to {classes - 1}"
            raise InputError(f"{path}: {wrong}; the file is damaged, or of another set: fetch the set again")
    starts = tuple(int(start) for start in np.cumsum([0, *map(len, parts)]))
    return Records(paths, header, starts), np.concatenate(parts)


def read_mat(path: Path, checksum: str | None, *, limit: int | None = None) -> tuple[Images, Labels]:
    """SVHN's cropped digits: X (32, 32, 3, N), y (N, 1) with 10 for the digit 0. Returns (N, 3, 32, 32) and digits.

    The file must have the published checksum: scipy's reader trusts the lengths that a MATLAB file claims.
    """
    verify(path, checksum)
    from scipy.io import loadmat  # noqa: PLC0415 (slow to import)

    content = loadmat(path, variable_names=("X", "y"))
    labels = content["y"].reshape(-1)[:limit].astype(np.int64)
    return np.ascontiguousarray(content["X"][..., :limit].transpose(3, 2, 0, 1)), labels % 10


def verify(path: Path, checksum: str | None) -> None:
    """Refuse a file that has not this checksum, or that has no published one."""
    algorithm, _, digest = (checksum or "").partition(":")
    if not digest or extra("pooch").file_hash(path, algorithm) != digest:
        raise InputError(f"{path}: is not the official file ({checksum}); fetch the set again")


def read_idx(path: Path, *, dims: int) -> Images:
    """An idx file of bytes, plain or gzipped, with this many dimensions."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: truncated or damaged ({error}); fetch it again") from error
    start = 4 + 4 * dims
    if len(content) < start or content[:4] != bytes([0, 0, 8, dims]):
        expected = f"000008{dims:02x}, an idx file of bytes with {dims} dimension{'s' * (dims > 1)}"
        raise InputError(f"{path}: starts with {content[:4].hex() or 'nothing'}, expected {expected}; give such a file")
    shape = tuple(int(side) for side in np.frombuffer(content[4:start], ">u4"))
    if not 0 < math.prod(shape) == len(content) - start:
        wrong = f"its header says {shape}, but {len(content) - start:,} bytes follow"
        raise InputError(f"{path}: {wrong}; fetch it again")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
