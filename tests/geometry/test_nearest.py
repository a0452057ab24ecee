"""The nearest class: the same as float64's whatever the data, by a bound that is proven and here measured."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from igeood.geometry import gaussian, nearest


def brute(x: Tensor, means: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 11 with the whole table of classes in float64."""
    apart = (x.double()[:, None] - means.double()) / (math.sqrt(8.0) * std.double())
    squares = torch.asinh(apart).square().sum(dim=-1)
    return math.sqrt(8.0) * squares.min(dim=1).values.sqrt(), squares.argmin(dim=1)


def assert_the_same(x: Tensor, means: Tensor, std: Tensor) -> None:
    found, expected = gaussian.nearest_distance(x, means, std), brute(x, means, std)
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(
        found[0].double(), expected[0], rtol=1e-12 if found[0].dtype == torch.float64 else 1e-6, atol=0
    )


def sample(n: int, n_classes: int, k: int, spread: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Half of the rows near a class, half near none; deviations over a decade, the spread of the means uneven."""
    generator = torch.Generator().manual_seed(seed)
    std = 10 ** torch.rand(k, generator=generator, dtype=torch.float64)
    means = torch.randn(n_classes, k, generator=generator, dtype=torch.float64) * std
    means *= spread * 2 * torch.rand(k, generator=generator, dtype=torch.float64)
    labels = torch.randint(n_classes, (n,), generator=generator)
    x = torch.randn(n, k, generator=generator, dtype=torch.float64) * std * 1.2
    x[: n // 2] += means[labels[: n // 2]]
    return x, means, std


@pytest.mark.parametrize("spread", [0.0, 1e-6, 0.1, 0.6, 2.0, 50.0])
@pytest.mark.parametrize(("n_classes", "k"), [(2, 1), (10, 342), (100, 64), (400, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_as_the_whole_table(n_classes, k, spread, dtype):
    x, means, std = sample(100 if k > 50 else 300, n_classes, k, spread)
    assert_the_same(x.to(dtype), means, std)


@pytest.mark.parametrize("shift", [0.0, 1e3, 1e8])
def test_same_far_from_the_origin(shift):
    x, means, std = sample(200, 50, 40, 0.6)
    assert_the_same(x + shift, means + shift, std)


@pytest.mark.parametrize("far", [10.0, 1e4, 1e10, 1e30, 1e300])
def test_same_far_from_all_classes(far):
    x, means, std = sample(60, 50, 40, 0.6)
    x[::2] *= far
    x[1::2, 3] = -far
    assert_the_same(x, means, std)


def test_same_where_a_deviation_is_tiny_or_huge():
    x, means, std = sample(200, 50, 40, 0.6)
    std[:4] = torch.tensor([1e-30, 1e-8, 1e8, 1e30], dtype=torch.float64)
    assert_the_same(x, means, std)


def test_same_at_ties_and_near_them():
    x, means, std = sample(200, 60, 40, 0.6)
    means[30:] = means[:30]  # the first of equals wins
    assert_the_same(x, means, std)
    means[30:, 0] += 1e-9 * std[0]
    assert_the_same(x, means, std)
    assert gaussian.nearest_distance(means, means[:30], std)[0][:30].eq(0).all()


def test_rows_and_columns_that_are_not_contiguous():
    x, means, std = sample(300, 50, 80, 0.6)
    parts = x[::2, ::2], means[:, ::2], std[::2]
    found, expected = gaussian.nearest_distance(*parts), gaussian.nearest_distance(*(p.contiguous() for p in parts))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_one_row_at_a_time_and_small_chunks(monkeypatch):
    x, means, std = sample(400, 60, 30, 0.6)
    distance, label = gaussian.nearest_distance(x, means, std)
    alone = [gaussian.nearest_distance(row[None], means, std) for row in x]
    torch.testing.assert_close(torch.cat([d for d, _ in alone]), distance, rtol=1e-13, atol=0)
    assert torch.equal(torch.cat([y for _, y in alone]), label)
    monkeypatch.setattr("igeood.geometry.precision.CHUNK_ELEMENTS", 1000)
    again = gaussian.nearest_distance(x, means, std)
    torch.testing.assert_close(again[0], distance, rtol=1e-13, atol=0)
    assert torch.equal(again[1], label)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.floats(0.01, 3.0), st.integers(2, 120), st.integers(1, 40))
def test_law_same_as_the_whole_table(seed, spread, n_classes, k):
    assert_the_same(*sample(1 + (1 << 17) // (n_classes * k) % 400, n_classes, k, spread, seed))


def approximation(x: Tensor, means: Tensor, kinds: list[tuple[int, int]], monkeypatch) -> tuple[Tensor, Tensor]:
    """How far off the sums are (N, C), of x and means in units of 1/scale, and the bound (C,), with these (n, m)."""
    monkeypatch.setattr(nearest, "_KINDS", kinds)
    centre = (means.amin(dim=0) + means.amax(dim=0)) / 2
    offsets = (means - centre).T.contiguous()
    order, blocks = nearest._plan(offsets, 10**6)
    offsets, moved = offsets[order], (x - centre)[:, order]
    total, bound = nearest._approximate(moved.float(), offsets, blocks)
    left_out = torch.zeros(len(x), dtype=torch.float64)
    for first, last, n, _ in blocks:
        if n:
            node = nearest._nodes(n)[0] * offsets[first:last].abs().amax(dim=1) if n > 1 else 0.0
            left_out += torch.asinh(moved[:, first:last] - node).square().sum(dim=1)
    exact = torch.asinh(moved[:, None] - offsets.T).square().sum(dim=-1)
    return total.double() + left_out[:, None] - exact, bound


def adversarial(reach: float, n: int) -> Tensor:
    """Where the remainder is greatest and rounding worst: about the classes, at their ends, far and very far."""
    near = torch.linspace(-2 * reach - 2, 2 * reach + 2, n, dtype=torch.float64)
    far = torch.logspace(0, 17, n, dtype=torch.float64)
    return torch.cat([near, far, -far, torch.tensor([reach, -reach, 0.0], dtype=torch.float64)])[:, None]


@pytest.mark.parametrize("kind", [*nearest._KINDS, (0, 0)], ids=str)
@pytest.mark.parametrize("reach", [0.0, 1e-3, 0.1, 0.4, 0.8, 1.4])
@pytest.mark.parametrize("k", [1, 30])
def test_the_bound_holds(kind, reach, k, monkeypatch):
    monkeypatch.setattr(nearest, "_TOLERANCE", math.inf)
    generator = torch.Generator().manual_seed(k)
    means = reach * (2 * torch.rand(200, k, generator=generator, dtype=torch.float64) - 1)
    means[0], means[1] = reach, -reach
    x = adversarial(reach, 300).expand(-1, k)
    if k > 1:
        x = x * torch.rand(k, generator=generator, dtype=torch.float64)
    for part in x.split(100):  # the bound grows with the greatest of the rows
        error, bound = approximation(part, means, [kind] if kind[0] else [], monkeypatch)
        assert (error.abs() <= bound).all()


def test_the_bound_is_not_far_from_the_truth(monkeypatch):
    """Were it loose by orders of magnitude, the test above would say nothing."""
    monkeypatch.setattr(nearest, "_TOLERANCE", math.inf)
    means = torch.linspace(-0.5, 0.5, 101, dtype=torch.float64)[:, None]
    for kind in nearest._KINDS:
        error, bound = approximation(adversarial(0.5, 300)[:300], means, [kind], monkeypatch)
        if kind[0] * kind[1] <= 6:  # of higher degrees, rounding is all there is
            assert (error.abs() / bound).max() > 0.1


@pytest.mark.parametrize(("n", "m"), nearest._KINDS)
def test_the_basis_is_known_as_well_as_stated(n, m):
    """To a thousandth of the roundings that are counted for it, at the nodes, next to them and elsewhere."""
    nodes = nearest._nodes(n)
    xi = [min(1.0, node + step) for node in nodes for step in (0.0, 1e-12, 1e-5)] + [-1.0, -0.3, 0.2, 1.0]
    table = nearest._hermite(torch.tensor(xi, dtype=torch.float64), n, m)
    if n == 1:
        torch.testing.assert_close(
            table, torch.stack([torch.tensor(xi, dtype=torch.float64) ** r for r in range(m + 1)])
        )
        return
    with mpmath.workdps(60):
        exact = [[mpmath.mpf(node) for node in nodes], [mpmath.mpf(value) for value in xi]]
        for i, node in enumerate(exact[0]):
            others = [other for other in exact[0] if other != node]
            slope = 2 * sum(1 / (node - other) for other in others)
            assert abs(slope) < 200
            for column, value in enumerate(exact[1]):
                square = mpmath.fprod((value - other) / (node - other) for other in others) ** 2
                derivative = (value - node) * square
                assert abs(table[n + i, column].item() - derivative) <= abs(derivative) * 2.0**-44
                counted = square + abs(slope * derivative)
                assert abs(table[i, column].item() - (square - slope * derivative)) <= counted * 2.0**-44


@pytest.mark.parametrize("nodes", [8, 10])
@pytest.mark.parametrize("delta", [1e-12, 1e-10])
def test_same_for_classes_close_to_each_other_at_a_node(nodes, delta):
    """Where all of the basis but one vanishes, and with it all other roundings."""
    generator = torch.Generator().manual_seed(1)
    at = 1.7 * math.cos(math.pi / (2 * nodes))
    means = at + delta * torch.randn(500, 8, generator=generator, dtype=torch.float64)
    means[0], means[1] = 1.7, -1.7
    x = torch.randn(500, 8, generator=generator, dtype=torch.float64) * 3
    std = torch.full((8,), 1 / math.sqrt(8.0), dtype=torch.float64)
    squares = torch.asinh(x[:, None] - means).square().sum(dim=-1)
    found, rows = gaussian.nearest_distance(x, means, std)[1], torch.arange(500)
    assert (squares[rows, found] <= squares.amin(dim=1) * (1 + 1e-14)).all()


def test_no_derivative_is_steeper_than_stated():
    """`c_r` is attained at 0 for even r, and not exceeded elsewhere."""
    with mpmath.workdps(60):
        for r in (2, 3, 4, 5, 6, 8, 12, 16, 20):
            for t in (0.0, 0.1, 0.3, 0.7, 1.0, 2.0, 10.0):
                slope = mpmath.taylor(lambda v: mpmath.asinh(v) ** 2, t, r)[r]
                assert abs(slope) <= nearest._steepest(r) * (1 + 1e-12)
                if t == 0 and r % 2 == 0:
                    assert float(abs(slope)) == pytest.approx(nearest._steepest(r), rel=1e-12)


@pytest.mark.parametrize(("n", "m"), nearest._KINDS)
def test_the_polynomial_is_hermites(n, m):
    """It takes the values and derivatives of the function at the nodes: it is exact for polynomials of degree < nm."""
    nodes = nearest._nodes(n)
    generator = torch.Generator().manual_seed(n)
    coefficients = torch.randn(n * m, generator=generator, dtype=torch.float64)
    p = np.polynomial.Polynomial(coefficients.numpy())
    xi = torch.linspace(-1, 1, 50, dtype=torch.float64)
    data = [p.deriv(d)(node) / math.factorial(d) for d in range(m) for node in nodes]
    table = nearest._hermite(xi, n, m)
    torch.testing.assert_close(
        torch.tensor(data, dtype=torch.float64) @ table[:-1], torch.tensor(p(xi.numpy())), atol=1e-8, rtol=0
    )
    expected = torch.stack([xi - node for node in nodes]).prod(dim=0) ** m
    torch.testing.assert_close(table[-1], expected, atol=1e-12, rtol=0)


def test_squared_sums_to_the_last_digits():
    x = torch.logspace(-150, 140, 59, dtype=torch.float64)[:, None]
    found = nearest.squared_sums(
        x, torch.zeros(1, 1, dtype=torch.float64), torch.ones(1), torch.arange(59), torch.zeros(59, dtype=torch.int64)
    )
    with mpmath.workdps(40):
        expected = [float(mpmath.asinh(mpmath.mpf(v)) ** 2) for v in x[:, 0].tolist()]
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-15)


def test_gradients_reach_means_and_deviations_too():
    x, means, std = sample(20, 5, 4, 0.6)
    for part in (means.requires_grad_(), std.requires_grad_()):
        (slope,) = torch.autograd.grad(gaussian.nearest_distance(x, means, std)[0].sum(), part)
        assert slope.isfinite().all()
        assert slope.ne(0).any()


def test_no_channel_and_no_row():
    distance, label = gaussian.nearest_distance(torch.empty(3, 0), torch.empty(2, 0), torch.empty(0))
    assert distance.tolist() == label.tolist() == [0, 0, 0]
    assert gaussian.nearest_distance(torch.empty(0, 7), torch.ones(2, 7), torch.ones(7))[1].shape == (0,)


def spread_out(n_classes: int) -> Tensor:
    """Offsets (k, C), even over ±h in each channel, with h from a millionth to a hundred."""
    reach = torch.logspace(-6, 2, 600, dtype=torch.float64)
    return reach[:, None] * torch.linspace(-1, 1, n_classes, dtype=torch.float64)


@pytest.mark.parametrize("n_classes", [2, 100, 1000, 20_000])
def test_the_plan_has_every_channel_once_in_blocks_that_fit_the_memory(n_classes):
    order, blocks = nearest._plan(spread_out(n_classes), 1000)
    assert sorted(order.tolist()) == list(range(600))
    assert [b.first for b in blocks] == [0, *(b.last for b in blocks[:-1])]
    assert blocks[-1].last == 600
    for b, after in zip(blocks, [*blocks[1:], None], strict=True):
        most, size = (512, (b.n * b.m + 1) * n_classes / (1 << 20)) if b.n else (32, n_classes / (1 << 14))
        width = b.last - b.first
        assert 1 <= width <= most
        assert width == 1 or width * size <= 1
        if after is not None and (after.n, after.m) == (b.n, b.m):  # more of the kind: this one is as wide as can be
            assert width == most or (width + 1) * size > 1


def remainder(kind: tuple[int, int], offsets: Tensor) -> Tensor:
    """Mean over the classes of the interpolation's error bound in each channel, (k,), from the nodes themselves."""
    n, m = kind
    reach = offsets.abs().amax(dim=1, keepdim=True)
    product = torch.stack([(offsets - node * reach).abs() for node in nearest._nodes(n)]).prod(dim=0) ** m
    return nearest._steepest(n * m) * product.mean(dim=1)


@pytest.mark.parametrize("n_classes", [100, 1000])
def test_the_plan_is_good_enough_and_no_better(n_classes):
    """Errors within the tolerance; a kind with fewer nodes and columns would not do (the estimate is within 2.5)."""
    offsets = spread_out(n_classes)
    order, blocks = nearest._plan(offsets, 10**6)
    limit = nearest._TOLERANCE / math.sqrt(len(offsets))
    seen = set()
    for b in blocks:
        here = offsets[order[b.first : b.last]]
        seen.add((b.n, b.m))
        if b.n:
            assert (remainder((b.n, b.m), here) <= limit * (1 + 1e-3)).all()
        smaller = [k for k in nearest._KINDS if not b.n or (k[0] * k[1] < b.n * b.m and k[0] <= b.n)]
        for kind in smaller:
            assert (2.5 * remainder(kind, here) > limit).all()
    assert {(0, 0), (1, 3)} < seen
    assert len(seen) >= 6


def test_the_plan_prefers_the_cheaper_way():
    """Two classes are quicker computed than interpolated at many nodes; a wider reach takes more columns."""
    _, blocks = nearest._plan(spread_out(2), 1000)
    assert {b.n for b in blocks} == {0, 1}
    order, blocks = nearest._plan(spread_out(1000), 10**6)
    columns = torch.empty(600)
    for b in blocks:
        columns[order[b.first : b.last]] = b.n * b.m if b.n else math.inf
    assert (columns.diff().nan_to_num(0.0) >= 0).all()


@pytest.mark.parametrize(("spread", "most"), [(0.1, 0.32), (0.6, 0.38), (2.0, 0.07)])
def test_few_classes_are_computed_again(spread, most, monkeypatch):
    """The bound is tight enough: of sixty classes one is left over for most of the rows."""
    pairs = []
    plain = nearest.squared_sums

    def counted(x, means, scale, rows, labels):
        pairs.append(len(rows))
        return plain(x, means, scale, rows, labels)

    monkeypatch.setattr(nearest, "squared_sums", counted)
    x, means, std = sample(600, 60, 60, spread)
    nearest.nearest_class(x, means, 1 / (math.sqrt(8.0) * std))
    assert sum(pairs) <= most * 600
    assert max(pairs, default=0) <= 256 * 60


@pytest.mark.parametrize("k", [1, 2, 40])
def test_same_with_several_threads(k):
    x, means, std = sample(300, 60, k, 0.6)
    threads = torch.get_num_threads()
    alone = gaussian.nearest_distance(x, means, std)
    torch.set_num_threads(2 if threads == 1 else 1)
    try:
        assert_the_same(x, means, std)
        torch.testing.assert_close(gaussian.nearest_distance(x, means, std)[0], alone[0], rtol=1e-13, atol=0)
    finally:
        torch.set_num_threads(threads)


def test_squared_sums_whose_squares_overflow():
    x = torch.tensor([[1e200, 2.0], [-3e307, 1.0], [0.5, 2.0]], dtype=torch.float64)
    means, scale = torch.tensor([[1.0, 1.0], [-1e200, 0.0]], dtype=torch.float64), torch.tensor([2.0, 0.5]).double()
    rows, labels = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 0, 1, 0])
    found = nearest.squared_sums(x, means, scale, rows, labels)
    expected = torch.asinh((x[rows] - means[labels]) * scale).square().sum(dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
