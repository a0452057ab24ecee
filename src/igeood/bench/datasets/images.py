"""An image set: where its images are, and which of them; they are read and prepared only when asked for."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from igeood.errors import InputError, import_extra
from igeood.images import read_image, resized

SIDE = 32
PREPARATION = 1  # part of every digest: raise it when `igeood.images.resized` gives other pixels
BLOCK = 1000  # images that are read, or in noise made, together

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Files:
    """Image files, one image each; resized smoothly, or by the nearest pixel."""

    paths: tuple[Path, ...]
    nearest: bool = False

    def __len__(self) -> int:
        return len(self.paths)

    def resized(self, rows: Rows, side: int) -> Images:
        """The images of these rows, (n, 3, side, side), resized once, from the file."""
        return np.stack([read_image(self.paths[row], side, nearest=self.nearest) for row in rows])

    def content(self, rows: Rows) -> Iterator[bytes]:
        """The files' bytes, for the digest."""
        return (self.paths[row].read_bytes() for row in rows)


@dataclass(frozen=True, eq=False)
class Arrays:
    """Images in memory: (N, 3, 32, 32), or grey ones (N, H, W) that are resized and repeated over the channels."""

    values: NDArray[Any]

    def __len__(self) -> int:
        return len(self.values)

    def read(self, rows: Rows) -> Images:
        """The images of these rows, prepared, (n, 3, 32, 32)."""
        chosen = self.values[rows]
        if chosen.ndim == 4:
            return chosen
        return np.stack([resized(_picture(grey), SIDE) for grey in chosen])

    def resized(self, rows: Rows, side: int) -> Images:
        """The images of these rows, (n, 3, side, side), resized from 32 x 32."""
        images = self.read(rows)
        if side == SIDE:
            return images
        return np.stack([resized(_picture(image.transpose(1, 2, 0)), side) for image in images])

    def content(self, rows: Rows) -> Iterator[bytes]:
        """What each image is made from, for the digest: its shape, and its bytes before preparation."""
        return (repr(self.values.shape[1:]).encode() + self.values[row].tobytes() for row in rows)


class Records(Arrays):
    """Images (N, 3, 32, 32) whose digest is that of the pixels alone."""

    def content(self, rows: Rows) -> Iterator[bytes]:
        """The pixels."""
        return (self.read(row[None]).tobytes() for row in rows)


class Noise(Records):
    """Gaussian noise, made here: `values` are the images' numbers, and an image depends on its number only."""

    def read(self, rows: Rows) -> Images:
        """The images of these rows."""
        return np.stack([_noise(n // BLOCK)[n % BLOCK] for n in self.values[rows].tolist()])


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images, read lazily, and their labels if they have any.

    Attributes
    ----------
    name, title : str
        What `load` was asked for, and a name for tables.
    labels : array of shape (N,), int64, or None
    classes : int or None
        Number of classes that the labels may have.
    note : str
        What a reader of results should know: that the set is a part of the official one, for example.
    side : int
        Pixels of each side of the images.
    """

    name: str
    title: str
    source: Files | Arrays
    rows: Rows
    labels: Labels | None = None
    classes: int | None = None
    note: str = ""
    side: int = SIDE

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: slice | Sequence[int] | NDArray[Any]) -> "ImageSet":
        """A subset, by slice, indices or mask. Nothing is read."""
        rows = np.atleast_1d(np.arange(len(self))[key])
        return replace(self, rows=self.rows[rows], labels=None if self.labels is None else self.labels[rows])

    def limited(self, limit: int | None) -> "ImageSet":
        """At most `limit` images, evenly spaced from first to last, so that every class folder has its share."""
        if limit is not None and limit < 1:
            raise InputError(f"must be at least 1, got {limit}", argument="limit")
        if limit is None or limit >= len(self):
            return self
        return self[np.linspace(0, len(self) - 1, limit).round().astype(np.int64)]

    def images(self) -> Images:
        """All images at once, uint8 (N, 3, side, side)."""
        return np.concatenate([np.empty((0, 3, self.side, self.side), np.uint8), *self.batches(BLOCK)])

    def batches(self, size: int = 100) -> Iterator[Images]:
        """The images in order, `size` at a time, uint8 (n, 3, side, side)."""
        starts = range(0, len(self), size)
        return (self.source.resized(self.rows[start : start + size], self.side) for start in starts)

    def contents(self) -> frozenset[bytes]:
        """A hash of each image's source, to find images that two sets share."""
        return frozenset(hashlib.blake2b(c, digest_size=16).digest() for c in self.source.content(self.rows))

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the selected images' source bytes in order, the labels, and the version of the preparation."""
        size = "" if self.side == SIDE else f" {self.side}"
        size += " nearest" if getattr(self.source, "nearest", False) else ""
        total = hashlib.sha256(f"igeood images {PREPARATION} {len(self)}{size}\n".encode())
        for content in self.source.content(self.rows):
            total.update(f"{len(content)}\n".encode() + content)
        total.update(b"" if self.labels is None else self.labels.astype("<i8").tobytes())
        return total.hexdigest()


@lru_cache(maxsize=10)  # 30 MB: all of the blocks, as rows are often spread over them
def _noise(block: int) -> Images:
    """1,000 images: mean 0.5, variance 1, clipped to [0, 1]."""
    p = np.random.default_rng([0, block]).normal(0.5, 1.0, (BLOCK, 3, SIDE, SIDE)).clip(0, 1)
    return (255 * p).round().astype(np.uint8)


def _picture(image: Images) -> Any:
    return import_extra("PIL.Image", "data").fromarray(image)
