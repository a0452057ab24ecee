import gzip
import hashlib
import io
import stat
import tarfile
import zipfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from igeood.bench.datasets.unpack import unpack
from igeood.errors import InputError

FILES = {"set/a.txt": b"a" * 10, "set/deep/b.txt": b"b" * 20, "./c.txt": b""}


@pytest.fixture
def into(tmp_path):
    folder = tmp_path / "into"
    folder.mkdir()
    return folder


@pytest.fixture(params=["tar.gz", "zip"])
def build(request, tmp_path, tar, zipped):
    def made(files):
        return (zipped if request.param == "zip" else tar)(tmp_path / f"x.{request.param}", files)

    return made


def test_files_come_out_with_their_hashes(build, into):
    found = unpack(build(FILES), into)
    assert (into / "set/deep/b.txt").read_bytes() == b"b" * 20
    assert found["set/a.txt"] == {"size": 10, "sha256": hashlib.sha256(b"a" * 10).hexdigest()}
    assert set(found) == {"set/a.txt", "set/deep/b.txt", "c.txt"}


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/out", "a\\..\\out", "C:/out", "C:out"])
def test_no_entry_gets_out(build, into, name):
    with pytest.raises(InputError, match=r"x\.(zip|tar\.gz): entry .* points outside .*remove it"):
        unpack(build({name: b"x"}), into)
    assert not list(into.rglob("*"))
    assert not (into.parent / "out").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(tmp_path, tar, into, kind):
    member = tarfile.TarInfo("link")
    member.type, member.linkname = kind, "/etc/passwd"
    with pytest.raises(InputError, match="'link' is no plain file"):
        unpack(tar(tmp_path / "x.tgz", members=[member]), into)
    assert not list(into.rglob("*"))


def test_links_in_zip_files_are_refused(tmp_path, into):
    info = zipfile.ZipInfo("link")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(InputError, match="'link' is no plain file"):
        unpack(tmp_path / "x.zip", into)


def test_bombs_are_stopped(build, into):
    with pytest.raises(InputError, match="unpacks to more than is allowed"):
        unpack(build({"a": bytes(900_000), "b": bytes(900_000)}), into, max_bytes=1_000_000)
    with pytest.raises(InputError, match="more than 3 entries"):
        unpack(build({str(i): b"" for i in range(5)}), into, max_members=3)


def test_permissions_are_ordinary(tmp_path, into):
    info = tarfile.TarInfo("run.sh")
    info.mode, info.size = 0o4777, 2
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.addfile(info, io.BytesIO(b"hi"))
    unpack(tmp_path / "x.tar", into)
    assert not (into / "run.sh").stat().st_mode & 0o7111


@pytest.mark.parametrize("name", ["x.zip", "x.tar.gz", "x.tar", "x.tgz"])
@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", gzip.compress(b"no tar", mtime=0)])
def test_what_is_no_archive_is_said_to_be_none(tmp_path, into, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=rf"{name}: damaged, or no archive .*fetch it again"):
        unpack(tmp_path / name, into)


def test_a_header_that_claims_much_is_not_read_into_memory(tmp_path, into):
    member = tarfile.TarInfo("pax")
    member.type, member.size = tarfile.XHDTYPE, 50_000_000
    with gzip.open(tmp_path / "x.tgz", "wb") as file:
        file.write(member.tobuf() + bytes(50_000_000))
    with pytest.raises(InputError, match="a header of 50,"):
        unpack(tmp_path / "x.tgz", into)


def test_many_large_files_come_out_right(tmp_path, tar, into):
    files = {f"d/{i}": bytes([i]) * (1 << 20) * (i % 3) + b"end" * i for i in range(12)}
    unpack(tar(tmp_path / "x.tar.gz", files), into)
    assert all((into / name).read_bytes() == content for name, content in files.items())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_damaged_archives_unpack_or_are_refused(build, into, data):
    path = build({"set/a": b"abc" * 100, "set/b": b"xyz" * 50})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: len(content) - data.draw(st.sampled_from([0, 0, 7, 60]))])
    try:
        unpack(path, into)
    except InputError:
        pass
    except OSError as error:  # names that this disk cannot hold are the caller's to report
        assert error.filename  # noqa: PT017
