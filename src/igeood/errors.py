"""The few exceptions and warnings of the library. Each message names the argument, the place and the cure."""

import difflib
import errno
from collections.abc import Iterable


class IgeoodError(Exception):
    """Anything that igeood raises on purpose."""


class InputError(IgeoodError, ValueError):
    """An argument that cannot be used as it is."""

    @classmethod
    def unknown(cls, argument: str, given: object, known: Iterable[str]) -> "InputError":
        """For a name that is none of those known: it tells them, and the one that was perhaps meant."""
        names = list(known)
        near = difflib.get_close_matches(str(given).lower(), names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return cls(f"{argument}: no {given!r}; {hint}there are {', '.join(names)}")


_OF_FILE = (None, errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EINVAL)


def is_of_disk(error: Exception) -> bool:
    """Whether an error is the system's, and says nothing of one file: of a failing disk, for example."""
    return isinstance(error, OSError) and error.errno not in _OF_FILE


class NotReadyError(IgeoodError, RuntimeError):
    """A step was called before the one it builds on: score before fit, predict before calibrate."""


class GuardFileError(IgeoodError, ValueError):
    """A file of igeood's, such as a guard's, that is damaged, foreign, or from a newer version."""


class MissingExtraError(IgeoodError, ImportError):
    """A feature whose optional dependency is not installed."""


class IgeoodWarning(UserWarning):
    """Something the user should know; the result stands."""


class UnsuitedError(InputError):
    """The classifier lacks what a method needs, such as batch norms."""


class HeadError(UnsuitedError):
    """The classifier has not the head that a method needs: a linear one, or one that returns more than logits."""
