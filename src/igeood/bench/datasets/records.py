"""Readers of the official array files: CIFAR's binary records, SVHN's .mat, the idx files of the MNIST family."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from igeood.bench.datasets.images import SIDE, Images, Labels, Records
from igeood.errors import InputError, import_extra

PIXELS = 3 * SIDE * SIDE
AGAIN = "fetch the set again"


def read_cifar(paths: tuple[Path, ...], *, classes: int) -> tuple[Records, Labels]:
    """CIFAR's binary files of fixed-size records: label bytes, then the R, G and B planes of 32 x 32.

    Returns the source and the labels. With 100 classes the second label byte, the fine one, counts.
    """
    header = 2 if classes == 100 else 1
    record = header + PIXELS
    images, labels = [], []
    for path in paths:
        content = np.fromfile(path, np.uint8)
        if len(content) == 0 or len(content) % record:
            problem = f"{len(content):,} bytes is no whole number of {record}-byte records: truncated"
            raise InputError(problem, place=str(path), cure=AGAIN)
        *_, label, pixels = np.split(content.reshape(-1, record), range(1, header + 1), axis=1)
        if label.max() >= classes:
            row = int(label.argmax())
            problem = f"record {row} has label {label[row, 0]}, expected 0 to {classes - 1}"
            raise InputError(problem, place=str(path), cure=AGAIN)
        images.append(pixels.reshape(-1, 3, SIDE, SIDE))
        labels.append(label[:, 0].astype(np.int64))
    return Records(np.concatenate(images)), np.concatenate(labels)


def read_mat(path: Path, checksum: str | None, *, limit: int | None = None) -> tuple[Images, Labels]:
    """SVHN's cropped digits: X (32, 32, 3, N), y (N, 1) with 10 for the digit 0. Returns (N, 3, 32, 32) and digits.

    The file must have the published checksum: scipy's reader trusts the lengths that a MATLAB file claims.
    """
    algorithm, _, digest = (checksum or "").partition(":")
    if not digest or import_extra("pooch", "data").file_hash(path, algorithm) != digest:
        raise InputError(f"is not the official file ({checksum})", place=str(path), cure=AGAIN)
    from scipy.io import loadmat  # noqa: PLC0415 (slow to import)

    content = loadmat(path, variable_names=("X", "y"))
    labels = content["y"].reshape(-1)[:limit].astype(np.int64)
    return np.ascontiguousarray(content["X"][..., :limit].transpose(3, 2, 0, 1)), labels % 10


def read_idx(path: Path, *, dims: int) -> Images:
    """An idx file of bytes with this many dimensions, plain or gzipped; or else the gzipped file beside it."""
    places = [place for place in (path, path.with_name(f"{path.name}.gz")) if place.is_file()]
    if not places:
        cure = "give an idx file, or the folder of the four"
        raise InputError(f"neither it nor {path.name}.gz is there", place=str(path), cure=cure)
    path = places[0]
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"truncated or damaged ({error})", place=str(path), cure=AGAIN) from error
    start = 4 + 4 * dims
    if len(content) < start or content[:4] != bytes([0, 0, 8, dims]):
        problem = f"starts with {content[:4].hex() or 'nothing'}, expected 000008{dims:02x}"
        raise InputError(problem, place=str(path), cure=f"give an idx file of bytes with {dims} dimensions")
    shape = tuple(int(side) for side in np.frombuffer(content[4:start], ">u4"))
    if not 0 < math.prod(shape) == len(content) - start:
        problem = f"its header says {shape}, but {len(content) - start:,} bytes follow"
        raise InputError(problem, place=str(path), cure=AGAIN)
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
