import dataclasses
import errno
import json
import subprocess
import sys

import pytest

from igeood.bench.datasets import DATASETS, Download, store
from igeood.bench.datasets.store import OWN, get, status
from igeood.errors import InputError

SMALL = {"cifar-10-batches-bin/data_batch_1.bin": 3, "cifar-10-batches-bin/test_batch.bin": 2}


@pytest.fixture
def served(web, tmp_path, tar, cifar):
    """A small CIFAR-10 on the server."""
    files = {name: cifar(n) for name, n in SMALL.items()}
    content = tar(tmp_path / "made.tar.gz", files).read_bytes()
    download = Download(web.add("small.tar.gz", content), len(content))
    layouts = {split: ((name,),) for split, name in zip(("train", "test"), SMALL, strict=True)}
    return dataclasses.replace(
        DATASETS["cifar-10"], counts={"train": 3, "test": 2}, layouts=layouts, downloads=(download,)
    )


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


def names(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_get_fetches_unpacks_and_notes_every_file(served, root, web):
    assert status(served, root).state == "missing"
    assert get(served, root)
    assert names(root) == [f"{OWN}/cifar-10.json", *SMALL]
    manifest = json.loads((root / OWN / "cifar-10.json").read_text())
    assert set(manifest["files"]) == set(SMALL)
    assert status(served, root, deep=True, decode=True) == store.Status("cifar-10", "ok", 5, 5)
    assert not get(served, root)
    assert len(web.asked) == 1
    assert get(served, root, force=True)
    assert len(web.asked) == 2


def test_a_part_is_completed_and_other_files_stay(served, root, cifar):
    (root / "cifar-10-batches-bin").mkdir(parents=True)
    (root / "cifar-10-batches-bin/test_batch.bin").write_bytes(cifar(1))
    (root / "cifar-10-batches-bin/mine.txt").write_text("mine")
    assert status(served, root) == store.Status("cifar-10", "partial", 1, 5, "train 0 of 3; test 1 of 2")
    assert get(served, root)
    assert (root / "cifar-10-batches-bin/mine.txt").read_text() == "mine"
    assert status(served, root, deep=True).state == "ok"


def test_verification_finds_what_has_changed(served, root):
    get(served, root)
    path = root / "cifar-10-batches-bin/test_batch.bin"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    assert status(served, root).state == "ok"
    found = status(served, root, deep=True)
    assert found.state == "damaged"
    assert "test_batch.bin: has other contents" in found.detail
    assert "get --force cifar-10" in found.detail
    path.write_bytes(content[:3073])
    assert "3,073 bytes, expected 6,146" in status(served, root, deep=True).detail
    path.write_bytes(content[:-1])
    assert "truncated" in status(served, root).detail
    path.unlink()
    assert "is gone" in status(served, root, deep=True).detail
    (root / OWN / "cifar-10.json").write_text("[")
    assert "cifar-10.json: damaged" in status(served, root, deep=True).detail
    (root / OWN / "cifar-10.json").unlink()
    assert status(served, root, deep=True).detail == "test 0 of 2; no manifest: counted only"


def test_too_many_images_are_damage_and_decoding_finds_bad_ones(tmp_path, pictures):
    dataset = dataclasses.replace(DATASETS["isun"], counts={"test": 2})
    pictures(tmp_path / "iSUN", ["a.png", "b.png", "c.png"])
    assert "3 images, expected 2; remove" in status(dataset, tmp_path).detail
    (tmp_path / "iSUN/c.png").unlink()
    (tmp_path / "iSUN/b.png").write_bytes(b"no image")
    assert status(dataset, tmp_path).state == "ok"
    found = status(dataset, tmp_path, decode=True)
    assert (found.state, "b.png" in found.detail) == ("damaged", True)


def test_plain_files_need_no_unpacking(web, root, tmp_path):
    content = b"not really a mat file"
    download = Download(web.add("test_32x32.mat", content), into="svhn")
    dataset = dataclasses.replace(DATASETS["svhn"], downloads=(download,), counts={"test": 10_000})
    assert get(dataset, root)
    assert (root / "svhn/test_32x32.mat").read_bytes() == content
    assert status(dataset, root, deep=True).state == "damaged"


def test_a_bad_archive_leaves_no_set(served, root, web, tmp_path, tar):
    content = tar(
        tmp_path / "bad.tar.gz", {"cifar-10-batches-bin/test_batch.bin": b"x" * 3073, "../out": b"x"}
    ).read_bytes()
    dataset = dataclasses.replace(served, downloads=(Download(web.add("bad.tar.gz", content)),))
    with pytest.raises(InputError, match=r"bad\.tar\.gz: entry '\.\./out'"):
        get(dataset, root)
    assert names(root) == ["bad.tar.gz"]
    assert not list((root / OWN).glob("unpack-*"))


def test_another_archive_than_expected_is_said_so(served, root, web, tmp_path, tar):
    content = tar(tmp_path / "other.tar.gz", {"other/file": b"x"}).read_bytes()
    dataset = dataclasses.replace(served, downloads=(Download(web.add("other.tar.gz", content)),))
    with pytest.raises(InputError, match=r"cifar-10 is missing after download .*see https"):
        get(dataset, root)


def test_a_full_disk_while_unpacking_keeps_the_download(served, root, web, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("igeood.bench.datasets.unpack._write", full)
    with pytest.raises(InputError, match="the disk is full; what is done is kept"):
        get(served, root)
    assert names(root) == ["small.tar.gz"]
    monkeypatch.undo()
    assert get(served, root)
    assert len(web.asked) == 1
    assert (root / "small.tar.gz").exists()  # it may as well be the user's


def test_a_read_only_root_is_named(served, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"file.*cannot be written .*IGEOOD_DATA"):
        get(served, tmp_path / "file" / "root")


def test_made_sets_need_nothing_and_others_say_where_to_go(root):
    assert not get(DATASETS["gaussian"], root)
    assert not root.exists()
    by_hand = dataclasses.replace(DATASETS["lsun"], downloads=())
    with pytest.raises(InputError, match=r"lsun: must be fetched by hand: see https.*unpack it in"):
        get(by_hand, root)


def test_two_processes_do_not_fetch_the_same_set(served, root):
    script = (
        "import sys; from pathlib import Path; from igeood.files import only_one\n"
        "with only_one(Path(sys.argv[1]) / '.igeood' / 'cifar-10.lock', 'cifar-10'):\n"
        "    print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(InputError, match=r"cifar-10: another process is writing there .*cifar-10\.lock.*wait"):
            get(served, root)
        other.kill()
    assert get(served, root)  # a lock does not outlive its process


def test_an_archive_touches_nothing_but_its_own_set(served, root, web, tmp_path, tar, cifar):
    """Entries in other sets' folders, in the manifests' or beside them are not unpacked."""
    own = {name: cifar(n) for name, n in SMALL.items()}
    foreign = {"iSUN/a.png": b"x", f"{OWN}/isun.json": b"{}", "weights/w.safetensors": b"x", "readme.txt": b"x"}
    content = tar(tmp_path / "odd.tar.gz", {**own, **foreign}).read_bytes()
    odd = dataclasses.replace(served, downloads=(Download(web.add("odd.tar.gz", content), len(content)),))
    (root / OWN / "unpack-cifar-10").mkdir(parents=True)  # what a killed run left
    (root / OWN / "unpack-cifar-10" / "half").write_text("half")
    assert get(odd, root)
    assert names(root) == [f"{OWN}/cifar-10.json", *SMALL]
