"""Out-of-distribution detection for any trained classifier, by Fisher–Rao distances (IGEOOD)."""

import importlib
from typing import TYPE_CHECKING, Any

from igeood.version import __version__

if TYPE_CHECKING:
    from igeood import calibration, errors, geometry, metrics, networks
    from igeood.detectors import METHODS, Energy, IgeoodLogits, KLDivergence, MaxSoftmax, Odin, detector
    from igeood.guard import Guard, Verdict, black_box, load
    from igeood.outputs import Outputs

# Where each name lives. They are imported on first use: `igeood --help` should not wait for torch.
_HOMES = {
    **dict.fromkeys(["METHODS", "Energy", "IgeoodLogits", "KLDivergence", "MaxSoftmax", "Odin"], "detectors"),
    "detector": "detectors",
    **dict.fromkeys(["Guard", "Verdict", "black_box", "load"], "guard"),
    "Outputs": "outputs",
}
_MODULES = ("calibration", "errors", "geometry", "metrics", "networks")

__all__ = [
    "METHODS",
    "Energy",
    "Guard",
    "IgeoodLogits",
    "KLDivergence",
    "MaxSoftmax",
    "Odin",
    "Outputs",
    "Verdict",
    "__version__",
    "black_box",
    "calibration",
    "detector",
    "errors",
    "geometry",
    "load",
    "metrics",
    "networks",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"igeood.{name}")
    if name in _HOMES:
        value = getattr(importlib.import_module(f"igeood.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'igeood' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
