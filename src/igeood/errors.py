"""The few exceptions and warnings of the library, and findings. Each names what is wrong, where, and the cure.

Errors carry facts; whoever shows them formats them. In a cure, braces mark an argument: ``{tpr=0.9}`` is shown as
``tpr=0.9`` in Python and as ``--tpr 0.9`` by the command line.
"""

import difflib
import errno
import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import Self

_MARKED = re.compile(r"\{([^{}]*)\}")
_OF_FILE = (None, errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EINVAL)


def plain(text: str, spell: Callable[[str], str] = str) -> str:
    """A text without its braces; `spell` says how to write what was marked by them.

    >>> plain("give fewer, or {tpr=0.9}")
    'give fewer, or tpr=0.9'
    """
    return _MARKED.sub(lambda marked: spell(marked[1]), text)


class IgeoodError(Exception):
    """Anything that igeood raises on purpose.

    Parameters
    ----------
    what : str
        What is wrong, and where in the argument.
    argument : str, optional
        The name of the argument.
    cure : str, optional
        What to do about it.
    place : str, optional
        Where the argument was found, such as a file or a batch.
    """

    def __init__(
        self, what: str, *, argument: str | None = None, cure: str | None = None, place: str | None = None
    ) -> None:
        super().__init__(what)
        self.what = what
        self.argument = argument
        self.cure = cure
        self.place = place

    def within(self, place: str) -> Self:
        """The same error, found at a place such as a file or a batch."""
        self.place = place if self.place is None else f"{place}: {self.place}"
        return self

    def text(self, spell: Callable[[str], str] = str) -> str:
        """The error as a sentence; `spell` writes the names of arguments."""
        argument = None if self.argument is None else spell(self.argument)
        sentence = ": ".join(part for part in (self.place, argument, self.what) if part)
        return sentence if self.cure is None else f"{sentence}; {plain(self.cure, spell)}"

    def __str__(self) -> str:
        return self.text()


class InputError(IgeoodError, ValueError):
    """An argument that cannot be used as it is."""

    @classmethod
    def unknown(cls, argument: str, given: object, known: Iterable[str]) -> "InputError":
        """Raised for an unknown name; lists the known ones, the closest first."""
        names = list(known)
        near = difflib.get_close_matches(str(given).lower(), names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return cls(f"no {given!r}", argument=argument, cure=f"{hint}there are {', '.join(names)}")


class NoRowsError(InputError):
    """A source of samples that has none."""


class NotReadyError(IgeoodError, RuntimeError):
    """A step was called before the one it builds on: score before fit, predict before calibrate."""


class GuardFileError(IgeoodError, ValueError):
    """An igeood file, such as a guard's, that is damaged, foreign, or of another version."""


class MissingExtraError(IgeoodError, ImportError):
    """A feature whose optional dependency is not installed."""


class UnsuitedError(InputError):
    """The classifier lacks what a method needs, such as a linear head or batch norms."""


class IgeoodWarning(UserWarning):
    """Something the user should know; the result stands."""


Level = Literal["warning", "info"]


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a guard, or worth knowing.

    Attributes
    ----------
    code : str
        A short name for programs, the same in every version.
    level : {"warning", "info"}
        A warning is also issued as an `IgeoodWarning`.
    message, cure : str
        What was found, and what to do.
    """

    code: str
    level: Level
    message: str
    cure: str

    def text(self, spell: Callable[[str], str] = str) -> str:
        """The finding as a sentence; `spell` writes the names of arguments."""
        if self.message.endswith("?"):
            return f"{self.message} {plain(self.cure[0].upper() + self.cure[1:], spell)}"
        return f"{self.message}; {plain(self.cure, spell)}"

    def __str__(self) -> str:
        return self.text()


def is_of_disk(error: Exception) -> bool:
    """Whether an error comes from the system, such as a failing disk, and not from one file."""
    return isinstance(error, OSError) and error.errno not in _OF_FILE


def import_extra(module: str, extra: str) -> Any:
    """Import a module of an optional dependency; the error names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = (error.name or module).partition(".")[0]
        raise MissingExtraError(f"{name} is needed", cure=f"pip install 'igeood[{extra}]'") from error
