"""The one table of methods: a decorator puts a detector in it, and everything else reads it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from igeood.detectors.base import Detector
from igeood.errors import InputError
from igeood.summary import Needs

K = TypeVar("K", bound=type[Detector])
Style = tuple[str, str, str]


@dataclass(frozen=True)
class Method:
    """A registered method.

    Attributes
    ----------
    kind : type of Detector
        Its class.
    title : str
        Its name in tables and plots.
    fixed : mapping
        Options that the name fixes.
    style : tuple of str
        In plots: colour, line and marker, as matplotlib names them.
    tunes : bool or "only"
        Whether comparisons tune it on OOD samples; "only": before that it is another method.
    """

    kind: type[Detector]
    title: str
    fixed: Mapping[str, Any]
    style: Style
    tunes: bool | Literal["only"]

    @property
    def needs(self) -> Needs:
        """What the method needs."""
        return self.kind.needs

    @property
    def needs_layers(self) -> bool:
        """Whether it cannot do without hidden layers: a method for the white box."""
        return self.needs.must_read_layers

    @property
    def options(self) -> list[str]:
        """Options that are left to the user."""
        return [option.name for option in fields(self.kind) if option.name not in self.fixed]


METHODS: dict[str, Method] = {}


def register(
    name: str,
    *,
    title: str | None = None,
    fixed: Mapping[str, Any] | None = None,
    style: Style = ("#7F7F7F", "-", "."),
    tunes: bool | Literal["only"] = True,
) -> Callable[[K], K]:
    """Class decorator that makes a detector a method: guards, command line, tables and plots find it by its name.

    Parameters
    ----------
    name : str
        Such as `"my-method"`.
    title : str, optional
        Its name in tables and plots; by default `name`.
    fixed : mapping, optional
        Options that this name fixes; a class may have several names.
    style : tuple of str, optional
        In plots: colour, line and marker, as matplotlib names them.
    tunes : bool or "only"
        Whether comparisons tune it on OOD samples; "only": before that it is another method.
    """

    def add(kind: K) -> K:
        if kind.score is Detector.score and kind.terms is Detector.terms:
            raise InputError(f"{kind.__qualname__} has no score", argument="kind", cure="override score, or terms")
        there = METHODS.get(name)
        if there is not None and repr(there.kind) != repr(kind):  # the same class may be imported again
            raise InputError(f"{name!r} is {there.kind.__qualname__} already", argument="name", cure="choose another")
        METHODS[name] = Method(kind, title or name, dict(fixed or {}), style, tunes)
        return kind

    return add


def detector(name: str, **options: Any) -> Detector:
    """Make a detector by its method's name, one of `METHODS`.

    Parameters
    ----------
    name : str
        Such as `"energy"`.
    options
        Constructor arguments of the method's class, except those that the name fixes.

    Examples
    --------
    >>> detector("energy", temperature=2.0)
    Energy(temperature=2.0, probabilities=False)
    """
    method = METHODS.get(name)
    if method is None:
        raise InputError.unknown("method", name, METHODS)
    for option in options:
        if option not in method.options:
            others = [other for other, entry in METHODS.items() if option in entry.options][:3]
            cure = f"methods that have it: {', '.join(others)}" if others else "leave it out"
            raise InputError(f"{name!r} takes {', '.join(method.options) or 'no options'}", argument=option, cure=cure)
    return method.kind(**method.fixed, **options)


def method_name(instance: Detector) -> str:
    """Name under which a detector is registered."""
    params = instance.params()
    for name, method in METHODS.items():
        if type(instance) is method.kind and method.fixed.items() <= params.items():
            return name
    raise InputError(f"{type(instance).__name__} is not registered", argument="detector", cure="use @igeood.register")
