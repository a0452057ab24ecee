"""Small right files of images and data sets, and how each is read."""

import gzip
import io
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.io import savemat
from seeds import SIDE, pixels

from igeood.datasets import Dataset, ImageSet, load
from igeood.datasets.unpack import unpack


def pictures(suffix: str) -> list[bytes]:
    """An image in each mode that the format has, some with options."""
    kind = Image.registered_extensions()[suffix]
    rgb = Image.fromarray(pixels(9, 11, 3))
    options: dict[str, list[dict[str, Any]]] = {
        "JPEG": [{"quality": 60}, {"progressive": True}],
        "PNG": [{}, {"interlace": 1}],
        "GIF": [{}, {"save_all": True, "append_images": [rgb.rotate(90)]}],
        "WEBP": [{}, {"lossless": True}, {"save_all": True, "append_images": [rgb]}],
        "TIFF": [{}, {"compression": "tiff_deflate"}, {"compression": "tiff_lzw"}, {"compression": "jpeg"}],
    }
    found = []
    for mode in ("RGB", "L", "1", "P", "LA", "RGBA", "CMYK", "I;16"):
        image = Image.fromarray(pixels(9, 22).view(np.uint16)) if mode == "I;16" else rgb.convert(mode)
        for more in options.get(kind, [{}]):
            made = io.BytesIO()
            try:
                image.save(made, kind, **more)
            except (OSError, ValueError, TypeError, RuntimeError):
                continue  # a mode that this format has not
            found.append(made.getvalue())
    return found


def read_folder(path: Path) -> None:
    check(load(f"folder:{path.parent}"))


def check(images: ImageSet) -> None:
    found = images.images()
    assert found.dtype == np.uint8
    assert found.shape == (len(images), 3, SIDE, SIDE)
    assert len(images) > 0
    if images.labels is not None:
        assert images.labels.shape == (len(images),)
        assert bool((images.labels >= 0).all())
        assert bool((images.labels < images.classes).all())


def cifar(dataset: Dataset) -> list[bytes]:
    header = 2 if dataset.classes == 100 else 1
    return [
        bytes(header) + pixels(3072, seed=s).tobytes() + bytes([1] * header) + pixels(3072).tobytes() for s in (1, 2)
    ]


def mat(_: Dataset) -> list[bytes]:
    found = []
    for packed in (True, False):
        made = io.BytesIO()
        savemat(
            made,
            {"X": pixels(SIDE, SIDE, 3, 3) // 64 * 64, "y": np.array([[1], [10], [3]], np.uint8)},
            do_compression=packed,
        )
        found.append(made.getvalue())
    return found


def photographs(_: Dataset) -> list[bytes]:
    return pictures(".jpg") + pictures(".png")


def idx(*shape: int) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes() + (pixels(*shape) % 10).tobytes()


def gz(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def read_idx(path: Path) -> None:
    check(load(f"idx:{path}"))


def read_idx_folder(path: Path) -> None:
    images = load(f"idx:{path.parent}")
    check(images)
    assert len(images.labels) == 2


def archives(suffix: str) -> list[bytes]:
    files = {
        "set/a.txt": b"abc" * 50,
        "set/deep/b.bin": pixels(300).tobytes(),
        "set/empty": b"",
        "set/" + "n" * 120: b"long",
    }
    made = io.BytesIO()
    if suffix == ".zip":
        with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return [made.getvalue()]
    found = []
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w", format=form) as archive:
            for name, content in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        found.append(made.getvalue())
    return found if suffix == ".tar" else [gz(content) for content in found]


def read_archive(path: Path) -> None:
    into = path.parent / "into"
    into.mkdir(parents=True)
    try:
        found = unpack(path, into, max_bytes=1 << 20, max_members=1000)
        assert all((into / name).stat().st_size == entry["size"] for name, entry in found.items())
    finally:
        odd = [p for p in into.rglob("*") if p.is_symlink() or not (p.is_file() or p.is_dir())]
        beside = {p.name for p in path.parent.iterdir()}
        _remove(into)
        assert not odd, odd
        assert beside == {path.name, "into"}, beside


def _remove(folder: Path) -> None:
    """Without `shutil.rmtree`, which names files in a way that cannot be watched."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
