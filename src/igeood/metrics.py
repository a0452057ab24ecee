"""How well scores tell in-distribution from out-of-distribution, exactly, ties included.

In-distribution is the positive class, as in the paper; a higher score is more out-of-distribution. All results are
fractions. Scores come as NumPy arrays, tensors or lists.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from igeood.errors import InputError
from igeood.outputs import ArrayLike, as_vector

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Evaluation:
    """The three numbers of the paper's tables, as fractions."""

    tnr_at_tpr: float
    auroc: float
    aupr: float


def evaluate(id_scores: ArrayLike, ood_scores: ArrayLike, tpr: float = 0.95) -> Evaluation:
    """Compute the three metrics together, sorting once.

    >>> evaluate([0.0, 1.0], [2.0, 3.0])
    Evaluation(tnr_at_tpr=1.0, auroc=1.0, aupr=1.0)
    """
    inside, outside = _sorted(id_scores, "id_scores"), _sorted(ood_scores, "ood_scores")
    rank = math.ceil(exact_fraction(tpr, "tpr") * len(inside))  # the first k with k/n ≥ tpr
    refused = len(outside) - np.searchsorted(outside, inside[rank - 1], "right")
    scores, tied = np.unique(inside, return_counts=True)
    below, not_above = (np.searchsorted(outside, scores, side) for side in ("left", "right"))
    kept = np.cumsum(tied)  # in-distribution scores at or below each
    twice_pairs = 2 * len(inside) * len(outside)
    area = (twice_pairs - int(tied @ (below + not_above))) / twice_pairs
    precision = float((tied * (kept / (kept + not_above))).sum()) / len(inside)
    return Evaluation(float(refused / len(outside)), area, precision)


def tnr_at_tpr(id_scores: ArrayLike, ood_scores: ArrayLike, tpr: float = 0.95) -> float:
    """Share of OOD samples refused at the first threshold that keeps a share `tpr` of the in-distribution ones.

    The threshold is an in-distribution score, without interpolation; samples above it are refused.

    >>> tnr_at_tpr([1, 2, 3, 4], [2, 3, 4, 5], tpr=0.75)
    0.5
    """
    return evaluate(id_scores, ood_scores, tpr).tnr_at_tpr


def auroc(id_scores: ArrayLike, ood_scores: ArrayLike) -> float:
    """Probability that an OOD sample scores above an in-distribution one, a tie counting for half.

    >>> auroc([1, 2], [2, 3])
    0.875
    """
    return evaluate(id_scores, ood_scores).auroc


def aupr(id_scores: ArrayLike, ood_scores: ArrayLike) -> float:
    """Area under the precision–recall curve as average precision, in-distribution being positive.

    >>> round(aupr([1, 3], [2, 4]), 6)
    0.833333
    """
    return evaluate(id_scores, ood_scores).aupr


def exact_fraction(share: float, name: str) -> Fraction:
    """The simple fraction that a float such as 0.95 stands for, in (0, 1): 19/20, not its binary neighbour."""
    if isinstance(share, bool) or not isinstance(share, Real) or not 0.0 < share < 1.0:
        raise InputError(f"expected a number strictly between 0 and 1, got {share!r}", argument=name)
    return Fraction(repr(float(share)))


def _sorted(scores: ArrayLike, name: str) -> Values:
    vector, _ = as_vector(scores, name)
    if len(vector) == 0:
        raise InputError("empty", argument=name, cure="give at least one score on each side")
    return np.sort(vector.numpy())
