"""Which samples tuning used."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from igeood import validation
from igeood.errors import InputError
from igeood.outputs import row_keys


def test_samples_are_chosen_by_content_and_seed():
    rows = torch.randn(20_000, 5, generator=torch.Generator().manual_seed(1))
    keys = row_keys(rows)
    for share in (0.1, 0.5, 0.9):
        used = validation.chosen(keys, share, seed=3)
        assert abs(used.double().mean() - share) < 4 * (share * (1 - share) / 20_000) ** 0.5
    order = torch.randperm(20_000, generator=torch.Generator().manual_seed(2))
    assert torch.equal(validation.chosen(row_keys(rows[order]), 0.5, 3), validation.chosen(keys, 0.5, 3)[order])
    same = (validation.chosen(keys, 0.5, 3) == validation.chosen(keys, 0.5, 4)).double().mean()
    assert 0.48 < same < 0.52
    assert validation.chosen(keys, 1.0, 0).all()
    for share in (0.0, 1.5, "half", True):
        with pytest.raises(InputError, match="share"):
            validation.chosen(keys, share, seed=0)
    for seed in (-1, 2**32, 0.5, None):
        with pytest.raises(InputError, match="seed"):
            validation.chosen(keys, 0.5, seed)


def test_keys_tell_rows_apart_but_not_precisions():
    rows = torch.randn(50_000, 10, generator=torch.Generator().manual_seed(0))
    keys = row_keys(rows)
    assert len(np.unique(keys)) == 50_000
    assert np.array_equal(keys, row_keys(rows.double()))
    assert np.array_equal(row_keys(torch.zeros(1, 3)), row_keys(-torch.zeros(1, 3)))
    assert len(np.unique(row_keys(torch.eye(1000)))) == 1000
    assert len(np.unique(row_keys(torch.cartesian_prod(*[torch.arange(4.0)] * 6)))) == 4**6


small = st.lists(st.integers(0, 5), max_size=20).map(lambda x: np.array(x, dtype=np.uint64))


@given(small, small)
def test_unused_takes_out_as_many_as_were_used(keys, used):
    fresh = validation.unused(keys, used).numpy()
    left = Counter(keys.tolist()) - Counter(used.tolist())
    assert Counter(keys[fresh].tolist()) == left


@given(small, small)
def test_merge_keeps_the_larger_count(first, second):
    merged = validation.merge(first, second)
    assert Counter(merged.tolist()) == Counter(first.tolist()) | Counter(second.tolist())
