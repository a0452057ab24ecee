"""Types are as wide as they should be."""

import torch

from igeood.geometry import precision


def test_types(monkeypatch):
    half, single, double = (torch.ones(1, dtype=t) for t in (torch.float16, torch.float32, torch.float64))
    assert precision.result_dtype(half, single) == precision.result_dtype(half) == torch.float32
    assert precision.result_dtype(half, double) == precision.wide(half).dtype == torch.float64
    monkeypatch.setattr(precision, "_NO_FLOAT64", frozenset({"cpu"}))
    assert precision.wide(half).dtype == precision.wide(double).dtype == torch.float32
