"""One file over HTTP: it is resumed where it stopped, and appears under its name only when its checksum is right."""

import errno
import hashlib
import http.client
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from igeood.errors import InputError

CHUNK = 1 << 18
MAX_BYTES = 4 << 30  # of a download whose size nobody published
TIMEOUT = 60.0
CHANGED = "the file has changed, or is another one"

Progress = Callable[[str, int, int | None], None]  # the file's name, bytes so far, bytes in all if known


class _CutError(Exception):
    """The connection ended before the file did."""


def fetch(
    url: str,
    path: Path,
    *,
    size: int | None = None,
    checksum: str | None = None,
    progress: Progress | None = None,
    tries: int = 3,
) -> None:
    """Download `url` to `path`.

    What has arrived is kept in `path`.part, and the next call goes on from there if the server still has the same
    file. The size and the checksum are checked before the file gets its name.

    Parameters
    ----------
    url : str
        http or https.
    path : Path
        Where to put the file; what was there is replaced in the end.
    size : int, optional
        Expected number of bytes.
    checksum : str, optional
        Expected checksum, `md5:…` or `sha256:…`.
    progress : callable, optional
        Called with the file's name, the bytes so far, and the bytes in all if known.
    tries : int
        How often to connect, in all, when the connection is cut.
    """
    if not re.match(r"https?://", url, re.IGNORECASE):
        raise InputError(f"url: {url} is neither http nor https")
    part, state = beside(path)
    for attempt in range(tries):
        try:
            with writing(path):
                _transfer(url, part, state, size, progress)
            break
        except _CutError as error:
            if attempt == tries - 1:
                raise InputError(f"{url}: {error}; run the same command again to go on from there") from None
    with writing(path):
        _check(url, part, state, size, checksum)
        part.replace(path)
        state.unlink(missing_ok=True)


def beside(path: Path) -> tuple[Path, Path]:
    """Where the unfinished file is, and what is remembered about it."""
    return path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.part.json")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in one line what is wrong with the disk."""
    try:
        yield
    except OSError as error:
        told = f"cannot be written ({error.strerror or error}); choose another folder with IGEOOD_DATA"
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            told = "the disk is full; what is done is kept: free some space and run it again"
        raise InputError(f"{path}: {told}") from None


def _transfer(url: str, part: Path, state: Path, size: int | None, progress: Progress | None) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)
    start, validator = _resumable(url, part, state)
    if size is not None and start >= size:
        return
    with _open(url, start, validator) as response:
        resumed = response.status == http.client.PARTIAL_CONTENT
        if resumed and (_range_start(response) != start or _validator(response) not in {None, validator}):
            part.unlink(missing_ok=True)
            raise _CutError("the server answered with a part of another file")
        start = start if resumed else 0
        length = response.headers.get("Content-Length", "")
        total = start + int(length) if length.isdecimal() else None
        limit = MAX_BYTES if size is None else size
        if (total or 0) > limit:
            raise InputError(f"{url}: {total:,} bytes, expected at most {limit:,}; {CHANGED}")
        if not resumed:
            part.unlink(missing_ok=True)  # before its new description: they must never be of two files
            state.write_text(json.dumps({"url": url, "validator": _validator(response)}), encoding="utf-8")
        done = _copy(response, part, start, limit, total, progress)
    if total is not None and done < total:
        raise _CutError(f"the connection ended after {done:,} of {total:,} bytes")


def _copy(response: Any, part: Path, done: int, limit: int, total: int | None, progress: Progress | None) -> int:
    """Append to the part until the response ends; how long the part is then."""
    with part.open("r+b" if done else "wb") as file:
        file.seek(done)
        file.truncate()
        report = progress or (lambda *_: None)
        report(part.name.removesuffix(".part"), done, total)
        while chunk := _receive(response):
            done += len(chunk)
            if done > limit:
                file.truncate(0)
                raise InputError(f"{part}: more than the {limit:,} bytes expected; {CHANGED}")
            file.write(chunk)
            report(part.name.removesuffix(".part"), done, total)
        file.flush()
        os.fsync(file.fileno())
    return done


def _receive(response: Any) -> bytes:
    """The next bytes. Apart from writing them, so that a broken connection and a full disk are told apart."""
    try:
        return bytes(response.read1(CHUNK))
    except (OSError, http.client.HTTPException) as error:
        raise _CutError(f"the connection broke ({error})") from None


def _open(url: str, start: int, validator: str | None) -> Any:
    headers = {"User-Agent": "igeood", "Accept-Encoding": "identity"}
    if start and validator:
        headers |= {"Range": f"bytes={start}-", "If-Range": validator}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 (the scheme was checked)
    opener = urllib.request.build_opener(_Redirect())
    try:
        return opener.open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and start:
            return _open(url, 0, None)
        said = f"{error.code} {error.reason}"
        raise InputError(f"{url}: the server says {said}; see the set's page for a new address") from None
    except (OSError, http.client.HTTPException) as error:
        raise _CutError(f"no connection ({getattr(error, 'reason', error)})") from None


class _Redirect(urllib.request.HTTPRedirectHandler):
    """Redirections, but never from https to less."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """The next request."""
        if not newurl.startswith("https://" if req.type == "https" else ("http://", "https://")):
            raise InputError(f"{req.full_url}: redirects to {newurl}, which is less safe; see the set's page")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _resumable(url: str, part: Path, state: Path) -> tuple[int, str | None]:
    """How much is there of the same file, and how the server will know it."""
    try:
        known = json.loads(state.read_text(encoding="utf-8"))
        if known["url"] == url and isinstance(known["validator"], str):
            return part.stat().st_size, known["validator"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return 0, None


def _validator(response: Any) -> str | None:
    """A strong ETag, or a date: what If-Range takes."""
    tag: str | None = response.headers.get("ETag")
    date: str | None = response.headers.get("Last-Modified")
    return tag if tag and not tag.startswith("W/") else date


def _range_start(response: Any) -> int | None:
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else None


def _check(url: str, part: Path, state: Path, size: int | None, checksum: str | None) -> None:
    found = part.stat().st_size
    wrong = f"{found:,} bytes, expected {size:,}" if size not in {None, found} else checksum_differs(part, checksum)
    if wrong:
        part.unlink()
        state.unlink(missing_ok=True)
        raise InputError(f"{url}: {wrong}; nothing was kept: run it again, or see the set's page for a new file")


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    """A file's checksum, in hexadecimal."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def checksum_differs(path: Path, checksum: str | None) -> str:
    """What a file's checksum is in place of the published one, in words; empty if it is right, or none is known."""
    algorithm, _, expected = (checksum or "").partition(":")
    found = file_digest(path, algorithm) if expected else expected
    return f"{algorithm} {found}, expected {expected}" if found != expected else ""
