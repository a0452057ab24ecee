"""Training rows that are hard to sum: imbalanced classes, repeated rows, an offset in the features."""

import numpy as np
import pytest
import torch

from igeood.outputs import HEAD, Outputs

SIZES = (230, 90, 50, 24, 6)  # rows of each class


@pytest.fixture(scope="session")
def rows() -> Outputs:
    generator = torch.Generator().manual_seed(0)
    labels = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
    n = len(labels)
    logits = torch.randn(n, len(SIZES), generator=generator)
    logits[torch.arange(n), labels] += 3.0
    features = {"early": 3, "late": 4, "early|max": 3, HEAD: 2}
    blocks = {block: labels[:, None] + torch.randn(n, k, generator=generator) + 100.0 for block, k in features.items()}
    rows = Outputs(logits, blocks, labels)
    order = torch.randperm(n, generator=generator)
    order[:60] = order[60:80].repeat(3)  # twenty rows come four times
    assert len(np.unique(rows[order].keys)) < n - 40
    return rows[order]
