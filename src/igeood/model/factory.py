"""A model from the name of what makes it."""

import sys
from pathlib import Path
from pkgutil import resolve_name

from torch import nn

from igeood.errors import InputError


def make_model(spec: str) -> nn.Module:
    """The model that MODULE:NAME is, or makes. The module's code runs; the current folder is searched too."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        model = resolve_name(spec)
        model = model if isinstance(model, nn.Module) else model()
    except (Exception, SystemExit) as error:  # of the user's own code
        problem = f"{spec} failed: {type(error).__name__}: {error}"
        raise InputError(f"model: {problem}; give MODULE:NAME, such as nets:make_model for nets.py") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"model: {spec} is {type(model).__name__}; expected a torch.nn.Module, or what makes one")
    return model
