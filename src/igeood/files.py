"""Files that appear whole or not at all, and folders that one process writes at a time."""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from igeood.errors import InputError


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write `content` to `path`, replacing what was there only once everything is on disk."""
    with whole(path) as file:
        file.write(content)


@contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file to write to, that takes the place of `path` once all is on disk; after an error nothing is left of it.

    A file that is replaced passes on its permissions; of a link, what it leads to is replaced.
    """
    target = Path(path)
    if not target.name:
        raise InputError(f"path: {str(target)!r} names no file")
    target = Path(os.path.realpath(target)) if target.is_symlink() else target
    if not target.parent.is_dir():
        raise InputError(f"path: {target.parent} is no folder; make it first")
    if target.is_dir():
        raise InputError(f"path: {target} is a folder; name a file in it")
    mode = _mode(target)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    try:
        with temporary.open("xb") as file:
            if mode is not None:
                temporary.chmod(mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = os.fspath(path)  # not the temporary file's, or none
        raise


def _mode(target: Path) -> int | None:
    """Permissions of a file that is there."""
    if not target.exists():
        return None
    if not target.is_file():
        raise InputError(f"path: {target} is no ordinary file; name another")
    return stat.S_IMODE(target.stat().st_mode)


@contextmanager
def only_one(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Hold the lock file `path`; another process that wants it gets an error. A killed process holds nothing."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("ab") as file:
        try:
            _lock(file.fileno())
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
                raise
            raise InputError(f"{what}: another process is writing there ({target}); wait for it, or stop it") from None
        yield


def _lock(descriptor: int) -> None:
    if os.name == "nt":
        import msvcrt  # noqa: PLC0415 (there is none elsewhere)

        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
    else:
        import fcntl  # noqa: PLC0415 (there is none on Windows)

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
