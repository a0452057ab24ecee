"""A model from the name of what makes it, and its weights from a file that builds nothing but tensors."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn

from igeood.errors import InputError

M = TypeVar("M", bound=nn.Module)
SHOWN = 300  # letters of torch's list of the keys that differ


def make_model(spec: str) -> nn.Module:
    """The model that MODULE:NAME is, or makes. The module's code runs; the current folder is searched too."""
    model = resolved(spec, "model", lambda found: found if isinstance(found, nn.Module) else found())
    if not isinstance(model, nn.Module):
        raise InputError(f"{spec} is {type(model).__name__}, no torch.nn.Module nor what makes one", argument="model")
    return model


def resolved(spec: str, argument: str, use: Callable[[Any], Any] = lambda found: found) -> Any:
    """What MODULE:NAME is, in use; errors of the user's code name the argument."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        return use(resolve_name(spec))
    except (Exception, SystemExit) as error:  # of the user's own code
        problem = f"{spec} failed: {type(error).__name__}: {error}"
        raise InputError(problem, argument=argument, cure="give MODULE:NAME, such as nets:make_model") from error


def read_weights(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by name, and the file's metadata.

    Parameters
    ----------
    path : path
        A `.safetensors` file; or `.pt` or `.pth` with a state dict, alone or under `state_dict` or `model`.
    """
    source = Path(path)
    if not source.is_file():
        raise InputError(f"there is no file {source}", argument="weights", cure="check the path")
    if source.suffix not in (".safetensors", ".pt", ".pth"):
        raise InputError(f"{source} is neither .safetensors nor a state dict in .pt or .pth", argument="weights")
    try:
        if source.suffix == ".safetensors":
            with safe_open(source, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
        loaded = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # damage shows as any kind of error
        cure = "get a whole copy, or save model.state_dict() alone"
        raise InputError(f"{source} is damaged, or holds more than tensors", argument="weights", cure=cure) from error
    for key in ("state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise InputError(f"{source} holds no state dict", argument="weights", cure="save model.state_dict() alone")
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
        problem = f"{path} is of another architecture ({keys}…)"
        raise InputError(problem, argument="weights", cure="name the network that it was made with") from error
    return model.eval()
