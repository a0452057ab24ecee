"""Archives, unpacked as if a stranger had made them: plain files and folders only, inside the target, not too many."""

import errno
import gzip
import hashlib
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from igeood.errors import InputError

MAX_BYTES = 8 << 30
MAX_MEMBERS = 500_000
FREE_BYTES, RATIO = 1 << 26, 100  # no archive of images unpacks to more than so many times its size, and a little
DAMAGE = (OSError, EOFError, ValueError, LookupError, RuntimeError)
NAMES = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EINVAL, errno.EILSEQ)
FOREIGN = "it is not the official archive: remove it"
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")

Entry = dict[str, int | str]  # size, sha256
Opener = Callable[[], IO[bytes]]
Members = Generator[tuple[str, Opener | None], None, None]


def unpack(
    archive: Path,
    into: Path,
    *,
    folders: Collection[str] = (),
    max_bytes: int = MAX_BYTES,
    max_members: int = MAX_MEMBERS,
) -> dict[str, Entry]:
    """Unpack a tar or zip archive into a folder, and give each file's size and SHA-256 by its path in the folder.

    Only what is below `folders` is unpacked, if some are given. Absolute paths, `..`, links and devices are errors, and
    so are two files of one name, and more than `max_members` entries, `max_bytes` bytes or `RATIO` times the archive's.
    """
    with _reading(archive):
        most = min(max_bytes, FREE_BYTES + RATIO * archive.stat().st_size)
    names: set[str] = set()  # as a disk sees them that does not tell cases apart
    files: dict[str, Entry] = {}
    total = count = 0
    with closing(_zip(archive) if archive.suffix == ".zip" else _tar(archive, most + FREE_BYTES)) as members:
        for name, content in members:
            count += 1
            if count > max_members:
                raise InputError(f"{archive}: more than {max_members:,} entries; {FOREIGN}")
            parts = _parts(archive, name)
            if folders and (not parts or parts[0] not in folders):
                continue
            target = into.joinpath(*parts)
            with _naming(archive, name):
                (target if content is None else target.parent).mkdir(parents=True, exist_ok=True)
                if content is None:
                    continue
                if (same := "/".join(parts).casefold()) in names:
                    raise InputError(f"{archive}: entry {name!r} is there twice; {FOREIGN}")
                names.add(same)
                size, digest = _write(archive, content, target, most - total)
            total += size
            files[target.relative_to(into).as_posix()] = {"size": size, "sha256": digest}
    return files


@contextmanager
def _naming(archive: Path, name: str) -> Iterator[None]:
    """A name that no disk takes is the archive's fault."""
    try:
        yield
    except OSError as error:
        if error.errno not in NAMES:
            raise
        raise InputError(f"{archive}: entry {name!r} cannot be a file ({error.strerror}); {FOREIGN}") from None


@contextmanager
def _reading(archive: Path) -> Iterator[None]:
    """Damage shows as many kinds of errors, OSError among them, which is not to be taken for the disk's."""
    try:
        yield
    except InputError:
        raise
    except (*DAMAGE, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
        raise InputError(f"{archive}: damaged, or no archive ({error}); remove it and fetch it again") from None


def _parts(archive: Path, name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in {"", "."}]
    if name.startswith("/") or ".." in parts or re.search(r"[\\:\0]", name):
        raise InputError(f"{archive}: entry {name!r} points outside the archive; {FOREIGN}")
    return parts


def _write(archive: Path, opened: Opener, target: Path, left: int) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    with _reading(archive):
        content = opened()
    with content, target.open("wb") as file:
        while chunk := _take(archive, content):
            size += len(chunk)
            if size > left:
                raise InputError(f"{archive}: unpacks to more than is allowed; {FOREIGN}")
            digest.update(chunk)
            file.write(chunk)
    return size, digest.hexdigest()


def _take(archive: Path, content: IO[bytes]) -> bytes:
    with _reading(archive):
        return content.read(1 << 20)


def _tar(archive: Path, most: int) -> Members:
    with _reading(archive), archive.open("rb") as raw:
        file: Any = _Sips(raw if archive.suffix == ".tar" else gzip.GzipFile(fileobj=raw), most)
        tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 (it holds nothing but `raw`)
        for member in tar:
            if not (member.isdir() or member.isreg()) or member.issparse():
                raise InputError(f"{archive}: entry {member.name!r} is no plain file; {FOREIGN}")
            yield member.name, None if member.isdir() else partial(tar.extractfile, member)  # type: ignore[misc]
            tar.members.clear()  # type: ignore[attr-defined]  # 100,000 headers need not stay in memory


class _Sips:
    """A file that gives little at a time, and not more than `most` in all.

    A header that claims gigabytes must not be read into memory, nor what is passed over be unpacked for hours.
    """

    def __init__(self, file: IO[bytes] | gzip.GzipFile, most: int) -> None:
        self.file, self.tell, self.most = file, file.tell, most

    def seek(self, place: int) -> int:
        if not 0 <= place <= self.most:
            raise ValueError(f"an entry at {place:,} bytes, more than is allowed")
        return self.file.seek(place)

    def read(self, size: int) -> bytes:
        if not 0 <= size <= 1 << 22:
            raise ValueError(f"a header of {size:,} bytes")
        return self.file.read(size)


def _zip(archive: Path) -> Members:
    with _reading(archive), zipfile.ZipFile(archive) as zipped:
        for info in zipped.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in {0, stat.S_IFREG, stat.S_IFDIR}:
                raise InputError(f"{archive}: entry {info.filename!r} is no plain file; {FOREIGN}")
            yield info.filename, None if info.is_dir() else partial(zipped.open, info)
