"""Arrays of every kind come in, and go out as they came; bad rows are refused, or not valid, with a reason."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from igeood.errors import InputError
from igeood.outputs import LARGEST, Outputs, as_tensor, id_keys, row_keys

ROWS = np.arange(12.0).reshape(4, 3)
TENSOR = torch.from_numpy(ROWS)
KINDS = [
    *(ROWS.tolist(), ROWS.astype(int).tolist()),
    *(ROWS.astype(dtype) for dtype in (np.float16, np.float32, ">f4", np.longdouble, ">i8")),
    *(np.broadcast_to(ROWS, (4, 3)), ROWS[::-1].copy()[::-1], np.asfortranarray(ROWS), np.repeat(ROWS, 2, 1)[:, ::2]),
    *(TENSOR.float(), TENSOR.bfloat16(), TENSOR.int(), TENSOR.T.contiguous().T),
]


@pytest.mark.parametrize("array", KINDS, ids=lambda array: f"{type(array).__name__} {getattr(array, 'dtype', '')}")
def test_arrays_of_numbers_are_taken_and_left_alone(array):
    outputs = Outputs(array, {"layer": array}, labels=[0, 1, 2, 0])
    for values in (outputs.logits, outputs.features["layer"]):
        assert np.array_equal(values.numpy(), ROWS)
        assert values.dtype in (torch.float32, torch.float64)
    kind = torch.Tensor if isinstance(array, torch.Tensor) else np.ndarray
    assert isinstance(outputs.like(torch.ones(4, requires_grad=True)), kind)
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        outputs.logits.add_(1.0)
        assert np.array_equal(array, ROWS)


def test_masked_classes_and_integers_of_any_width_are_taken():
    assert Outputs([[0.0, -np.inf], [-np.inf, 2.0]]).valid.all()
    assert as_tensor(np.array([2**64 - 1], dtype=np.uint64), "x")[0].item() == float(2**64)
    for dtype in (np.int8, np.uint64, ">i4"):
        assert Outputs(ROWS, labels=np.array([0, 1, 2, 0], dtype)).labels.tolist() == [0, 1, 2, 0]


def with_value(value):
    """Rows 1 and 3 have only this."""
    return np.where(np.arange(4)[:, None] % 2, value, ROWS)


REFUSED = {
    "logits": [ROWS.astype(complex), None, torch.zeros(4, 3, dtype=torch.bool), ROWS[0], ROWS[:, :1]],
    "features": [{"conv": ROWS[:3]}, {"conv": ROWS[:, :0]}],
    "labels": [torch.ones(4, dtype=torch.bool), np.eye(4, 3), [0, 1, 3, 3], torch.tensor([0, -1, 0, 0])],
    "keys": [np.arange(3, dtype=np.uint64), np.arange(4)],
    "ids": [["a", "b"]],
    "on_error": ["ignore"],
}


@pytest.mark.parametrize("argument", REFUSED)
def test_what_cannot_be_used_is_refused_by_name_and_with_a_cure(argument):
    for value in REFUSED[argument]:
        with pytest.raises(InputError) as caught:
            Outputs(**{"logits": ROWS, argument: value})
        assert caught.value.argument.split("[")[0] == argument
        assert caught.value.cure


def test_a_bad_row_is_named_by_its_place_in_the_whole(refused):
    nan = with_value(np.nan)
    for options, argument, row in (
        ({"logits": nan, "name": "id_data"}, "id_data", "row 61 "),
        ({"labels": [0, 1, 9, 0]}, "labels", "row 62 "),
        ({"logits": nan, "features": {"conv": nan}}, "features['conv']", "row 61 "),  # where the overflow was
    ):
        with refused(argument) as caught:
            Outputs(**{"logits": ROWS, **options}, first=60)
        assert row in caught.value.what


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_valid_are_zeros_with_a_reason(bad):
    for options, reasons in (
        ({"logits": with_value(bad)}, [1, 3]),
        ({"features": {"a": with_value(10 * LARGEST), "b": with_value(bad)}}, [1, 3]),
        ({"reasons": {2: "no image"}}, [2]),
        ({"reasons": {1: "no image"}, "logits": with_value(bad)}, [1, 3]),
    ):
        outputs = Outputs(**{"logits": ROWS, **options}, on_error="refuse")
        assert sorted(outputs.reasons) == (~outputs.valid).nonzero()[:, 0].tolist() == reasons
        assert outputs.reasons.get(1) == options.get("reasons", outputs.reasons).get(1)  # the first reason stays
        for values in (outputs.logits, *outputs.features.values()):
            assert (values[~outputs.valid] == 0).all()
        assert torch.equal(outputs.logits[outputs.valid], torch.from_numpy(ROWS)[outputs.valid])
        with pytest.raises(InputError, match=f"row {60 + reasons[0]}"):
            outputs.check_valid(first=60)


def test_reasons_follow_slices_choices_and_joins():
    outputs = Outputs(np.where(np.arange(10)[:, None] == 5, np.nan, np.zeros((10, 3))), on_error="refuse")
    for part, rows in (
        (outputs[torch.tensor([5, 6])], [0]),
        (outputs[torch.arange(10) > 3], [1]),
        (outputs[1::2], [2]),
        (outputs[6:].only([]), []),
        (Outputs.concat([outputs[:3], outputs, outputs]), [8, 18]),
    ):
        assert sorted(part.reasons) == (~part.valid).nonzero()[:, 0].tolist() == rows


def test_probabilities_become_their_logarithms(refused):
    rows = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5], [0.2, 0.3, 0.6], [1.5, -0.5, 0.0]])
    logs = Outputs(rows[:2]).from_probabilities().logits
    torch.testing.assert_close(logs[:, 1], rows[:2, 1].double().log())
    with refused("probabilities") as caught:
        Outputs(rows).from_probabilities(first=60)
    assert "row 62 " in caught.value.what
    outputs = Outputs(rows, reasons={0: "no image"})
    after = outputs.from_probabilities("refuse")
    assert (sorted(after.reasons), after.reasons[0], sorted(outputs.reasons)) == ([0, 2, 3], "no image", [0])
    assert torch.cat([after.logits, logs]).isfinite().all()


def test_slices_joins_and_choices_keep_everything(refused):
    keys = np.arange(6, dtype=np.uint64)
    outputs = Outputs(torch.randn(6, 3), {"a": torch.randn(6, 4), "b": torch.randn(6, 2)}, [0, 1, 2] * 2, keys=keys)
    whole = Outputs.concat([outputs[:2], outputs[2:5], outputs[torch.tensor([5])]])
    parts = [(each.logits, dict(each.features), each.labels) for each in (whole, outputs)]
    torch.testing.assert_close(*parts, rtol=0, atol=0)
    assert np.array_equal(whole.keys, keys)
    assert list(outputs.only(["b", "a"]).features) == ["b", "a"]
    stepped = outputs.replace(_predicted=torch.tensor([2, 2, 2, 0, 0, 0]))  # of the clean input, before a step
    assert Outputs.concat([stepped[1:4], stepped[:1]]).predicted.tolist() == [2, 2, 0, 2]
    assert torch.equal(outputs.predicted, outputs.logits.argmax(dim=1))
    for other in (Outputs(torch.zeros(1, 4)), outputs.only(["b", "a"])):
        with refused("outputs"):
            Outputs.concat([outputs, other])
    with refused("labels"):
        Outputs.concat([outputs, outputs.replace(labels=None)])
    slopes = Outputs(torch.zeros(2, 3, requires_grad=True))[:1]
    assert (slopes.logits.requires_grad, slopes.detached().logits.requires_grad) == (True, False)
    named = Outputs.of(Outputs(ROWS), [2, 1, 0, 0], ids=[7, 8, 9, 10])
    assert named.labels.tolist() == [2, 1, 0, 0]
    assert np.array_equal(named.keys, id_keys([7, 8, 9, 10]))


def test_equal_rows_have_equal_keys_and_others_have_not():
    values = torch.randn(1000, 5, generator=torch.Generator().manual_seed(0))
    keys = row_keys(values)
    assert np.array_equal(row_keys(values.double().flip(0))[::-1], keys)  # the same values
    assert np.array_equal(row_keys(-torch.zeros(1, 5)), row_keys(torch.zeros(1, 5)))
    assert len(np.unique(keys)) == 1000
    moved = values.double()
    moved[:, 2] *= 1 + 1e-13  # far below float32
    for others in (row_keys(moved), row_keys(values, values), row_keys(values[:, [1, 0, 2, 3, 4]])):
        assert not (others == keys).any()
    coarse = torch.cartesian_prod(*[torch.arange(9.0)] * 5)  # logits of few levels, as quantised networks give
    for rows in (coarse, coarse / 8):
        assert len(np.unique(row_keys(rows))) == len(rows)


def test_keys_are_uniform():
    """So that the rows with the smallest keys are a random sample: χ² of the top and of the bottom byte."""
    random = torch.randn(50_000, 4, generator=torch.Generator().manual_seed(0))
    for keys in (row_keys(random), row_keys(torch.arange(100_000.0).reshape(-1, 2)), id_keys(range(50_000))):
        for byte in (keys >> np.uint64(56), keys & np.uint64(255)):
            assert chisquare(np.bincount(byte.astype(int), minlength=256)).pvalue > 1e-6


def test_keys_are_of_ids_or_of_what_is_left_of_the_rows():
    outputs = Outputs(ROWS, {"a": ROWS, "b": ROWS})
    before = outputs.only(["a"]).keys
    assert not np.array_equal(outputs.keys, before)
    assert np.array_equal(outputs.only(["a"]).keys, before)  # whether or not anybody has looked at the keys
    assert np.array_equal(outputs.replace(logits=outputs.logits + 1).keys, Outputs(ROWS + 1, outputs.features).keys)
    named = Outputs(ROWS, ids=[7, "b", np.int32(9), "ü\udc80"])
    assert np.array_equal(named.keys, id_keys(["7", "b", 9, "ü\udc80"]))
    assert np.array_equal(named[1:3].only([]).keys, named.keys[1:3])
    joined = Outputs.concat([named, outputs.only([])])
    assert [each.identified for each in (outputs, named[1:3], joined)] == [False, True, False]
