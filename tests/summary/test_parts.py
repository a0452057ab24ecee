"""Sums against exact fractions; the sample against brute force: of each class its q smallest distinct keys."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from igeood.geometry import precision
from igeood.outputs import Outputs
from igeood.summary import ClassSums, Sample


def make_sample(capacity, strata=5):
    """Holds so many float32 rows of 5 values, with their keys, labels and counts, and some slack."""
    return Sample(5, {}, strata, -(-capacity * (4 * 5 + 24) * 33 // 32), torch.float32)


def brute_force(rows, capacity, *, strata=5):
    """Keys and counts of each class's q smallest distinct keys, in Python."""
    labels = rows.labels.tolist() if strata > 1 else [0] * len(rows)
    totals = [labels.count(c) for c in range(strata)]
    q = max(k for k in range(1, max(totals) + 1) if sum(min(n, k) for n in totals) <= capacity)
    kept = []
    for c in range(strata):
        keys = [int(key) for key, label in zip(rows.keys, labels, strict=True) if label == c]
        kept += [(c, key, keys.count(key)) for key in sorted(set(keys))[:q]]
    return kept


def content(sample):
    outputs, _ = sample.outputs()
    labels = outputs.labels.tolist() if outputs.labels is not None else [0] * len(outputs)
    counts = sample.state()["counts"].tolist()
    return list(zip(labels, map(int, outputs.keys), counts, strict=True))


@pytest.mark.parametrize(
    ("capacity", "size"), [(77, 1), *((n, size) for n in (5, 23, 77, 290, 1000) for size in (7, 400))]
)
def test_rows_are_those_of_the_rule(rows, capacity, size):
    sample = make_sample(capacity)
    assert sample.capacity == capacity
    for i in range(0, 400, size):
        sample.add(rows[i : i + size])
    assert content(sample) == brute_force(rows, capacity)
    kept, weights = sample.outputs()
    values = {int(key): row for key, row in zip(rows.keys, rows.logits, strict=True)}
    assert all(torch.equal(row, values[int(key)]) for key, row in zip(kept.keys, kept.logits, strict=True))
    for c, total in enumerate(torch.bincount(rows.labels).tolist()):
        of_class = kept.labels == c
        counts = torch.tensor([count for label, _, count in content(sample) if label == c])
        torch.testing.assert_close(weights[of_class], total / counts.sum() * counts.double())  # they stand for all


def test_without_labels_there_is_one_stratum_and_a_large_batch_is_compacted_in_its_midst(rows):
    """Many more rows than fit, in one call, with the smallest keys last."""
    sample = make_sample(37, strata=1)
    sample.add(rows.replace(labels=None))
    assert content(sample) == brute_force(rows, 37, strata=1)
    assert sample.outputs()[1].sum() == pytest.approx(400)
    many = Outputs(torch.randn(3000, 5, generator=torch.Generator().manual_seed(1)), labels=torch.arange(3000) % 5)
    many = many[torch.from_numpy(np.argsort(many.keys)[::-1].copy())]
    sample = make_sample(40)
    sample.add(many)
    assert content(sample) == brute_force(many, 40)


def test_a_few_of_each_class(rows):
    sample = make_sample(1000)
    sample.add(rows)
    (kept, weights), (whole, _) = sample.outputs(per_class=8), sample.outputs()
    assert np.array_equal(torch.bincount(kept.labels), np.minimum(sample.kept, 8))
    for c, total in enumerate(torch.bincount(rows.labels).tolist()):
        assert weights[kept.labels == c].sum() == pytest.approx(total)
        assert np.array_equal(kept.keys[kept.labels == c], whole.keys[whole.labels == c][:8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_stays_within_the_budget(dtype):
    sample = Sample(5, {}, 2, 1 << 20, dtype)
    for seed in range(4):
        logits = torch.randn(20_000, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)
        sample.add(Outputs(logits, labels=torch.arange(20_000) % 2))
    assert 0.9 * 2**20 < sample._values.nbytes + sample._beside.nbytes <= 2**20


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
