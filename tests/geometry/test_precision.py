"""Chunks cover every row once and stay within their memory; types are as wide as they should be."""

import pytest
import torch

from igeood.geometry import precision


@pytest.mark.parametrize("width", [0, 1, 2, 7, 99, 100, 101, 5000])
def test_chunks_cover_each_row_once_in_order_and_are_as_large_as_their_memory_allows(width, monkeypatch):
    monkeypatch.setattr(precision, "CHUNK_ELEMENTS", 100)
    most = max(1, 100 // max(1, width))
    assert precision.chunk_rows(width) == most
    for n in (0, 1, most, most + 1, 2 * most, 2 * most + 1, 100):
        slices = list(precision.row_chunks(n, width))
        assert [i for rows in slices for i in range(n)[rows]] == list(range(n))
        assert all(rows.stop - rows.start <= most for rows in slices)
        x = torch.arange(5.0 * n).reshape(n, 5)
        assert torch.equal(precision.by_rows(lambda part: part[:, :2].long(), x, width), x[:, :2].long())


def test_types(monkeypatch):
    half, single, double = (torch.ones(1, dtype=t) for t in (torch.float16, torch.float32, torch.float64))
    assert precision.result_dtype(half, single) == precision.result_dtype(half) == torch.float32
    assert precision.result_dtype(half, double) == precision.wide(half).dtype == torch.float64
    monkeypatch.setattr(precision, "_NO_FLOAT64", frozenset({"cpu"}))
    assert precision.wide(half).dtype == precision.wide(double).dtype == torch.float32
