import errno
import hashlib
import json
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from igeood.bench.datasets import download
from igeood.bench.datasets.download import beside, fetch
from igeood.errors import InputError

CONTENT = np.random.default_rng(0).bytes(300_000)
MD5 = "md5:" + hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()


@pytest.fixture
def target(tmp_path):
    return tmp_path / "folder" / "file.bin"


def left(target):
    return sorted(path.name for path in target.parent.iterdir())


def test_a_file_arrives_whole_and_progress_is_told(web, target):
    told = []
    fetch(web.add("f", CONTENT), target, size=len(CONTENT), checksum=MD5, progress=lambda *a: told.append(a))
    assert target.read_bytes() == CONTENT
    assert left(target) == ["file.bin"]
    assert told[-1] == ("file.bin", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


def test_sha256_and_no_checksum_at_all(web, target):
    fetch(web.add("f", CONTENT), target, checksum="sha256:" + hashlib.sha256(CONTENT).hexdigest())
    fetch(web.add("g", b"other"), target)
    assert target.read_bytes() == b"other"


@pytest.mark.parametrize("ranges", [True, False])
def test_a_cut_connection_is_resumed_or_started_again(web, target, ranges):
    web.cut_after, web.ranges = 100_000, ranges
    url = web.add("f", CONTENT)
    with pytest.raises(InputError, match=r"ended after 100,000 of 300,000 bytes; run the same command again"):
        fetch(url, target, tries=1)
    assert left(target) == ["file.bin.part", "file.bin.part.json"]
    fetch(url, target, checksum=MD5)
    assert web.asked == [None, "bytes=100000-"]
    assert target.read_bytes() == CONTENT
    assert left(target) == ["file.bin"]


def test_it_connects_again_by_itself(web, target):
    web.cut_after = 1234
    fetch(web.add("f", CONTENT), target, checksum=MD5)
    assert web.asked == [None, "bytes=1234-"]


def test_a_changed_file_is_started_again(web, target):
    web.cut_after = 1000
    with pytest.raises(InputError):
        fetch(web.add("f", b"old" * 1000), target, tries=1)
    fetch(web.add("f", CONTENT), target, checksum=MD5)
    assert target.read_bytes() == CONTENT


def test_without_a_validator_nothing_is_resumed(web, target):
    web.cut_after, web.validators = 1000, False
    fetch(web.add("f", CONTENT), target, checksum=MD5)
    assert web.asked == [None, None]


@pytest.mark.parametrize("state", ["", "[]", "{}", '{"url": 3, "validator": null}', "\x00"])
def test_a_damaged_memory_only_means_a_new_start(web, target, state):
    part, memory = beside(target)
    target.parent.mkdir()
    part.write_bytes(b"rubbish")
    memory.write_text(state)
    fetch(web.add("f", CONTENT), target, checksum=MD5)
    assert target.read_bytes() == CONTENT


def test_a_server_that_answers_with_another_part_is_not_believed(web, target):
    web.cut_after, web.lie = 1000, True
    fetch(web.add("f", CONTENT), target, checksum=MD5)
    assert web.asked == [None, "bytes=1000-", None]


def test_a_complete_part_is_used_or_asked_for_again(web, target):
    url = web.add("f", CONTENT)
    part, memory = beside(target)
    target.parent.mkdir()
    part.write_bytes(CONTENT)
    tag = f'"{hashlib.sha256(CONTENT).hexdigest()[:16]}"'
    memory.write_text(json.dumps({"url": url, "validator": tag}))
    fetch(url, target, checksum=MD5)  # its size is unknown: the server answers 416
    assert web.asked == ["bytes=300000-", None]
    target.rename(part)
    memory.write_text(json.dumps({"url": url, "validator": tag}))
    fetch(url, target, size=len(CONTENT), checksum=MD5)
    assert len(web.asked) == 2


def test_a_wrong_checksum_leaves_nothing(web, target):
    with pytest.raises(InputError, match=r"/f: md5 [0-9a-f]{32}, expected 0+; nothing was kept: run it again"):
        fetch(web.add("f", CONTENT), target, checksum="md5:" + "0" * 32)
    assert left(target) == []


def test_an_old_file_survives_a_bad_download(web, target):
    target.parent.mkdir()
    target.write_bytes(b"old")
    with pytest.raises(InputError):
        fetch(web.add("f", CONTENT), target, checksum="md5:" + "0" * 32)
    assert target.read_bytes() == b"old"


def test_wrong_sizes_are_errors(web, target, monkeypatch):
    url = web.add("f", CONTENT)
    with pytest.raises(InputError, match="300,000 bytes, expected at most 10"):
        fetch(url, target, size=10)
    with pytest.raises(InputError, match="300,000 bytes, expected 400,000; nothing was kept"):
        fetch(url, target, size=400_000)
    monkeypatch.setattr(download, "MAX_BYTES", 1000)
    with pytest.raises(InputError, match="at most 1,000"):
        fetch(url, target)
    assert not target.exists()


def test_a_server_that_sends_more_than_it_said_is_cut_off(web, target, monkeypatch):
    monkeypatch.setattr(download, "_receive", lambda _: b"x" * 100_000)
    with pytest.raises(InputError, match="more than the 300,000 bytes"):
        fetch(web.add("f", CONTENT), target, size=len(CONTENT))
    assert beside(target)[0].stat().st_size == 0


def test_refusals_name_the_address_and_the_way_on(web, target):
    with pytest.raises(InputError, match=r"/none: the server says 404 .*see the set's page"):
        fetch(f"{web.url}/none", target)
    for url in ("file:///etc/passwd", "ftp://host/x", "/etc/passwd"):
        with pytest.raises(InputError, match="neither http nor https"):
            fetch(url, target)
    with pytest.raises(InputError, match=r"no connection .*run the same command again"):
        fetch("http://127.0.0.1:9/x", target, tries=2)


@pytest.mark.parametrize("place", ["ftp://host/x", "file:///etc/passwd"])
def test_redirections_stay_on_the_web(web, target, place):
    web.redirect = place
    with pytest.raises(InputError, match=r"(redirects to|the server says 302)"):
        fetch(f"{web.url}/f", target)


def test_https_is_not_left_by_a_redirection():
    request = urllib.request.Request("https://host/f")
    with pytest.raises(InputError, match="redirects to http://host/f, which is less safe"):
        download._Redirect().redirect_request(request, None, 302, "Found", {}, "http://host/f")
    assert download._Redirect().redirect_request(request, None, 302, "Found", {}, "https://other/f").host == "other"


def test_a_full_disk_keeps_what_is_there(web, target, monkeypatch):
    url = web.add("f", CONTENT)
    web.cut_after = 1000
    with pytest.raises(InputError):
        fetch(url, target, tries=1)
    real = Path.open

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

    def opened(path, mode="r", *args, **options):
        file = real(path, mode, *args, **options)
        return Full(file) if mode == "r+b" else file

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(InputError, match=r"file\.bin: the disk is full; what is done is kept: free some space"):
        fetch(url, target)
    monkeypatch.undo()
    assert beside(target)[0].stat().st_size == 1000
    fetch(url, target, checksum=MD5)


def test_a_folder_that_cannot_be_written_is_named(web, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"cannot be written .*IGEOOD_DATA"):
        fetch(web.add("f", CONTENT), tmp_path / "file" / "f")
