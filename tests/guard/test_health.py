"""Health checks: mistaken set-ups are named by code, honest ones are left in peace, and the promise is kept."""

import runpy
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import igeood
from igeood.errors import IgeoodWarning

SETUPS = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "health.py")))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Few temperatures: which one is found does not matter here."""
    monkeypatch.setattr("igeood.guard.tune.SWEEP_POINTS", 5)
    monkeypatch.setattr("igeood.guard.tune.REFINEMENTS", 0)


@pytest.mark.parametrize("name", SETUPS.MISTAKEN)
def test_a_mistaken_setup_is_named(name):
    code, steps = SETUPS.MISTAKEN[name]
    codes, texts = SETUPS.said(steps)
    assert code in codes, texts
    assert not any("\n" in text for text in texts)


@pytest.mark.parametrize("name", SETUPS.HONEST)
def test_an_honest_setup_is_left_in_peace(name):
    """Two splits: tuned and calibrated on the same rows, and on others; the benchmark has two hundred."""
    assert [*chain(*SETUPS.alarms(name, 2))] == []


def warnings_of(guard):
    return [finding.code for finding in guard.health if finding.level == "warning"]


def test_findings_follow_their_steps_and_travel_in_the_file(classifier, tmp_path):
    c, guard = classifier, igeood.black_box()
    with pytest.warns(IgeoodWarning) as caught:
        guard.fit(c.train, (c.labels + 1) % 10)
    assert [str(each.message) for each in caught] == [str(finding) for finding in guard.health]
    assert caught[0].filename == __file__
    with pytest.warns(IgeoodWarning):
        guard.fit(c.train, c.labels).tune(c.ood, c.held_out)
    with pytest.warns(IgeoodWarning):
        guard.calibrate(c.train)
    assert warnings_of(guard) == ["swapped", "trained-on"]
    guard.save(tmp_path / "guard")
    loaded = igeood.load(tmp_path / "guard")
    assert loaded.health == guard.health
    with pytest.warns(IgeoodWarning):  # by what the file knows of the training rows
        loaded.calibrate(c.train)
    assert warnings_of(loaded.calibrate(c.test)) == ["swapped"]
    assert guard.tune(c.held_out, c.ood).calibrate(c.test).fit(c.train, c.labels).health == []


def test_what_is_only_worth_knowing_is_no_warning(model, data):
    guard = igeood.black_box(model).fit(data.train)
    assert guard.health == []
    (sampled,) = guard.fit(data.train, budget=20_000).health
    assert (sampled.code, sampled.level) == ("sampled", "info")
    kept = guard.summary.samples["features"].kept
    assert all(str(int(number)) in sampled.message for number in (kept.min(), kept.max()))


TPR, REPEATS, TEST = 0.9, 30, 400


@pytest.mark.filterwarnings("ignore:ood. ")  # of five trees few are refused
@pytest.mark.parametrize("how", ["the same rows", "other rows"])
@pytest.mark.parametrize("n_trees", [5, 50])
def test_coverage_with_ties(n_trees, how):
    """Fresh samples are kept as promised, on average, whoever is left out: of a forest's probabilities, 5 or 50 levels.

    An assertion fails with a probability below 1e-6 if the promise holds: five standard errors of the mean.
    """
    kept = [SETUPS.kept_share(n_trees, how, seed, TPR, TEST) for seed in range(REPEATS)]
    assert np.mean(kept) >= TPR - 5 * np.std(kept) / REPEATS**0.5
