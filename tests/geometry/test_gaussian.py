"""Fisher–Rao between diagonal Gaussians: accuracy over 24 orders of magnitude, gradients, laws."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad

from igeood.errors import InputError
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


def test_against_the_length_of_the_geodesic():
    """The metric is (dμ² + 2dσ²)/σ²: with x = μ/√2 a hyperbolic half-plane, whose geodesics are half circles."""
    mean_p, std_p, mean_q, std_q = 0.3, 0.8, 2.1, 1.7
    x1, x2 = mean_p / math.sqrt(2), mean_q / math.sqrt(2)
    centre = (x1**2 + std_p**2 - x2**2 - std_q**2) / (2 * (x1 - x2))
    t1, t2 = math.atan2(std_p, x1 - centre), math.atan2(std_q, x2 - centre)
    length = math.sqrt(2) * abs(quad(lambda t: 1 / math.sin(t), t1, t2)[0])
    assert between((mean_p, std_p), (mean_q, std_q)) == pytest.approx(length, rel=1e-10)


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


@given(st.lists(gaussians, min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_law_broadcast_is_a_loop_and_channels_permute(items, random):
    mean, std = torch.tensor(items, dtype=torch.float64).T
    grid = gaussian.distance(mean[:, None, None], std[:, None, None], mean[None, :, None], std[None, :, None])
    for i, p in enumerate(items):
        for j, q in enumerate(items):
            assert grid[i, j].item() == pytest.approx(between(p, q), rel=1e-12)
    order = list(range(len(items)))
    random.shuffle(order)
    origin = torch.zeros_like(mean), torch.ones_like(std)
    expected = gaussian.distance(mean, std, *origin).item()
    assert gaussian.distance(mean[order], std[order], *origin).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("place", range(4))
def test_errors_name_the_argument_and_types_are_as_wide_as_the_widest(place):
    parts = [torch.ones(2, 3) for _ in range(4)]
    parts[place][1, 2] = math.inf
    with pytest.raises(InputError) as caught:
        gaussian.univariate_distance(*parts)
    assert caught.value.argument == ("mean_p", "std_p", "mean_q", "std_q")[place]
    for dtype in (torch.float32, torch.float64):
        parts[place] = torch.ones(3, dtype=dtype)
        assert gaussian.univariate_distance(*parts).shape == (2, 3)
        assert gaussian.distance(*parts).dtype == dtype


def test_nearest_distance_names_what_is_wrong_and_its_result_has_the_type_of_its_input():
    good = {"x": torch.ones(4, 3), "means": torch.ones(2, 3), "std": torch.ones(3)}
    assert gaussian.nearest_distance(**good)[0].dtype == torch.float32
    for argument, bad in {"x": torch.ones(4, 2), "means": torch.ones(0, 3), "std": torch.ones(2)}.items():
        with pytest.raises(InputError) as caught:
            gaussian.nearest_distance(**{**good, argument: bad})
        assert caught.value.argument == "x, means, std"
        with pytest.raises(InputError) as caught:
            gaussian.nearest_distance(**{**good, argument: good[argument] * math.nan})
        assert caught.value.argument == argument
