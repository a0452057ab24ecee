r"""Which class is nearest in the sum over channels of :math:`f(t)=\operatorname{asinh}^2t`, without an N×C×k table.

In channel j the classes lie at :math:`\mu=c+h\xi`, :math:`|\xi|\le1`. As a function of ξ, :math:`f(x-\mu)` is replaced
by the polynomial p of degree < R that has its value and first m-1 derivatives at n Chebyshev nodes (R = nm; n = 1 is
Taylor's). The polynomial is a sum over r of (a function of x)·(a function of μ), so the sum over channels is a matmul.
It is done in float32; a class that the bound below does not exclude is computed again in float64.

*Bound.* From :math:`f'(t)=2\int_0^1\frac{t}{1+b^2t^2}\,dy`, :math:`b^2=1-y^2`, and
:math:`\frac{d}{dt}\frac{t}{1+b^2t^2}=\operatorname{Re}(1+ibt)^{-2}=\int_0^\infty we^{-w}\cos(btw)\,dw`, for r ≥ 2

.. math:: \frac{|f^{(r)}(t)|}{r!}\le\frac2{r!}\int_0^1\!\int_0^\infty b^{r-2}w^{r-1}e^{-w}\,dw\,dy
          =\frac{\sqrt\pi\,\Gamma(r/2)}{r\,\Gamma((r+1)/2)}=:c_r\quad\text{for every real }t,

and the remainder of Hermite's interpolation is :math:`|f-p|\le c_R\,h^R\prod_i|\xi-\xi_i|^m`, whatever x is.

*Derivatives.* :math:`(1+t^2)f''+tf'=2`; differentiated, it gives each :math:`a_d=f^{(d)}/d!` from the two before it.
:math:`|a_1|\le4/3`, and :math:`|a_d|\le c_d\le1` above, so a difference of two values is no more than 4/3 of that of
their arguments. Only differences are summed, for a term that all classes share decides nothing: rounding grows with x
no faster than one value's own, which is like :math:`\log^2|x|`.

*Rounding,* in units of :math:`\epsilon=2^{-24}`. A sum of K products, in any order, is off by K·Σ|products| at most.
In t = x - hξᵢ three roundings come to 2|t|+3h. With log and 1/√ good to 2 and 3, asinh t is off by 7+2|asinh t|, its
square, t's part included, by :math:`9(1+|\operatorname{asinh}t|)^2+4h`. Then :math:`a_1` is off by 22 and :math:`a_2`
by 17; the recurrence, whose factors are at most (2d+1)/(2d+4) and d²/(d+1)(d+2), takes that to 53 at d = 7. The part of
t is :math:`(d+1)|a_{d+1}|(2|t|+3h)`, where :math:`|ta_{d+1}|` is bounded by the recurrence: 64+6h is enough for all d.
Hermite's basis, in float64, is off by less than a thousandth of what these units count for it: a value's polynomial is
:math:`(1-s(\xi-\xi_i))\,l^2`, a derivative's :math:`(\xi-\xi_i)\,l^2`, products of at most 30 factors with |s| < 200.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from igeood.geometry.precision import chunk_rows, row_chunks, wide

_EPS = 1.01 * 2.0**-24  # the hundredth is for the rounding of the bound itself
_TOLERANCE = 0.02  # of the bound in one channel, times √k: sums of different classes are about √k apart
_KINDS = [(1, m) for m in (3, 4, 5, 6, 8)] + [(n, 2) for n in (3, 4, 5, 6, 8, 10)]  # (n, m)
_SMALL = 1 << 16  # so many asinh in float64 cost less than to plan


class _Block(NamedTuple):
    """Channels first:last, in the order of the plan, with n nodes of m derivatives; n = 0: no interpolation."""

    first: int
    last: int
    n: int
    m: int


def _width(part: int, x: Tensor) -> int:
    """The width for `row_chunks`: a part of a chunk stays in one thread's cache; more threads must seldom meet."""
    return part * x.shape[1] if torch.get_num_threads() == 1 else max(1, x.shape[1] // 2)


def squared_sums(x: Tensor, means: Tensor, scale: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
    """Sums over channels of asinh²((x-μ)·scale), (M,), of pairs of a row of x (N, k) and one of the means (C, k).

    With ½log(1+2u(u+√(1+u²))), exact to the last digits: torch.asinh takes one number at a time on a CPU.
    """
    sums = means.new_empty(len(rows))
    width = _width(8, x)
    work = means.new_empty(3, min(len(rows), chunk_rows(width)), x.shape[1])  # new memory costs more than arithmetic
    for few in row_chunks(len(rows), width):
        u, root, other = work[:, : len(rows[few])]
        u.copy_(x.index_select(0, rows[few])).sub_(torch.index_select(means, 0, labels[few], out=other))
        u.mul_(scale).abs_()
        torch.mul(u, u, out=root).add_(1.0)
        root.mul_(torch.rsqrt(root, out=other)).add_(u).mul_(u).mul_(2.0).log1p_()
        torch.sum(root.square_(), dim=1, out=sums[few])
    sums *= 0.25
    for i in (~sums.isfinite()).nonzero()[:, 0].tolist():  # a square overflowed
        sums[i] = torch.asinh((wide(x[rows[i]]) - means[labels[i]]) * scale).square().sum()
    return sums


def nearest_class(x: Tensor, means: Tensor, scale: Tensor) -> Tensor:
    """Index (N,) of the class with the smallest of the `squared_sums`, the first of equals: x (N, k), means (C, k)."""
    if len(means) == 1:
        return torch.zeros(len(x), dtype=torch.int64, device=x.device)
    if len(x) <= 2 or x.numel() * len(means) <= _SMALL:
        unknown = means.new_full((len(means),), math.inf)
        return _settle(unknown.new_zeros(len(x), len(means)), unknown, x, means, scale)
    centre = (means.amin(dim=0) + means.amax(dim=0)) / 2
    offsets = ((means - centre) * scale).T.contiguous()  # (k, C)
    order, blocks = _plan(offsets, len(x))
    offsets = offsets[order]
    found = [torch.empty(0, dtype=torch.int64, device=x.device)]
    width, step = _width(8, x), 16 * chunk_rows(max(means.shape))
    work = means.new_empty(min(len(x), chunk_rows(width)), x.shape[1])  # new memory costs more than arithmetic
    singles = work.float()
    for start in range(0, len(x), step):
        part = x[start : start + step]
        moved = torch.empty_like(part, dtype=torch.float32, memory_format=torch.contiguous_format)
        for rows in row_chunks(len(part), width):
            here, single = work[: len(part[rows])], singles[: len(part[rows])]
            single.copy_(here.copy_(part[rows]).sub_(centre).mul_(scale))
            torch.index_select(single, 1, order, out=moved[rows])
        found.append(_settle(*_approximate(moved, offsets, blocks), part, means, scale))
    return torch.cat(found)


def _plan(offsets: Tensor, n_rows: int) -> tuple[Tensor, list[_Block]]:
    """The order of the channels (k,) and their blocks: each takes the cheapest (n, m) within the tolerance."""
    n_channels, n_classes = offsets.shape
    reach = offsets.abs().amax(dim=1)  # (k,)
    fourth = offsets.square().square_().mean(dim=1)  # the mean of |δ|^m is no more than that of δ⁴h^{m-4}
    product = n_classes * (1 / 45 + 2 / max(1, n_rows))  # nanoseconds for a column of the matmul, and to make it
    costs = {(n, m): n * (2.5 + 0.5 * m) + (n * m - 1) * product for n, m in _KINDS} | {(0, 0): 3.0 * n_classes}
    kinds = sorted(costs, key=costs.__getitem__)
    choice = torch.full((n_channels,), kinds.index((0, 0)), device=reach.device)
    for number in reversed(range(kinds.index((0, 0)))):
        n, m = kinds[number]
        error = fourth ** min(m / 4, 1) * reach ** max(m - 4, 0) if n == 1 else (2.0 * (reach / 2.0) ** n) ** m / 2
        choice[_steepest(n * m) * error * math.sqrt(n_channels) <= _TOLERANCE] = number
    blocks, first = [], 0
    for (n, m), count in zip(kinds, choice.bincount(minlength=len(kinds)).tolist(), strict=True):
        width = max(1, min(512, (1 << 20) // ((n * m + 1) * n_classes)) if n else min(32, (1 << 14) // n_classes))
        blocks += [_Block(i, min(i + width, first + count), n, m) for i in range(first, first + count, width)]
        first += count
    return choice.argsort(stable=True), blocks


def _steepest(r: int) -> float:
    """c_r: no derivative of order r ≥ 2 of asinh² is greater than r!·c_r."""
    return math.sqrt(math.pi) * math.gamma(r / 2) / (r * math.gamma((r + 1) / 2))


def _nodes(n: int) -> list[float]:
    return [math.cos((2 * i + 1) * math.pi / (2 * n)) if n > 1 else 0.0 for i in range(n)]


def _hermite(xi: Tensor, n: int, m: int) -> Tensor:
    """Hermite's basis at ξ, and Π(ξ-ξᵢ)^m: (nm+1, ...). As products: what vanishes at a node does so exactly."""
    table = xi.new_ones(n * m + 1, *xi.shape)
    if n == 1:
        for r in range(1, m + 1):
            torch.mul(table[r - 1], xi, out=table[r])
        return table
    nodes = _nodes(n)  # and m = 2
    for i, node in enumerate(nodes):
        others = [other for other in nodes if other != node]
        for other in others:
            table[i].mul_((xi - other).div_(node - other))
        torch.mul(table[i].square_(), xi - node, out=table[n + i])
        table[i].sub_(table[n + i], alpha=2.0 * sum(1.0 / (node - other) for other in others))
        table[-1].mul_(xi - node)
    table[-1].square_()
    return table


def _basis(offsets: Tensor, reach: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    """What a block's derivatives are multiplied with, (nm-1, b, C), and the interpolation's error, (C,)."""
    table = _hermite(offsets / reach.clamp(min=torch.finfo(reach.dtype).tiny)[:, None], n, m)
    error = _steepest(n * m) * (table[-1].abs_().T @ reach ** (n * m))
    for d, factor in enumerate(_factors(m)):
        table[d * n : (d + 1) * n] *= (factor * (-reach) ** d)[:, None]
    return table[1:-1].float(), error  # the basis sums to 1: all values are taken less the first node's


def _factors(m: int) -> list[float]:
    """What the m derivatives that `_add_products` computes are multiples of: its recurrence has one factor fewer."""
    factors = [1.0, 2.0, 1.0]
    for d in range(1, m - 2):
        factors.append(-d * d / ((d + 1) * (d + 2)) * factors[d])
    return factors[:m]


def _approximate(x: Tensor, offsets: Tensor, blocks: list[_Block]) -> tuple[Tensor, Tensor]:
    """Sums over channels (N, C), up to a term for each row, and how far off each class's may be (C,)."""
    total = x.new_zeros(len(x), offsets.shape[1])
    reach = offsets.abs().amax(dim=1)  # (k,)
    far = max(map(abs, map(float, x.aminmax())))
    growth = (1.0 + torch.asinh(far + reach)).square() + reach  # (k,), what a value's rounding is a multiple of
    bound = 2.0**-50 * growth.sum().repeat(offsets.shape[1])  # float64's own rounding: it decides where it can
    additions = sum(max(1, block.n * block.m - 1) for block in blocks) + 4
    for block in blocks:
        here = slice(block.first, block.last)
        roundings = block.last - block.first + additions
        if block.n == 0:
            bound += _EPS * (9 + roundings) * growth[here].sum()
            _add_direct(total, x[:, here], offsets[here].T.float().contiguous())
            continue
        table, error = _basis(offsets[here], reach[here], block.n, block.m)
        weights = (64.0 + 4 / 3 * roundings + 6.0 * reach[here]).repeat(len(table), 1)  # (nm-1, b)
        weights[: block.n - 1] = 18.0 * growth[here] + 8 / 3 * roundings * reach[here]
        bound += error + (table.abs().flatten(0, 1).T @ (_EPS * weights).flatten().float()).to(bound)
        _add_products(total, x[:, here], reach[here].float(), table, block)
    return total, bound


def _add_direct(total: Tensor, x: Tensor, offsets: Tensor) -> None:
    """Add asinh²(x-μ) of all pairs, in float32: for channels where no interpolation pays."""
    for rows in row_chunks(len(x), 4 * offsets.numel()):
        t = x[rows, None, :] - offsets  # (n, C, b)
        root = (t * t).add_(1.0).sqrt_()
        total[rows] += t.abs_().add_(root).log_().square_().sum(dim=-1)


def _add_products(total: Tensor, x: Tensor, reach: Tensor, table: Tensor, block: _Block) -> None:
    """Add the products of the derivatives a_d at the nodes, (N, b) each, with the table's (b, C)."""
    n, m = block.n, block.m
    width = _width(4, x)
    work = x.new_empty(6, min(len(x), chunk_rows(width)), x.shape[1])
    one, factors = x.new_ones(()), _factors(m)
    for rows in row_chunks(len(x), width):
        here, part = x[rows], total[rows]
        t, q, root, a, new, base = work[:, : len(here)]
        for i, node in enumerate(_nodes(n)):
            torch.sub(here, node * reach, out=t)
            torch.addcmul(one, t, t, out=q)
            torch.rsqrt(q, out=root)
            torch.abs(t, out=a).add_(q.mul_(root)).log_().copysign_(t)  # asinh t
            if n > 1:
                torch.mul(a, a, out=q if i else base)
            if i:
                part.addmm_(q.sub_(base), table[i - 1])
            part.addmm_(a.mul_(root), table[n - 1 + i])
            if m == 2:
                continue
            t.mul_(root.square_())  # root is now 1/(1+t²)
            torch.addcmul(root, t, a, value=-1.0, out=new)
            part.addmm_(new, table[2 * n - 1 + i])
            for d in range(1, m - 2):
                ratio = -(2 * d + 1) / (d + 2) * factors[d + 1] / factors[d + 2]
                a.mul_(root).addcmul_(t, new, value=ratio)
                a, new = new, a
                part.addmm_(new, table[(d + 2) * n - 1 + i])


def _settle(total: Tensor, bound: Tensor, x: Tensor, means: Tensor, scale: Tensor) -> Tensor:
    """The nearest class (N,) from sums that are off by the bound: classes that it leaves open are computed again."""
    bound = bound.float() * (1.0 + 1e-6)
    lower = total - bound
    best, nearest = total.add_(bound).min(dim=1)
    left = ~(lower > best[:, None])  # (N, C); a sum that overflowed is left open
    several = (left.sum(dim=1) > 1).nonzero()[:, 0]
    for start in range(0, len(several), 256):  # the pairs can be many
        rows = several[start : start + 256]
        row, label = left[rows].nonzero().T
        squares = means.new_full((len(rows), len(means)), math.inf)
        squares[row, label] = squared_sums(x, means, scale, rows[row], label)
        nearest[rows] = squares.argmin(dim=1)
    return nearest
