"""Which samples tuning used."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from igeood import validation
from igeood.errors import InputError


def test_split_is_seeded_and_disjoint():
    used, rest = validation.split(101, 0.5, seed=3)
    assert sorted([*used.tolist(), *rest.tolist()]) == list(range(101))
    assert torch.equal(used, validation.split(101, 0.5, seed=3)[0])
    assert not torch.equal(used, validation.split(101, 0.5, seed=4)[0])
    assert len(validation.split(10, 1.0, seed=0)[1]) == 0
    with pytest.raises(InputError, match="share"):
        validation.split(10, 0.0, seed=0)


def test_keys_tell_rows_apart_but_not_precisions():
    rows = torch.randn(50_000, 10, generator=torch.Generator().manual_seed(0))
    keys = validation.row_keys(rows)
    assert len(np.unique(keys)) == 50_000
    assert np.array_equal(keys, validation.row_keys(rows.double()))
    assert np.array_equal(validation.row_keys(torch.zeros(1, 3)), validation.row_keys(-torch.zeros(1, 3)))
    assert len(np.unique(validation.row_keys(torch.eye(1000)))) == 1000
    assert len(np.unique(validation.row_keys(torch.cartesian_prod(*[torch.arange(4.0)] * 6)))) == 4**6


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
