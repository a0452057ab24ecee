"""How Gaussian a network's features are, layer by layer: the checks of the paper's appendix."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from igeood.errors import InputError
from igeood.outputs import Outputs
from igeood.summary import ClassSums

MOST_FOR_SHAPIRO = 1000  # rows of a class: W of more differs in the third digit, and takes as many times longer


@dataclass(frozen=True)
class LayerDiagnostics:
    """What a diagonal Gaussian with pooled covariance leaves out, on one layer.

    Attributes
    ----------
    condition_full, condition_infinity, condition_diagonal : float
        Condition numbers of the pooled covariance in the 2-norm and in the infinity norm, the paper's; and of its
        diagonal, which is the same in both. Infinite when singular.
    dominant, dominant_signed : float
        Share of the rows whose diagonal exceeds the sum of the others' absolute values, the usual diagonal dominance;
        and of those whose diagonal exceeds the sum of the others with their signs, which is what the paper writes.
    shapiro_w : float
        Shapiro–Wilk's W of each class and channel, averaged: 1 for a Gaussian. Constants are left out; NaN if all are.
    dead : int
        Channels that are constant in every class.
    """

    condition_full: float
    condition_infinity: float
    condition_diagonal: float
    dominant: float
    dominant_signed: float
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
        problem = "diagnostics need features and labels of 3 samples or more"
        raise InputError(problem, argument="outputs", cure="use igeood.extract")
    return {layer: _layer(x, outputs.labels, outputs.n_classes) for layer, x in outputs.features.items()}


def _layer(features: Tensor, labels: Tensor, n_classes: int) -> LayerDiagnostics:
    features = features.detach().double()
    covariance = ClassSums.of(features, labels, n_classes, "full").covariance
    diagonal = covariance.diagonal()
    eigenvalues = torch.linalg.eigvalsh(covariance).clamp(min=0.0)
    classes = [features[labels == label].cpu().numpy() for label in sorted({*labels.tolist()})]
    alive = np.any([np.ptp(rows, axis=0) > 0 for rows in classes], axis=0)
    w = [value for rows in classes for value in _shapiro_w(rows[:MOST_FOR_SHAPIRO])]
    return LayerDiagnostics(
        condition_full=_ratio(eigenvalues.max(), eigenvalues.min()),
        condition_infinity=float(torch.linalg.cond(covariance, torch.inf)) if eigenvalues.min() > 0 else float("inf"),
        condition_diagonal=_ratio(diagonal.max(), diagonal.min()),
        dominant=float((2.0 * diagonal > covariance.abs().sum(dim=1)).double().mean()),
        dominant_signed=float((2.0 * diagonal > covariance.sum(dim=1)).double().mean()),
        shapiro_w=float(np.mean(w)) if w else float("nan"),
        dead=int((~alive).sum()),
    )


def _shapiro_w(rows: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> Iterator[float]:
    """W of each column of one class's rows (n, k) that is not constant; of fewer than 3 rows there is none."""
    from scipy.stats import shapiro  # noqa: PLC0415 (slow to import)

    for column in rows.T if len(rows) > 2 else ():
        if np.ptp(column) > 0:
            yield float(shapiro(column).statistic)


def _ratio(high: Tensor, low: Tensor) -> float:
    return float("inf") if float(low) <= 0.0 else float(high / low)
