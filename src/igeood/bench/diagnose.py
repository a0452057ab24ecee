"""How Gaussian a network's features are, layer by layer: the checks of the paper's appendix."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from igeood.errors import InputError
from igeood.outputs import Outputs
from igeood.summary import ClassSums

MOST_FOR_SHAPIRO = 5000  # its p-value's tables end there; W itself needs no more


@dataclass(frozen=True)
class LayerDiagnostics:
    """What a diagonal Gaussian with pooled covariance leaves out, on one layer.

    Attributes
    ----------
    condition_full, condition_diagonal : float
        Condition numbers of the pooled covariance, and of its diagonal; infinite when singular.
    dominance : float
        Mean over rows of |diagonal| / Σ |row|: 1 for a diagonal matrix.
    shapiro_w : float
        Mean over channels of Shapiro–Wilk's W of the features about their class means: 1 for a Gaussian.
    dead : int
        Channels that never move; they are left out of W.
    """

    condition_full: float
    condition_diagonal: float
    dominance: float
    shapiro_w: float
    dead: int


def diagnose(outputs: Outputs) -> dict[str, LayerDiagnostics]:
    """Diagnose each layer's features.

    Parameters
    ----------
    outputs : Outputs
        With features and labels, of in-distribution samples: `igeood.extract(model, loader)` gives them.

    Returns
    -------
    dict of LayerDiagnostics
        By layer.
    """
    if not outputs.features or outputs.labels is None or len(outputs) < 3:
        raise InputError("outputs: diagnostics need features and labels of 3 samples or more; use igeood.extract")
    return {layer: _layer(x, outputs.labels, outputs.n_classes) for layer, x in outputs.features.items()}


def _layer(features: Tensor, labels: Tensor, n_classes: int) -> LayerDiagnostics:
    from scipy.stats import shapiro  # noqa: PLC0415 (slow to import)

    features = features.detach().double()
    sums = ClassSums.of(features, labels, n_classes, "full")
    covariance = sums.covariance
    diagonal = covariance.diagonal()
    eigenvalues = torch.linalg.eigvalsh(covariance).clamp(min=0.0)
    residual = (features - sums.mean[labels])[:MOST_FOR_SHAPIRO].cpu().numpy()
    alive = np.ptp(residual, axis=0) > 0
    w = [shapiro(column).statistic for column in residual[:, alive].T]
    row_sums = covariance.abs().sum(dim=1)
    return LayerDiagnostics(
        condition_full=_ratio(eigenvalues.max(), eigenvalues.min()),
        condition_diagonal=_ratio(diagonal.max(), diagonal.min()),
        dominance=float((diagonal / row_sums)[row_sums > 0].mean()),
        shapiro_w=float(np.mean(w)) if w else float("nan"),
        dead=int((~alive).sum()),
    )


def _ratio(high: Tensor, low: Tensor) -> float:
    return float("inf") if float(low) <= 0.0 else float(high / low)
