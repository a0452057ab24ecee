"""Arrays of every kind come in, and go out as they came."""

import numpy as np
import pytest
import torch

from igeood.errors import InputError
from igeood.outputs import Outputs, RowBuffer, as_tensor, as_vector


def test_slices_and_joins():
    outputs = Outputs(torch.randn(6, 3), {"conv": torch.randn(6, 4)}, [0, 1, 2, 0, 1, 2])
    parts = [outputs[:2], outputs[2:5], outputs[torch.tensor([5])]]
    whole = Outputs.concat(parts)
    assert torch.equal(whole.logits, outputs.logits)
    assert torch.equal(whole.features["conv"], outputs.features["conv"])
    assert torch.equal(whole.labels, outputs.labels)
    assert (len(whole), whole.n_classes, len(parts[1])) == (6, 3, 3)


def test_joining_what_does_not_fit():
    with pytest.raises(InputError, match="logits: a batch has 4 columns, an earlier one 3"):
        Outputs.concat([Outputs(torch.zeros(1, 3)), Outputs(torch.zeros(1, 4))])
    with pytest.raises(InputError, match="nothing to join"):
        Outputs.concat([])


def test_labels_can_be_put_in():
    outputs = Outputs(np.zeros((2, 3)))
    assert Outputs.of(outputs) is outputs
    assert Outputs.of(outputs, [2, 1]).labels.tolist() == [2, 1]
    with pytest.raises(InputError, match="labels: 3 at position 0"):
        Outputs.of(outputs, [3, 1])


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(4, 3)[::-1],
        np.arange(12.0).reshape(3, 4).T,
        np.arange(12.0).reshape(4, 3).astype(">f8"),
        np.arange(12.0).reshape(4, 3).astype(">f4"),
        np.arange(12.0).reshape(4, 3).astype(np.longdouble),
        np.arange(12, dtype=np.uint64).reshape(4, 3),
        np.arange(12, dtype=np.uint16).reshape(4, 3),
        np.arange(24.0).reshape(4, 6)[:, ::2],
    ],
)
def test_any_layout_of_numpy(array):
    outputs = Outputs(array)
    assert np.array_equal(outputs.logits.numpy(), array.astype(float))
    assert outputs.numpy


def test_a_read_only_array_is_not_written_to():
    array = np.arange(6.0).reshape(2, 3)
    array.setflags(write=False)
    Outputs(array).logits.add_(1)
    assert array[0, 0] == 0.0


def test_dtypes():
    assert as_tensor(np.zeros(2, np.float16), "x")[0].dtype == torch.float32
    assert as_tensor(torch.zeros(2, dtype=torch.bfloat16), "x")[0].dtype == torch.float32
    assert as_tensor(np.zeros(2, np.float32), "x")[0].dtype == torch.float32
    assert as_tensor([1, 2], "x")[0].dtype == torch.float64
    assert as_tensor(np.array([2**64 - 1], dtype=np.uint64), "x")[0].item() == float(2**64)


def test_results_go_out_as_they_came():
    result = torch.ones(2, requires_grad=True)
    assert isinstance(Outputs(np.zeros((2, 3))).like(result), np.ndarray)
    assert isinstance(Outputs([[0.0, 1.0]]).like(result), np.ndarray)
    assert Outputs(torch.zeros(2, 3)).like(result) is result


def test_gradients_pass_through():
    logits = torch.zeros(2, 3, requires_grad=True)
    assert Outputs(logits)[:1].logits.requires_grad


def test_features_that_do_not_fit():
    logits = np.zeros((4, 3))
    with pytest.raises(InputError, match=r"features\['conv'\]: expected shape \(4, k\), got \(3, 2\)"):
        Outputs(logits, {"conv": np.zeros((3, 2))})
    features = np.zeros((4, 2))
    features[[1, 3]] = np.nan, np.inf
    with pytest.raises(InputError, match=r"features\['conv'\]: sample 1 has NaN or infinity \(2 of 4"):
        Outputs(logits, {"conv": features})
    with pytest.raises(InputError, match=r"^features\['conv'\]: is on the meta device"):
        Outputs(logits, {"conv": torch.zeros(4, 2, device="meta")})


def test_a_layer_is_named_before_the_logits_it_spoilt():
    broken = torch.zeros(4, 3)
    broken[2] = torch.nan
    with pytest.raises(InputError, match=r"features\['conv'\]: sample 2"):
        Outputs(broken, {"conv": broken.clone()})


def test_rows_in_a_buffer():
    buffer = RowBuffer()
    with pytest.raises(InputError, match="no batch"):
        _ = buffer.rows
    parts = [torch.randn(n, 3, generator=torch.Generator().manual_seed(n)) for n in (1, 5000, 0, 7, 20_000)]
    for part in parts:
        buffer.append(part)
    assert torch.equal(buffer.rows, torch.cat(parts))
    assert len(buffer) == 25_008
    with pytest.raises(InputError, match="columns"):
        buffer.append(torch.zeros(2, 4))


def test_vectors():
    values, is_numpy = as_vector([3, 1], "scores")
    assert values.tolist() == [3.0, 1.0]
    assert is_numpy
    with pytest.raises(InputError, match="scores: NaN at position 1"):
        as_vector([1.0, np.nan], "scores")
    with pytest.raises(InputError, match=r"scores: expected one score a sample, shape \(N,\)"):
        as_vector([[1.0]], "scores")
