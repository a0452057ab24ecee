"""The few exceptions and warnings of the library. Each message names the argument, the place and the cure."""


class IgeoodError(Exception):
    """Anything that igeood raises on purpose."""


class InputError(IgeoodError, ValueError):
    """An argument that cannot be used as it is."""


class NotReadyError(IgeoodError, RuntimeError):
    """A step was called before the one it builds on: score before fit, predict before calibrate."""


class GuardFileError(IgeoodError, ValueError):
    """A file of igeood's, such as a guard's, that is damaged, foreign, or from a newer version."""


class MissingExtraError(IgeoodError, ImportError):
    """A feature whose optional dependency is not installed."""


class IgeoodWarning(UserWarning):
    """Something the user should know; the result stands."""
