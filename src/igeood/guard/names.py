"""Names of classes: given, or known to the loader or to the model."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from igeood.errors import InputError

LONGEST = 1000  # characters of a name
SHORT = 20  # characters of a torch device's or type's
DEEPEST = 4  # data sets inside each other, such as a subset of a subset


def class_names(given: Sequence[str] | None, n_classes: int, *knowing: Any) -> tuple[str, ...] | None:
    """The names that were given, once they are one for each class; else the first that fit of those that are known.

    Parameters
    ----------
    given : sequence of str, optional
        Names in the order of the columns of the logits.
    n_classes : int
        C.
    knowing
        What may know them: a loader, whose data set may have `classes`; a model, whose `config` may have `id2label`.
    """
    if given is not None:
        return checked_names(given, n_classes)
    for names in (names for one in knowing for names in _known(one)):
        with suppress(InputError):
            return checked_names(names, n_classes)
    return None


def checked_names(names: Any, n_classes: int | None = None) -> tuple[str, ...]:
    """Names as a tuple, once they are texts that a terminal can show, C where that is known."""
    is_list = getattr(names, "ndim", 0) == 1 or (isinstance(names, Sequence) and not isinstance(names, str))
    if not is_list or not all(isinstance(name, str) for name in names):
        raise InputError(f"expected a list of names, got {type(names).__name__}", argument="classes", cure="give texts")
    if n_classes not in (None, len(names)):
        raise InputError(f"{len(names)} names for {n_classes} classes", argument="classes", cure="give one for each")
    for name in names:
        if not name.isprintable() or not 0 < len(name) <= LONGEST:
            raise InputError(f"{name[:50]!r} is empty, too long or not printable", argument="classes", cure="rename it")
    return tuple(map(str, names))


def checked_columns(columns: Any) -> dict[str, Any] | None:
    """Remembered columns of logits files, once they are names."""
    names = [] if columns is None else [*(columns["logits"] or ()), columns["id"] or ""]
    if not all(isinstance(name, str) for name in names):
        raise InputError(f"{columns!r}", argument="columns")
    return columns  # type: ignore[no-any-return]


def checked_text(text: Any, name: str) -> str | None:
    """What torch calls a device or a type, once it is a short text that a terminal can show; or None."""
    if text is None or (isinstance(text, str) and text.isprintable() and 0 < len(text) <= SHORT):
        return text
    raise InputError(f"{text!r}", argument=name)


def _known(source: Any) -> Iterator[Any]:
    """Lists of names that a loader's data sets, one inside the other, or a model's configuration have."""
    labels = getattr(getattr(source, "config", None), "id2label", None)
    if isinstance(labels, dict):
        names = [labels.get(i, labels.get(str(i))) for i in range(len(labels))]
        yield None if names == [f"LABEL_{i}" for i in range(len(labels))] else names  # the library's own default
    for _ in range(DEEPEST):
        yield getattr(source, "classes", None)
        source = getattr(source, "dataset", None)
