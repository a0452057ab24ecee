"""Fisher–Rao between diagonal Gaussians: accuracy over 24 orders of magnitude, gradients, laws, the nearest class."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from igeood.geometry import gaussian


def exact(mean_p: float, std_p: float, mean_q: float, std_q: float) -> float:
    """The paper's own log-ratio form of Eq. 9, in 80 digits."""
    with mpmath.workdps(80):
        m1, s1, m2, s2 = (mpmath.mpf(v) for v in (mean_p, std_p, mean_q, std_q))
        far = mpmath.sqrt((m1 - m2) ** 2 / 2 + (s1 + s2) ** 2)
        near = mpmath.sqrt((m1 - m2) ** 2 / 2 + (s1 - s2) ** 2)
        return float(mpmath.sqrt(2) * mpmath.log((far + near) / (far - near)))


@pytest.mark.parametrize("shift", np.geomspace(1e-6, 1e6, 7))
@pytest.mark.parametrize("ratio", [1e-6, 1e-3, 0.5, 0.999999, 1.0, 1.000001, 2.0, 1e3, 1e6])
@pytest.mark.parametrize("std", [1e-3, 1.0, 1e3])
def test_univariate_of_float32_is_exact_to_1e_5(shift, ratio, std):
    arguments = [np.float32(v) for v in (std * shift, std, 0.0, std * ratio)]
    distance = gaussian.univariate_distance(*(torch.tensor(v) for v in arguments))
    assert distance.dtype == torch.float32
    assert distance.item() == pytest.approx(exact(*map(float, arguments)), rel=1e-5)


def test_gradients_agree_with_finite_differences():
    generator = torch.Generator().manual_seed(3)
    mean_p, mean_q = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator)
    std_p, std_q = torch.rand(2, 3, 4, dtype=torch.float64, generator=generator) + 0.2
    pair = [t.clone().requires_grad_() for t in (mean_p, std_p, mean_q, std_q)]
    assert torch.autograd.gradcheck(gaussian.distance, pair, rtol=1e-4, atol=1e-9)
    classes = [t.clone().requires_grad_() for t in (mean_p, mean_q, std_p[0])]
    assert torch.autograd.gradcheck(lambda *t: gaussian.nearest_distance(*t)[0], classes, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 1e-30, 1e-15, 1e-6, 1.0, 1e6])
def test_gradients_are_finite_at_and_near_coincidence(dtype, offset):
    mean = torch.zeros(2, 3, dtype=dtype)
    moved = (mean + offset).requires_grad_()
    std = torch.full((2, 3), 0.5, dtype=dtype, requires_grad=True)
    parts = torch.autograd.grad(gaussian.distance(moved, std, mean, torch.ones(2, 3) * 0.5).sum(), (moved, std))
    parts += torch.autograd.grad(gaussian.nearest_distance(moved, mean, std[0])[0].sum(), (moved, std))
    assert all(part.isfinite().all() for part in parts)


positive, real = st.floats(1e-4, 1e4), st.floats(-1e4, 1e4)
gaussians = st.tuples(real, positive)


def between(p: tuple[float, float], q: tuple[float, float]) -> float:
    values = (torch.tensor(v, dtype=torch.float64) for v in (*p, *q))
    return gaussian.univariate_distance(*values).item()


@given(gaussians, gaussians, gaussians, st.floats(1e-2, 1e2))
def test_law_metric_without_scale(p, q, r, scale):
    assert between(p, p) == 0.0
    assert between(p, q) == between(q, p) >= 0.0
    assert between(p, r) <= (between(p, q) + between(q, r)) * (1 + 1e-12)
    scaled = [(scale * mean, scale * std) for mean, std in (p, q)]
    assert between(*scaled) == pytest.approx(between(p, q), rel=1e-6, abs=1e-7)


@given(st.lists(gaussians, min_size=2, max_size=5))
def test_law_broadcast_is_a_loop(items):
    mean, std = torch.tensor(items, dtype=torch.float64).T
    grid = gaussian.distance(mean[:, None, None], std[:, None, None], mean[None, :, None], std[None, :, None])
    loop = [[between(p, q) for q in items] for p in items]
    torch.testing.assert_close(grid, torch.tensor(loop, dtype=torch.float64), rtol=1e-12, atol=0)


UNIVARIATE, NEAREST = ("mean_p", "std_p", "mean_q", "std_q"), ("x", "means", "std")


@pytest.mark.parametrize("names", [UNIVARIATE, NEAREST])
def test_errors_name_the_argument(names, refused):
    function = gaussian.nearest_distance if names == NEAREST else gaussian.univariate_distance
    for place, name in enumerate(names):
        parts = [torch.ones(3) if other == "std" else torch.ones(2, 3) for other in names]
        parts[place] = parts[place] * math.nan
        with refused(name):
            function(*parts)
    with refused("x, means, std"):
        gaussian.nearest_distance(torch.ones(4, 2), torch.ones(2, 3), torch.ones(3))


def brute(x: Tensor, means: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 11 with the whole table of classes in float64."""
    apart = (x.double()[:, None] - means.double()) / (math.sqrt(8.0) * std.double())
    squares = torch.asinh(apart).square().sum(dim=-1)
    return math.sqrt(8.0) * squares.min(dim=1).values.sqrt(), squares.argmin(dim=1)


def assert_the_same(x: Tensor, means: Tensor, std: Tensor) -> None:
    expected = brute(x, means, std)
    distance, label = gaussian.nearest_distance(x, means, std)
    assert torch.equal(label, expected[1])
    rtol = 1e-12 if distance.dtype == torch.float64 else 1e-6
    torch.testing.assert_close(distance.double(), expected[0], rtol=rtol, atol=0)


def sample(n: int, n_classes: int, k: int, spread: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Half of the rows near a class, half near none; deviations over a decade, the spread of the means uneven."""
    rng = np.random.default_rng(seed)
    std = 10 ** rng.random(k)
    means = rng.normal(size=(n_classes, k)) * std * spread * 2 * rng.random(k)
    x = rng.normal(size=(n, k)) * std * 1.2
    x[: n // 2] += means[rng.integers(n_classes, size=n // 2)]
    return tuple(torch.from_numpy(array) for array in (x, means, std))


@pytest.mark.parametrize("spread", [0.0, 1e-6, 0.1, 0.6, 2.0, 50.0])
@pytest.mark.parametrize(("n_classes", "k"), [(2, 1), (10, 342), (100, 64), (400, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_as_the_whole_table(n_classes, k, spread, dtype):
    x, means, std = sample(100 if k > 50 else 300, n_classes, k, spread)
    assert_the_same(x.to(dtype), means, std)


def test_same_far_away_with_tiny_deviations_and_at_ties():
    x, means, std = sample(200, 50, 40, 0.6)
    assert_the_same(x + 1e8, means + 1e8, std)
    for far in (10.0, 1e10, 1e300):
        outlier = x.clone()
        outlier[::2] *= far
        outlier[1::2, 3] = -far
        assert_the_same(outlier, means, std)
    uneven = std.clone()
    uneven[:4] = torch.tensor([1e-30, 1e-8, 1e8, 1e30], dtype=torch.float64)
    assert_the_same(x, means, uneven)
    means[25:] = means[:25]  # the first of equals wins
    assert_the_same(x, means, std)
    means[25:, 0] += 1e-9 * std[0]
    assert_the_same(x, means, std)
    assert gaussian.nearest_distance(means[:25], means, std)[0].eq(0).all()


def test_rows_alone_in_chunks_with_gaps_and_with_threads(monkeypatch):
    x, means, std = sample(400, 60, 60, 0.6)
    parts = x[::2, ::2], means[:, ::2], std[::2]
    distance, label = gaussian.nearest_distance(*parts)
    alone = [gaussian.nearest(row[None], *parts[1:]) for row in parts[0]]
    ways = [tuple(torch.cat(values) for values in zip(*alone, strict=True))]
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if threads == 1 else 1)
    ways.append(gaussian.nearest(*parts))
    torch.set_num_threads(threads)
    monkeypatch.setattr("igeood.geometry.precision.CHUNK_ELEMENTS", 1000)
    ways.append(gaussian.nearest_distance(*(part.contiguous() for part in parts)))
    for again in ways:
        torch.testing.assert_close(again[0], distance, rtol=1e-13, atol=0)
        assert torch.equal(again[1], label)
    distance, label = gaussian.nearest_distance(torch.empty(3, 0), torch.empty(2, 0), torch.empty(0))
    assert distance.tolist() == label.tolist() == [0, 0, 0]  # without a channel


def test_asinh_to_the_last_digits_and_where_its_square_overflows():
    x = torch.logspace(-150, 300, 91, dtype=torch.float64)
    with mpmath.workdps(40):
        expected = [float(mpmath.asinh(mpmath.mpf(v))) for v in x.tolist()]
    np.testing.assert_allclose(gaussian.asinh(-x).numpy(), expected, rtol=1e-15)
