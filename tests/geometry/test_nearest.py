"""The nearest class: the same as float64's whatever the data."""

import math

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from igeood.geometry import gaussian


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
