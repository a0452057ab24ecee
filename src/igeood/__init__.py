"""Out-of-distribution detection for any trained classifier, by Fisher–Rao distances (IGEOOD)."""

import importlib
from typing import Any

from igeood.version import __version__

# Names are imported on first use, from their homes: `igeood --help` should not wait for torch. Types: __init__.pyi.
_HOMES = {
    "checking": "Check check",
    "comparison": "compare",
    "detectors": "METHODS Detector Energy Igeood IgeoodFeatures IgeoodLogits IgeoodPlus Mahalanobis MaxSoftmax Odin",
    "detectors.registry": "detector register",
    "detectors.options": "options",
    "detectors.wrap": "wrap",
    "guard": "Guard Verdict black_box grey_box load summarise white_box",
    "guard.source": "extract",
    "logits_files": "read_logits write_logits",
    "monitor": "Monitor",
    "outputs": "Outputs",
    "summary": "Needs Summary",
}
_MODULES = ("calibration", "errors", "geometry", "guard", "metrics")
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = ["__version__", *_HOME_OF, *_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"igeood.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'igeood' has no attribute {name!r}")
    return globals().setdefault(name, getattr(importlib.import_module(f"igeood.{_HOME_OF[name]}"), name))


def __dir__() -> list[str]:
    return sorted(__all__)
