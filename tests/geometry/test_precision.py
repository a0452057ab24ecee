"""Chunks cover every row once and stay within their memory; types are as wide as they should be."""

from unittest.mock import Mock

import pytest
import torch

from igeood.geometry import precision


@pytest.mark.parametrize("width", [0, 1, 2, 7, 99, 100, 101, 5000])
def test_a_chunk_is_as_large_as_its_memory_allows(width, monkeypatch):
    monkeypatch.setattr(precision, "CHUNK_ELEMENTS", 100)
    rows = precision.chunk_rows(width)
    assert rows == 1 or rows * width <= 100
    assert (rows + 1) * max(1, width) > 100


@pytest.mark.parametrize("n", [0, 1, 13, 14, 15, 28, 29, 100])
def test_chunks_cover_each_row_once_in_order(n, monkeypatch):
    monkeypatch.setattr(precision, "CHUNK_ELEMENTS", 100)
    sizes = [14] * (n // 14) + [n % 14] * (n % 14 > 0)
    slices = list(precision.row_chunks(n, 7))
    assert [i for rows in slices for i in range(n)[rows]] == list(range(n))
    assert [rows.stop - rows.start for rows in slices] == sizes
    x, half = torch.arange(5.0 * n).reshape(n, 5), Mock(side_effect=lambda part: part[:, :2].long())
    assert torch.equal(precision.by_rows(half, x, 7), x[:, :2].long())
    assert [len(call.args[0]) for call in half.call_args_list] == (sizes or [0])


def test_types(monkeypatch):
    half, single, double = (torch.ones(1, dtype=t) for t in (torch.float16, torch.float32, torch.float64))
    assert precision.result_dtype(half, single) == precision.result_dtype(half) == torch.float32
    assert precision.result_dtype(double, half) == precision.result_dtype(half, double) == torch.float64
    assert precision.wide(half).dtype == torch.float64
    monkeypatch.setattr(precision, "_NO_FLOAT64", frozenset({"cpu"}))
    assert precision.wide(half).dtype == precision.wide(double).dtype == torch.float32
