"""Small files of each official format, archives of them, and a web server on this machine."""

import hashlib
import io
import tarfile
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from igeood.bench.datasets import DATASETS

N = 12  # images of a file or folder


def cifar_bytes(n, *, classes=10, seed=0):
    records = np.random.default_rng(seed).integers(0, 256, (n, 3072 + (2 if classes == 100 else 1)), dtype=np.uint8)
    records[:, 1 if classes == 100 else 0] = np.arange(n) % classes
    return records.tobytes()


def idx_bytes(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def write_images(folder, names, size=(40, 36)):
    folder.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(names):
        pixels = np.random.default_rng(i).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)


def write_mat(path):
    x = np.random.default_rng(3).integers(0, 256, (32, 32, 3, N), dtype=np.uint8)
    savemat(path, {"X": x, "y": (np.arange(N, dtype=np.uint8) % 10 + 1)[:, None]})
    return x


def md5(content):
    return f"md5:{hashlib.md5(content, usedforsecurity=False).hexdigest()}"


def write_split(dataset, split, root):
    for seed, place in enumerate(root / place for place in dataset.layouts[split][0]):
        place.parent.mkdir(parents=True, exist_ok=True)
        if dataset.kind == "cifar":
            place.write_bytes(cifar_bytes(N, classes=dataset.classes, seed=seed))
        elif dataset.kind == "mat":
            write_mat(place)
        else:
            write_images(place / "deep", [f"{i:02}.png" for i in range(N)])


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Every set in its official layout, with twelve images a file or folder; the .mat files count as official."""
    for dataset in DATASETS.values():
        for split in dataset.layouts:
            write_split(dataset, split, tmp_path / "data")
    svhn, content = DATASETS["svhn"], (tmp_path / "data/svhn/test_32x32.mat").read_bytes()
    downloads = tuple(replace(download, checksum=md5(content)) for download in svhn.downloads)
    monkeypatch.setitem(DATASETS, "svhn", replace(svhn, downloads=downloads))
    return tmp_path / "data"


@pytest.fixture(scope="session")
def make():
    """The functions above, for tests of this folder."""
    return SimpleNamespace(cifar=cifar_bytes, idx=idx_bytes, images=write_images, mat=write_mat, md5=md5)


@pytest.fixture(scope="session")
def packed():
    """Makes the bytes of a tar.gz or zip archive from {name: bytes} and TarInfo objects."""

    def build(files, *members, kind="tar.gz"):
        target = io.BytesIO()
        if kind == "zip":
            with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, content in files.items():
                    archive.writestr(name, content)
            return target.getvalue()
        with tarfile.open(fileobj=target, mode="w:gz") as archive:
            for name, content in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            for member in members:
                archive.addfile(member)
        return target.getvalue()

    return build


@pytest.fixture
def web(file_server, tmp_path_factory):
    """A server of a folder's files."""
    folder = tmp_path_factory.mktemp("web")
    with file_server(folder) as address:
        yield SimpleNamespace(url=address, folder=folder)
