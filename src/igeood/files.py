"""Files that appear whole or not at all, and folders that one process writes at a time."""

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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

    A file that is replaced passes on its permissions; of a link, what it leads to is replaced. What a killed process
    left of its attempt to write `path` is removed.
    """
    target = Path(path)
    if not target.name:
        raise InputError(f"path: {str(target)!r} names no file; give its name")
    target = Path(os.path.realpath(target)) if target.is_symlink() else target
    if not target.parent.is_dir():
        raise InputError(f"path: {target.parent} is no folder; make it first")
    if target.is_dir():
        raise InputError(f"path: {target} is a folder; name a file in it")
    mode = _mode(target)
    _sweep(target)
    temporary, file = _beside(target)
    try:
        with file:
            if mode is not None:
                temporary.chmod(mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
            if os.name == "nt":  # where an open file keeps its name; elsewhere it is locked until it has the new one
                file.close()
            temporary.replace(target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = os.fspath(path)  # not the temporary file's, or none
        raise


def _beside(target: Path) -> tuple[Path, IO[bytes]]:
    """A new temporary file, locked as long as it is open: so it is known from what a killed process left."""
    while True:
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
        try:
            file = temporary.open("xb")
        except OSError as error:
            error.filename = str(target)
            raise
        held = True
        with suppress(OSError):  # on a file system without locks nothing is swept away
            held = _held(file)
        if held and temporary.exists():  # else it was swept away before it was locked
            return temporary, file
        file.close()


def _sweep(target: Path) -> None:
    """Remove temporary files of `target` that no process holds any more."""
    ours = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}\.part")
    names: list[str] = []
    with suppress(OSError):  # a folder that may be written to, but not listed
        names = os.listdir(target.parent) if os.name != "nt" else []  # noqa: PTH208 (quicker than paths)
    for path in (target.parent / name for name in names if ours.fullmatch(name)):
        with suppress(OSError), path.open("r+b") as file:
            _lock(file.fileno())
            path.unlink(missing_ok=True)


def _mode(target: Path) -> int | None:
    """Permissions of a file that is there."""
    if not target.exists():
        return None
    if not target.is_file():
        raise InputError(f"path: {target} is no ordinary file; name another")
    return stat.S_IMODE(target.stat().st_mode)


@contextmanager
def only_one(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Hold the lock file `path`; another process that wants it gets an error. A killed process holds nothing.

    The file goes when it is released.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with target.open("ab") as file:
            if not _held(file):
                raise InputError(f"{what}: another process is writing there ({target}); wait for it, or stop it")
            if not _is_at(file, target):  # who held it has removed it meanwhile
                continue
            try:
                yield
            finally:
                with suppress(OSError):  # as on Windows, where an open file stays
                    target.unlink()
        return


def _held(file: IO[bytes]) -> bool:
    """Lock an open file; False if another process has it."""
    try:
        _lock(file.fileno())
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
            raise
        return False
    return True


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _lock(descriptor: int) -> None:
    if os.name == "nt":
        import msvcrt  # noqa: PLC0415 (there is none elsewhere)

        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
    else:
        import fcntl  # noqa: PLC0415 (there is none on Windows)

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
