"""Fitting is adding: whatever the batches, shards and their order, the same sums and rows; files hold them."""

from contextlib import nullcontext
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
import torch

from igeood.bench.methods.gram import Ranges  # sums of another kind
from igeood.errors import GuardFileError
from igeood.files import read_record, write_record
from igeood.outputs import HEAD, Outputs
from igeood.summary import BUDGET, ClassSums, Needs, Summary, by_correct, by_prediction
from igeood.summary import summary as module

ALL = Needs(layers="all", labels=True, sums="full", samples=("logits", "features"))
SMALL = 4000  # bytes: some rows of each class


def squared(x):
    return x.square()


def shards(rows, needs, *, budget=BUDGET, **options):
    return [Summary(needs, budget=budget, **options).add(rows[a:b]) for a, b in ((0, 90), (90, 250), (250, 400))]


def assert_same(one, other):
    """Sums to rounding, all else to the bit."""
    assert torch.equal(one.counts, other.counts)
    assert np.array_equal(one.keys, other.keys)
    assert np.array_equal(one.key_counts, other.key_counts)
    assert list(one.widths.items()) == list(other.widths.items())
    for sums, expected in zip(one.sums.values(), other.sums.values(), strict=True):  # means, not shifts from an origin
        for name in ("mean", "scatter") if isinstance(sums, ClassSums) else vars(sums):
            torch.testing.assert_close(getattr(sums, name), getattr(expected, name), rtol=1e-12, atol=1e-9)
    kept = [{k: (s.state(), s.outputs()[1]) for k, s in each.samples.items()} for each in (one, other)]
    torch.testing.assert_close(*kept, rtol=0, atol=0)  # rows, keys, counts, order; weights


ADDED = [
    *(ALL, Needs(samples=("logits",)), Needs(layers="last", sums="mean"), replace(ALL, sums=Ranges)),
    replace(ALL, group=by_prediction, pool=max, head=True),
    replace(ALL, group=by_correct, transform=squared, sums="diagonal"),
]


@pytest.mark.parametrize("budget", [BUDGET, 4 * SMALL])
@pytest.mark.parametrize("needs", ADDED)
def test_batches_shards_and_their_order_do_not_matter(rows, needs, budget):
    for data in (rows,) if needs.labels else (rows, rows.replace(labels=None)):
        whole = Summary.of(data, needs, budget=budget)
        for size in (3, 64):
            parts = (data[start : start + size] for start in range(0, len(data), size))
            assert_same(reduce(Summary.add, parts, Summary(needs, budget=budget)), whole)
        a, b, c = shards(data, needs, budget=budget)
        for total in (a + c + b, b + a + c, c + b + a, a + (b + c), Summary(needs, budget=budget) + b + a + c):
            assert_same(total, whole)


def test_samples_are_nested_and_share_the_budget(rows):
    needs = Needs(layers="last", labels=True, samples=("logits", "features"))
    samples = Summary.of(rows, needs, budget=2 * SMALL).samples
    assert {name: list(sample.widths) for name, sample in samples.items()} == {"logits": [], "features": [HEAD]}
    assert set(samples["features"].outputs()[0].keys) < set(samples["logits"].outputs()[0].keys)
    assert sum(sample.budget for sample in samples.values()) == 2 * SMALL


def test_of_unequal_budgets_the_smaller_holds_and_adding_changes_neither_side(rows):
    a, b, c = shards(rows, ALL)
    expected = Summary.of(rows, ALL, budget=2 * SMALL)
    small = Summary.of(rows[90:250], ALL, budget=2 * SMALL)
    for total in (a + small + c, Summary(ALL, budget=2 * SMALL) + (a + b + c)):
        assert_same(total, expected)
        assert total.budget == 2 * SMALL
    before = Summary.of(rows[:90], ALL)
    for total in (a + b, a + Summary(ALL), Summary(ALL) + a):
        total.add(rows[250:])
        assert_same(a, before)


def test_ids_are_keys_and_those_of_training_rows_are_bounded(rows, monkeypatch):
    """The rows with the smallest ids' hashes are kept, not those with the smallest hashes of their content."""
    keys = np.random.default_rng(0).integers(2**64, size=400, dtype=np.uint64)
    summary = Summary.of(Outputs(rows.logits, keys=keys), Needs(samples=("logits",)), budget=SMALL)
    sample = summary.samples["logits"]
    assert np.array_equal(sample.outputs()[0].keys, np.sort(keys)[: sample.quota])
    assert summary.identified
    assert not (summary + Summary.of(rows.replace(labels=None), Needs(samples=("logits",)))).identified
    monkeypatch.setattr(module, "KEYS", 50)
    contents, counts = np.unique(rows.only([]).keys, return_counts=True)
    a, b, c = shards(rows, Needs())
    for summary in (Summary.of(rows, Needs()), c + a + b):
        assert np.array_equal(summary.keys, contents[:50])
        assert np.array_equal(summary.key_counts, counts[:50])


def test_files_and_bytes_hold_a_summary(rows, tmp_path):
    a, b, c = shards(rows, ALL, budget=2 * SMALL, model="abc")
    a.about = {"classes": ["a", "b"]}
    a.head = (torch.ones(5, 2), torch.zeros(5))
    a.save(tmp_path / "a")
    loaded = Summary.load(tmp_path / "a")
    assert_same(loaded, a)
    assert (loaded.model, loaded.budget, loaded.described) == ("abc", 2 * SMALL, a.described)
    torch.testing.assert_close(loaded.head, a.head)
    total = Summary(ALL, budget=4 * SMALL)
    total.about = {"preparation": {"size": 8}}
    for part in (c, loaded, b, Summary(ALL)):  # the last has no row
        total += Summary.from_bytes(part.to_bytes())
    assert_same(total, Summary.of(rows, ALL, budget=2 * SMALL))
    assert total.about == {"classes": ["a", "b"], "preparation": {"size": 8}}


@pytest.mark.parametrize("change", [{"sums": "mean", "transform": squared}, {"sums": Ranges}])
def test_a_file_has_no_functions_but_adds_to_a_summary_that_has_them(rows, change, refused):
    needs = replace(ALL, **change)
    a, b, c = shards(rows, needs)
    bare = Summary.from_bytes(a.to_bytes())
    assert bare.described == needs.describe()
    with refused("summary"):
        bare.add(rows)
    with refused("summary") if needs.sums is Ranges else nullcontext():  # two files do not know how these add
        bare + Summary.from_bytes(b.to_bytes())
    whole = Summary.of(rows, needs)
    assert_same(Summary.from_bytes(a.to_bytes(), needs).add(rows[90:]), whole)
    for total in (b + bare + c, bare + b + c, Summary.from_bytes((b + c).to_bytes(), needs) + bare):
        assert_same(total, whole)


def test_files_that_are_no_summary(rows, tmp_path):
    summary = Summary.of(rows, ALL)
    summary.save(tmp_path / "summary")
    record, tensors = read_record(tmp_path / "summary", "summary")
    for change in ({"needs": {"samples": []}}, {"n_classes": "ten"}, {"widths": 3}):
        write_record(tmp_path / "summary", {**record, **change}, tensors)
        with pytest.raises(GuardFileError):
            Summary.load(tmp_path / "summary")
    with pytest.raises(GuardFileError):
        Summary.from_bytes(summary.to_bytes()[:-1])


def test_summaries_and_batches_that_do_not_add(rows, refused):
    one, other = (Summary(ALL, model="one").add(part) for part in (rows, rows[:9]))
    one.about, other.about = {"classes": ["a", "b"]}, {"classes": ["b", "a"]}
    changed = [Summary(replace(ALL, **change), model="one") for change in ({"sums": "mean"}, {"transform": squared})]
    for summary in (other, *(each.add(rows[:9]) for each in (*changed, Summary(ALL, model="two")))):
        with refused("summary"):
            one + summary
    free, narrow = Needs(samples=("logits",)), Outputs(rows.logits[:, :4], labels=rows.labels % 4)
    bare, turned = rows.replace(labels=None), rows.only(["late", "early"])
    for needs, batch, argument in ((free, bare, "labels"), (free, narrow, "outputs"), (ALL, turned, "outputs")):
        with refused(argument):
            Summary.of(rows, needs).add(batch)
        with refused(argument):
            Summary.of(rows, needs) + Summary.of(batch, needs)


@pytest.mark.parametrize("samples", [("logits",), ("logits", "features")])
def test_a_budget_that_is_too_small_names_the_bytes_that_are_enough(rows, samples, refused):
    needs = replace(ALL, samples=samples)
    for budget in (0, 1.5, True):
        with refused("budget"):
            Summary(needs, budget=budget)
    with refused("budget") as caught:
        Summary.of(rows, needs, budget=200)
    needed = max(int(word) for word in caught.value.cure.replace(",", "").split() if word.isdigit())
    assert all(sample.quota >= 1 for sample in Summary.of(rows, needs, budget=needed).samples.values())
    with refused("budget"):
        Summary.of(rows, needs, budget=needed - 1)
