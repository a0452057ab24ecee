"""Chunks cover every row once and stay within their memory; types are as wide as they should be."""

from unittest.mock import Mock

import pytest
import torch

from igeood.geometry import precision


@pytest.mark.parametrize("width", [0, 1, 2, 7, 99, 100, 101, 5000])
def test_chunks_cover_each_row_once_in_order_and_are_as_large_as_their_memory_allows(width, monkeypatch):
    monkeypatch.setattr(precision, "CHUNK_ELEMENTS", 100)
    most = max(1, 100 // max(1, width))
    assert precision.chunk_rows(width) == most
    for n in (0, 1, most, most + 1, 2 * most, 2 * most + 1, 100):
        sizes = [min(most, n - start) for start in range(0, max(n, 1), most)]
        slices = list(precision.row_chunks(n, width))
        assert [i for rows in slices for i in range(n)[rows]] == list(range(n))
        assert [rows.stop - rows.start for rows in slices] == sizes
        x, half = torch.arange(5.0 * n).reshape(n, 5), Mock(side_effect=lambda part: part[:, :2].long())
        assert torch.equal(precision.by_rows(half, x, width), x[:, :2].long())
        assert [len(call.args[0]) for call in half.call_args_list] == sizes


def test_types(monkeypatch):
    half, single, double = (torch.ones(1, dtype=t) for t in (torch.float16, torch.float32, torch.float64))
    assert precision.result_dtype(half, single) == precision.result_dtype(half) == torch.float32
    assert precision.result_dtype(double, half) == precision.result_dtype(half, double) == torch.float64
    assert precision.wide(half).dtype == torch.float64
    monkeypatch.setattr(precision, "_NO_FLOAT64", frozenset({"cpu"}))
    assert precision.wide(half).dtype == precision.wide(double).dtype == torch.float32
