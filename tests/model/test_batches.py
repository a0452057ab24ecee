"""What comes in, batch by batch."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from igeood.errors import NoRowsError
from igeood.model.batch import as_batch, batches

X, Y = torch.arange(60.0).reshape(20, 3), torch.arange(20) % 4


SOURCES = {
    "a pair": lambda: (X, Y),
    "a mapping": lambda: {"x": X, "labels": Y},
    "more in a batch": lambda: [(X, Y, "path", None)],
    "a loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=6),
    "a generator": lambda: ((x, y) for x, y in zip(X.split(7), Y.split(7), strict=True)),
    "an empty batch between": lambda: [(X[:5], Y[:5]), (X[:0], Y[:0]), (X[5:], Y[5:])],
    "read-only arrays": lambda: (np.broadcast_to(X.numpy(), X.shape), Y.numpy()),
    "arrays of negative stride": lambda: (np.ascontiguousarray(X.numpy()[::-1])[::-1], Y.numpy()),
    "labels in a list": lambda: (X, Y.tolist()),
}


@pytest.mark.parametrize("source", SOURCES)
def test_sources(source):
    parts = [(b.x.clone(), torch.as_tensor(b.labels).clone(), b.keys) for b in batches(SOURCES[source]())]
    for values, expected in zip(zip(*parts, strict=True), (X, Y, as_batch(X).keys), strict=True):
        assert np.array_equal(np.concatenate(values), expected)


def test_a_whole_tensor_is_cut_with_its_labels(refused):
    x, y = torch.full((600, 9), 3e38), torch.arange(600)  # finite, though their sum is not
    pieces = list(batches((x, y.tolist())))
    assert [len(piece) for piece in pieces] == [256, 256, 88]
    assert torch.equal(torch.cat([piece.labels for piece in pieces]), y)
    with refused("labels"):
        list(batches((x, y[:256])))


def test_the_input_and_the_rows_of_a_mapping():
    mask, pixels = torch.ones(20, 6), torch.rand(20, 3, 2, 2)
    batch = as_batch({"bool_masked_pos": mask, "pixel_values": pixels, "labels": Y, "flag": True})
    assert batch.x is pixels
    assert set(batch.inputs) == {"bool_masked_pos", "pixel_values", "flag"}
    rows = batch[torch.arange(20) > 16]
    assert (len(rows), len(rows.labels), rows.inputs["flag"]) == (3, 3, True)
    moved = batch.with_x(pixels * 2)
    assert torch.equal(moved.x, pixels * 2)
    assert moved.inputs["bool_masked_pos"] is mask
    assert as_batch({"attention_mask": mask, "input_ids": mask.long()}).x.dtype == torch.int64


def test_keys_ignore_padding_and_order_and_precision_and_keep_digits():
    ids = torch.tensor([[5, 7, 9, 0], [4, 1, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    padded = {name: nn.functional.pad(value, (0, 3)) for name, value in reversed(batch.items())}
    assert np.array_equal(as_batch(batch).keys, as_batch(padded).keys)
    other = as_batch({**batch, "attention_mask": torch.zeros_like(ids)})
    assert not np.isin(as_batch(batch).keys, other.keys).any()  # all tensors count
    assert len(set(as_batch(torch.tensor([[2**24], [2**24 + 1]])).keys.tolist())) == 2
    x = torch.rand(5, 3, dtype=torch.float64)  # the model sees float32 of both
    assert np.array_equal(as_batch(x).keys, as_batch(x.float()).keys)


def test_what_is_no_batch_and_a_loaders_own_exception(refused):
    for source, argument, place in (
        (3, "x", None),
        (["text"], None, "x: batch 0"),
        ([{"path": "a", "labels": Y}], None, "x: batch 0"),
        ([X, torch.where(X == 10, torch.inf, X)], "inputs", "x: batch 1"),
        (X.to(torch.uint8), "inputs", None),
    ):
        with refused(argument, place):
            list(batches(source))
    with pytest.raises(NoRowsError):
        list(batches([]))
    with pytest.raises(ZeroDivisionError):
        list(batches(X * (1 // i) for i in (1, 0)))
