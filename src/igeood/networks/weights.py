"""Weights from files: safetensors, or torch's own format read without unpickling anything but tensors."""

import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from igeood.errors import InputError

M = TypeVar("M", bound=nn.Module)
SHOWN = 3  # keys that an error names


def read_weights(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by name, and what the file says of itself.

    Parameters
    ----------
    path : path
        A `.safetensors` file; or `.pt` or `.pth` with a state dict, alone or under `state_dict` or `model`.
    """
    source = Path(path)
    if not source.is_file():
        raise InputError(f"weights: there is no file {source}")
    if source.suffix == ".safetensors":
        try:
            with safe_open(source, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
        except (SafetensorError, ValueError, RuntimeError, OverflowError) as error:
            raise InputError(f"weights: {source} is damaged ({error}); fetch a whole copy") from None
    if source.suffix not in (".pt", ".pth"):
        raise InputError(f"weights: {source} is neither .safetensors nor a state dict in .pt or .pth")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it is about to refuse
            loaded = torch.load(source, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, IndexError, OSError):
        cure = "save model.state_dict() alone"
        raise InputError(f"weights: {source} is damaged, or holds more than tensors; {cure}") from None
    return _state_dict(loaded, source), {}


def _state_dict(loaded: Any, source: Path) -> dict[str, Tensor]:
    for key in ("state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise InputError(f"weights: {source} holds no state dict; save model.state_dict() alone")
    return {str(name).removeprefix("module."): value for name, value in loaded.items()}


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
    return ", ".join(keys[:SHOWN]) + (", …" if len(keys) > SHOWN else "")
