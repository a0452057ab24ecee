"""Keys of samples: 64-bit hashes of ids, inputs or rows, the same in every process."""

from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

Keys = np.ndarray[Any, np.dtype[np.uint64]]
BLOCK_VALUES = 1 << 20  # values that are worked on at a time


def id_keys(ids: Any) -> Keys:
    """(N,) uint64: a hash of each id as text, so 7, np.int32(7) and "7" have one key, in every process."""
    texts = (str(one).encode(errors="surrogatepass") for one in (ids.tolist() if hasattr(ids, "tolist") else ids))
    return np.array([int.from_bytes(blake2b(text, digest_size=8).digest(), "big") for text in texts], dtype=np.uint64)


def row_keys(*values: Tensor) -> Keys:
    """A 64-bit hash of each row's content, (N,) uint64: equal rows have equal keys, others almost surely not.

    A row keeps its key whether its values come as float32 or as float64. Keys are uniform, so those with the smallest
    keys are a random sample.
    """
    n = len(values[0])
    total = np.zeros(n, dtype=np.uint64)
    for place, value in enumerate(values):
        flat = value.detach().reshape(n, value.shape[1:].numel())
        step = max(1, (BLOCK_VALUES >> 3) // max(1, flat.shape[1]))  # a megabyte of 64-bit numbers
        odd = np.random.default_rng([0x16E00D, place]).integers(2**63, size=flat.shape[1], dtype=np.uint64)
        odd = odd * np.uint64(2) + np.uint64(1)
        total += np.concatenate([_mixed_sum(block.cpu(), odd) for block in torch.split(flat, step)])
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        total ^= total >> np.uint64(33)
        total *= np.uint64(factor)
    return total ^ (total >> np.uint64(33))


def _mixed_sum(block: Tensor, odd: Keys) -> Keys:
    """Sum over columns of mixed bits times odd numbers; zeros add nothing, nor what float32 leaves of such values."""
    single = block.to(torch.float32) + 0.0  # −0.0 is 0.0
    bits = single.contiguous().numpy().view(np.uint32).astype(np.uint64)
    total: Keys = ((bits ^ (bits >> np.uint64(15))) * odd).sum(axis=1, dtype=np.uint64)
    if block.dtype != torch.float64:
        return total
    return total + _mixed_sum(torch.where(single.isfinite(), block - single, 0.0).to(torch.float32), odd[::-1])
