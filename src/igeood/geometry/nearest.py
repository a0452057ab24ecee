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

from igeood.geometry.plain import is_plain
from igeood.geometry.precision import by_rows, chunk_rows, row_chunks, wide

_EPS = 1.01 * 2.0**-24  # the hundredth is for the rounding of the bound itself
_TOLERANCE = 0.02  # of the bound in one channel, times √k: sums of different classes are about √k apart
_NODES = (3, 4, 5, 6, 8, 10, 12, 16, 20)
SMALL = 1 << 17  # so many asinh in float64 cost less than the interpolation's calls
_FEW, _DIRECT = 8, 1 << 14  # in plain mode: classes that the interpolation leaves open; values of a row without it


class Prepared(NamedTuple):
    """Gaussians that share a standard deviation, with what the search needs and can be computed once."""

    means: Tensor  # (C, k)
    scale: Tensor  # (k,)
    centre: Tensor  # (k,) the middle of the means
    order: Tensor  # (k,) the plan's order of the channels
    offsets: Tensor  # (k, C) scaled means about the centre, in that order
    blocks: list[tuple[int, int, int]]  # channels first:last, in that order, with n nodes; n = 0: no interpolation
    tables: list[tuple[Tensor, Tensor] | None]  # `basis` of each block, where there is interpolation


def prepare(means: Tensor, scale: Tensor) -> Prepared:
    """State of the search among the means (C, k) with distances in units of 1/scale, (k,); both are wide."""
    with torch.no_grad():
        centre = (means.amin(dim=0) + means.amax(dim=0)) / 2
        offsets = ((means - centre) * scale).T.contiguous()  # (k, C)
        order, blocks = _plan(offsets)
        offsets = offsets[order]
        tables = [basis(offsets[first:last], n) if n else None for first, last, n in blocks]
    return Prepared(means, scale, centre, order, offsets, blocks, tables)


def nearest(x: Tensor, prepared: Prepared) -> tuple[Tensor, Tensor]:
    """Least sum over channels of asinh²((x-μ)·scale), (N,), and its class, the first of equals, for x (N, k)."""
    if is_plain():
        return _plain_nearest(x, prepared)
    if x.numel() * len(prepared.means) <= SMALL:
        squares = asinh_squared((x[:, None] - prepared.means).mul_(prepared.scale)).sum(dim=-1)  # (N, C)
        label = squares.argmin(dim=1)
        return squares.gather(1, label[:, None])[:, 0], label
    step = 16 * chunk_rows(max(prepared.means.shape))
    label = torch.cat([_search(part, prepared) for part in torch.split(x, step)])
    return squared_sums(x, prepared, torch.arange(len(x), device=x.device), label), label


def _plain_nearest(x: Tensor, prepared: Prepared) -> tuple[Tensor, Tensor]:
    """As `nearest`, in plain mode: of many classes those are compared that the interpolation finds nearest."""
    means, classes = prepared.means, None
    if means.numel() > _DIRECT and len(means) > _FEW:
        classes = _approximate(_moved(x, prepared), prepared)[0].topk(_FEW, dim=1, largest=False).indices
        means = means[classes]  # (N, 8, k)
    least = asinh_squared((wide(x)[:, None] - means) * prepared.scale).sum(dim=-1).min(dim=1)
    label = least.indices if classes is None else classes.gather(1, least.indices[:, None])[:, 0]
    return least.values, label


def squared_sums(x: Tensor, prepared: Prepared, rows: Tensor, labels: Tensor) -> Tensor:
    """Sums over channels of asinh²((x-μ)·scale), (M,), of pairs of a row of x (N, k) and a class."""
    sums = prepared.means.new_empty(len(rows))
    for few in row_chunks(len(rows), _width(8, x.shape[1])):
        t = wide(x.index_select(0, rows[few])) - prepared.means.index_select(0, labels[few])
        sums[few] = asinh_squared(t.mul_(prepared.scale)).sum(dim=1)
    return sums


def asinh_squared(t: Tensor) -> Tensor:
    """asinh²t; t is overwritten.

    With ½log(1+2u(u+√(1+u²))), exact to the last digits: torch.asinh takes one number at a time on a CPU.
    """
    root = torch.mul(t, t).add_(1.0).sqrt_()
    squares = root.add_(t.abs_()).mul_(t).mul_(2.0).log1p_().square_().mul_(0.25)
    if is_plain() or math.isfinite(float(squares.sum())):
        return squares
    return torch.asinh(t).square_()  # a square overflowed


def _width(part: int, width: int) -> int:
    """The width for `row_chunks`: a part of a chunk stays in one thread's cache; more threads must seldom meet."""
    return part * width if torch.get_num_threads() == 1 else max(1, width // 2)


def _search(x: Tensor, prepared: Prepared) -> Tensor:
    """Index (N,) of the nearest class."""
    means = prepared.means
    if len(x) <= 2 or len(means) == 1:
        return _settle(means.new_zeros(len(x), len(means)), means.new_full((len(means),), math.inf), x, prepared)
    return _settle(*_approximate(_moved(x, prepared), prepared), x, prepared)


def _moved(x: Tensor, prepared: Prepared) -> Tensor:
    """Rows (N, k) about the classes' centre, scaled, in the plan's order; float32, in plain mode float64."""

    def scaled(rows: Tensor) -> Tensor:
        moved = (wide(rows) - prepared.centre).mul_(prepared.scale).index_select(1, prepared.order)
        return moved if is_plain() else moved.float()

    return by_rows(scaled, x, _width(8, x.shape[1]))


def _plan(offsets: Tensor) -> tuple[Tensor, list[tuple[int, int, int]]]:
    """The order of the channels (k,) and their blocks: each takes the fewest nodes within the tolerance that pay."""
    n_channels, n_classes = offsets.shape
    reach = offsets.abs().amax(dim=1)  # (k,)
    direct = 3.0 * n_classes  # nanoseconds for a value of each class; below, to make a column and for its products
    kinds = [n for n in _NODES if n * (3.5 + n_classes / 40) < direct] + [0]
    choice = torch.full((n_channels,), len(kinds) - 1, device=reach.device)
    for number, n in reversed(list(enumerate(kinds[:-1]))):
        error = steepest(n) * 4 / math.pi * (reach / 2.0) ** n  # the mean of |T_n| is 2/π
        choice[error * math.sqrt(n_channels) <= _TOLERANCE] = number
    blocks, first = [], 0
    for n, count in zip(kinds, choice.bincount(minlength=len(kinds)).tolist(), strict=True):
        width = max(1, min(512, (1 << 20) // ((n + 1) * n_classes)) if n else min(32, (1 << 14) // n_classes))
        blocks += [(i, min(i + width, first + count), n) for i in range(first, first + count, width)]
        first += count
    return choice.argsort(stable=True), blocks


def steepest(r: int) -> float:
    """c_r: no derivative of order r ≥ 2 of asinh² is greater than r!·c_r."""
    return math.sqrt(math.pi) * math.gamma(r / 2) / (r * math.gamma((r + 1) / 2))


def nodes(n: int) -> list[float]:
    """Chebyshev's n nodes."""
    return [math.cos((2 * i + 1) * math.pi / (2 * n)) for i in range(n)]


def basis(offsets: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Lagrange's basis at the offsets (b, C), without the first: (n-1, b, C), and the interpolation's error, (C,)."""
    reach = offsets.abs().amax(dim=1)
    xi = offsets / reach.clamp(min=torch.finfo(reach.dtype).tiny)[:, None]
    apart = torch.stack([xi - node for node in nodes(n)])  # (n, b, C)
    error = steepest(n) * (apart.prod(dim=0).abs_().T @ reach**n)
    table = xi.new_ones(n - 1, *xi.shape)  # the basis sums to 1: all values are taken less the first node's
    for i in range(1, n):
        for j in range(n):
            if j != i:
                table[i - 1].mul_(apart[j] / (nodes(n)[i] - nodes(n)[j]))
    return table.float(), error


def _approximate(x: Tensor, prepared: Prepared) -> tuple[Tensor, Tensor]:
    """Sums over channels (N, C), up to a term for each row, and how far off each class's may be (C,)."""
    offsets, blocks = prepared.offsets, prepared.blocks
    total = x.new_zeros(x.shape[0], offsets.shape[1])
    reach = offsets.abs().amax(dim=1)  # (k,)
    far = torch.maximum(x.amax(dim=0), -x.amin(dim=0))  # (k,)
    growth = (1.0 + torch.asinh(far + reach)).square() - 1.0 + reach  # (k,), what a value's rounding is a multiple of
    bound = 2.0**-50 * growth.sum().repeat(offsets.shape[1])  # float64's own rounding: it decides where it can
    additions = sum(max(1, n - 1) for _, _, n in blocks) + 4
    for (first, last, n), known in zip(blocks, prepared.tables, strict=True):
        here, roundings = slice(first, last), last - first + additions
        if known is None:
            bound += _EPS * (5 + roundings) * growth[here].sum()
            points = offsets[here].T.to(x.dtype).contiguous()  # (C, b)
            for rows in row_chunks(x.shape[0], 4 * points.numel()):
                total[rows] += _rough_squares(x[rows, None, here] - points).sum(dim=-1)
            continue
        table, error = known
        weights = _EPS * (10.0 * growth[here] + 8 / 3 * roundings * reach[here])  # (b,)
        bound += error + weights @ table.abs().sum(dim=0).to(weights)
        points = x.new_tensor(nodes(n))[:, None] * reach[here].to(x.dtype)  # (n, b)
        for rows in row_chunks(x.shape[0], _width(4, last - first)):
            base = _rough_squares(x[rows, here] - points[0])
            for point, column in zip(points[1:], table, strict=True):
                total[rows].addmm_(_rough_squares(x[rows, here] - point).sub_(base), column.to(x.dtype))
    return total, bound


def _rough_squares(t: Tensor) -> Tensor:
    """asinh²t in float32; t is overwritten."""
    root = torch.mul(t, t).add_(1.0).sqrt_()
    return t.abs_().add_(root).log_().square_()


def _settle(total: Tensor, bound: Tensor, x: Tensor, prepared: Prepared) -> Tensor:
    """The nearest class (N,) from sums that are off by the bound: classes that it leaves open are computed again."""
    bound = bound.float() * (1.0 + 1e-6)
    lower = total - bound
    best, label = total.add_(bound).min(dim=1)
    left = ~(lower > best[:, None])  # (N, C); a sum that overflowed is left open
    several = (left.sum(dim=1) > 1).nonzero()[:, 0]
    for start in range(0, len(several), 256):  # the pairs can be many
        rows = several[start : start + 256]
        row, open_label = left[rows].nonzero().T
        squares = prepared.means.new_full(left[rows].shape, math.inf)
        squares[row, open_label] = squared_sums(x, prepared, rows[row], open_label)
        label[rows] = squares.argmin(dim=1)
    return label
