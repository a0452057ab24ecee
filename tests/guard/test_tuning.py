"""What `tune` chooses: temperature, input step, weights."""

import pytest
import torch

import igeood
from igeood.guard.guard import EPSILONS
from igeood.guard.tune import SWEEP_RANGE, best, search_temperature, sweep
from igeood.metrics import evaluate
from igeood.outputs import Outputs
from igeood.summary import Summary


@pytest.fixture(scope="module")
def arguments(make):
    """A detector, a summary of training rows, and validation outputs whose best temperature is not 1."""
    data = make(10, n=600, margin=5.0)
    summary = Summary.of(Outputs(data.train, labels=data.labels), igeood.IgeoodLogits.needs)
    return igeood.IgeoodLogits().learn(summary), summary, (Outputs(data.held_out), Outputs(data.ood))


def test_the_sweep_covers_its_range_and_refines_around_the_best(arguments):
    detector, _, (inside, outside) = arguments
    before, done = detector.score(inside), []
    trials = search_temperature(*arguments, sweep, progress=lambda *now: done.append(now))
    assert done == [(i, len(trials)) for i in range(1, len(trials) + 1)]
    temperatures = [trial["temperature"] for trial in trials]
    assert (temperatures[0], temperatures[-1]) == SWEEP_RANGE
    assert temperatures == sorted({1.0, *temperatures})
    at = temperatures.index(best(trials, len(outside))["temperature"])
    neighbours = temperatures[max(at - 1, 0) : at + 2]
    assert neighbours[-1] / neighbours[0] < 1.05
    assert trials == search_temperature(*arguments, sweep)  # the same every time
    assert torch.equal(detector.score(inside), before)


def test_near_ties_of_tnr_are_broken_by_auroc():
    values = [(10.0, 0.800, 0.90), (1.0, 0.796, 0.95), (5.0, 0.790, 0.99), (0.1, 0.796, 0.95)]
    trials = [dict(zip(("temperature", "tnr", "auroc"), each, strict=True)) for each in values]
    assert best(trials, n_ood=200) is trials[1]
    assert best(trials, n_ood=1000) is trials[0]
    assert best(trials, n_ood=50) is trials[2]
    assert best(trials, n_ood=50, least=0.795) is trials[1]  # no worse than before
    assert best(trials, n_ood=50, least=0.9) is trials[0]  # all are


@pytest.mark.parametrize("method", [name for name, m in igeood.METHODS.items() if not m.needs_layers])
def test_every_black_box_method_can_be_tuned_by_a_search_of_ones_own(known, suited, method):
    parts = (known.train, known.held_out, known.ood)
    train, inside, outside = (suited(part, igeood.METHODS[method].needs) for part in parts)
    guard = igeood.black_box(method=method).fit(train)
    before = evaluate(guard.score(inside), guard.score(outside)).tnr_at_tpr

    def search(attempt, trials, n_ood):
        assert n_ood == 400
        for temperature in (0.5, 1.0, 3.0):
            assert attempt(temperature) == trials[-1]["tnr"]

    tuning = guard.tune(inside, outside, share=1.0, search=search).tuning
    after = evaluate(guard.score(inside), guard.score(outside)).tnr_at_tpr
    assert (tuning.before, tuning.after) == pytest.approx((before, after))  # on all of them, for the share is 1
    assert after >= before
    if guard.detector.params().get("temperature") is not None:
        assert guard.detector.params()["temperature"] == tuning.temperature
        assert [trial["temperature"] for trial in tuning.trials] == [0.5, 1.0, 3.0]
    assert guard.tune(inside, outside, search=None).tuning.trials == []


def test_a_guard_is_never_worse_on_its_validation_samples_than_before(known, monkeypatch):
    """A search that ends at a useless temperature, and weights that are learnt the wrong way round."""

    def poor(self, *_, **__):
        self.weights_ = -self.weights_
        return igeood.detectors.weighted.WeightSearch(1.0, 0.0, 0.0)

    monkeypatch.setattr("igeood.detectors.Weighted.learn_weights", poor)
    guard = igeood.white_box(method="igeood").fit(known.train)
    scores = guard.score(known.ood)
    tuning = guard.tune(known.held_out, known.ood, search=lambda attempt, *_: attempt(1000.0)).tuning
    assert tuning.after == tuning.before > 0
    assert tuning.strength is None
    assert guard.detector.temperature == tuning.temperature == 1.0
    assert torch.equal(guard.score(known.ood), scores)
    assert [finding.code for finding in guard.health] == ["no-gain"]


def test_the_grey_box_chooses_its_step_on_the_papers_grid_from_loaders_that_do_not_augment(model, data, refused):
    guard = igeood.grey_box(model, method="energy").fit(data.train).tune(data.held_out, data.ood)
    steps = guard.tuning.steps
    assert tuple(step["epsilon"] for step in steps) == EPSILONS == tuple(round(0.0002 * i, 4) for i in range(21))
    assert guard.epsilon == best(steps, guard.tuning.n_ood, guard.tuning.before)["epsilon"]
    options = {"epsilon": guard.epsilon, "temperature": guard.detector.temperature, "method": "energy"}
    fixed = igeood.grey_box(model, **options).fit(data.train)
    torch.testing.assert_close(fixed.score(data.test), guard.score(data.test), rtol=1e-9, atol=1e-9)
    loader = type("Augmenting", (), {"__iter__": lambda _: iter([data.test + 0.01 * torch.rand(300, 3, 8, 8)])})()
    with refused("id_data"):
        fixed.tune(loader, data.ood, epsilons=(0.0, 0.001))
