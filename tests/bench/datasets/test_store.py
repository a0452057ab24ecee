import gc
import tarfile
from dataclasses import replace

import pytest

from igeood.bench.datasets import DATASETS, Download
from igeood.bench.datasets.store import OWN, get, status, unpack
from igeood.errors import InputError

SMALL = {"cifar-10-batches-bin/data_batch_1.bin": 3, "cifar-10-batches-bin/test_batch.bin": 2}


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.fixture
def serve(web, make, packed):
    """Puts an archive on the server, and returns a small CIFAR-10 that is fetched from there."""

    def put(foreign=None, name="small.tar.gz", **options):
        files = {place: make.cifar(n) for place, n in SMALL.items()}
        content = packed(files | (foreign or {}), kind=name.partition(".")[2])
        (web.folder / name).write_bytes(content)
        layouts = {split: ((place,),) for split, place in zip(("train", "test"), SMALL, strict=True)}
        download = Download(f"{web.url}{name}", **{"checksum": make.md5(content), **options})
        return replace(DATASETS["cifar-10"], counts={"train": 3, "test": 2}, layouts=layouts, downloads=(download,))

    return put


def names(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.suffix != ".lock")


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_get_completes_what_is_there_and_leaves_other_files(serve, root, make, kind):
    small = serve({"iSUN/a.png": b"x", f"{OWN}/cifar-10.lock": b""}, f"small.{kind}")
    assert status(small, root).state == "missing"
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    (folder / "test_batch.bin").write_bytes(make.cifar(1))
    (folder / "mine.txt").write_text("mine")
    assert (status(small, root).state, status(small, root).found) == ("partial", 1)
    assert get(small, root)
    assert (names(root), status(small, root).state) == (sorted([*SMALL, f"{folder.name}/mine.txt"]), "ok")
    assert (folder / "mine.txt").read_text() == "mine"
    assert not get(small, root)
    assert get(small, root, force=True)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # pooch leaves the answer to a failed request open
@pytest.mark.parametrize("wrong", ["checksum", "cut", "not found"])
def test_a_download_that_fails_leaves_nothing(serve, root, web, wrong):
    small = serve(**({"checksum": f"md5:{'0' * 32}"} if wrong == "checksum" else {}))
    file = web.folder / "small.tar.gz"
    if wrong == "cut":
        file.write_bytes(file.read_bytes()[:100])
    if wrong == "not found":
        file.unlink()
    with pytest.raises(InputError, match=r"small\.tar\.gz"):
        get(small, root)
    assert names(root) == []
    assert not (root / OWN / "cifar-10").exists()
    gc.collect()


def link(kind, target):
    member = tarfile.TarInfo("set/link")
    member.type, member.linkname = kind, target
    return member


BAD = {
    "out.tar.gz": ({"set/a": b"a", "set/../../out": b"x"},),
    "link.tar.gz": ({}, link(tarfile.SYMTYPE, "/etc/passwd")),
    "hard.tar.gz": ({}, link(tarfile.LNKTYPE, "../x")),
    "device.tar.gz": ({}, link(tarfile.CHRTYPE, "")),
    "large.zip": ({"set/a": bytes(900), "set/b": bytes(900)},),
    "large.tar.gz": ({"set/a": bytes(900), "set/b": bytes(900)},),
}


@pytest.mark.parametrize("name", [*BAD, "page.zip", "page.tar.gz", "page.tar"])
def test_bad_archives_are_refused(tmp_path, packed, name, monkeypatch):
    monkeypatch.setattr("igeood.bench.datasets.store.MAX_BYTES", 1000)
    content = packed(*BAD[name], kind=name.partition(".")[2]) if name in BAD else b"<html>not found</html>"
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=name):
        unpack(tmp_path / name, tmp_path / "into", folders={"set"})
    assert names(tmp_path) == [name]


def test_nothing_of_a_zip_is_written_outside(tmp_path, packed):
    (tmp_path / "out.zip").write_bytes(packed({"set/a": b"a", "set/../../out": b"x", "../set/b": b"x"}, kind="zip"))
    unpack(tmp_path / "out.zip", tmp_path / "into", folders={"set"})
    assert names(tmp_path) == ["into/set/a", "out.zip"]
