"""Weights from files: safetensors, or torch's own format with `weights_only`, which builds nothing but tensors."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn

from igeood.errors import InputError

M = TypeVar("M", bound=nn.Module)
SHOWN = 300  # letters of torch's list of the keys that differ


def read_weights(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by name, and the file's metadata.

    Parameters
    ----------
    path : path
        A `.safetensors` file; or `.pt` or `.pth` with a state dict, alone or under `state_dict` or `model`.
    """
    source = Path(path)
    if not source.is_file():
        raise InputError(f"weights: there is no file {source}; check the path")
    if source.suffix not in (".safetensors", ".pt", ".pth"):
        raise InputError(f"weights: {source} is neither .safetensors nor a state dict in .pt or .pth; give such a file")
    try:
        if source.suffix == ".safetensors":
            with safe_open(source, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
        loaded = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # damage shows as any kind of error
        cure = "get a whole copy, or save model.state_dict() alone"
        raise InputError(f"weights: {source} is damaged, or holds more than tensors; {cure}") from error
    for key in ("state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise InputError(f"weights: {source} holds no state dict; save model.state_dict() alone")
    return {str(name).removeprefix("module."): value for name, value in loaded.items()}, {}


def load_weights(model: M, path: str | os.PathLike[str]) -> M:
    """Load the weights of a file into a model and set it to evaluation mode; returns the model.

    Parameters
    ----------
    model : Module
        Of the architecture that the file was made with.
    path : path
        As in `read_weights`.
    """
    tensors, _ = read_weights(path)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        keys = " ".join(str(error).split())[:SHOWN]
        cure = "name the network that the file was made with, or give this one's own weights"
        raise InputError(f"weights: {path} is of another architecture ({keys}…); {cure}") from error
    return model.eval()
