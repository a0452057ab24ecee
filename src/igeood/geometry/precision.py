"""Which precision to compute in, and how many rows at a time."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 18  # 2 MB of float64: a few temporaries of that size stay in the cache
_NO_FLOAT64 = frozenset({"mps"})
_WITH_AUTOCAST = ("cpu", "cuda", "mps", "xpu")
# Whether this thread traces a graph: nothing may depend on values or on the number of rows. torch.compiler.is_exporting
# says so of all threads, and others may be scoring.
exporting = ContextVar("exporting", default=False)


@contextmanager
def precise() -> Iterator[None]:
    """For detectors' arithmetic: without autocast, which is for the model. What is made may serve for gradients."""
    with torch.inference_mode(False), ExitStack() as stack:
        for device in filter(torch.is_autocast_enabled, _WITH_AUTOCAST):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def wide(x: Tensor) -> Tensor:
    """Return `x` in float64, or float32 on a device that has no float64."""
    return x.to(torch.float32 if x.device.type in _NO_FLOAT64 else torch.float64)


def result_dtype(*tensors: Tensor) -> torch.dtype:
    """Return float64 if any input is float64, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def chunk_rows(width: int) -> int:
    """Rows of `width` elements in a chunk."""
    return max(1, CHUNK_ELEMENTS // max(1, width))


def row_chunks(n: int, width: int) -> Iterator[slice]:
    """Slices of `n` rows such that each chunk has about `CHUNK_ELEMENTS` elements; no row is one empty chunk."""
    if exporting.get():
        yield slice(None)
        return
    step = chunk_rows(width)
    for start in range(0, max(n, 1), step):
        yield slice(start, min(start + step, n))


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor, width: int) -> Tensor:
    """`function` of the rows of `x`, a chunk at a time: its temporaries have about `width` elements a row."""
    parts = [function(x[rows]) for rows in row_chunks(x.shape[0], width)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
