"""Fisher–Rao between diagonal Gaussians: accuracy over 24 orders of magnitude, gradients, laws."""

import math
import re

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
    found = gaussian.univariate_distance(*(torch.tensor(v) for v in arguments))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(exact(*map(float, arguments)), rel=1e-5)


def test_diagonal_distance_adds_in_squares():
    generator = torch.Generator().manual_seed(0)
    mean_p, mean_q = torch.randn(2, 7, generator=generator)
    std_p, std_q = torch.rand(2, 7, generator=generator) + 0.1
    expected = math.sqrt(sum(exact(*map(float, v)) ** 2 for v in zip(mean_p, std_p, mean_q, std_q, strict=True)))
    assert gaussian.distance(mean_p, std_p, mean_q, std_q).item() == pytest.approx(expected, rel=1e-5)


def test_against_the_length_of_the_geodesic():
    """The metric is (dμ² + 2dσ²)/σ²: with x = μ/√2 a hyperbolic half-plane, whose geodesics are half circles."""
    mean_p, std_p, mean_q, std_q = 0.3, 0.8, 2.1, 1.7
    x1, x2 = mean_p / math.sqrt(2), mean_q / math.sqrt(2)
    centre = (x1**2 + std_p**2 - x2**2 - std_q**2) / (2 * (x1 - x2))
    t1, t2 = math.atan2(std_p, x1 - centre), math.atan2(std_q, x2 - centre)
    length = math.sqrt(2) * abs(quad(lambda t: 1 / math.sin(t), t1, t2)[0])
    values = (torch.tensor(v, dtype=torch.float64) for v in (mean_p, std_p, mean_q, std_q))
    assert gaussian.univariate_distance(*values).item() == pytest.approx(length, rel=1e-10)


def test_gradients_agree_with_finite_differences():
    generator = torch.Generator().manual_seed(3)
    mean_p, mean_q = (torch.randn(3, 4, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2))
    std_p, std_q = ((torch.rand(3, 4, dtype=torch.float64, generator=generator) + 0.2).requires_grad_() for _ in "12")
    assert torch.autograd.gradcheck(gaussian.distance, (mean_p, std_p, mean_q, std_q), rtol=1e-4, atol=1e-9)
    means = torch.randn(5, 4, dtype=torch.float64, generator=generator)
    std = torch.rand(4, dtype=torch.float64, generator=generator) + 0.2
    assert torch.autograd.gradcheck(lambda x: gaussian.nearest_distance(x, means, std)[0], mean_p, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 1e-30, 1e-15, 1e-6, 1.0, 1e6])
def test_gradients_are_finite_at_and_near_coincidence(dtype, offset):
    mean = torch.zeros(2, 3, dtype=dtype)
    moved = (mean + offset).requires_grad_()
    std = torch.full((2, 3), 0.5, dtype=dtype, requires_grad=True)
    parts = torch.autograd.grad(gaussian.distance(moved, std, mean, torch.ones(2, 3) * 0.5).sum(), (moved, std))
    assert all(part.isfinite().all() for part in parts)
    (part,) = torch.autograd.grad(gaussian.nearest_distance(moved, mean, std.detach()[0])[0].sum(), moved)
    assert part.isfinite().all()


positive, real = st.floats(1e-4, 1e4), st.floats(-1e4, 1e4)
gaussians = st.tuples(real, positive)


def between(p: tuple[float, float], q: tuple[float, float]) -> float:
    values = (torch.tensor(v, dtype=torch.float64) for v in (*p, *q))
    return gaussian.univariate_distance(*values).item()


@given(gaussians, gaussians, gaussians)
def test_law_metric(p, q, r):
    assert between(p, p) == 0.0
    assert between(p, q) == between(q, p) >= 0.0
    assert between(p, r) <= (between(p, q) + between(q, r)) * (1 + 1e-12)


@given(gaussians, gaussians, st.floats(1e-2, 1e2))
def test_law_scale_invariance(p, q, scale):
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
def test_errors_name_the_argument(place):
    names = ("mean_p", "std_p", "mean_q", "std_q")

    def of(value):
        return [value if i == place else torch.ones(2, 3) for i in range(4)]

    spoilt = torch.ones(2, 3)
    spoilt[1, 2] = math.inf
    expected = "positive and finite" if place % 2 else "finite"
    with pytest.raises(InputError, match=f"^{names[place]}: must be {expected} everywhere; "):
        gaussian.univariate_distance(*of(spoilt))
    assert gaussian.univariate_distance(*of(torch.ones(3))).shape == (2, 3)
    assert gaussian.distance(*of(torch.ones(2, 3, dtype=torch.float64))).dtype == torch.float64
    assert gaussian.distance(*of(torch.ones(3))).dtype == torch.float32


def test_nearest_distance_names_what_is_wrong():
    good = [torch.ones(4, 3), torch.ones(2, 3), torch.ones(3)]
    for place, shape in [(0, (3,)), (0, (4, 2)), (1, (0, 3)), (1, (2, 2)), (2, (2,))]:
        arguments = [*good[:place], torch.ones(shape), *good[place + 1 :]]
        with pytest.raises(InputError, match="^x, means, std: .*" + re.escape(f"{tuple(shape)}")):
            gaussian.nearest_distance(*arguments)
    for place, name in enumerate(("x", "means", "std")):
        arguments = [t.clone() for t in good]
        arguments[place].view(-1)[1] = math.nan
        with pytest.raises(InputError, match=f"^{name}: "):
            gaussian.nearest_distance(*arguments)
        arguments[place] = torch.ones(good[place].shape, dtype=torch.float64)
        assert gaussian.nearest_distance(*arguments)[0].dtype == torch.float64
    assert gaussian.nearest_distance(*good)[0].dtype == torch.float32


def test_the_differentiable_path_gives_the_same_distances_and_reaches_every_argument():
    generator = torch.Generator().manual_seed(5)
    x, means = torch.randn(40, 12, generator=generator) * 3, torch.randn(6, 12, generator=generator)
    std = torch.rand(12, generator=generator, dtype=torch.float64) + 0.05
    plain = gaussian.nearest_distance(x, means, std)
    for place in range(3):
        arguments = [t.clone().requires_grad_(i == place) for i, t in enumerate((x, means, std))]
        distance, label = gaussian.nearest_distance(*arguments)
        torch.testing.assert_close(distance.detach(), plain[0], rtol=1e-12, atol=0)
        assert torch.equal(label, plain[1])
        (slope,) = torch.autograd.grad(distance.sum(), arguments[place])
        assert slope.isfinite().all()
        assert slope.ne(0).any()
        with torch.no_grad():
            assert not gaussian.nearest_distance(*arguments)[0].requires_grad


def test_prepared_classes_and_several_layers_at_once():
    generator = torch.Generator().manual_seed(6)
    layers = [(torch.randn(9, k, generator=generator), torch.randn(4, k, generator=generator)) for k in (3, 8)]
    prepared = [gaussian.prepare_nearest(means, torch.full((means.shape[1],), 0.7)) for _, means in layers]
    alone = []
    for (x, means), classes in zip(layers, prepared, strict=True):
        distance, label = gaussian.nearest_prepared(x, classes)
        checked = gaussian.nearest_distance(x.double(), means, torch.full((means.shape[1],), 0.7))
        assert distance.dtype == torch.float64
        assert torch.equal(distance, checked[0])
        assert torch.equal(label, checked[1])
        alone.append(distance)
    together = gaussian.Layers(prepared)
    rows = [x for x, _ in layers]
    assert together.fits(rows)
    torch.testing.assert_close(together.distances(rows), torch.stack(alone, dim=1), rtol=1e-12, atol=0)
    assert not together.fits([rows[0].clone().requires_grad_(), rows[1]])
    assert not together.fits([torch.zeros(10**5, 3), torch.zeros(10**5, 8)])
