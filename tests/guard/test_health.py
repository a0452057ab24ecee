"""What a guard says of itself: mistaken set-ups are named, honest ones are not; and which samples are the same."""

import re
import runpy
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import igeood
from igeood.errors import IgeoodWarning, InputError
from igeood.guard.health import of_counts
from igeood.guard.known import Known, chosen, mark, occurrences
from igeood.guard.tuning import best
from igeood.outputs import Outputs

SETUPS = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "health.py")))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Few temperatures: which one is found does not matter here."""
    monkeypatch.setattr("igeood.guard.tuning.SWEEP_POINTS", 5)
    monkeypatch.setattr("igeood.guard.tuning.REFINEMENTS", 0)


@pytest.mark.parametrize("name", SETUPS.MISTAKEN)
def test_a_mistaken_setup_is_named(name):
    code, steps = SETUPS.MISTAKEN[name]
    codes, texts = SETUPS.said(steps)
    assert code in codes, texts
    assert all(re.search(r"; |\? ", text) and "\n" not in text for text in texts)  # a problem and a cure, in a line


@pytest.mark.parametrize("name", SETUPS.HONEST)
def test_an_honest_setup_is_left_in_peace(name):
    """Two splits: tuned and calibrated on the same rows, and on others; the benchmark has two hundred."""
    assert [*chain(*SETUPS.alarms(name, 2))] == []


def test_there_are_enough_setups():
    assert min(len(SETUPS.MISTAKEN), len(SETUPS.HONEST)) > 20


def test_findings_follow_their_steps_and_travel_in_the_file(classifier, tmp_path):
    c, guard = classifier, igeood.black_box()
    with pytest.warns(IgeoodWarning, match="^labels: the classifier disagrees") as caught:
        guard.fit(c.train, (c.labels + 1) % 10)
    assert [str(each.message) for each in caught] == [str(finding) for finding in guard.health]
    assert caught[0].filename == __file__
    with pytest.warns(IgeoodWarning):
        guard.fit(c.train, c.labels).tune(c.ood, c.held_out)
    with pytest.warns(IgeoodWarning, match="perhaps the same samples"):
        guard.calibrate(c.train)
    codes = [finding.code for finding in guard.health if finding.level == "warning"]
    assert codes == ["swapped", "trained-on"]
    guard.save(tmp_path / "guard")
    loaded = igeood.load(tmp_path / "guard")
    assert loaded.health == guard.health
    with pytest.warns(IgeoodWarning, match="equal outputs"):  # by what the file knows of the training rows
        loaded.calibrate(c.train)
    loaded.calibrate(c.test)
    assert [f.code for f in loaded.health if f.level == "warning"] == ["swapped"]
    assert guard.tune(c.held_out, c.ood).calibrate(c.test).fit(c.train, c.labels).health == []


def test_what_is_only_worth_knowing_is_no_warning(make, known):
    c = make(4, n=400, margin=3.0)
    guard = igeood.black_box().fit(c.train, c.labels).calibrate(2.0 * c.held_out.roll(1, 1))
    (finding,) = guard.health
    assert (finding.code, finding.level) == ("calibration-shift", "info")
    assert "lower than training scores, KS distance 0." in finding.message
    edge = igeood.black_box(method="energy").fit(known.train).tune(known.held_out, known.ood)
    trials = edge.tuning.trials
    at_edge = edge.tuning.temperature in (trials[0]["temperature"], trials[-1]["temperature"])
    assert [finding.code for finding in edge.health] == ["temperature-at-edge"] * at_edge


def test_near_ties_of_tnr_are_broken_by_auroc():
    trials = [
        {"temperature": 10.0, "tnr": 0.800, "auroc": 0.90}, {"temperature": 1.0, "tnr": 0.796, "auroc": 0.95},
        {"temperature": 5.0, "tnr": 0.790, "auroc": 0.99}, {"temperature": 0.1, "tnr": 0.796, "auroc": 0.95},
    ]  # fmt: skip
    assert best(trials, n_ood=200) is trials[1]
    assert best(trials, n_ood=1000) is trials[0]
    assert best(trials, n_ood=50) is trials[2]
    assert best(trials, n_ood=50, least=0.795) is trials[1]  # no worse than before
    assert best(trials, n_ood=50, least=0.9) is trials[0]  # all are


def test_ids_say_who_is_the_same_sample_whatever_the_outputs(classifier):
    c, ids = classifier, [f"a{i}" for i in range(400)]
    guard = igeood.black_box().fit(c.train, c.labels, ids=ids)
    noise = 0.01 * torch.randn(400, 10, generator=torch.Generator().manual_seed(0))
    with pytest.warns(IgeoodWarning, match="id_data: 400 of 400 samples are training samples; classifiers"):
        guard.calibrate(c.train + noise, ids=ids)
    assert guard.calibration.trained_on == 400
    others = [f"b{i}" for i in range(400)]
    guard.tune(c.held_out, Outputs(c.ood, ids=[f"c{i}" for i in range(400)]), ids=others)
    n_id = guard.tuning.n_id
    assert guard.calibrate(c.held_out + noise, ids=others).calibration.left_out == n_id
    assert guard.calibrate(c.train, ids=[f"d{i}" for i in range(400)]).calibration.left_out == 0  # others, if equal
    with pytest.warns(IgeoodWarning, match="samples that tune used are known by ids, these by outputs"):
        guard.calibrate(c.held_out)
    assert [finding.level for finding in guard.health if finding.code == "not-compared"] == ["info", "warning"]
    with pytest.raises(InputError, match="ood: 100 of 100 samples are in-distribution ones; remove them"):
        guard.tune(c.held_out, Outputs(c.ood[:100], ids=others[:100]), ids=others, share=1.0)
    for data, options, message in (
        (c.held_out, {"ids": ids[:3]}, "ids: 3 of them for 400 rows; give one for each"),
        ([c.held_out[:200], c.held_out[200:]], {"ids": ids}, "ids: id_data come in blocks; give each block its own"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            guard.calibrate(data, **options)


def test_a_guard_with_a_model_knows_its_inputs_by_their_content(model, data):
    guard = igeood.black_box(model, method="energy").fit(data.train)
    with pytest.raises(InputError, match="ids: a guard with a model knows its inputs by their content"):
        guard.calibrate(data.test, ids=range(300))
    with pytest.warns(IgeoodWarning, match="800 of 800 samples are training samples"):
        guard.calibrate(data.train)


def test_distinct_declares_that_nothing_is_to_be_compared(classifier):
    c = classifier
    guard = igeood.black_box().fit(c.train, c.labels).tune(c.held_out, c.ood)
    assert guard.calibrate(c.held_out, distinct=True).calibration.left_out == 0
    guard.calibrate(c.train, distinct=True)
    assert guard.calibration.trained_on == 0
    assert guard.promise.startswith("at least 95%")
    mixed = torch.cat([c.ood, c.test[:100]])
    with pytest.raises(InputError, match=r"^ood: \d+ of 500 samples and in-distribution ones have equal outputs"):
        guard.tune(c.test, mixed)
    assert guard.tune(c.test, mixed, distinct=True).tuning.n_ood == 500


def rows_of(content, n, seed=0):
    """Rows that are numbers of contents, some frequent and some rare, as keys."""
    draw = np.random.default_rng(seed)
    keys = np.random.default_rng(1).integers(2**63, size=content, dtype=np.uint64)
    return keys[np.minimum(draw.zipf(1.5, size=n), content) - 1]


@pytest.mark.parametrize("sizes", [(400, 400), (5000, 100), (100, 5000)])
@pytest.mark.parametrize("contents", [3, 300, 30_000])
def test_equal_rows_by_chance_are_no_accusation_and_many_that_repeat_nowhere_else_are(sizes, contents):
    """Independent draws from one discrete source, a hundred times; and rows that are distinct in each set."""
    accused = 0
    for seed in range(100):
        first, second = (Known.of(rows_of(contents, n, [seed, n, side]), False) for side, n in enumerate(sizes))
        accused += first.shared(second) is not None
    assert accused <= 1
    first, second = (np.arange(start, start + n, dtype=np.uint64) for start, n in zip((0, 10_000), sizes, strict=True))
    assert Known.of(first, False).shared(Known.of(second, False)) is None
    second[:25] = first[:25]
    shared = Known.of(first, False).shared(Known.of(second, False))
    assert (shared.count, shared.of) == (25, sizes[1])
    second[2:25] = 2**50 + np.arange(23)  # two may be a chance
    assert Known.of(first, False).shared(Known.of(second, False)) is None
    assert Known.of(first, True).shared(Known.of(second, True)).chance is None  # or a fact


def test_equal_rows_are_split_at_random_and_left_out_as_often_as_they_were_used():
    keys = np.repeat(np.array([1, 2, 3], dtype=np.uint64), [1000, 500, 1])
    drawn = chosen(keys, 0.5, 0, occurrences(keys))
    assert abs(int(drawn[:1000].sum()) - 500) < 80
    assert abs(int(drawn[1000:1500].sum()) - 250) < 60
    order = np.random.default_rng(0).permutation(len(keys))
    again = chosen(keys[order], 0.5, 0, occurrences(keys[order]))
    assert np.array_equal(np.sort(keys[drawn]), np.sort(keys[order][again]))  # whatever the order
    halves = [occurrences(keys[:700]), occurrences(keys[700:], keys[:700])]  # and the batches
    assert np.array_equal(np.concatenate(halves), occurrences(keys))
    used = Known.of(keys[drawn], False, ((*mark(keys), 0.5, 0),))
    assert int(used.unused(keys, False).sum()) == len(keys) - int(drawn.sum())  # all of them are there again
    assert used.unused(keys[:900], False).all()  # others, by chance equal
    assert used.unused(keys, True).all()  # ids are no rows


def test_counts_of_honest_rows_are_unequal():
    draw = np.random.default_rng(0)
    for counts, identified, is_copied in (
        (np.full(50, 6), False, True),
        (draw.poisson(8, 60) + 1, False, True),
        (draw.zipf(1.5, 300), False, False),
        (np.full(4, 100), False, False),  # a row for each class
        (np.array([1, 60, 9, 5, 30, 7]), False, False),
        (np.full(50, 6), True, True),
        (np.r_[np.ones(100, int), np.full(20, 3)], True, False),  # some copies
        (np.array([5]), True, False),  # too few to say anything
    ):
        assert bool(list(of_counts(counts, 4, identified, "rows"))) == is_copied


TPR, REPEATS, TEST = 0.9, 30, 400


@pytest.mark.filterwarnings("ignore:ood. ")  # of five trees few are refused
@pytest.mark.parametrize("how", ["the same rows", "other rows", "distinct"])
@pytest.mark.parametrize("n_trees", [5, 50])
def test_coverage_with_ties(n_trees, how):
    """Fresh samples are kept as promised, on average, whoever is left out: of a forest's probabilities, 5 or 50 levels.

    An assertion fails with a probability below 1e-6 if the promise holds: five standard errors of the mean.
    """
    kept = [SETUPS.kept_share(n_trees, how, seed, TPR, TEST) for seed in range(REPEATS)]
    assert np.mean(kept) >= TPR - 5 * np.std(kept) / REPEATS**0.5
