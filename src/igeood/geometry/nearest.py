r"""Which class is nearest in the sum over channels of :math:`f(t)=\operatorname{asinh}^2t`, without an N×C×k table.

In channel j the classes lie at :math:`\mu=c+h\xi`, :math:`|\xi|\le1`. As a function of ξ, :math:`f(x-\mu)` is replaced
by the polynomial p of degree < n that has its values at n Chebyshev nodes. The polynomial is a sum over the nodes of (a
function of x)·(a function of μ), so the sum over channels is a matmul. It is done in float32; a class that the bound
below does not exclude is computed again in float64.

*Bound.* From :math:`f'(t)=2\int_0^1\frac{t}{1+b^2t^2}\,dy`, :math:`b^2=1-y^2`, and
:math:`\frac{d}{dt}\frac{t}{1+b^2t^2}=\operatorname{Re}(1+ibt)^{-2}=\int_0^\infty we^{-w}\cos(btw)\,dw`, for r ≥ 2

.. math:: \frac{|f^{(r)}(t)|}{r!}\le\frac2{r!}\int_0^1\!\int_0^\infty b^{r-2}w^{r-1}e^{-w}\,dw\,dy
          =\frac{\sqrt\pi\,\Gamma(r/2)}{r\,\Gamma((r+1)/2)}=:c_r\quad\text{for every real }t,

and the remainder of the interpolation is :math:`|f-p|\le c_n\,h^n\prod_i|\xi-\xi_i|`, whatever x is.

*Rounding,* in units of :math:`\epsilon=2^{-24}`. A sum of K products, in any order, is off by K·Σ|products| at most.
In t = x - hξᵢ roundings come to 2|t|+3h, which moves f by 4a+4h at most, a = |asinh t|, :math:`|f'|\le4/3`. √(1+t²) is
off by twice itself, |t|+√(1+t²) by three times, and with a logarithm good to 2, a by 3+2a; its square by 6a+5a². A
value is off by :math:`5((1+a)^2-1+h)`. Only differences of values at two nodes are summed, for a term that all classes
share decides nothing; they are no more than :math:`8h/3`: rounding grows with x no faster than one value's own, which
is like :math:`\log^2|x|`. Lagrange's basis is a product of at most 20 factors in float64: its rounding is less than a
thousandth of what is counted here.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from igeood.geometry.precision import by_rows, chunk_rows, exporting, row_chunks, wide

_EPS = 1.01 * 2.0**-24  # the hundredth is for the rounding of the bound itself
_TOLERANCE = 0.02  # of the bound in one channel, times √k: sums of different classes are about √k apart
_NODES = (3, 4, 5, 6, 8, 10, 12, 16, 20)
_WIDTH = 256  # channels in one product: rounding grows with their number
SMALL = 1 << 17  # so many asinh in float64 cost less than the interpolation's calls
_FEW = 8  # classes that are compared in an exported graph, the nearest by the interpolation
_DIRECT = 1 << 14  # values of a row up to which a graph compares all classes


class Group(NamedTuple):
    """Channels that are interpolated with the same number of nodes n, or not at all."""

    channels: Tensor  # (b,)
    reach: Tensor  # (b,) h
    points: Tensor  # (n, b) nodes; without interpolation (C, b), the classes
    table: Tensor | None  # (n-1, b, C) Lagrange's basis at the classes, without the first node's
    error: Tensor  # (C,) bound on the interpolation's error


class Prepared(NamedTuple):
    """Gaussians that share a standard deviation, with what the search needs and can be computed once."""

    means: Tensor  # (C, k)
    scale: Tensor  # (k,)
    centre: Tensor  # (k,) the middle of the means
    groups: list[Group]


def prepare(means: Tensor, scale: Tensor) -> Prepared:
    """State of the search among the means (C, k) with distances in units of 1/scale, (k,); both are wide."""
    with torch.no_grad():
        centre = (means.amin(dim=0) + means.amax(dim=0)) / 2
        offsets = ((means - centre) * scale).T.contiguous()  # (k, C)
        n_nodes = _node_counts(offsets)
        groups = []
        for n in sorted(set(n_nodes.tolist())):
            blocks = torch.split((n_nodes == n).nonzero()[:, 0], _WIDTH)
            groups += [_group(channels, offsets[channels], n) for channels in blocks]
    return Prepared(means, scale, centre, groups)


def nearest(x: Tensor, prepared: Prepared) -> Tensor:
    """The class (N,) with the least sum over channels of asinh²((x-μ)·scale), the first of equals, for x (N, k)."""
    means = prepared.means
    if exporting.get():
        return _graph_nearest(x, prepared)
    if x.shape[0] <= 2 or x.numel() * len(means) <= SMALL:
        return by_rows(lambda rows: _squared_sums(rows[:, None], means, prepared.scale).argmin(dim=1), x, means.numel())
    step = 16 * chunk_rows(max(means.shape))
    return torch.cat([_search(rows, prepared) for rows in torch.split(x, step)])


def asinh(t: Tensor) -> Tensor:
    """Compute asinh |t|, differentiable and exact to the last digits; torch.asinh is slow on a CPU."""
    size = t.abs()
    root = size.clamp(max=1e150)  # whose square is finite; beyond, the fraction is 1
    fraction = root / (1.0 + (1.0 + root * root).sqrt())
    return torch.log1p(size + size * fraction)


def _squared_sums(x: Tensor, means: Tensor, scale: Tensor) -> Tensor:
    """Sums over channels of asinh²((x-μ)·scale): (..., k) → (...)."""
    return asinh((wide(x) - means) * scale).square_().sum(dim=-1)


def _graph_nearest(x: Tensor, prepared: Prepared) -> Tensor:
    """As `nearest`, in a graph: of many classes those are compared that the interpolation finds nearest."""
    means = prepared.means
    if means.numel() <= _DIRECT or len(means) <= _FEW:
        return _squared_sums(x[:, None], means, prepared.scale).argmin(dim=1)
    candidates = _approximate(x, prepared)[0].topk(_FEW, dim=1, largest=False).indices  # (N, 8)
    places = _squared_sums(x[:, None], means[candidates], prepared.scale).argmin(dim=1, keepdim=True)
    return candidates.gather(1, places)[:, 0]


def _search(x: Tensor, prepared: Prepared) -> Tensor:
    """As `nearest`: classes that the bound leaves open are computed again in float64."""
    sums, bound = _approximate(x, prepared)
    bound = bound.float() * (1.0 + 1e-6)
    best, label = (sums + bound).min(dim=1)
    is_open = ~(sums - bound > best[:, None])  # (N, C); a sum that overflowed is left open

    def of_pairs(pairs: Tensor) -> Tensor:  # (M, 2) of a row and a class
        return _squared_sums(x[pairs[:, 0]], prepared.means[pairs[:, 1]], prepared.scale)

    for rows in torch.split((is_open.sum(dim=1) > 1).nonzero()[:, 0], 256):  # the pairs can be many
        row, candidate = is_open[rows].nonzero().T
        squares = prepared.means.new_full(is_open[rows].shape, math.inf)
        squares[row, candidate] = by_rows(of_pairs, torch.stack([rows[row], candidate], dim=1), x.shape[1])
        label[rows] = squares.argmin(dim=1)
    return label


def _node_counts(offsets: Tensor) -> Tensor:
    """Nodes of each channel (k,): the fewest within the tolerance that pay; 0 for no interpolation."""
    n_channels, n_classes = offsets.shape
    reach = offsets.abs().amax(dim=1)
    counts = torch.zeros(n_channels, dtype=torch.int64, device=reach.device)
    for n in reversed(_NODES):
        pays = n * (3.5 + n_classes / 40) < 3.0 * n_classes  # nanoseconds: a column and its products; direct values
        error = steepest(n) * 4 / math.pi * (reach / 2.0) ** n  # the mean of |T_n| is 2/π
        if pays:
            counts[error * math.sqrt(n_channels) <= _TOLERANCE] = n
    return counts


def _group(channels: Tensor, offsets: Tensor, n: int) -> Group:
    """Channels with n nodes, and the classes' offsets (b, C) in them."""
    reach = offsets.abs().amax(dim=1)
    if n == 0:
        return Group(channels, reach, offsets.T.float().contiguous(), None, offsets.new_zeros(offsets.shape[1]))
    xi = offsets / reach.clamp(min=torch.finfo(reach.dtype).tiny)[:, None]
    at = nodes(n)
    apart = torch.stack([xi - node for node in at])  # (n, b, C)
    error = steepest(n) * (apart.prod(dim=0).abs().T @ reach**n)
    table = xi.new_ones(n - 1, *xi.shape)  # the basis sums to 1: all values are taken less the first node's
    for i in range(1, n):
        for j in range(n):
            if j != i:
                table[i - 1] *= apart[j] / (at[i] - at[j])
    return Group(channels, reach, torch.stack([node * reach for node in at]).float(), table.float(), error)


def steepest(r: int) -> float:
    """c_r: no derivative of order r ≥ 2 of asinh² is greater than r!·c_r."""
    return math.sqrt(math.pi) * math.gamma(r / 2) / (r * math.gamma((r + 1) / 2))


def nodes(n: int) -> list[float]:
    """Chebyshev's n nodes."""
    return [math.cos((2 * i + 1) * math.pi / (2 * n)) for i in range(n)]


def _approximate(x: Tensor, prepared: Prepared) -> tuple[Tensor, Tensor]:
    """Sums over channels (N, C) in float32, up to a term for each row, and how far off each class's may be (C,)."""
    moved = by_rows(lambda rows: ((wide(rows) - prepared.centre) * prepared.scale).float(), x, x.shape[1])  # (N, k)
    farthest = moved.abs().amax(dim=0)  # (k,)
    sums = moved.new_zeros(x.shape[0], len(prepared.means))
    bound = prepared.means.new_zeros(len(prepared.means))
    additions = sum(1 if group.table is None else len(group.table) for group in prepared.groups) + 4
    for channels, reach, points, table, error in prepared.groups:
        growth = (1.0 + torch.asinh(farthest[channels] + reach)).square() - 1.0 + reach  # rounding of one value
        bound += error + 2.0**-50 * growth.sum()  # float64's own rounding: it decides where it can
        roundings = len(channels) + additions
        here = moved[:, channels]
        if table is None:
            bound += _EPS * (5 + roundings) * growth.sum()
            for rows in row_chunks(x.shape[0], 4 * points.numel()):
                sums[rows] += _rough_squares(here[rows, None] - points).sum(dim=-1)
            continue
        weights = _EPS * (10.0 * growth + 8 / 3 * roundings * reach)  # (b,)
        bound += weights @ table.abs().sum(dim=0).to(weights)
        for rows in row_chunks(x.shape[0], 4 * len(channels)):
            base = _rough_squares(here[rows] - points[0])
            for point, column in zip(points[1:], table, strict=True):
                sums[rows].addmm_(_rough_squares(here[rows] - point).sub_(base), column)
    return sums, bound


def _rough_squares(t: Tensor) -> Tensor:
    """asinh²t in float32; t is overwritten."""
    root = torch.mul(t, t).add_(1.0).sqrt_()
    return t.abs_().add_(root).log_().square_()
