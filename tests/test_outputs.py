"""Arrays of every kind come in, and go out as they came; what cannot be used is refused with a place and a cure."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from igeood import outputs as module
from igeood.errors import InputError
from igeood.outputs import Outputs, as_tensor, recut, row_keys

ROWS = np.arange(12.0).reshape(4, 3)


KINDS = [
    *(ROWS.tolist(), ROWS.astype(int).tolist(), ROWS.astype(np.float16), ROWS.astype(np.float32), ROWS.astype(">f4")),
    *(ROWS.astype(np.longdouble), ROWS.astype(">i8"), np.broadcast_to(ROWS, (4, 3)), ROWS[::-1].copy()[::-1]),
    *(np.asfortranarray(ROWS), np.repeat(ROWS, 2, axis=1)[:, ::2], torch.from_numpy(ROWS).float()),
    *(torch.from_numpy(ROWS).bfloat16(), torch.from_numpy(ROWS).int(), torch.from_numpy(ROWS.T.copy()).T),
]


@pytest.mark.parametrize("array", KINDS, ids=lambda array: f"{type(array).__name__} {getattr(array, 'dtype', '')}")
def test_arrays_of_numbers_are_taken_and_left_alone(array):
    outputs = Outputs(array, {"layer": array}, labels=[0, 1, 2, 0])
    for values in (outputs.logits, outputs.features["layer"]):
        assert np.array_equal(values.numpy(), ROWS)
        assert values.dtype in (torch.float32, torch.float64)
    is_tensor = isinstance(array, torch.Tensor)
    assert isinstance(outputs.like(torch.ones(4, requires_grad=True)), torch.Tensor if is_tensor else np.ndarray)
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        outputs.logits.add_(1.0)
        assert np.array_equal(array, ROWS)


def test_masked_classes_and_integers_of_any_width_are_taken():
    assert Outputs([[0.0, -np.inf], [-np.inf, 2.0]]).logits.isinf().sum() == 2
    assert as_tensor(np.array([2**64 - 1], dtype=np.uint64), "x")[0].item() == float(2**64)
    for value in (np.zeros(2, np.float16), torch.zeros(2).bfloat16(), np.zeros(2, np.float32)):
        assert as_tensor(value, "x")[0].dtype == torch.float32
    for dtype in (np.int8, np.uint64, ">i4"):
        assert Outputs(ROWS, labels=np.array([0, 1, 2, 0], dtype)).labels.tolist() == [0, 1, 2, 0]


def with_value(value):
    return np.where(np.arange(4)[:, None] % 2, value, ROWS)


REFUSED = {
    "logits": [
        (ROWS.astype(complex), "complex128.*convert"),
        (None, "object.*convert"),
        (torch.zeros(4, 3, dtype=torch.bool), "bool.*convert"),
        (ROWS[0], r"got \(3,\).*logits\[None, :\]"),
        (ROWS[:, :1], r"at least 2; got \(4, 1\).*a single sample"),
        (with_value(np.nan), r"row 1 has NaN, .* \(2 of 4.*remove"),
        (with_value(np.inf), r"row 1 has .*\+inf .* \(2 of 4.*remove"),
        (torch.from_numpy(with_value(-np.inf)), r"row 1 has .*nothing but −inf \(2 of 4.*remove"),
    ],
    "features": [
        (ROWS[:3], r"\(4, k\), got \(3, 3\).*one for each row"),
        (ROWS[:, :0], r"got \(4, 0\).*one for each row"),
        (with_value(-np.inf).astype(np.float32), r"row 1 has NaN, infinity.* \(2 of 4.*remove"),
        (with_value(1e200), r"row 1 has .* or a value beyond 1e\+100.*remove"),
    ],
    "labels": [
        (torch.ones(4, dtype=torch.bool), "bool.*convert them to integers"),
        (np.eye(4, 3), r"\(4, 3\).*one class each"),
        ([0, 1, 3, 3], r"row 2 has a class outside 0…2 \(2 of 4.*number the classes"),
        (torch.tensor([0, -1, 0, 0]), "row 1 has a class outside.*number the classes"),
    ],
    "keys": [(np.arange(3, dtype=np.uint64), r"\(3,\).*hash"), (np.arange(4), "int64.*hash")],
}


@pytest.mark.parametrize("argument", REFUSED)
def test_what_cannot_be_used_is_refused_with_place_and_cure(argument):
    for value, said in REFUSED[argument]:
        array, name = ({"conv": value}, r"features\['conv'\]") if argument == "features" else (value, argument)
        with pytest.raises(InputError, match=rf"^{name}: .*{said}"):
            Outputs(**{"logits": ROWS, argument: array})
    nan = with_value(np.nan)
    for options, said in (  # the place in the whole
        ({"logits": nan, "name": "id_data"}, "id_data: row 61 has NaN"),
        ({"labels": [0, 1, 9, 0]}, "labels: row 62 has a class outside"),
        ({"logits": nan, "features": {"conv": nan}}, r"features\['conv'\]: row 61 has NaN"),
    ):
        with pytest.raises(InputError, match=f"^{said}"):
            Outputs(**{"logits": ROWS, **options}, first=60)


def test_slices_joins_and_choices_keep_everything():
    keys = np.arange(6, dtype=np.uint64)
    outputs = Outputs(torch.randn(6, 3), {"a": torch.randn(6, 4), "b": torch.randn(6, 2)}, [0, 1, 2] * 2, keys=keys)
    whole = Outputs.concat([outputs[:2], outputs[2:5], outputs[torch.tensor([5])]])
    assert torch.equal(whole.logits, outputs.logits)
    assert all(torch.equal(whole.features[block], outputs.features[block]) for block in "ab")
    assert torch.equal(whole.labels, outputs.labels)
    assert np.array_equal(whole.keys, keys)
    assert list(outputs.only(["b", "a"]).features) == ["b", "a"]
    assert outputs[2:].first == 2
    assert repr(outputs) == "Outputs(6 samples, 3 classes, layers a, b, labels)"
    for other, said in (
        (Outputs(torch.zeros(1, 4)), "outputs: a batch has .*'logits', 4.*, an earlier one .*'logits', 3.*; give"),
        (outputs.only(["b", "a"]), "outputs: a batch has .*'b', 2.*'a', 4.*, an earlier one .*'a', 4.*'b', 2"),
        (outputs.replace(labels=None), "labels: some batches have them and some have none"),
    ):
        with pytest.raises(InputError, match=said):
            Outputs.concat([outputs, other])
    slopes = Outputs(torch.zeros(2, 3, requires_grad=True), {"a": torch.zeros(2, 4, requires_grad=True)})[:1]
    for part, wanted in ((slopes, True), (slopes.detached(), False)):
        assert part.logits.requires_grad == part.features["a"].requires_grad == wanted
    bare = Outputs(ROWS)
    assert Outputs.of(bare) is bare
    assert Outputs.of(bare, [2, 1, 0, 0]).labels.tolist() == [2, 1, 0, 0]
    assert bare.labels is None


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_blocks_do_not_depend_on_how_rows_came(sizes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_VALUES", 30)  # 10 rows of 3 values
        total = sum(sizes)
        rows = torch.arange(3.0 * total).reshape(-1, 3)
        blocks = [block.logits for block in recut(map(Outputs, rows.split(sizes)))]
    assert [len(block) for block in blocks] == ([min(10, total - start) for start in range(0, total, 10)] or [0])
    assert torch.equal(torch.cat(blocks), rows)


def test_equal_rows_have_equal_keys_others_have_not_and_keys_are_uniform_and_of_what_is_left():
    values = torch.randn(1000, 5, generator=torch.Generator().manual_seed(0))
    keys = row_keys(values)
    assert np.array_equal(row_keys(values.double()), keys)  # the same values
    assert np.array_equal(row_keys(values.flip(0))[::-1], keys)
    assert np.array_equal(row_keys(-torch.zeros(1, 5)), row_keys(torch.zeros(1, 5)))
    assert len(np.unique(keys)) == 1000
    moved = values.double()
    moved[:, 2] *= 1 + 1e-13  # far below float32
    assert not (row_keys(moved) == keys).any()
    assert not (row_keys(values, values) == keys).any()
    assert not (row_keys(values[:, [1, 0, 2, 3, 4]]) == keys).any()
    coarse = torch.cartesian_prod(*[torch.arange(9.0)] * 5)  # logits of few levels, as quantised networks give
    for rows in (coarse, coarse / 8):
        assert len(np.unique(row_keys(rows))) == len(rows)
    # so that the rows with the smallest keys are a random sample: χ² of the top and of the bottom byte
    random = torch.randn(50_000, 4, generator=torch.Generator().manual_seed(0))
    for keys in (row_keys(random), row_keys(torch.arange(100_000.0).reshape(-1, 2))):
        for byte in (keys >> np.uint64(56), keys & np.uint64(255)):
            assert chisquare(np.bincount(byte.astype(int), minlength=256)).pvalue > 1e-6
    # of what is left of the rows, whether or not anybody has looked at the keys before
    outputs = Outputs(ROWS, {"a": ROWS, "b": ROWS})
    before, _ = outputs.only(["a"]).keys, outputs.keys
    assert np.array_equal(outputs.only(["a"]).keys, before)
    more = outputs.logits + 1
    assert np.array_equal(outputs.replace(logits=more).keys, Outputs(ROWS + 1, outputs.features).keys)
    assert np.array_equal(outputs.keyed().replace(logits=more).only([]).keys, outputs.keys)
    ids = np.array([5, 3, 9, 2**63], dtype=np.uint64)
    outputs = Outputs(ROWS, keys=ids)
    assert np.array_equal(outputs[1:3].keys, ids[1:3])
    assert np.array_equal(outputs.only([]).keys, ids)


def test_rows_that_are_refused_follow_slices_and_joins():
    logits = np.zeros((10, 3), np.float32)
    logits[5] = np.nan
    outputs, good = Outputs(logits, refused={}), Outputs(logits[:3])
    for part, rows in (
        (outputs[torch.tensor([5, 6])], [0]),
        (outputs[torch.arange(10) > 3], [1]),
        (outputs[-6:], [1]),
        (outputs[1::2], [2]),
        (Outputs.concat([good, outputs]), [8]),
        (Outputs.concat([outputs[:4], outputs[4:]]), [5]),
    ):
        assert [row - part.first for row in part.refused if 0 <= row - part.first < len(part)] == rows
