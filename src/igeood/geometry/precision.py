"""Which precision to compute in, and how many rows at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 20  # 8 MB of float64: fits the cache's neighbourhood, keeps every temporary small
_NO_FLOAT64 = frozenset({"mps"})


def wide(x: Tensor) -> Tensor:
    """Return `x` in float64, or float32 on a device that has no float64."""
    return x.to(torch.float32 if x.device.type in _NO_FLOAT64 else torch.float64)


def result_dtype(*tensors: Tensor) -> torch.dtype:
    """Return float64 if any input is float64, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def broadcastable(*tensors: Tensor) -> bool:
    """Whether the tensors' shapes broadcast together."""
    try:
        torch.broadcast_shapes(*(t.shape for t in tensors))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


def chunk_rows(width: int) -> int:
    """Rows of `width` elements in a chunk."""
    return max(1, CHUNK_ELEMENTS // max(1, width))


def row_chunks(n: int, width: int, least: int = 1) -> Iterator[slice]:
    """Slices of `n` rows such that each chunk has about `CHUNK_ELEMENTS` elements of `width` a row, or `least` rows."""
    step = max(chunk_rows(width), least)
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))
