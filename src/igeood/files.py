"""Files that appear whole or not at all, one writer at a time, and records: tensors and JSON in one safetensors file.

The metadata of a record's file has one entry, `igeood`: a JSON text with everything that is not a tensor, and a SHA-256
of the rest of that text and all tensors. Nothing in a file is ever executed.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
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

SCHEMA = 3
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
        raise InputError(f"{target} is a folder, or no ordinary file", argument="path", cure="name a file")
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
def only_one(path: PathLike, argument: str, *, patience: float = 0.0) -> Iterator[None]:
    """Hold the lock file `path`; another process that wants it gets an error after `patience` seconds.

    The error names `argument`. The lock of a killed process is free. The file is removed at the end.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(target).acquire(timeout=patience)
    except Timeout:
        raise InputError(f"another process writes there ({target})", argument=argument, cure="wait for it") from None
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
    """Content of the file that `write_record` writes."""
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}  # share no memory
    full = {"schema": SCHEMA, "igeood": __version__, **record}
    text = json.dumps({**full, "sha256": digest(full, copies)}, sort_keys=True)
    return save(copies, {"igeood": text})


def record_head(path: PathLike) -> dict[str, Any]:
    """The JSON part of a record's file of any schema, unchecked; empty if it is no sound record."""
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
        raise GuardFileError(f"there is no {kind} file {source}", argument="path", cure="check the path")
    try:
        return read_bytes(source.read_bytes(), kind)
    except GuardFileError as error:
        raise error.within(str(source)) from None


def read_bytes(content: bytes, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what `record_bytes` returned."""
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        text = header.get("__metadata__", {}).get("igeood", "null")
        record = json.loads(text)
        is_intact = json.dumps(record, sort_keys=True) == text  # a changed digit may stand for the same number
        with torch.inference_mode(False):
            tensors = load(content)
    except (SafetensorError, AttributeError, KeyError, ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise GuardFileError(f"damaged, or no {kind} file ({error!r})", cure="fetch a whole copy") from None
    schema = record.get("schema") if isinstance(record, dict) else None
    if not isinstance(schema, int):
        raise GuardFileError(f"a safetensors file, but no {kind}", cure="give one that igeood wrote")
    if schema != SCHEMA:
        cure = "fit again with this version and save" if schema < SCHEMA else "upgrade igeood"
        raise GuardFileError(f"written by igeood {record.get('igeood')} (schema {schema}, not {SCHEMA})", cure=cure)
    if record.get("kind", kind) != kind:
        raise GuardFileError(f"holds a {record['kind']}, not a {kind}", cure=f"give a {kind} file")
    if record.pop("sha256", None) != digest(record, tensors) or not is_intact:
        raise GuardFileError("damaged: its SHA-256 does not match", cure="fetch a whole copy")
    return record, tensors


@contextmanager
def describing(path: PathLike, kind: str) -> Iterator[None]:
    """An error in what a sound file says is a `GuardFileError`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        problem = f"{path} does not describe a {kind} ({' '.join(str(error).split())})"  # it may quote the file
        raise GuardFileError(problem, argument="path", cure="save it again") from error


def digest(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a record and of its tensors' names, types, shapes and values."""
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()
