"""Out-of-distribution detection for any trained classifier, by Fisher–Rao distances (IGEOOD)."""

import importlib
from typing import TYPE_CHECKING, Any

from igeood.version import __version__

if TYPE_CHECKING:
    from igeood import benchmark, calibration, datasets, errors, geometry, metrics, networks
    from igeood.access import black_box, grey_box, load, white_box
    from igeood.detectors import (
        METHODS,
        Energy,
        Igeood,
        IgeoodFeatures,
        IgeoodLogits,
        IgeoodPlus,
        KLDivergence,
        Mahalanobis,
        MaxSoftmax,
        Odin,
        detector,
    )
    from igeood.diagnostics import diagnose
    from igeood.extraction import extract
    from igeood.guard import Guard, Verdict
    from igeood.tables import read_logits, write_logits
    from igeood.outputs import Outputs

# Where each name lives. They are imported on first use: `igeood --help` should not wait for torch.
_HOMES = {
    **dict.fromkeys(["METHODS", "Energy", "Igeood", "IgeoodFeatures", "IgeoodLogits", "IgeoodPlus"], "detectors"),
    **dict.fromkeys(["KLDivergence", "Mahalanobis", "MaxSoftmax", "Odin", "detector"], "detectors"),
    **dict.fromkeys(["black_box", "grey_box", "white_box", "load"], "access"),
    **dict.fromkeys(["Guard", "Verdict"], "guard"),
    "diagnose": "diagnostics",
    "extract": "extraction",
    **dict.fromkeys(["read_logits", "write_logits"], "tables"),
    "Outputs": "outputs",
}
_MODULES = ("benchmark", "calibration", "datasets", "errors", "geometry", "metrics", "networks")

__all__ = [
    "METHODS",
    "Energy",
    "Guard",
    "Igeood",
    "IgeoodFeatures",
    "IgeoodLogits",
    "IgeoodPlus",
    "KLDivergence",
    "Mahalanobis",
    "MaxSoftmax",
    "Odin",
    "Outputs",
    "Verdict",
    "__version__",
    "benchmark",
    "black_box",
    "calibration",
    "datasets",
    "detector",
    "diagnose",
    "errors",
    "extract",
    "geometry",
    "grey_box",
    "load",
    "metrics",
    "networks",
    "read_logits",
    "white_box",
    "write_logits",
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
