"""Chunks cover every row once and stay within their memory; types are as wide as they should be."""

import pytest
import torch

from igeood.geometry import precision
from igeood.geometry.weiszfeld import chunks


@pytest.mark.parametrize("width", [0, 1, 2, 7, 99, 100, 101, 5000])
def test_a_chunk_is_as_large_as_its_memory_allows(width, monkeypatch):
    monkeypatch.setattr(precision, "CHUNK_ELEMENTS", 100)
    rows = precision.chunk_rows(width)
    assert rows == 1 or rows * width <= 100
    assert (rows + 1) * max(1, width) > 100


@pytest.mark.parametrize("n", [0, 1, 13, 14, 15, 28, 100])
def test_chunks_cover_each_row_once_in_order(n, monkeypatch):
    monkeypatch.setattr(precision, "CHUNK_ELEMENTS", 100)
    slices = list(precision.row_chunks(n, 7))  # 14 rows each
    assert [i for rows in slices for i in range(n)[rows]] == list(range(n))
    assert [rows.stop - rows.start for rows in slices] == [14] * (n // 14) + [n % 14] * (n % 14 > 0)


@pytest.mark.parametrize("n", [0, 1, 13, 14, 15, 28, 29, 100])
def test_by_rows_is_the_function_of_the_whole_in_pieces(n, monkeypatch):
    monkeypatch.setattr(precision, "CHUNK_ELEMENTS", 100)
    seen = []

    def function(x):
        seen.append(len(x))
        return x[:, :2].long() * 3

    x = torch.arange(5.0 * n).reshape(n, 5)
    found = precision.by_rows(function, x, 7)
    assert torch.equal(found, x[:, :2].long() * 3)
    assert seen == ([14] * (n // 14) + [n % 14] * (n % 14 > 0) or [0])


def test_float64_wherever_the_device_has_it(monkeypatch):
    half = torch.ones(2, dtype=torch.float16)
    assert precision.wide(half).dtype == torch.float64
    monkeypatch.setattr(precision, "_NO_FLOAT64", frozenset({"cpu"}))
    assert precision.wide(half).dtype == precision.wide(half.double()).dtype == torch.float32


def test_the_device_without_float64():
    assert frozenset({"mps"}) == precision._NO_FLOAT64


def test_results_are_float64_if_any_input_is():
    half, single, double = (torch.ones(1, dtype=t) for t in (torch.float16, torch.float32, torch.float64))
    assert precision.result_dtype(half, single) == precision.result_dtype(half) == torch.float32
    for mixed in ((double, half), (half, double), (double,)):
        assert precision.result_dtype(*mixed) == torch.float64


def test_shapes_that_broadcast():
    assert precision.broadcastable(torch.ones(3, 1), torch.ones(4), torch.ones(()))
    assert not precision.broadcastable(torch.ones(3), torch.ones(4))
    assert not precision.broadcastable(torch.ones(3), torch.ones(3), torch.ones(2))


@pytest.mark.parametrize("n_classes", [3, 20])
def test_samples_are_cut_anew_whatever_the_batches(n_classes, monkeypatch):
    """Chunks of 100 numbers, but not fewer rows than classes; the samples in order, each once."""
    monkeypatch.setattr(precision, "CHUNK_ELEMENTS", 100)
    logits, labels = torch.randn(90, n_classes), torch.arange(90, dtype=torch.uint8)
    size = 33 if n_classes == 3 else 20
    for batch in (1, 7, 20, 33, 45, 90):
        parts = list(chunks(zip(logits.split(batch), labels.split(batch), strict=True)))
        assert [len(rows) for rows, _ in parts] == [size] * (90 // size) + [90 % size] * (90 % size > 0)
        assert torch.equal(torch.cat([rows for rows, _ in parts]), logits)
        assert torch.equal(torch.cat([classes for _, classes in parts]), labels.long())
