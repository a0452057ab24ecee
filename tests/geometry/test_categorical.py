"""Fisher–Rao on the simplex: accuracy, extremes, gradients, laws."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from igeood.geometry import categorical


def exact_distance(p: torch.Tensor, q: torch.Tensor) -> float:
    """Eq. 2 in 60 digits, from the very floats that were given."""
    with mpmath.workdps(60):
        a, b = ([mpmath.e ** (mpmath.mpf(float(v)) - float(row.max())) for v in row] for row in (p, q))
        overlap = mpmath.fsum(mpmath.sqrt(x * y) for x, y in zip(a, b, strict=True))
        ratio = overlap / mpmath.sqrt(mpmath.fsum(a) * mpmath.fsum(b))
        return float(2 * mpmath.acos(min(ratio, mpmath.mpf(1))))


def pairwise(logits, centres, temperature=1.0, reduce=None):
    return categorical.distances(logits, categorical.prepare(centres), temperature, reduce)


@pytest.mark.parametrize("n_classes", [2, 10, 1000])
@pytest.mark.parametrize("size", [1e-6, 1e-4, 1e-2, 1.0, 10.0, 100.0])
def test_distance_of_float32_is_exact_and_0_of_equal_inputs(n_classes, size):
    generator = torch.Generator().manual_seed(n_classes)
    for _ in range(3):
        p, direction = torch.randn(2, n_classes, generator=generator)
        q = p + direction * size
        expected = exact_distance(p, q)
        assert categorical.distance(p, q).item() == pytest.approx(expected, rel=1e-6)
        crossed = categorical.pairwise_distance(p[None], categorical.log_softmax(q)[None])
        assert crossed.item() == pytest.approx(expected, rel=1e-4)
    logits = 20 * torch.randn(100, n_classes, generator=generator)
    for same in (logits, logits.double()):
        assert categorical.distance(same, same).eq(0).all()
        assert categorical.pairwise_distance(same, same).diagonal().eq(0).all()


@pytest.mark.parametrize("peak", [1e4, 1e38])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 1000.0])
def test_extreme_logits_stay_finite(peak, temperature):
    rows = torch.tensor([[peak, -peak, 0.0], [-peak, peak, 0.0], [peak, peak, -peak], [0.0, -torch.inf, 1.0]])
    rows.requires_grad_()
    distances = categorical.pairwise_distance(rows, categorical.log_softmax(rows.detach()), temperature)
    assert distances.isfinite().all()
    assert categorical.distance(rows[:, None], rows[None]).isfinite().all()
    assert torch.autograd.grad(distances.sum(), rows)[0].isfinite().all()


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_gradient_agrees_with_finite_differences(scale):
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(6, 5, dtype=torch.float64, generator=generator) * scale).requires_grad_()
    centres = categorical.log_softmax(torch.randn(4, 5, dtype=torch.float64, generator=generator))
    for distance in (lambda f: pairwise(f, centres, 1.5), lambda f: categorical.distance(f[:3], f[3:])):
        assert torch.autograd.gradcheck(distance, logits, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("offset", [0.0, 1e-15, 1e-10, 1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_is_finite_bounded_and_the_same_by_both_paths_near_coincidence(offset, dtype):
    """The distance moves by at most 1 for each unit of logits, so no gradient is longer than 1."""
    base = torch.randn(8, 10, dtype=dtype, generator=torch.Generator().manual_seed(4))
    moved = base.clone()
    moved[:, 0] += offset
    moved.requires_grad_()
    (gradient,) = torch.autograd.grad(categorical.distance(moved, base).sum(), moved)
    assert (torch.linalg.vector_norm(gradient, dim=1) <= 1.0 + 1e-6).all()
    (by_pairs,) = torch.autograd.grad(categorical.pairwise_distance(moved, base).diagonal().sum(), moved)
    assert by_pairs.isfinite().all()
    if offset >= 1e-6 and dtype == torch.float64:
        torch.testing.assert_close(by_pairs, gradient, rtol=1e-6, atol=1e-9)


def rows(count: int) -> st.SearchStrategy[torch.Tensor]:
    """`count` rows of float64 logits of one width."""
    values = st.floats(-60, 60, allow_nan=False)
    return st.integers(2, 6).flatmap(lambda c: arrays(np.float64, (count, c), elements=values)).map(torch.from_numpy)


@given(rows(3), st.randoms(use_true_random=False), st.floats(-100, 100))
def test_law_metric_whose_classes_may_be_permuted_and_logits_shifted(f, random, shift):
    d = categorical.pairwise_distance(f, f)
    assert torch.equal(d.diagonal(), torch.zeros(3, dtype=torch.float64))
    assert ((d >= 0) & (d <= math.pi)).all()
    torch.testing.assert_close(d, d.T, rtol=1e-9, atol=1e-9)
    assert d[0, 2] <= d[0, 1] + d[1, 2] + 1e-7
    expected = categorical.distance(f[0], f[1]).item()
    assert expected == categorical.distance(f[1], f[0]).item()
    order = list(range(f.shape[1]))
    random.shuffle(order)
    assert categorical.distance(f[0][order], f[1][order]).item() == pytest.approx(expected, rel=1e-7, abs=1e-12)
    # a shift rounds the logits themselves: 1e-13 of them
    assert categorical.distance(f[0] + shift, f[1]).item() == pytest.approx(expected, rel=1e-6, abs=1e-11)


@given(rows(5))
@settings(max_examples=50)
def test_law_broadcast_is_a_loop(f):
    loop = torch.stack([torch.stack([categorical.distance(p, q) for q in f]) for p in f])
    torch.testing.assert_close(categorical.distance(f[:, None], f[None]), loop, rtol=1e-12, atol=0)
    torch.testing.assert_close(categorical.pairwise_distance(f, f), loop, rtol=1e-6, atol=1e-12)


def test_rows_alone_and_reduced_in_chunks_are_those_of_the_whole(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    logits, centres = (torch.randn(n, 7, dtype=torch.float64, generator=generator) * 4 for n in (53, 5))
    logits[3, 5] = centres[2, 5] = -torch.inf
    centres[0] = logits[0]  # a pair whose chord is measured
    logits.requires_grad_()
    whole = pairwise(logits, centres, 2.0)
    (expected,) = torch.autograd.grad(whole.sum(), logits, retain_graph=True)
    alone = torch.cat([pairwise(row[None], centres, 2.0) for row in logits])
    torch.testing.assert_close(alone, whole, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr("igeood.geometry.precision.CHUNK_ELEMENTS", 70)
    sums = pairwise(logits, centres, 2.0, lambda d: d.sum(dim=1))
    torch.testing.assert_close(sums, whole.sum(dim=1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(sums.sum(), logits)[0], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("names", [("logits_p", "logits_q"), ("logits", "centroids")])
def test_errors_name_the_argument(names, refused):
    function = categorical.pairwise_distance if "logits" in names else categorical.distance
    with refused(", ".join(names)):
        function(torch.zeros(2, 3), torch.zeros(2, 4))
    for value, place in ((math.nan, 0), (math.inf, 0), (-math.inf, 0), (math.nan, 1)):
        spoilt = [torch.zeros(2, 2), torch.zeros(2, 2)]
        spoilt[place][1] = value
        with refused(names[place]):
            function(*spoilt)
