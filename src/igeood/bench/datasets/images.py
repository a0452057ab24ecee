"""An image set: where its images are, and which of them; they are read and prepared only when asked for."""

import hashlib
import io
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from igeood.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 32
PREPARATION = 1  # part of every digest: raise it when `prepare` gives other pixels
BLOCK = 1000  # images that are read, or in noise made, together
MAX_PIXELS = 2**26  # of an image, and of what its resizing makes: far above any photograph used here
FREE_PIXELS, PIXELS_PER_BYTE = 2**22, 64  # what a file may unpack to: a photograph's has fewer pixels than bytes
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # Pillow has others, of which one starts Ghostscript

Images = NDArray[np.uint8]
Rows = NDArray[np.int64]


class Source(ABC):
    """Something with images that can be read by row."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, rows: Rows) -> Images:
        """The images of these rows, prepared, (n, 3, 32, 32)."""

    def content(self, rows: Rows) -> Iterator[bytes]:
        """What each of these images is made from, for the digest: unless a source says more, its bytes."""
        for start in range(0, len(rows), BLOCK):
            yield from (image.tobytes() for image in self.read(rows[start : start + BLOCK]))


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images, lazily, and their labels if they have any.

    Attributes
    ----------
    name, title : str
        What `load` was asked for, and a name for tables.
    labels : array of shape (N,), int64, or None
    classes : int or None
        How many classes the labels may have.
    note : str
        What a reader of results should know: that the set is a part of the official one, for example.
    side : int
        Pixels of each side of the images given out.
    """

    name: str
    title: str
    source: Source
    rows: Rows
    labels: NDArray[np.int64] | None = None
    classes: int | None = None
    note: str = ""
    side: int = SIDE
    _digest: list[str] = field(default_factory=list, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: slice | Sequence[int] | NDArray[Any]) -> "ImageSet":
        """A subset, by slice, indices or mask. Nothing is read."""
        at = np.atleast_1d(np.arange(len(self))[key if isinstance(key, slice) else _indices(key, len(self))])
        return replace(self, rows=self.rows[at], labels=None if self.labels is None else self.labels[at])

    def limited(self, limit: int | None) -> "ImageSet":
        """At most `limit` images, evenly spaced from first to last, so that every class folder has its share."""
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | np.integer) or limit < 1):
            raise InputError(f"limit: must be a positive integer or None, got {limit!r}")
        if limit is None or limit >= len(self):
            return self
        return self[np.linspace(0, len(self) - 1, limit).round().astype(np.int64)]

    def images(self) -> Images:
        """All images at once, uint8 (N, 3, side, side)."""
        images = np.empty((len(self), 3, self.side, self.side), np.uint8)
        for i, batch in enumerate(self.batches(BLOCK)):
            images[BLOCK * i : BLOCK * i + len(batch)] = batch
        return images

    def batches(self, size: int = 100) -> Iterator[Images]:
        """The images in order, `size` at a time, uint8 (n, 3, side, side)."""
        if not isinstance(size, int) or size < 1:
            raise InputError(f"size: must be a positive integer, got {size!r}")
        return (self._read(self.rows[start : start + size]) for start in range(0, len(self), size))

    def _read(self, rows: Rows) -> Images:
        """Files at the wanted size; what is 32 x 32 already, resized from that."""
        if isinstance(self.source, Files):
            return self.source.read(rows, self.side)
        images = self.source.read(rows)
        if self.side == SIDE:
            return images
        made = (pillow().fromarray(image.transpose(1, 2, 0)) for image in images)
        return stack([prepare(image, where=self.name, side=self.side) for image in made], self.side)

    def contents(self) -> frozenset[bytes]:
        """A hash of each image's source, to find images that two sets share."""
        return frozenset(hashlib.blake2b(c, digest_size=16).digest() for c in self.source.content(self.rows))

    def digest(self) -> str:
        """SHA-256 over the selected images' source bytes in order, the labels, and the version of the preparation."""
        if not self._digest:
            size = "" if self.side == SIDE else f" {self.side}"
            total = hashlib.sha256(f"igeood images {PREPARATION} {len(self)}{size}\n".encode())
            for content in self.source.content(self.rows):
                total.update(f"{len(content)}\n".encode() + content)
            total.update(b"" if self.labels is None else self.labels.astype("<i8").tobytes())
            self._digest.append(total.hexdigest())
        return self._digest[0]


def _indices(key: Sequence[int] | NDArray[Any], n: int) -> NDArray[Any]:
    at = np.asarray(key)
    if at.size == 0:
        return np.empty(0, np.int64)
    if at.dtype.kind not in "iub" or at.ndim > 1:
        raise InputError(f"index: must be a slice, integers or a mask (N,), got {at.dtype} of shape {at.shape}")
    outside = len(at) != n if at.dtype == bool else (at < -n) | (at >= n)
    if at.ndim and np.any(outside):
        told = f"a mask of {len(at)}" if at.dtype == bool else int(at[outside][0])
        raise InputError(f"index: {told} does not fit a set of {n} images; give 0 to {n - 1}, or a mask of {n}")
    return at


@dataclass(frozen=True, eq=False)
class Files(Source):
    """Image files, one image each."""

    paths: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, rows: Rows, side: int = SIDE) -> Images:
        """The images of these rows."""
        with decoding():
            return stack([prepare_file(self.paths[row], side) for row in rows], side)

    def content(self, rows: Rows) -> Iterator[bytes]:
        """The files' bytes."""
        return (_bytes(self.paths[row]) for row in rows)


@dataclass(frozen=True, eq=False)
class Arrays(Source):
    """Images in memory: (N, 3, 32, 32), or grey ones (N, H, W) that are resized and repeated over the channels."""

    values: Images
    where: str = "image"  # for errors

    def __len__(self) -> int:
        return len(self.values)

    def read(self, rows: Rows) -> Images:
        """The images of these rows."""
        chosen = self.values[rows]
        if chosen.ndim == 4:
            return chosen
        if chosen.shape[1:] == (SIDE, SIDE):
            return np.repeat(chosen[:, None], 3, axis=1)
        return stack([prepare(pillow().fromarray(grey), where=self.where) for grey in chosen])

    def content(self, rows: Rows) -> Iterator[bytes]:
        """The images' shape, and their bytes before preparation."""
        return (repr(self.values.shape[1:]).encode() + self.values[row].tobytes() for row in rows)


@dataclass(frozen=True, eq=False)
class Noise(Source):
    """Gaussian noise, made here. An image does not depend on how many are asked for."""

    count: int

    def __len__(self) -> int:
        return self.count

    def read(self, rows: Rows) -> Images:
        """The images of these rows."""
        images = np.empty((len(rows), 3, SIDE, SIDE), np.uint8)
        for block in np.unique(rows // BLOCK):
            chosen = rows // BLOCK == block
            images[chosen] = _noise(int(block))[rows[chosen] % BLOCK]
        return images


@lru_cache(maxsize=10)  # 30 MB: all of the blocks, as rows are often spread over them
def _noise(block: int) -> Images:
    """1,000 images: mean 0.5, variance 1, clipped to [0, 1]."""
    p = np.random.default_rng([0, block]).normal(0.5, 1.0, (BLOCK, 3, SIDE, SIDE)).clip(0, 1)
    return (255 * p).round().astype(np.uint8)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); fetch the set again") from None


def one_line(error: Exception) -> str:
    """What another library's error says, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def stack(images: Sequence[Images], side: int = SIDE) -> Images:
    """Images one above the other, also when there are none."""
    return np.stack(images) if images else np.empty((0, 3, side, side), np.uint8)


def pillow() -> Any:
    """Pillow's Image module, or the error that says how to get it."""
    try:
        from PIL import Image  # noqa: PLC0415 (an optional dependency)
    except ImportError:
        raise MissingExtraError("reading image files needs Pillow; pip install 'igeood[data]'") from None
    return Image


@contextmanager
def decoding() -> Iterator[None]:
    """Pillow's warnings about odd files are not the user's business, but a decompression bomb is an error."""
    image = pillow()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", image.DecompressionBombWarning)
        yield


def prepare_file(path: Path, side: int = SIDE) -> Images:
    """Decode and prepare one image file, (3, side, side). Call it within `decoding`."""
    image = pillow()
    content = _bytes(path)  # all of it: of a file, Pillow would ask for as much as the file says there is
    try:
        with image.open(io.BytesIO(content), formats=FORMATS) as opened:
            if opened.width * opened.height > FREE_PIXELS + PIXELS_PER_BYTE * len(content):
                told = f"{opened.width} x {opened.height} pixels from {len(content):,} bytes"
                raise InputError(f"{path}: {told} is no photograph, and may be a bomb; remove it")  # noqa: TRY301
            return prepare(opened, where=str(path), side=side)
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 (each of Pillow's formats fails in its own way)
        reason = one_line(error)
        raise InputError(f"{path}: does not decode as an image ({reason}); remove it, or fetch the set again") from None


def prepare(image: "Image", *, where: str, side: int = SIDE) -> Images:
    """Resize the shorter side to 32 pixels (bilinear), or to `side`, crop the centre, convert to RGB: (3, 32, 32)."""
    resampling = pillow().Resampling.BILINEAR
    if min(image.size) < 1 or image.width * image.height > MAX_PIXELS:
        raise InputError(f"{where}: {image.width} x {image.height} pixels is no image to be read here; remove it")
    scale = side / min(image.size)
    width, height = (max(side, round(scale * length)) for length in image.size)
    if width * height > MAX_PIXELS:
        raise InputError(f"{where}: {image.width} x {image.height} pixels is too long and narrow to resize; remove it")
    if image.mode.startswith("I"):  # 16 bits: Pillow would cut them off at 255
        image = pillow().fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    resized = image.convert("RGB").resize((width, height), resampling)
    left, top = (width - side) // 2, (height - side) // 2
    return np.asarray(resized.crop((left, top, left + side, top + side))).transpose(2, 0, 1)
