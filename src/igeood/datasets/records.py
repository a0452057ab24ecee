"""Readers of the official array files: CIFAR's binary records, SVHN's .mat, the idx files of the MNIST family."""

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from igeood.datasets.images import SIDE, Images, Rows, Source, one_line
from igeood.errors import InputError

PIXELS = 3 * SIDE * SIDE
MAX_MAT = 1_000_000  # images; the largest official SVHN file has 604,388
DEFLATE = 1032  # no gzip file unpacks to more than this many times its size

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
    from scipy.io import loadmat, whosmat  # noqa: PLC0415 (half a second to import)

    try:
        shapes = {name: shape for name, shape, _ in whosmat(path)}
        x, y = shapes.get("X", ()), shapes.get("y", ())
        fits = len(x) == 4 and x[:3] == (SIDE, SIDE, 3) and 0 < x[3] <= MAX_MAT and y in {(x[3], 1), (1, x[3])}
        content = loadmat(path, variable_names=["X", "y"]) if fits else {}
    except Exception as error:  # noqa: BLE001 (a damaged file fails anywhere in scipy)
        raise InputError(f"{path}: damaged, or no MATLAB file ({one_line(error)}); fetch the set again") from None
    if not fits or content["X"].dtype != np.uint8 or content["y"].dtype.kind not in "iuf":
        raise InputError(f"{path}: expected uint8 X (32, 32, 3, N) and y (N, 1), got {shapes}; fetch the set again")
    labels = content["y"].reshape(-1)[:limit].astype(np.int64)
    check_labels(path, labels - 1, 10)
    return np.ascontiguousarray(content["X"][..., :limit].transpose(3, 2, 0, 1)), labels % 10


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
    size = path.stat().st_size * (DEFLATE if path.suffix == ".gz" else 1)
    if claimed == 0:
        raise InputError(f"{path}: its header says {shape}: no data; fetch it again")
    content = file.read(claimed + 1) if claimed <= size else b""
    if len(content) != claimed:
        told = f"its header says {shape}, {claimed:,} bytes, but the file has another size"
        raise InputError(f"{path}: {told}; fetch it again")
    return np.frombuffer(content, np.uint8).reshape(shape)
