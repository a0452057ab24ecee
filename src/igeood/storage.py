"""Tensors and JSON in one safetensors file: it appears whole or not at all, and is read only if nothing has changed.

The file's metadata has one entry, `igeood`: a JSON text with everything that is not a tensor, and a SHA-256 over the
rest of that text and all tensors. Nothing in it is ever executed.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from igeood.errors import GuardFileError
from igeood.files import write_whole
from igeood.version import __version__

SCHEMA = 1


def write(path: str | os.PathLike[str], record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a record and its tensors to `path`, replacing what was there only once everything is on disk."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    full = {"schema": SCHEMA, "igeood": __version__, **record}
    text = json.dumps({**full, "sha256": _digest(full, plain)}, sort_keys=True)
    content = save(plain, {"igeood": text})
    write_whole(path, content)


def read(path: str | os.PathLike[str], what: str = "guard") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what `write` wrote, `what` in words. A damaged, foreign or newer file is an error."""
    source = Path(path)
    if not source.is_file():
        raise GuardFileError(f"path: there is no {what} file {source}; check the path")
    try:
        with torch.inference_mode(False), safe_open(source, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        record = _record(source, metadata.get("igeood"), what)
        same = json.dumps(record, sort_keys=True) == metadata["igeood"]  # a changed digit may stand for the same number
        whole = record.pop("sha256", None) == _digest(record, tensors) and same
        if any(tensor.is_complex() for tensor in tensors.values()):
            raise ValueError("complex numbers")  # noqa: TRY301
    except GuardFileError:
        raise
    except FileNotFoundError:  # so safetensors calls a file that may not be read
        raise GuardFileError(f"path: {source} cannot be read; mend its permissions") from None
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise GuardFileError(
            f"path: {source} is damaged, or no {what} file ({reason}); save the {what} again, or fetch a whole copy"
        ) from None
    if not whole:
        raise GuardFileError(f"path: {source} is damaged: its SHA-256 does not match; fetch a whole copy")
    return record, tensors


def _record(source: Path, text: str | None, what: str) -> dict[str, Any]:
    """The JSON text's content, if its schema is one that this version reads."""
    try:
        record = json.loads(text) if text is not None else None
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("schema"), int):
        raise GuardFileError(f"path: {source} is a safetensors file, but no {what}; give one that igeood wrote")
    if record["schema"] > SCHEMA:
        raise GuardFileError(
            f"path: {source} has schema {record['schema']}, written by igeood {record.get('igeood')}; "
            f"igeood {__version__} reads up to {SCHEMA}: upgrade igeood"
        )
    return record


def _digest(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()
