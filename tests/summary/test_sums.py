"""Sums of classes against exact fractions; they add as those of the whole."""

from fractions import Fraction

import pytest
import torch

from igeood.geometry import precision
from igeood.summary import ClassSums


def assert_close(sums, expected):
    assert torch.equal(sums.count, expected.count)
    torch.testing.assert_close(sums.mean, expected.mean, rtol=1e-12, atol=0)
    size = float(expected.scatter.abs().max()) if expected.scatter.numel() else 1.0
    torch.testing.assert_close(sums.scatter / size, expected.scatter / size, rtol=0, atol=1e-12)


def exact_variance(x, labels):
    """Pooled variance (k,) in rational numbers."""
    values = [[Fraction(v) for v in row] for row in x.double().tolist()]
    total = [Fraction(0)] * x.shape[1]
    for label in set(labels.tolist()):
        rows = [row for row, y in zip(values, labels.tolist(), strict=True) if y == label]
        for j, column in enumerate(zip(*rows, strict=True)):
            mean = sum(column) / len(column)
            total[j] += sum((v - mean) ** 2 for v in column)
    return torch.tensor([float(t / len(values)) for t in total], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, -1e7])
@pytest.mark.parametrize("size", [1, 7, 400])
def test_variance_is_exact_whatever_the_batches_and_the_offset(rows, dtype, offset, size):
    x = (rows.features["late"].double() * torch.tensor([1.0, 0.1, 3.0, 30.0]) + offset).to(dtype)
    x[:, 1] = offset  # never varies
    labels = rows.labels
    for kind in ("diagonal", "full"):
        parts = [ClassSums.of(x[i : i + size], labels[i : i + size], 5, kind) for i in range(0, len(x), size)]
        while len(parts) > 1:  # in pairs, as a tree of machines would
            parts = [sum(parts[i + 1 : i + 2], parts[i]) for i in range(0, len(parts), 2)]
        torch.testing.assert_close(parts[0].variance, exact_variance(x, labels), rtol=1e-11, atol=1e-20)


@pytest.mark.parametrize("kind", ["mean", "diagonal", "full"])
def test_nothing_adds_nothing_and_chunks_do_not_matter(rows, kind, monkeypatch):
    x, labels = rows.features["late"].double(), rows.labels
    nothing, whole = ClassSums.of(x[:0], labels[:0], 5, kind), ClassSums.of(x, labels, 5, kind)
    pooled, sums = whole.pooled() if kind != "mean" else whole, [nothing + whole, whole + nothing]
    monkeypatch.setattr(precision, "CHUNK_ELEMENTS", 64)
    for each in (*sums, ClassSums.of(x, labels, 5, kind)):
        assert_close(each, whole)
    if kind != "mean":
        assert_close(pooled, ClassSums.of(x, labels * 0, 1, kind))
