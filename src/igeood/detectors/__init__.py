"""Detectors: outputs in, one score a sample out; higher is more out-of-distribution. Each is one class in one file."""

import importlib
import pkgutil

from igeood.detectors.base import Detector
from igeood.detectors.gaussians import IgeoodFeatures, Mahalanobis
from igeood.detectors.logits import Energy, IgeoodLogits, MaxSoftmax, Odin
from igeood.detectors.options import options
from igeood.detectors.registry import METHODS, Method, detector, method_name, register
from igeood.detectors.weighted import Igeood, IgeoodPlus, MahalanobisLayers, Weighted
from igeood.detectors.wrap import wrap

for _module in pkgutil.iter_modules(__path__):  # a detector in a new file registers itself
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["METHODS", "Detector", "Method", "Weighted", "detector", "method_name", "options", "register", "wrap"]
__all__ += ["Energy", "IgeoodLogits", "MaxSoftmax", "Odin"]
__all__ += ["Igeood", "IgeoodFeatures", "IgeoodPlus", "Mahalanobis", "MahalanobisLayers"]
