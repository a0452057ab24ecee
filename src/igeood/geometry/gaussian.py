r"""Fisher–Rao distances between Gaussians with a diagonal covariance (the paper's Eq. 9–12).

The manifold of univariate Gaussians is a hyperbolic half-plane; with a diagonal covariance, distances add in squares.
The closed form used here is the paper's Eq. 9 rewritten without cancellation:

.. math:: \rho = 2\sqrt2\,\operatorname{asinh}\sqrt{\frac{\Delta^2/2 + (\sigma_1-\sigma_2)^2}{4\sigma_1\sigma_2}}
"""

import math

import torch
from torch import Tensor

from igeood.errors import InputError
from igeood.geometry.precision import by_rows, exporting, result_dtype, row_chunks, wide

_TWO_SQRT2 = 2.0 * math.sqrt(2.0)


def univariate_distance(mean_p: Tensor, std_p: Tensor, mean_q: Tensor, std_q: Tensor) -> Tensor:
    r"""Fisher–Rao distance between univariate Gaussians (Eq. 9, in its stable form).

    Parameters
    ----------
    mean_p, std_p, mean_q, std_q : Tensor
        Means and positive standard deviations; shapes broadcast.

    Returns
    -------
    Tensor
        :math:`\rho \ge 0`, of the broadcast shape. Its gradient is finite, and 0 where both Gaussians coincide.

    Examples
    --------
    >>> one, e = torch.tensor(1.0), torch.tensor(math.e)
    >>> round(univariate_distance(one, one, one, e).item(), 6)  # same mean: √2·|log(σ₁/σ₂)|
    1.414214
    """
    _check_values(mean_p=mean_p, std_p=std_p, mean_q=mean_q, std_q=std_q)
    dtype = result_dtype(mean_p, std_p, mean_q, std_q)
    mean_p, std_p, mean_q, std_q = (wide(t) for t in (mean_p, std_p, mean_q, std_q))
    scale = 2.0 * std_p.sqrt() * std_q.sqrt()  # two roots: the product could leave the floating-point range
    shift = (mean_p - mean_q) / (math.sqrt(2.0) * scale)
    legs = torch.stack([shift, ((std_p - std_q) / scale).expand_as(shift)], dim=-1)  # side by side: ten times as fast
    # a vector norm: unlike hypot and sqrt, its gradient at the origin is 0, not NaN
    return (_TWO_SQRT2 * torch.asinh(torch.linalg.vector_norm(legs, dim=-1))).to(dtype)


def distance(mean_p: Tensor, std_p: Tensor, mean_q: Tensor, std_q: Tensor) -> Tensor:
    r"""Fisher–Rao distance between Gaussians with diagonal covariance (Eq. 10): :math:`\sqrt{\sum_j\rho_j^2}`.

    Parameters
    ----------
    mean_p, std_p, mean_q, std_q : Tensor
        (..., k) means and positive standard deviations; batch dimensions broadcast.

    Returns
    -------
    Tensor
        (...,) distances.

    Examples
    --------
    >>> mean, std = torch.zeros(3), torch.ones(3)
    >>> distance(mean, std, mean, std).item()
    0.0
    """
    dtype = result_dtype(mean_p, std_p, mean_q, std_q)
    rho = univariate_distance(wide(mean_p), std_p, mean_q, std_q)  # (..., k)
    length: Tensor = torch.linalg.vector_norm(rho, dim=-1)
    return length.to(dtype)


def nearest_distance(x: Tensor, means: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    r"""Distance to the nearest class, all Gaussians sharing one standard deviation (Eq. 11).

    With equal standard deviations Eq. 9 is :math:`2\sqrt2\,\operatorname{asinh}(|\Delta|/(2\sqrt2\,\sigma))`.

    Parameters
    ----------
    x : Tensor
        (N, k) feature vectors.
    means : Tensor
        (C, k) class means.
    std : Tensor
        (k,) standard deviations.

    Returns
    -------
    distance : Tensor
        (N,) :math:`\min_y d`, differentiable.
    nearest : Tensor
        (N,) int64, the class that attains it (the first of equals).

    Examples
    --------
    >>> d, y = nearest_distance(torch.tensor([[0.9]]), torch.tensor([[0.0], [1.0]]), torch.ones(1))
    >>> y.item()
    1
    """
    if x.ndim != 2 or not len(means) or means.shape[1:] != x.shape[1:] or std.shape != x.shape[1:]:
        shapes = f"{tuple(x.shape)}, {tuple(means.shape)} and {tuple(std.shape)}"
        raise InputError(f"expected shapes (N, k), (C, k) and (k,), got {shapes}", argument="x, means, std")
    _check_values(x=x, means=means, std=std)
    distance, label = nearest(x, means, std)
    return distance.to(result_dtype(x, means, std)), label


def nearest(x: Tensor, means: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """`nearest_distance` of rows (N, k) in float64, without checks."""
    means = wide(means)
    scale = 1.0 / (_TWO_SQRT2 * wide(std))

    def squares(rows: Tensor) -> Tensor:
        return asinh((wide(rows)[:, None] - means) * scale).square_().sum(dim=-1)  # (n, C)

    with torch.no_grad():
        label = by_rows(lambda rows: squares(rows).argmin(dim=1), x, means.numel())
    lengths = []
    for rows in row_chunks(x.shape[0], x.shape[1]):
        rho = asinh((wide(x[rows]) - means[label[rows]]) * scale)  # (n, k)
        lengths.append(_TWO_SQRT2 * torch.linalg.vector_norm(rho, dim=-1))
    return torch.cat(lengths), label


def asinh(t: Tensor) -> Tensor:
    """Compute asinh |t|, differentiable and exact to the last digits; torch.asinh is slow on a CPU."""
    size = t.abs()
    root = size.clamp(max=1e150)  # whose square is finite; beyond, the fraction is 1
    fraction = root / (1.0 + (1.0 + root * root).sqrt())
    return torch.log1p(size + size * fraction)


def _check_values(**tensors: Tensor) -> None:
    """Raise unless all values are finite, and those of deviations positive; takes no memory."""
    for name, value in () if exporting.get() else tensors.items():
        least, expected = (0.0, "positive and finite") if name.startswith("std") else (-math.inf, "finite")
        if value.numel() and not all(least < float(end) < math.inf for end in value.detach().aminmax()):
            raise InputError(f"expected {expected} values", argument=name, cure="remove samples or channels")
