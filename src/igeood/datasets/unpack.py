"""Archives, unpacked as if a stranger had made them: plain files and folders only, inside the target, not too many."""

import gzip
import hashlib
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from igeood.errors import InputError

MAX_BYTES = 8 << 30
MAX_MEMBERS = 500_000
FOREIGN = "it is not the official archive: remove it"
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")

Entry = dict[str, int | str]  # size, sha256


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
    so is more than `max_members` entries or `max_bytes` bytes.
    """
    members = _zip(archive) if archive.suffix == ".zip" else _tar(archive)
    files: dict[str, Entry] = {}
    total = count = 0
    for name, content in members:
        count += 1
        if count > max_members:
            raise InputError(f"{archive}: more than {max_members:,} entries; {FOREIGN}")
        parts = _parts(archive, name)
        if folders and (not parts or parts[0] not in folders):
            continue
        target = into.joinpath(*parts)
        if content is None:
            target.mkdir(parents=True, exist_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        size, digest = _write(archive, content, target, max_bytes - total)
        total += size
        files[target.relative_to(into).as_posix()] = {"size": size, "sha256": digest}
    return files


@contextmanager
def _reading(archive: Path) -> Iterator[None]:
    """Damage shows as many kinds of errors, OSError among them, which is not to be taken for the disk's."""
    try:
        yield
    except InputError:
        raise
    except (OSError, EOFError, ValueError, RuntimeError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
        raise InputError(f"{archive}: damaged, or no archive ({error}); remove it and fetch it again") from None


def _parts(archive: Path, name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in {"", "."}]
    if name.startswith("/") or ".." in parts or re.search(r"[\\:\0]", name):
        raise InputError(f"{archive}: entry {name!r} points outside the archive; {FOREIGN}")
    return parts


def _write(archive: Path, content: IO[bytes], target: Path, left: int) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
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


def _tar(archive: Path) -> Iterator[tuple[str, IO[bytes] | None]]:
    with _reading(archive), archive.open("rb") as raw:
        file: Any = _Sips(raw if archive.suffix == ".tar" else gzip.GzipFile(fileobj=raw))
        tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 (it holds nothing but `raw`)
        for member in tar:
            if not (member.isdir() or member.isreg()) or member.issparse():
                raise InputError(f"{archive}: entry {member.name!r} is no plain file; {FOREIGN}")
            yield member.name, tar.extractfile(member)
            tar.members.clear()  # type: ignore[attr-defined]  # 100,000 headers need not stay in memory


class _Sips:
    """A file that gives little at a time: a header that claims gigabytes must not be read into memory."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile) -> None:
        self.file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= 1 << 22:
            raise ValueError(f"a header of {size:,} bytes")
        return self.file.read(size)


def _zip(archive: Path) -> Iterator[tuple[str, IO[bytes] | None]]:
    with _reading(archive), zipfile.ZipFile(archive) as zipped:
        for info in zipped.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in {0, stat.S_IFREG, stat.S_IFDIR}:
                raise InputError(f"{archive}: entry {info.filename!r} is no plain file; {FOREIGN}")
            yield info.filename, None if info.is_dir() else zipped.open(info)
