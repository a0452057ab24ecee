"""A model from `module:name`."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from igeood.errors import InputError


def find_model(spec: str) -> nn.Module:
    """The model `module:name`, or what the function of this name returns; the current folder is searched too."""
    module, _, name = spec.partition(":")
    if not (module and name) or module.endswith(".py"):
        raise InputError(f"model: expected MODULE:NAME, such as nets:make_model for nets.py; got {spec!r}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    model = _run(spec, lambda: getattr(importlib.import_module(module), name))
    if callable(model) and not isinstance(model, nn.Module):
        model = _run(spec, model)
    if not isinstance(model, nn.Module):
        raise InputError(f"model: {spec} is {type(model).__name__}; expected a torch.nn.Module, or what makes one")
    return model


def _run(spec: str, code: Callable[[], Any]) -> Any:
    """Run the user's code; an error of it is one line."""
    try:
        return code()
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"model: {spec} failed: {reason}; fix its name, or that module") from error
