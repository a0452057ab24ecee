"""Options of a detector: annotated attributes of its class, which its constructor takes and checks."""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from typing_extensions import dataclass_transform

from igeood.errors import InputError

K = TypeVar("K")
_EXPECTED = {int: "a whole number, at least 1", float: "a positive finite number", bool: "True or False"}


@dataclass_transform(kw_only_default=True)
def options(kind: type[K]) -> type[K]:
    """Class decorator: the annotated attributes of a detector's class become keyword arguments of its constructor."""
    return dataclass(kw_only=True, eq=False)(kind)


def checked_option(name: str, value: Any, annotation: Any) -> Any:
    """An option's value if its annotation allows it. Numbers are positive; other annotations allow anything."""
    is_positive = isinstance(value, Real) and not isinstance(value, bool) and 0.0 < float(value) < math.inf
    expected: list[str] = []
    for kind in get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,):
        if get_origin(kind) is Literal:
            fits = value in get_args(kind)
        elif kind in (int, float):
            fits = is_positive and (kind is float or isinstance(value, Integral))
        else:
            fits = not isinstance(kind, type) or isinstance(value, kind)
        if fits:
            return kind(value) if kind in (int, float) else value
        expected += [repr(choice) for choice in get_args(kind)] or [_EXPECTED.get(kind, "None")]
    raise InputError(f"expected {' or '.join(expected)}, got {value!r}", argument=name)
