"""A model from `module:name`."""

import difflib
import importlib
import sys
import traceback
from pathlib import Path
from typing import Any

from torch import nn

from igeood.errors import InputError


def find_model(spec: str) -> nn.Module:
    """The model that `module:name` is, or that the function of this name makes; the current folder is looked in too."""
    module, colon, name = spec.partition(":")
    if not (module and colon and name):
        raise InputError(f"model: expected MODULE:NAME, such as nets:make_model; got {spec!r}")
    found = _attribute(_imported(module), name, spec)
    if not isinstance(found, nn.Module) and callable(found):
        try:
            found = found()
        except Exception as error:  # noqa: BLE001 (the user's own code)
            raise InputError(f"model: {spec} failed: {_last(error)}") from None
    if not isinstance(found, nn.Module):
        raise InputError(f"model: {spec} is {type(found).__name__}; expected a torch.nn.Module, or what makes one")
    return found


def _imported(module: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InputError(f"model: no module {error.name!r} here or among the installed ones") from None
    except Exception as error:  # noqa: BLE001 (the user's own code)
        raise InputError(f"model: importing {module} failed: {_last(error)}") from None


def _attribute(module: Any, name: str, spec: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:
        near = difflib.get_close_matches(name, [n for n in dir(module) if not n.startswith("_")], n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"model: {spec}: the module has no {name!r}{hint}") from None


def _last(error: Exception) -> str:
    """An error of the user's code in one line, with its place."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    reason = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {reason} ({frame.filename}, line {frame.lineno})"
