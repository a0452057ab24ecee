"""Tiny files of each official format, and a web server that behaves or does not."""

import hashlib
import http.server
import io
import tarfile
import threading
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat


def cifar_bytes(n, *, classes=10, seed=0):
    rng = np.random.default_rng(seed)
    records = rng.integers(0, 256, (n, 3072 + (2 if classes == 100 else 1)), dtype=np.uint8)
    records[:, 0] = np.arange(n) % (20 if classes == 100 else 10)
    if classes == 100:
        records[:, 1] = np.arange(n) % 100
    return records.tobytes()


def idx_bytes(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def write_images(folder, names, size=(40, 36)):
    folder.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(names):
        pixels = np.random.default_rng(i).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)


def make_root(root: Path) -> Path:
    """A few images of every set, in the official layout."""
    (root / "cifar-10-batches-bin").mkdir(parents=True)
    (root / "cifar-100-binary").mkdir()
    (root / "svhn").mkdir()
    for i in range(1, 6):
        (root / f"cifar-10-batches-bin/data_batch_{i}.bin").write_bytes(cifar_bytes(4, seed=i))
    (root / "cifar-10-batches-bin/test_batch.bin").write_bytes(cifar_bytes(6))
    for part in ("train", "test"):
        (root / f"cifar-100-binary/{part}.bin").write_bytes(cifar_bytes(5, classes=100))
        x = np.random.default_rng(3).integers(0, 256, (32, 32, 3, 12), dtype=np.uint8)
        savemat(root / f"svhn/{part}_32x32.mat", {"X": x, "y": np.arange(12, dtype=np.uint8)[:, None] % 10 + 1})
    write_images(root / "tiny-imagenet-200/test/images", ["test_0.JPEG", "test_1.JPEG"], (64, 64))
    write_images(root / "tiny-imagenet-200/val/images", ["val_0.JPEG"], (64, 64))
    write_images(root / "tiny-imagenet-200/train/n01/images", ["n01_0.JPEG"], (64, 64))
    write_images(root / "LSUN_resize/LSUN_resize", ["1.jpg", "2.png"], (32, 32))
    write_images(root / "iSUN/iSUN_patches", ["a.jpeg", "b.jpeg"], (32, 32))
    write_images(root / "dtd/images/banded", ["banded_1.jpg"], (70, 50))
    write_images(root / "dtd/images/zigzagged", ["zigzagged_1.jpg"], (50, 90))
    write_images(root / "English/Img/GoodImg/Bmp/Sample001", ["img001-00001.png"], (20, 51))
    write_images(root / "English/Img/GoodImg/Msk/Sample001", ["img001-00001.png"], (20, 51))
    write_images(root / "English/Img/GoodImg/Bmp/Sample002", ["img002-00001.png"], (30, 12))
    write_images(root / "val_256", ["Places365_val_00000001.jpg"], (256, 256))
    return root


@pytest.fixture
def root(tmp_path):
    return make_root(tmp_path / "data")


@pytest.fixture(scope="session")
def cifar():
    return cifar_bytes


@pytest.fixture(scope="session")
def idx():
    return idx_bytes


@pytest.fixture(scope="session")
def pictures():
    return write_images


@pytest.fixture
def tar():
    """Make a tar.gz from {name: bytes}, or from TarInfo objects."""

    def build(path, files=(), members=()):
        with tarfile.open(path, "w:gz") as archive:
            for name, content in dict(files).items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            for member in members:
                archive.addfile(member)
        return path

    return build


@pytest.fixture
def zipped():
    def build(path, files):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return path

    return build


@dataclass
class Web:
    """A server on this machine: files by path, how it behaves, and what it was asked."""

    url: str = ""
    files: dict = field(default_factory=dict)
    ranges: bool = True
    cut_after: int | None = None  # bytes, once
    validators: bool = True
    lie: bool = False  # a wrong Content-Range
    redirect: str = ""
    asked: list = field(default_factory=list)

    def add(self, name, content):
        self.files[f"/{name}"] = content
        return f"{self.url}/{name}"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        web = self.server.web
        web.asked.append(self.headers.get("Range"))
        if web.redirect:
            self.send_response(302)
            self.send_header("Location", web.redirect)
            self.end_headers()
            return
        content = web.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        start = self._start(web, content, tag)
        if start is None:
            return
        body = content[start:]
        self.send_header("Content-Length", str(len(body)))
        if web.validators:
            self.send_header("ETag", tag)
        self.end_headers()
        if web.cut_after is not None:
            body, web.cut_after = body[: web.cut_after], None
        self.wfile.write(body)
        self.close_connection = True

    def _start(self, web, content, tag):
        asked = self.headers.get("Range")
        if not (web.ranges and asked and self.headers.get("If-Range") == tag):
            self.send_response(200)
            return 0
        start = int(asked.removeprefix("bytes=").rstrip("-"))
        if start >= len(content):
            self.send_error(416)
            return None
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {0 if web.lie else start}-{len(content) - 1}/{len(content)}")
        return start

    def log_message(self, *_):
        pass


@pytest.fixture
def web():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.web = Web(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server.web
        server.shutdown()
        thread.join()
