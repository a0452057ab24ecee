"""A model from `module:name`."""

import importlib
import sys
from pathlib import Path

from torch import nn

from igeood.bench.networks import load_weights
from igeood.errors import InputError


def find_model(spec: str, weights: str | None = None) -> nn.Module:
    """The model `module:name`, or what the function of this name returns, with its weights.

    The current folder is searched too.
    """
    module, _, name = spec.partition(":")
    if not (module and name) or module.endswith(".py"):
        raise InputError(f"model: expected MODULE:NAME, such as nets:make_model for nets.py; got {spec!r}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        model = getattr(importlib.import_module(module), name)
        model = model if isinstance(model, nn.Module) else model()
    except (Exception, SystemExit) as error:  # of the user's own code
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"model: {spec} failed: {reason}; fix its name, or that module") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"model: {spec} is {type(model).__name__}; expected a torch.nn.Module, or what makes one")
    return model if weights is None else load_weights(model, weights)
