"""Out-of-distribution detection for any trained classifier, by Fisher–Rao distances (IGEOOD)."""

import importlib
from typing import TYPE_CHECKING, Any

from igeood.version import __version__

# fmt: off
# isort: off
if TYPE_CHECKING:
    from igeood import calibration, errors, geometry, metrics
    from igeood.bench.compare import compare
    from igeood.bench.diagnose import diagnose
    from igeood.detectors import (
        METHODS, Detector, Energy, Igeood, IgeoodFeatures, IgeoodLogits, IgeoodPlus, Mahalanobis,
        MaxSoftmax, Odin, detector, options, register, wrap,
    )
    from igeood.guard import Guard, Verdict, black_box, grey_box, load, summarise, white_box
    from igeood.guard.source import extract
    from igeood.monitor import Monitor
    from igeood.outputs import Outputs
    from igeood.summary import Needs, Summary
    from igeood.tables import read_logits, write_logits

__all__ = [
    "METHODS", "Detector", "Energy", "Guard", "Igeood", "IgeoodFeatures", "IgeoodLogits", "IgeoodPlus",
    "Mahalanobis", "MaxSoftmax", "Monitor", "Needs", "Odin", "Outputs", "Summary", "Verdict", "__version__",
    "black_box", "calibration", "compare", "detector", "diagnose", "errors", "extract", "geometry", "grey_box", "load",
    "metrics", "options", "read_logits", "register", "summarise", "white_box", "wrap", "write_logits",
]
# isort: on
# fmt: on
# Names are imported on first use, from the first home that has them: `igeood --help` should not wait for torch.
_MODULES = {name: name for name in ("calibration", "errors", "geometry", "guard", "metrics")}
_MODULES |= {"benchmark": "bench.runs", "datasets": "bench.datasets", "networks": "bench.networks"}  # names of 0.1
_HOMES = ["outputs", "summary", "detectors", "guard", "guard.source", "monitor", "tables"]
_HOMES += ["bench.diagnose", "bench.compare"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"igeood.{_MODULES[name]}")
    if name not in __all__:
        raise AttributeError(f"module 'igeood' has no attribute {name!r}")
    homes = (importlib.import_module(f"igeood.{home}") for home in _HOMES)
    return globals().setdefault(name, next(getattr(home, name) for home in homes if hasattr(home, name)))


def __dir__() -> list[str]:
    return sorted(__all__)
