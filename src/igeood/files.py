"""Files that appear whole or not at all, one writer at a time, and records: tensors and JSON in one safetensors file.

The metadata of a record's file has one entry, `igeood`: a JSON text with everything that is not a tensor, and a SHA-256
of the rest of that text and all tensors. Nothing in a file is ever executed.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from igeood.errors import GuardFileError, InputError
from igeood.version import __version__

SCHEMA = 2
PATIENCE = 60.0  # seconds that a writer waits for another one of the same file
PathLike = str | os.PathLike[str]


def write_whole(path: PathLike, content: bytes) -> None:
    """Write `content` to `path`, replacing the old file only once everything is on disk."""
    with whole(path) as file:
        file.write(content)


@contextmanager
def whole(path: PathLike) -> Iterator[IO[bytes]]:
    """Open a file that replaces `path` once everything is on disk; after an error nothing of it is left.

    The new file keeps the old one's permissions; a link stays, and its target is replaced. The temporary file has a
    fixed name, so a killed writer's leftover is removed by the next one; a lock keeps two writers apart. A folder that
    is missing is made.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise InputError(f"path: {target} is a folder, or no ordinary file; name a file")
    temporary = target.with_name(f".{target.name}.part")
    try:
        with only_one(f"{temporary}.lock", "path", patience=PATIENCE):
            try:
                temporary.unlink(missing_ok=True)
                with temporary.open("xb") as file:
                    if target.exists():
                        shutil.copymode(target, temporary)
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        if error.filename in (None, str(temporary), f"{temporary}.lock"):
            error.filename, error.filename2 = os.fspath(path), None  # the file that the user knows
        raise


@contextmanager
def only_one(path: PathLike, what: str, *, patience: float = 0.0) -> Iterator[None]:
    """Hold the lock file `path`; another process that wants it gets an error after `patience` seconds.

    The lock of a killed process is free. The file is removed at the end.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(target).acquire(timeout=patience)
    except Timeout:
        raise InputError(f"{what}: another process is writing there ({target}); wait for it, or stop it") from None
    with lock:
        try:
            yield
        finally:
            # before the release: who waits for a removed file opens a new one; Windows keeps it
            with suppress(OSError):
                target.unlink()


def write_record(path: PathLike, record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a record (JSON values) and its tensors to one safetensors file."""
    write_whole(path, record_bytes(record, tensors))


def record_bytes(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """What `write_record` writes."""
    return save(*_sealed(record, tensors))


def _sealed(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors that share no memory, and the file's metadata."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    places = [tensor.untyped_storage().data_ptr() for tensor in plain.values()]
    shared = {place for place in places if places.count(place) > 1}
    plain = {n: t.clone() if t.untyped_storage().data_ptr() in shared else t for n, t in plain.items()}
    full = {"schema": SCHEMA, "igeood": __version__, **record}
    return plain, {"igeood": json.dumps({**full, "sha256": digest(full, plain)}, sort_keys=True)}


def record_head(path: PathLike) -> dict[str, Any]:
    """What a record's file of any schema says of itself, unchecked; empty if it is no sound record."""
    try:
        with safe_open(path, framework="pt") as file:
            record = json.loads((file.metadata() or {}).get("igeood", "null"))
    except (SafetensorError, ValueError, RuntimeError):
        return {}
    return {"kind": "guard", **record} if isinstance(record, dict) else {}


def read_record(path: PathLike, kind: str = "guard") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what `write_record` wrote; a damaged, foreign, older or newer file is an error.

    `kind` is what the file holds, for errors; where the record has a `kind` too, they must agree.
    """
    source = Path(path)
    if not source.is_file():
        raise GuardFileError(f"path: there is no {kind} file {source}; check the path")
    source.open("rb").close()  # safetensors reports a file that may not be read as missing

    def parts() -> tuple[str, dict[str, Tensor]]:
        with torch.inference_mode(False), safe_open(source, framework="pt") as file:
            text = (file.metadata() or {}).get("igeood", "null")
            return text, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)

    return _checked(parts, str(source), kind)


def read_bytes(content: bytes, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what `record_bytes` returned."""

    def parts() -> tuple[str, dict[str, Tensor]]:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return header["__metadata__"]["igeood"], load(content)

    return _checked(parts, f"this {kind}", kind)


def _checked(
    parts: Callable[[], tuple[str, dict[str, Tensor]]], source: str, kind: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The record and the tensors, once nothing in them has changed."""
    try:
        text, tensors = parts()
        record = json.loads(text)
        intact = json.dumps(record, sort_keys=True) == text  # a changed digit may stand for the same number
    except (SafetensorError, KeyError, ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise GuardFileError(f"path: {source} is damaged, or no {kind} file ({error!r}); fetch a whole copy") from None
    schema = record.get("schema") if isinstance(record, dict) else None
    if schema == 1:
        problem = "was written by igeood 0.1 (schema 1); this version does not read it: fit the guard again and save it"
    elif not isinstance(schema, int):
        problem = f"is a safetensors file, but no {kind}; give one that igeood wrote"
    elif schema != SCHEMA:
        problem = f"has schema {schema}, written by igeood {record.get('igeood')}; upgrade igeood"
    elif record.get("kind", kind) != kind:
        problem = f"holds a {record['kind']}, not a {kind}; give a {kind} file"
    elif record.pop("sha256", None) != digest(record, tensors) or not intact:
        problem = "is damaged: its SHA-256 does not match; fetch a whole copy"
    else:
        return record, tensors
    raise GuardFileError(f"path: {source} {problem}")


def digest(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a record and of its tensors' names, types, shapes and values."""
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()
