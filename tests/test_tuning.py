"""The search for a temperature."""

import sys

import pytest
import torch

import igeood
from igeood import black_box, white_box
from igeood.detectors.ensemble import WeightSearch
from igeood.errors import InputError, MissingExtraError
from igeood.metrics import evaluate
from igeood.outputs import Outputs
from igeood.tuning import SWEEP_RANGE, TemperatureSearch, Trial, tune_temperature


@pytest.fixture(scope="module")
def arguments(make):
    """A detector, training outputs and validation outputs whose best temperature is not 1."""
    data = make(10, n=600, margin=5.0)
    train = Outputs(data.train, labels=data.labels)
    return igeood.IgeoodLogits().fit(train), train, Outputs(data.held_out), Outputs(data.ood)


def test_every_trial_is_what_a_fit_at_that_temperature_gives(arguments):
    _, train, inside, outside = arguments
    for trial in tune_temperature(*arguments).trials[::8]:
        detector = igeood.IgeoodLogits(temperature=trial.temperature).fit(train)
        found = igeood.metrics.evaluate(detector.score(inside), detector.score(outside))
        assert trial.tnr == pytest.approx(found.tnr_at_tpr, abs=0.005)
        assert trial.auroc == pytest.approx(found.auroc, abs=1e-5)


def test_the_sweep_covers_its_range_and_refines_around_the_best(arguments):
    tuning = tune_temperature(*arguments)
    temperatures = [t.temperature for t in tuning.trials]
    assert (temperatures[0], temperatures[-1]) == SWEEP_RANGE
    assert 1.0 in temperatures
    assert len(temperatures) == len(set(temperatures)) >= 40
    assert temperatures == sorted(temperatures)
    assert tuning.best.rank() == max(t.rank() for t in tuning.trials)
    at = temperatures.index(tuning.best.temperature)
    neighbours = temperatures[max(at - 1, 0) : at + 2]
    assert neighbours[-1] / neighbours[0] < 1.05


def test_the_sweep_is_the_same_every_time(arguments):
    assert tune_temperature(*arguments) == tune_temperature(*arguments, seed=5)


def test_ties_go_to_the_better_auroc_then_towards_one():
    trials = [Trial(0.5, 0.9, 0.95), Trial(30.0, 0.9, 0.97), Trial(2.5, 0.9, 0.97), Trial(1.0, 0.8, 0.99)]
    assert max(trials, key=Trial.rank).temperature == 2.5


def test_the_detector_is_not_changed(arguments):
    detector, _, inside, _ = arguments
    before = detector.score(inside)
    tune_temperature(*arguments)
    assert detector.temperature == 1.0
    assert torch.equal(detector.score(inside), before)


@pytest.mark.parametrize("method", [name for name, m in igeood.METHODS.items() if not m.needs_layers])
def test_every_black_box_method_can_be_tuned(arguments, method):
    _, train, inside, outside = arguments
    tuning = tune_temperature(igeood.detector(method).fit(train), train, inside, outside)
    default = igeood.detector(method).temperature
    at_default = min(tuning.trials, key=lambda t: abs(t.temperature - default))
    assert tuning.best.tnr >= at_default.tnr


def test_bayesian_search_reaches_the_sweep_and_keeps_quiet(arguments, capfd):
    optuna = pytest.importorskip("optuna")
    level = optuna.logging.get_verbosity()
    found = tune_temperature(*arguments, search="bayes", trials=15)
    assert optuna.logging.get_verbosity() == level
    assert capfd.readouterr().err == ""
    assert len(found.trials) == 5 * 15
    assert all(1.0 <= t.temperature <= 1000.0 for t in found.trials)
    best_above_one = max(t.tnr for t in tune_temperature(*arguments).trials if t.temperature >= 1.0)
    assert found.best.tnr >= best_above_one - 0.01
    assert found == tune_temperature(*arguments, search="bayes", trials=15)


def test_bayesian_search_without_optuna(arguments, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'igeood\[tune\]'"):
        tune_temperature(*arguments, search="bayes")


@pytest.mark.parametrize("search", ["sweep", "bayes"])
def test_progress_runs_to_its_end(arguments, search):
    seen = []
    tune_temperature(*arguments, search=search, trials=2, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


def test_bad_input(arguments):
    detector, train, inside, outside = arguments
    with pytest.raises(InputError, match="search: expected 'sweep' or 'bayes'"):
        tune_temperature(*arguments, search="grid")
    with pytest.raises(InputError, match="ood_validation: empty"):
        tune_temperature(detector, train, inside, outside[:0])
    with pytest.raises(InputError, match="tpr"):
        tune_temperature(*arguments, tpr=1.5)


def test_a_guard_is_never_worse_on_its_validation_samples_than_before(known, monkeypatch, caplog):
    """A search that ends at a useless temperature: the guard keeps its own, and says so."""
    bad = Trial(1000.0, 1.0, 1.0)
    monkeypatch.setattr("igeood.tuning.tune_temperature", lambda *_, **__: TemperatureSearch(bad, (bad,)))
    guard = white_box().fit(known.train)
    before = guard.detector.temperature
    guard.tune(known.held_out, known.ood)
    assert guard.tuning.after >= guard.tuning.before
    assert guard.detector.temperature == guard.tuning.temperature.best.temperature

    def poor(self, *_, **__):
        self.weights_ = -self.weights_
        return WeightSearch(1.0, 0.0)

    monkeypatch.setattr("igeood.detectors.Ensemble.fit_weights", poor)
    guard = white_box().fit(known.train)
    scores = guard.score(known.ood)
    guard.tune(known.held_out, known.ood)
    assert guard.tuning.after == guard.tuning.before > 0
    assert guard.tuning.weights is None
    assert guard.detector.temperature == guard.tuning.temperature.best.temperature == before
    torch.testing.assert_close(guard.score(known.ood), scores, rtol=0, atol=0)
    assert "no more OOD validation samples are refused than before" in caplog.text


def test_the_rates_before_and_after_are_what_the_samples_say(known):
    guard = black_box().fit(known.train.logits, known.train.labels)
    first = evaluate(guard.score(known.held_out.logits), guard.score(known.ood.logits)).tnr_at_tpr
    guard.tune(known.held_out.logits, known.ood.logits, share=1.0)
    assert guard.tuning.before == first
    assert guard.tuning.after == evaluate(guard.score(known.held_out.logits), guard.score(known.ood.logits)).tnr_at_tpr
    assert guard.tuning.after >= first
