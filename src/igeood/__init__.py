"""Out-of-distribution detection for any trained classifier, by Fisher–Rao distances (IGEOOD)."""

import importlib
from typing import TYPE_CHECKING, Any

from igeood.version import __version__

if TYPE_CHECKING:
    from igeood import calibration as calibration
    from igeood import errors as errors
    from igeood import geometry as geometry
    from igeood import metrics as metrics
    from igeood.detectors import METHODS as METHODS
    from igeood.detectors import Detector as Detector
    from igeood.detectors import Energy as Energy
    from igeood.detectors import Igeood as Igeood
    from igeood.detectors import IgeoodFeatures as IgeoodFeatures
    from igeood.detectors import IgeoodLogits as IgeoodLogits
    from igeood.detectors import IgeoodPlus as IgeoodPlus
    from igeood.detectors import KLDivergence as KLDivergence
    from igeood.detectors import Mahalanobis as Mahalanobis
    from igeood.detectors import MaxSoftmax as MaxSoftmax
    from igeood.detectors import Odin as Odin
    from igeood.detectors import detector as detector
    from igeood.detectors import register as register
    from igeood.guard import Guard as Guard
    from igeood.guard import Verdict as Verdict
    from igeood.guard import black_box as black_box
    from igeood.guard import diagnose as diagnose
    from igeood.guard import grey_box as grey_box
    from igeood.guard import load as load
    from igeood.guard import summarise as summarise
    from igeood.guard import white_box as white_box
    from igeood.model.reader import extract as extract
    from igeood.outputs import Outputs as Outputs
    from igeood.summary import Needs as Needs
    from igeood.summary import Summary as Summary
    from igeood.tables import read_logits as read_logits
    from igeood.tables import write_logits as write_logits

# Where each name lives. They are imported on first use: `igeood --help` should not wait for torch.
_HOMES = {
    "detectors": "METHODS Detector Energy Igeood IgeoodFeatures IgeoodLogits IgeoodPlus KLDivergence Mahalanobis "
    "MaxSoftmax Odin detector register",
    "guard": "Guard Verdict black_box diagnose grey_box load summarise white_box",
    "model.reader": "extract",
    "outputs": "Outputs",
    "summary": "Needs Summary",
    "tables": "read_logits write_logits",
}
_NAMES = {name: home for home, names in _HOMES.items() for name in names.split()}
_MODULES = {name: name for name in ("calibration", "errors", "geometry", "metrics")}
_MOVED = {"benchmark": "bench.runs", "datasets": "bench.datasets", "networks": "bench.networks"}  # names of 0.1

__all__ = ["__version__", *_NAMES, *_MODULES]  # noqa: PLE0604 (all of them are strings)


def __getattr__(name: str) -> Any:
    module = {**_MODULES, **_MOVED}.get(name)
    if module is not None:
        return importlib.import_module(f"igeood.{module}")
    if name not in _NAMES:
        raise AttributeError(f"module 'igeood' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"igeood.{_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
