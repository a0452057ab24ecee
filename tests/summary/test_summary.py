"""Fitting is adding: whatever the batches, shards and their order, the same sums, rows and scores for every method."""

import itertools
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
import torch

import igeood
from igeood.errors import GuardFileError, InputError
from igeood.files import read_record, write_record
from igeood.outputs import HEAD, Outputs
from igeood.summary import ClassSums, Needs, Summary
from igeood.summary import total as module
from igeood.summary.needs import check_covers, joined

METHODS = sorted(igeood.METHODS)
ALL = Needs(layers="all", labels=True, sums="full", ranges=True, holdout=True, samples=("logits", "features"))
SMALL = 4000  # bytes: some rows of each class


def squared(x):
    return x.square()


def shards(rows, needs, *, budget=module.BUDGET, **options):
    return [Summary(needs, budget=budget, **options).add(rows[a:b]) for a, b in ((0, 90), (90, 250), (250, 400))]


def assert_same(one, other):
    """Sums to rounding, all else to the bit."""
    assert torch.equal(one.counts, other.counts)
    assert np.array_equal(one.keys, other.keys)
    assert list(one.widths.items()) == list(other.widths.items())
    assert one.sums.keys() == other.sums.keys()
    for block, sums in one.sums.items():
        torch.testing.assert_close(sums.mean, other.sums[block].mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(sums.scatter, other.sums[block].scatter, rtol=1e-12, atol=1e-9)
        assert torch.equal(sums.low, other.sums[block].low)
        assert torch.equal(sums.high, other.sums[block].high)
    kept = [{k: (s.state(), s.outputs()[1]) for k, s in each.samples.items()} for each in (one, other)]
    torch.testing.assert_close(*kept, rtol=0, atol=0)  # rows, keys, counts, order; weights


def ways(rows, needs, budget):
    """The same rows, summed up in many ways."""
    for size in (1, 7, 64):
        parts = (rows[start : start + size] for start in range(0, len(rows), size))
        yield reduce(Summary.add, parts, Summary(needs, budget=budget))
    a, b, c = shards(rows, needs, budget=budget)
    yield from (sum(order[1:], order[0]) for order in itertools.permutations((a, b, c)))
    yield a + (b + c)
    yield Summary(needs, budget=budget) + b + a + c


@pytest.mark.parametrize("budget", [module.BUDGET, SMALL])
@pytest.mark.parametrize("method", METHODS)
def test_batches_shards_and_their_order_do_not_matter(method, budget, rows, suited):
    needs = igeood.METHODS[method].needs
    rows = suited(rows, needs)
    for data in (rows,) if needs.labels else (rows, rows.replace(labels=None)):
        whole = Summary.of(data, needs, budget=budget)
        truncated = [len(sample) < len(np.unique(data.keys)) for sample in whole.samples.values()]
        assert all(truncated) or budget > SMALL
        expected = igeood.detector(method).learn(whole).score(data)
        for summary in ways(data, needs, budget):
            assert_same(summary, whole)
            scores = igeood.detector(method).learn(summary).score(data)
            torch.testing.assert_close(scores, expected, rtol=1e-9, atol=1e-9)


def test_everything_that_can_be_asked_for_adds(rows):
    for needs in (ALL, replace(ALL, group="predicted", statistic="max", samples=("statistics",), head=True),
                  replace(ALL, group="correct", transform=squared, sums="diagonal")):  # fmt: skip
        whole = Summary.of(rows, needs, budget=4 * SMALL)
        for summary in ways(rows, needs, 4 * SMALL):
            assert_same(summary, whole)


def test_samples_are_nested_and_share_the_budget(rows):
    needs = Needs(layers="all", statistic="max", head=True, labels=True, samples=("logits", "features", "statistics"))
    summary = Summary.of(rows, needs, budget=3 * SMALL)
    samples, blocks = summary.samples, {"logits": [], "features": [HEAD], "statistics": ["early|max"]}
    assert {kind: list(sample.widths) for kind, sample in samples.items()} == blocks
    assert repr(summary).startswith(f"Summary(400 rows, 5 classes, {len(samples['logits'])} kept with logits, ")
    assert repr(Summary(needs)) == "Summary(no rows)"
    statistics, features, logits = (set(samples[k].outputs()[0].keys) for k in ("statistics", "features", "logits"))
    assert statistics < features < logits
    assert sum(sample.budget for sample in samples.values()) == summary.budget


def test_of_unequal_budgets_the_smaller_holds_and_adding_changes_neither_side(rows):
    a, b, c = shards(rows, ALL)
    small = Summary.of(rows[90:250], ALL, budget=2 * SMALL)
    assert_same(a + small + c, Summary.of(rows, ALL, budget=2 * SMALL))
    assert (a + small + c).budget == 2 * SMALL
    assert_same(Summary(ALL, budget=2 * SMALL) + (a + b + c), Summary.of(rows, ALL, budget=2 * SMALL))
    before = Summary.of(rows[:90], ALL)
    for whole in (a + b, a + Summary(ALL), Summary(ALL) + a):
        whole.add(rows[250:])
        assert_same(a, before)
    assert_same((a + b).add(rows[250:]), Summary.of(rows, ALL))  # a sum takes in more rows


@pytest.mark.parametrize("group", ["label", "predicted", "correct"])
def test_sums_and_ranges_of_groups(rows, group):
    needs = Needs(layers="all", labels=True, sums="diagonal", ranges=True, group=group, transform=squared)
    summary = Summary.of(rows, needs)
    predicted = rows.logits.argmax(dim=1)
    kept = predicted == rows.labels if group == "correct" else torch.ones(400, dtype=torch.bool)
    groups = (predicted if group == "predicted" else rows.labels)[kept]
    x = rows.features["late"][kept]
    expected = ClassSums.of(squared(x), groups, 5)
    torch.testing.assert_close(summary.sums["late"].mean, expected.mean, rtol=1e-12, atol=0)
    assert torch.equal(summary.sums["late"].count, expected.count)
    for c in range(5):  # ranges are of the features themselves
        assert torch.equal(summary.sums["late"].low[c], x[groups == c].amin(dim=0))
        assert torch.equal(summary.sums["late"].high[c], x[groups == c].amax(dim=0))
    assert summary.counts.tolist() == torch.bincount(rows.labels).tolist()  # of all rows, whatever the groups


def test_held_out_rows_are_in_the_sample_and_not_in_the_ranges(rows):
    held_out = rows.keys < np.uint64(2**64 // 10)
    assert 10 < held_out.sum() < 80
    spiked = {block: value + 1e6 * torch.from_numpy(held_out)[:, None] for block, value in rows.features.items()}
    data = Outputs(rows.logits, spiked, rows.labels, keys=rows.keys)
    summary = Summary.of(data, ALL)
    assert float(summary.sums["late"].high.max()) < 1e3
    assert set(rows.keys[held_out]) <= set(summary.samples["features"].outputs()[0].keys)
    assert float(Summary.of(data, replace(ALL, holdout=False)).sums["late"].high.max()) > 1e5


def test_ids_are_keys_and_those_of_training_rows_are_bounded(rows, monkeypatch):
    """The rows with the smallest ids' hashes are kept, not those with the smallest hashes of their content."""
    ids = np.random.default_rng(0).integers(2**64, size=400, dtype=np.uint64)
    summary = Summary.of(Outputs(rows.logits, keys=ids), Needs(samples=("logits",)), budget=SMALL)
    sample = summary.samples["logits"]
    assert np.array_equal(sample.outputs()[0].keys, np.sort(ids)[: sample.quota])
    assert np.array_equal(summary.keys, np.sort(ids))
    monkeypatch.setattr(module, "KEYS", 50)
    for summary in ways(rows, Needs(), module.BUDGET):
        assert np.array_equal(summary.keys, np.unique(rows.only([]).keys)[:50])


def test_save_and_load(rows, tmp_path):
    a, b, c = shards(rows, ALL, budget=2 * SMALL, model="abc")
    a.save(tmp_path / "a")
    loaded = Summary.load(tmp_path / "a")
    assert_same(loaded, a)
    assert (loaded.model, loaded.budget, loaded.described) == ("abc", 2 * SMALL, a.described)
    whole = Summary.of(rows, ALL, budget=2 * SMALL)
    assert_same(loaded + b + c, whole)
    assert_same(loaded.add(rows[90:250]).add(rows[250:]), whole)
    Summary.of(rows, Needs(), budget=SMALL).save(tmp_path / "a")  # sums and samples of nothing
    assert Summary.load(tmp_path / "a").rows == 400
    # a file has no transform to apply
    a, b, _ = shards(rows, Needs(layers="all", labels=True, sums="mean", transform=squared))
    a.save(tmp_path / "a")
    loaded = Summary.load(tmp_path / "a")
    assert_same(loaded + b, a + b)
    with pytest.raises(InputError, match=r"^summary: .*'squared'.*is not in its file; .* add the two with \+"):
        loaded.add(rows)


def test_many_add_in_place_and_travel_as_bytes_even_without_a_row(rows):
    parts = [Summary.of(rows[i::7], ALL, budget=2 * SMALL) for i in range(7)] + [Summary(ALL)]
    parts[0].about, parts[7].about = {"classes": ["a", "b"]}, {"preparation": {"size": 8}}
    total = Summary(ALL, budget=4 * SMALL)
    for part in parts:
        content = part.to_bytes()
        total += Summary.from_bytes(content)
        assert part.to_bytes() == content
    assert_same(total, Summary.of(rows, ALL, budget=2 * SMALL))
    again = Summary.from_bytes(total.to_bytes())
    assert again.about == {"classes": ["a", "b"], "preparation": {"size": 8}}
    other = Summary(ALL)
    other.about = {"classes": ["b", "a"]}
    with pytest.raises(InputError, match="summary: classes differ"):
        total += other
    for damaged in (content[:-1], b"", b"no summary at all"):
        with pytest.raises(GuardFileError, match="is damaged, or no summary file"):
            Summary.from_bytes(damaged)


def test_files_that_are_no_summary(rows, tmp_path):
    path = tmp_path / "summary"
    Summary.of(rows, ALL).save(path)
    record, tensors = read_record(path, "summary")
    for change in ({"needs": {"samples": []}}, {"n_classes": "ten"}):
        write_record(path, {**record, **change}, tensors)
        with pytest.raises(GuardFileError, match=r"^path: .* does not describe a summary"):
            Summary.load(path)


def test_summaries_and_batches_that_do_not_add(rows):
    one = Summary(ALL, model="one").add(rows)
    for other, what in (
        (Summary(replace(ALL, sums="diagonal"), model="one"), "sums differ: 'full' and 'diagonal'"),
        (Summary(replace(ALL, transform=squared), model="one"), "transform differ: None and 'squared'"),
        (Summary(ALL, model="two"), "^summary: model differ: 'one' and 'two'; add those of one method and model"),
    ):
        with pytest.raises(InputError, match=what):
            one + other.add(rows[:9])
    assert_same(one, Summary.of(rows, ALL))
    whole = Summary.of(rows, free := Needs(samples=("logits",)))
    for other, what in (
        (rows.replace(labels=None), "labels: some batches have them and some have none"),
        (Outputs(rows.logits[:, :4], labels=rows.labels % 4), "outputs: a batch has widths .* 4.*; give batches"),
    ):
        for add in (whole.add, lambda other: whole + Summary.of(other, free)):
            with pytest.raises(InputError, match=what):
                add(other)
    for other in (rows.only(["late", "early"]), rows.only(["late"])):
        with pytest.raises(InputError, match=r"outputs: a batch has widths .*'late', .*; give batches of one model"):
            Summary.of(rows, ALL).add(other)


@pytest.mark.parametrize("samples", [("logits",), ("logits", "features")])
def test_a_budget_that_is_too_small_names_the_bytes_that_are_enough(rows, samples):
    needs = replace(ALL, samples=samples)
    for budget in (0, 1.5, True):
        with pytest.raises(InputError, match="budget: expected a number of bytes, at least 1; got "):
            Summary(ALL, budget=budget)
    with pytest.raises(InputError, match=r"^budget: 200 bytes cannot hold one training row of each class; ") as caught:
        Summary.of(rows, needs, budget=200)
    needed = int(str(caught.value).split("give at least ")[1].split()[0].replace(",", ""))
    assert all(sample.quota >= 1 for sample in Summary.of(rows, needs, budget=needed).samples.values())
    with pytest.raises(InputError, match=r"^budget: "):
        Summary.of(rows, needs, budget=needed - 1)


@pytest.mark.parametrize(
    "lack",
    [{"samples": ("logits",)}, {"sums": "mean"}, {"layers": "last"}, {"statistic": "max"}, {"group": "correct"},
     {"transform": squared}, {"ranges": False}, {"labels": False}, {"holdout": False}, {"head": False}],
)  # fmt: skip
def test_a_summary_for_other_needs_is_refused(lack):
    wanted, (name,) = replace(ALL, head=True), lack
    with pytest.raises(InputError, match=rf"^summary: Mine needs {name} .*, but it was made with .*; make it with a"):
        check_covers(replace(wanted, **lack).describe(), wanted.describe(), "Mine")
    ends, last, convolutions = (Needs(layers=kind, sums="mean").describe() for kind in ("all", "last", "convolutions"))
    check_covers(ends, last, "X")
    with pytest.raises(InputError, match="summary: X needs layers 'convolutions', but it was made with 'all'"):
        check_covers(ends, convolutions, "X")


def test_more_than_is_needed_is_enough(rows, suited):
    """One pass over the data serves many methods: here all of today's."""
    asked = [Needs(statistic=kind, head=True, returns=("h",)) for kind in ("mean", "gram", "moments")]
    kinds = [suited(rows, needs).features for needs in asked]
    features = {block: value for kind in kinds for block, value in kind.items()}
    rows = Outputs(rows.logits, features, rows.labels).keyed()  # as a guard does it: the sample is the same for all
    summaries = [Summary.of(rows, needs) for needs in joined(method.needs for method in igeood.METHODS.values())]
    assert len(summaries) == 5  # rows of length 1, those that are classified correctly, and other statistics apart
    for method in METHODS:
        wanted = igeood.METHODS[method].needs.describe()
        summary = next(s for s in summaries if covers(s.described, wanted))
        expected = igeood.detector(method).fit(rows).score(rows)
        scores = igeood.detector(method).learn(summary).score(rows)
        torch.testing.assert_close(scores, expected, rtol=1e-9, atol=1e-9)


def covers(summary, wanted):
    try:
        check_covers(summary, wanted, "X")
    except InputError:
        return False
    return True
