"""A model from `module:name`."""

import difflib
import functools
import importlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from igeood.errors import IgeoodError, InputError


def find_model(spec: str) -> nn.Module:
    """The model that `module:name` is, or that the function of this name makes; the current folder is looked in too."""
    module, colon, name = spec.partition(":")
    if not (module and colon and name):
        raise InputError(f"model: expected MODULE:NAME, such as nets:make_model; got {spec!r}")
    if module.endswith(".py"):
        cure = f"{module.removesuffix('.py').replace('/', '.')}:{name}"
        raise InputError(f"model: {spec} names a file, not a module; leave out .py: {cure}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    with _users_code(f"importing {module} failed"):
        imported = importlib.import_module(module)
    if not hasattr(imported, name):
        near = difflib.get_close_matches(name, [n for n in dir(imported) if not n.startswith("_")], n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"model: {spec}: the module has no {name!r}{hint}")
    found = getattr(imported, name)
    if not isinstance(found, nn.Module) and callable(found):
        with _users_code(f"{spec} failed"):
            found = found()
    if not isinstance(found, nn.Module):
        raise InputError(f"model: {spec} is {type(found).__name__}; expected a torch.nn.Module, or what makes one")
    return _telling(found)


def _telling(model: nn.Module) -> nn.Module:
    """The model, whose forward pass says in one line why it failed; its weights and fingerprint are the same."""
    forward = model.forward

    @functools.wraps(forward)
    def told(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except IgeoodError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 (the user's own code)
            shape = tuple(getattr(args[0], "shape", ())) if args else ()
            raise InputError(f"model: fails on an input of shape {shape}: {_reason(error)}; is --size right?") from None

    model.forward = told
    return model


@contextmanager
def _users_code(what: str) -> Iterator[None]:
    """An error of the user's own code in one line, with its place."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InputError(f"model: no module {error.name!r} here or among the installed ones") from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 (it may raise anything)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise InputError(f"model: {what}: {_reason(error)} ({frame.filename}, line {frame.lineno})") from None


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
