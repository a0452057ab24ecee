"""Weights from files: safetensors, or torch's own format read without unpickling anything but tensors."""

import io
import os
import pickletools
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from igeood.errors import InputError

M = TypeVar("M", bound=nn.Module)
SHOWN = 3  # keys that an error names
LONGEST = 1000  # letters of a word in a pickle


def read_weights(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by name, and what the file says of itself.

    Parameters
    ----------
    path : path
        A `.safetensors` file; or `.pt` or `.pth` with a state dict, alone or under `state_dict` or `model`.
    """
    source = Path(path)
    if not source.is_file():
        raise InputError(f"weights: there is no file {source}; check the path")
    if source.suffix == ".safetensors":
        try:
            with safe_open(source, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
        except FileNotFoundError:  # so safetensors calls a file that may not be read
            raise InputError(f"weights: {source} cannot be read; mend its permissions") from None
        except (SafetensorError, ValueError, RuntimeError, OverflowError) as error:
            reason = " ".join(str(error).split())  # it may quote the file
            raise InputError(f"weights: {source} is damaged ({reason}); fetch a whole copy") from None
    if source.suffix not in (".pt", ".pth"):
        raise InputError(f"weights: {source} is neither .safetensors nor a state dict in .pt or .pth; give such a file")
    try:
        with warnings.catch_warnings(), source.open("rb") as file:
            warnings.simplefilter("ignore")  # of what it is about to refuse
            loaded = torch.load(_vetted(file, source.stat().st_size), map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 (damage shows as any error, assertions included)
        cure = "save model.state_dict() alone"
        raise InputError(f"weights: {source} is damaged, or holds more than tensors; {cure}") from None
    return _state_dict(loaded, source), {}


def _vetted(file: IO[bytes], size: int) -> IO[bytes]:
    """A file of torch's that costs no more than its size says.

    Torch believes the lengths in its older format, unless all is in memory; unpacks what it never packs; and, for
    its error messages, searches what a pickle says in a time that grows with the square of its longest word.
    """
    older = file.read(2) != b"PK"
    file.seek(0)
    if older:
        file = io.BytesIO(file.read())
        pickles = [file] * 5  # one behind the other
    else:
        archive = zipfile.ZipFile(file)
        if sum(info.file_size for info in archive.infolist()) > size:
            raise ValueError("compressed, or twice the same")
        pickles = [io.BytesIO(archive.read(name)) for name in archive.namelist() if name.endswith("data.pkl")]
    for part in pickles:
        for _, said, _ in pickletools.genops(part):
            if isinstance(said, str | bytes) and max(map(len, said.split()), default=0) > LONGEST:
                raise ValueError("a name that no tensor has")
    file.seek(0)
    return file


def _state_dict(loaded: Any, source: Path) -> dict[str, Tensor]:
    for key in ("state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not all(_is_dense(value) for value in loaded.values()):
        raise InputError(f"weights: {source} holds no state dict of dense tensors; save model.state_dict() alone")
    return {str(name).removeprefix("module."): value for name, value in loaded.items()}


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided  # a sparse one's indices may point anywhere


def load_weights(model: M, path: str | os.PathLike[str]) -> M:
    """Put the weights of a file into a model, and the model into evaluation mode; the model is returned.

    A file of another architecture is an error that names the keys that differ, and the model stays as it was.

    Parameters
    ----------
    model : Module
        Of the architecture that the file was made with.
    path : path
        As in `read_weights`.
    """
    found, _ = read_weights(path)
    wanted = model.state_dict()
    optional = {name for name in wanted if name.endswith("num_batches_tracked")}  # older files have none
    both = sorted(wanted.keys() & found.keys())
    shapes = {name: (tuple(found[name].shape), tuple(wanted[name].shape)) for name in both}
    differ = {
        "missing": sorted(wanted.keys() - found.keys() - optional),
        "not expected": sorted(found.keys() - wanted.keys()),
        "of complex numbers": [name for name in both if found[name].is_complex()],
        "of another shape": [f"{name} {there} for {here}" for name, (there, here) in shapes.items() if there != here],
    }
    told = [f"{len(keys)} {what} ({_some(keys)})" for what, keys in differ.items() if keys]
    if told:
        raise InputError(
            f"weights: {path} is of another architecture than {type(model).__name__}: {'; '.join(told)}; "
            "name the network that the file was made with, or give this one's own weights"
        )
    model.load_state_dict(found, strict=False)
    model.eval()
    return model


def _some(keys: list[str]) -> str:
    return ", ".join(" ".join(key.split()) for key in keys[:SHOWN]) + (", …" if len(keys) > SHOWN else "")
