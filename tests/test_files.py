"""Files appear whole or not at all, by one writer at a time; records are read only if nothing has changed."""

import json
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from igeood import files
from igeood.errors import GuardFileError
from igeood.files import SCHEMA, only_one, read_record, whole, write_record, write_whole
from igeood.version import __version__


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("there", [True, False])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch, error, there):
    path = tmp_path / "a"
    if there:
        path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=error(28, "No space left on device")))
    with pytest.raises(error) as caught:
        write_whole(path, b"new")
    assert getattr(caught.value, "filename", str(path)) == str(path)
    assert names(tmp_path) == (["a"] if there else [])
    assert not there or path.read_bytes() == b"old"


def test_permissions_are_those_of_the_old_file_and_a_link_stays(tmp_path):
    umask = os.umask(0)
    os.umask(umask)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for mode in (0o666 & ~umask, 0o600, 0o664):
        if mode in (0o600, 0o664):
            (tmp_path / "a").chmod(mode)
        write_whole(tmp_path / "link", b"content")
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "a").read_bytes() == b"content"
        assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode


def test_paths_that_name_no_file_or_nothing(tmp_path, refused):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with refused("path"):
            write_whole(path, b"")
    with pytest.raises(GuardFileError):
        read_record(tmp_path / "none", "summary")


HOLDER = """
import time
from igeood.files import only_one, whole
with only_one("lock", "out"), whole("a") as file:
    file.write(b"half"); file.flush()
    print("holds", flush=True)
    time.sleep(300)
"""


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "PATIENCE", 0.2)
    (tmp_path / "a").write_bytes(b"old")
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "holds\n"
        for argument, lock in (("path", whole("a")), ("out", only_one("lock", "out"))):
            with refused(argument), lock:
                pass
        process.kill()
    assert (tmp_path / "a").read_bytes() == b"old"
    with only_one("lock", "out"):
        write_whole("a", b"new")
    assert ((tmp_path / "a").read_bytes(), names(tmp_path)) == (b"new", ["a"])  # what was left is swept


def test_writers_at_once_never_mix(tmp_path):
    contents = [bytes([65 + i]) * 200_000 for i in range(6)]
    with ThreadPoolExecutor(18) as pool:
        list(pool.map(lambda content: write_whole(tmp_path / "a", content), contents * 3))
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() in contents


X = torch.arange(6.0).reshape(2, 3)
TENSORS = {"x": X, "shared": X[:, 1:], "turned": X.T, "empty": torch.zeros(0, 3)}


@pytest.fixture
def path(tmp_path):
    write_record(tmp_path / "a.safetensors", {"kind": "guard", "share": 0.06666666666666667}, TENSORS)
    return tmp_path / "a.safetensors"


def test_a_record_comes_back_and_every_truncation_and_every_flipped_byte_is_refused(path):
    record, tensors = read_record(path)
    assert record == {"kind": "guard", "share": 0.06666666666666667, "schema": SCHEMA, "igeood": __version__}
    torch.testing.assert_close(tensors, TENSORS, rtol=0, atol=0)
    content = path.read_bytes()
    cuts = [content[:size] for size in range(0, len(content), 31)] + [content[:-1], content + b"\0"]
    places = range(0, len(content), 3)
    flips = [content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :] for at in places]
    same = content.replace(b"0.06666666666666667", b"0.06666666666666666")  # another text of the same number
    for damaged in [*cuts, *flips, same]:
        path.write_bytes(damaged)
        with pytest.raises(GuardFileError) as caught:
            read_record(path)
        assert caught.value.place == str(path)


NOW, NEXT = {"schema": SCHEMA}, {"schema": SCHEMA + 1, "igeood": "9.0"}


@pytest.mark.parametrize("record", [None, "[" * 100_000, {"schema": 1}, NOW, NEXT, {**NOW, "kind": "summary"}])
def test_other_files_are_refused(tmp_path, record):
    path = tmp_path / "a.safetensors"
    metadata = None if record is None else {"igeood": record if isinstance(record, str) else json.dumps(record)}
    save_file({"w": torch.zeros(2, dtype=torch.bfloat16)}, path, metadata)
    with pytest.raises(GuardFileError) as caught:
        read_record(path)
    assert caught.value.cure
