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

_FROZEN = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>", importlib.__file__)


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
    with _users_code(f"importing {module} failed", module):
        imported = importlib.import_module(module)
    if not hasattr(imported, name):
        near = difflib.get_close_matches(name, [n for n in dir(imported) if not n.startswith("_")], n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else "; name a model, or a function that makes one"
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
            what = f"fails on an input of shape {shape}: {_reason(error)}"
            raise InputError(f"model: {what}; is --size right?") from None

    model.forward = told
    return model


@contextmanager
def _users_code(what: str, module: str = "") -> Iterator[None]:
    """An error of the user's own code in one line, with its place."""
    try:
        yield
    except (Exception, SystemExit) as error:  # noqa: BLE001 (it may raise anything)
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(f"{missing}."):  # the module itself, not one that it imports
            told = f"no module {missing!r} here or among the installed ones"
            raise InputError(f"model: {told}; mend its name, or go to the folder that has it") from None
        raise InputError(f"model: {what}: {_reason(error)}; mend it there") from None


def _reason(error: BaseException) -> str:
    """What went wrong, and where: in the user's file rather than in a library that it calls."""
    text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in (__file__, *_FROZEN)]
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    return f"{text} ({own[-1].filename}, line {own[-1].lineno})" if own else text
