"""Fisher–Rao between diagonal Gaussians: accuracy over 24 orders of magnitude, gradients, laws."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
