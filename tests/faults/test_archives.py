"""Hostile archives and bombs: refused before anything is written outside, or much is written at all."""

import gzip
import io
import json
import os
import stat
import struct
import subprocess
import sys
import tarfile
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from igeood.datasets import DATASETS, Download
from igeood.datasets import unpack as unpacking
from igeood.datasets.store import get
from igeood.datasets.unpack import ARCHIVES, unpack
from igeood.errors import InputError

HERE = Path(__file__).parent


def member(name, content=b"x", kind=tarfile.REGTYPE, link="", mode=0o644):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    info.size = len(content) if kind in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE) else 0
    return info, content


def tar(*members, pax=None):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT) as archive:
        for info, content in members:
            info.pax_headers = pax or {}
            archive.addfile(info, io.BytesIO(content))
    return made.getvalue()


def zipped(*entries):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are there twice
        for name, content, mode in entries:
            info = zipfile.ZipInfo("x")
            info.filename, info.external_attr, info.compress_type = name, mode << 16, zipfile.ZIP_DEFLATED
            archive.writestr(info, content)
    return made.getvalue()


def build(suffix, *names_and_contents):
    """Plain files under these names."""
    if suffix == ".zip":
        return zipped(*((name, content, 0) for name, content in names_and_contents))
    content = tar(*(member(name, content) for name, content in names_and_contents))
    return content if suffix == ".tar" else gzip.compress(content, mtime=0)


OUTSIDE = [
    "../out", "set/../../out", "set/../../../../../../../tmp/out", "/igeood-out", "//igeood-out", "C:/out",
    "C:out", "C:\\out", "\\out", "set\\..\\..\\out", "\\\\host\\share\\out", "..", "set/..", "set/a:stream",
]  # fmt: skip
NO_FILE = [".", "set/" + 300 * "n", "d/" * 2500 + "f"]
TWICE = [("set/a", "set/a"), ("set/a", "set//a"), ("set/a", "./set/a"), ("set/a", "set/A"), ("set/ß", "SET/SS"),
         ("set/a", "set/a/b"), ("set/a/b", "set/a")]  # fmt: skip
LINKS = {
    "a symbolic link outside": [member("set/l", kind=tarfile.SYMTYPE, link="../../out")],
    "an absolute symbolic link": [member("set/l", kind=tarfile.SYMTYPE, link="/etc/passwd")],
    "a symbolic link to another member": [member("set/a"), member("set/l", kind=tarfile.SYMTYPE, link="a")],
    "a file behind a symbolic link": [member("set", kind=tarfile.SYMTYPE, link=".."), member("set/out")],
    "a hard link outside": [member("set/l", kind=tarfile.LNKTYPE, link="/etc/passwd")],
    "a hard link to another member": [member("set/a"), member("set/l", kind=tarfile.LNKTYPE, link="set/a")],
    "a character device": [member("set/null", kind=tarfile.CHRTYPE)],
    "a block device": [member("set/disk", kind=tarfile.BLKTYPE)],
    "a pipe": [member("set/pipe", kind=tarfile.FIFOTYPE)],
    "a sparse file": [member("set/hole", kind=tarfile.GNUTYPE_SPARSE)],
    "a link in an extended header": [member("set/l", kind=tarfile.SYMTYPE, link="x" * 3000)],
}


@pytest.fixture
def into(tmp_path):
    folder = tmp_path / "root" / "into"
    folder.mkdir(parents=True)
    return folder


def refuse(content, suffix, into, match, **limits):
    """Unpacking fails, and what is beside the folder is as it was; what is in it is plain."""
    archive = into.parents[1] / f"x{suffix}"
    archive.write_bytes(content)
    with pytest.raises(InputError, match=match) as error:
        unpack(archive, into, **limits)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"{archive}: ")
    assert {path.name for path in into.parents[1].iterdir()} == {"root", archive.name}
    assert list(into.parent.iterdir()) == [into]
    assert not Path("/igeood-out").exists()
    assert not Path("/tmp/out").exists()  # noqa: S108
    for path in into.rglob("*"):
        assert path.is_dir() or (path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1)
    return error.value


@pytest.mark.parametrize("suffix", ARCHIVES)
@pytest.mark.parametrize("name", OUTSIDE)
def test_no_name_leads_outside(into, suffix, name):
    refuse(build(suffix, (name, b"x")), suffix, into, "points outside|cannot be a file")
    assert not list(into.rglob("*"))


@pytest.mark.parametrize("suffix", ARCHIVES)
@pytest.mark.parametrize("name", NO_FILE, ids=lambda name: name[:8])
def test_names_that_no_file_can_have(into, suffix, name):
    refuse(build(suffix, (name, b"x")), suffix, into, "cannot be a file|damaged, or no archive")


@pytest.mark.parametrize("suffix", [s for s in ARCHIVES if s != ".zip"])
def test_a_name_with_a_nul_in_it(into, suffix):
    content = tar(member("set/a"), pax={"path": "set/a\0b"})
    refuse(content if suffix == ".tar" else gzip.compress(content), suffix, into, "points outside|damaged")


@pytest.mark.parametrize("suffix", ARCHIVES)
@pytest.mark.parametrize("names", TWICE, ids="+".join)
def test_two_files_of_one_name(into, suffix, names):
    """Also where only the case differs: on some disks that is the same file."""
    refuse(build(suffix, (names[0], b"one"), (names[1], b"two")), suffix, into, "is there twice|cannot be a file")


@pytest.mark.parametrize("suffix", [s for s in ARCHIVES if s != ".zip"])
@pytest.mark.parametrize("what", LINKS)
def test_links_devices_and_pipes(into, suffix, what):
    content = tar(*LINKS[what])
    refuse(content if suffix == ".tar" else gzip.compress(content), suffix, into, "is no plain file|damaged")


@pytest.mark.parametrize("kind", ["S_IFLNK", "S_IFCHR", "S_IFBLK", "S_IFIFO", "S_IFSOCK"])
def test_links_devices_and_pipes_in_zip(into, kind):
    content = zipped(("set/l", b"../../out", getattr(stat, kind) | 0o777))
    refuse(content, ".zip", into, "is no plain file")


@pytest.mark.parametrize("suffix", ARCHIVES)
def test_nothing_is_made_executable(into, suffix):
    mode = 0o6777
    if suffix == ".zip":
        content = zipped(("set/run", b"#!", stat.S_IFREG | mode))
    else:
        content = tar(member("set/run", b"#!", mode=mode))
        content = content if suffix == ".tar" else gzip.compress(content)
    archive = into.parents[1] / f"x{suffix}"
    archive.write_bytes(content)
    unpack(archive, into)
    assert not (into / "set/run").stat().st_mode & 0o7111


@pytest.mark.parametrize("suffix", ARCHIVES)
def test_an_archive_in_an_archive_is_a_file(into, suffix):
    inner = build(suffix, ("../out", b"x"))
    archive = into.parents[1] / f"x{suffix}"
    archive.write_bytes(build(suffix, (f"set/inner{suffix}", inner)))
    assert list(unpack(archive, into)) == [f"set/inner{suffix}"]
    assert (into / f"set/inner{suffix}").read_bytes() == inner


# --- bombs


def written(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("suffix", [".tar.gz", ".tgz", ".zip"])
@pytest.mark.parametrize("folders", [(), ("set",), ("other",)], ids=["all", "this", "another"])
def test_a_thousand_times_its_size(into, suffix, folders, monkeypatch):
    """Written, or passed over, it is stopped at a hundred times."""
    monkeypatch.setattr(unpacking, "FREE_BYTES", 1 << 20)
    content = build(suffix, ("set/zeros", bytes(16 << 20)))
    assert len(content) * 900 < 16 << 20
    if suffix == ".zip" and folders == ("other",):  # what is passed over in a zip is not unpacked
        (into.parents[1] / "x.zip").write_bytes(content)
        assert unpack(into.parents[1] / "x.zip", into, folders=folders) == {}
        return
    refuse(content, suffix, into, "more than is allowed", folders=folders)
    assert written(into) <= unpacking.FREE_BYTES + unpacking.RATIO * len(content)


@pytest.mark.parametrize("suffix", ARCHIVES)
def test_many_entries(into, suffix):
    content = build(suffix, *((f"set/{i}", b"") for i in range(2000)))
    refuse(content, suffix, into, "more than 500 entries", max_members=500)
    assert len(list(into.rglob("*"))) <= 501


def test_entries_that_share_their_bytes(into, monkeypatch):
    """A zip whose hundred entries are all the same stored bytes."""
    monkeypatch.setattr(unpacking, "FREE_BYTES", 0)
    body = os.urandom(1000)
    local = struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 0, zipfile.crc32(body), 1000, 1000, 1, 0) + b"a" + body
    heads = b"".join(
        struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 0, 0, 0, zipfile.crc32(body), 1000, 1000, 1, 0, 0, 0, 0, 0, 0)
        + b"a"
        for _ in range(3000)
    )
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 3000, 3000, len(heads), len(local), 0)
    refuse(local + heads + end, ".zip", into, "is there twice|damaged|more than is allowed")
    assert written(into) <= 1000


@pytest.mark.parametrize("claimed", [10**6, 8**11 - 1])
@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_an_entry_that_claims_more_than_there_is(into, suffix, claimed):
    info, _ = member("set/a")
    info.size = claimed
    content = info.tobuf() + bytes(1024)
    refuse(content if suffix == ".tar" else gzip.compress(content), suffix, into, "damaged|more than is allowed")


def test_a_zip_that_claims_more_than_there_is(into):
    content = bytearray(build(".zip", ("set/a", b"x" * 100)))
    at = content.index(b"PK\1\2") + 24
    content[at : at + 4] = struct.pack("<I", 2**32 - 2)
    (into.parents[1] / "x.zip").write_bytes(content)
    assert unpack(into.parents[1] / "x.zip", into)["set/a"]["size"] == 100  # what there is, as its checksum says


@pytest.mark.parametrize("suffix", ARCHIVES)
@pytest.mark.parametrize("fault", ["../out", "cut", "bomb"])
def test_nothing_half_unpacked_gets_the_name_of_a_set(tmp_path, suffix, fault, monkeypatch):
    """`get` leaves no file of the set, nor its own folder, when the archive turns out to be bad in the end."""
    monkeypatch.setattr(unpacking, "FREE_BYTES", 1 << 20)
    first = ("LSUN_resize/a.png", os.urandom(5000))
    last = {
        "../out": ("../out", b"x"),
        "cut": ("LSUN_resize/b.png", os.urandom(5000)),
        "bomb": ("LSUN_resize/b.png", bytes(4 << 20)),
    }
    content = build(suffix, first, last[fault])
    content = content[:8000] if fault == "cut" else content
    if fault == "bomb" and suffix == ".tar":
        monkeypatch.setattr(unpacking, "RATIO", 0)
    root = tmp_path / "root"
    root.mkdir()
    (root / f"x{suffix}").write_bytes(content)
    dataset = replace(DATASETS["lsun"], downloads=(Download(f"http://127.0.0.1:9/x{suffix}"),))
    with pytest.raises(InputError, match=r"points outside|damaged|more than is allowed"):
        get(dataset, root)
    assert {path.name for path in root.iterdir()} <= {f"x{suffix}", ".igeood"}
    assert not [path for path in (root / ".igeood").rglob("*") if path.suffix != ".lock"]
    assert {path.name for path in tmp_path.iterdir()} == {"root"}


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_small_files_that_would_fill_the_memory(tmp_path):
    """Each is refused within 64 MB and 16 times the file's size, and within seconds."""
    told = tmp_path / "told.json"
    done = subprocess.run(
        [sys.executable, HERE / "bombs.py", told], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(told.read_text())
    assert {what: f for what, f in found.items() if f["outcome"] != "refused" and not f["tolerant"]} == {}
    assert {what: f for what, f in found.items() if f["outcome"] == "failed"} == {}
    assert len(found) >= 31
    assert all(f["bytes"] < 500_000 for f in found.values())
