"""The fused loop gives what the plain path gives, and steps aside where it should."""

import pytest
import torch

from igeood.errors import InputError
from igeood.geometry import categorical, fused

pytest.importorskip("numba")


def plain(logits, centroids, temperature=1.0):
    return categorical.pairwise_distance(logits, centroids, temperature, lambda d: d.sum(dim=1))


def confident(n, n_classes, margin, dtype=torch.float64):
    generator = torch.Generator().manual_seed(n + n_classes)
    logits = torch.randn(n, n_classes, dtype=dtype, generator=generator)
    logits[torch.arange(n), torch.arange(n) % n_classes] += margin
    return logits


@pytest.mark.parametrize("n_classes", [2, 3, 10, 32])
@pytest.mark.parametrize("margin", [0.0, 3.0, 12.0, 30.0, 300.0])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 7.3, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_gives_the_plain_paths_numbers(n_classes, margin, temperature, dtype):
    logits = confident(300, n_classes, margin, dtype)
    centroids = categorical.log_softmax(confident(n_classes, n_classes, margin), temperature)
    found = fused.distance_sums(logits, centroids, temperature)
    torch.testing.assert_close(found, plain(logits, centroids, temperature), rtol=0, atol=2e-11 * n_classes)


def test_samples_on_a_centroid_are_at_distance_0():
    logits = confident(10, 10, 5.0)
    centroids = categorical.log_softmax(logits)
    one = fused.distance_sums(logits, centroids[:1], 1.0)
    assert float(one[0]) < 1e-15
    torch.testing.assert_close(one, plain(logits, centroids[:1]), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("n", [1, 127, 128, 129, 1000])
def test_any_number_of_samples_in_any_layout(n):
    logits, centroids = confident(n, 10, 4.0), categorical.log_softmax(confident(10, 10, 4.0))
    found = fused.distance_sums(logits, centroids, 1.0)
    torch.testing.assert_close(found, plain(logits, centroids), rtol=1e-12, atol=0)
    assert torch.equal(fused.distance_sums(logits.T.contiguous().T, centroids, 1.0), found)


def test_the_sum_uses_it_and_stays_itself_without(monkeypatch):
    logits, centroids = confident(200, 10, 4.0), categorical.log_softmax(confident(10, 10, 4.0))
    fast = categorical.distance_sum(logits, centroids)
    assert torch.equal(fast, fused.distance_sums(logits, centroids, 1.0))
    monkeypatch.setattr(fused, "installed", lambda: False)
    torch.testing.assert_close(categorical.distance_sum(logits, centroids), fast, rtol=1e-12, atol=0)


def test_a_sample_has_the_same_score_alone_as_among_others():
    logits, centroids = confident(3000, 10, 4.0), categorical.log_softmax(confident(10, 10, 4.0))
    whole = categorical.distance_sum(logits, centroids)
    for size in (1, 77):
        assert torch.equal(torch.cat([categorical.distance_sum(f, centroids) for f in logits.split(size)]), whole)


def test_masked_classes_and_huge_logits():
    logits, centroids = confident(50, 10, 4.0), categorical.log_softmax(confident(10, 10, 4.0))
    masked = logits.clone()
    masked[3, 4] = masked[5, :9] = -torch.inf
    for f in (masked, logits * 1e307, logits * 1e-307):
        found = fused.distance_sums(f, centroids, 1.0)
        torch.testing.assert_close(found, plain(f, centroids), rtol=1e-12, atol=0)


def test_it_steps_aside(monkeypatch):
    logits, centroids = confident(50, 10, 4.0), categorical.log_softmax(confident(10, 10, 4.0))
    moved = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(categorical.distance_sum(moved, centroids).sum(), moved)
    assert bool(gradient.isfinite().all())
    assert float(gradient.abs().max()) > 0
    trained = centroids.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(categorical.distance_sum(logits, trained).sum(), trained)
    assert float(gradient.abs().max()) > 0
    for value in (torch.nan, torch.inf):
        bad = logits.clone()
        bad[7, 1] = value
        with pytest.raises(InputError, match="NaN"):
            categorical.distance_sum(bad, centroids)
    bad = logits.clone()
    bad[7] = -torch.inf
    with pytest.raises(InputError, match="NaN"):
        categorical.distance_sum(bad, centroids)
    for dtype in (torch.float16, torch.bfloat16):
        half = logits.to(dtype)
        assert torch.equal(categorical.distance_sum(half, centroids), plain(half, centroids))
    wide = confident(50, 33, 4.0)
    assert fused.distance_sums(wide, wide[:33], 1.0) is None
    assert fused.distance_sums(logits, centroids, 1e-300) is None
    assert fused.distance_sums(logits[:0], centroids, 1.0) is None
    monkeypatch.setattr(fused, "installed", lambda: False)
    assert fused.distance_sums(logits, centroids, 1.0) is None
