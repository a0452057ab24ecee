"""Every method by its name."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from igeood.detectors.base import Detector, parameter_names
from igeood.detectors.ensemble import Ensemble, Igeood, IgeoodPlus, MahalanobisEnsemble
from igeood.detectors.logits import Energy, IgeoodLogits, KLDivergence, MaxSoftmax, Odin
from igeood.errors import InputError


@dataclass(frozen=True)
class Method:
    """A line of the catalogue: the detector's class, and the options that the name fixes."""

    kind: type[Detector]
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def needs_layers(self) -> bool:
        """Whether the method reads hidden layers: the white box's."""
        return issubclass(self.kind, Ensemble)

    @property
    def options(self) -> list[str]:
        """Options that are left to the user."""
        return [name for name in parameter_names(self.kind) if name not in self.fixed]


METHODS: Mapping[str, Method] = {
    "msp": Method(MaxSoftmax),
    "odin": Method(Odin),
    "energy": Method(Energy),
    "kl-sum": Method(KLDivergence, {"reduce": "sum"}),
    "kl-min": Method(KLDivergence, {"reduce": "min"}),
    "igeood-logits": Method(IgeoodLogits, {"reduce": "sum"}),
    "igeood-logits-min": Method(IgeoodLogits, {"reduce": "min"}),
    "mahalanobis": Method(MahalanobisEnsemble),
    "igeood": Method(Igeood),
    "igeood+": Method(IgeoodPlus),
}


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
        raise InputError(f"method: no {name!r}; {_suggest(name, METHODS)}")
    for option in options:
        if option in method.fixed:
            raise InputError(f"{option}: {name!r} means {option}={method.fixed[option]!r}; pick another method instead")
        if option not in method.options:
            raise InputError(f"{option}: {name!r} has no such option; it takes {', '.join(method.options)}")
    return method.kind(**method.fixed, **options)


def method_name(instance: Detector) -> str:
    """Name under which the catalogue has this detector."""
    params = instance.params()
    for name, method in METHODS.items():
        if type(instance) is method.kind and all(params[key] == value for key, value in method.fixed.items()):
            return name
    raise InputError(f"detector: {type(instance).__name__} is not in the catalogue, which has {', '.join(METHODS)}")


def _suggest(name: str, known: Mapping[str, Method]) -> str:
    close = difflib.get_close_matches(str(name).lower(), list(known), n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{hint}methods: {', '.join(known)}"
