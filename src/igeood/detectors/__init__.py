"""Detectors: outputs in, one score a sample out; higher is more out-of-distribution."""

from igeood.detectors.base import Detector
from igeood.detectors.catalog import METHODS, Method, detector, method_name
from igeood.detectors.ensemble import Ensemble, Igeood, IgeoodPlus, MahalanobisEnsemble
from igeood.detectors.features import IgeoodFeatures, Mahalanobis
from igeood.detectors.logits import Energy, IgeoodLogits, KLDivergence, MaxSoftmax, Odin

__all__ = [
    "METHODS",
    "Detector",
    "Energy",
    "Ensemble",
    "Igeood",
    "IgeoodFeatures",
    "IgeoodLogits",
    "IgeoodPlus",
    "KLDivergence",
    "Mahalanobis",
    "MahalanobisEnsemble",
    "MaxSoftmax",
    "Method",
    "Odin",
    "detector",
    "method_name",
]
