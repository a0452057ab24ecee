"""What `tune` chooses: temperature, input step, weights; and which samples it used."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import igeood
from igeood.errors import InputError
from igeood.guard.guard import EPSILONS
from igeood.guard.known import merge, unused
from igeood.guard.tuning import SWEEP_RANGE, best, chosen, tune_temperature
from igeood.metrics import evaluate
from igeood.outputs import Outputs, row_keys
from igeood.summary import Summary


@pytest.fixture(scope="module")
def arguments(make):
    """A detector, samples of training rows, and validation outputs whose best temperature is not 1."""
    data = make(10, n=600, margin=5.0)
    summary = Summary.of(Outputs(data.train, labels=data.labels), igeood.IgeoodLogits.needs)
    return igeood.IgeoodLogits().learn(summary), summary.samples, Outputs(data.held_out), Outputs(data.ood)


def test_the_sweep_covers_its_range_and_refines_around_the_best(arguments):
    detector, samples, inside, outside = arguments
    before = detector.score(inside)
    trials = tune_temperature(*arguments)
    temperatures = [trial["temperature"] for trial in trials]
    assert (temperatures[0], temperatures[-1]) == SWEEP_RANGE
    assert temperatures == sorted({1.0, *temperatures})
    at = temperatures.index(best(trials, len(outside))["temperature"])
    neighbours = temperatures[max(at - 1, 0) : at + 2]
    assert neighbours[-1] / neighbours[0] < 1.05
    assert trials == tune_temperature(*arguments, seed=5)  # the same every time
    assert torch.equal(detector.score(inside), before)
    for trial in trials[::12]:  # each is about what a fit at that temperature gives
        exact = detector.at_temperature(trial["temperature"], samples)
        rates = evaluate(exact.score(inside), exact.score(outside))
        assert trial["tnr"] == pytest.approx(rates.tnr_at_tpr, abs=0.01)
        assert trial["auroc"] == pytest.approx(rates.auroc, abs=1e-4)


@pytest.mark.parametrize("method", [name for name, m in igeood.METHODS.items() if not m.needs_layers])
def test_every_black_box_method_can_be_tuned(known, suited, method):
    parts = (known.train, known.held_out, known.ood)
    train, inside, outside = (suited(part, igeood.METHODS[method].needs) for part in parts)
    guard = igeood.black_box(method=method).fit(train)
    before = evaluate(guard.score(inside), guard.score(outside)).tnr_at_tpr
    tuning = guard.tune(inside, outside, share=1.0).tuning
    after = evaluate(guard.score(inside), guard.score(outside)).tnr_at_tpr
    assert (tuning.before, tuning.after) == (before, after)  # on all of them, for the share is 1
    assert after >= before
    assert guard.detector.params().get("temperature") == tuning.temperature


def test_a_guard_is_never_worse_on_its_validation_samples_than_before(known, monkeypatch, caplog):
    """A search that ends at a useless temperature, and weights that are learnt the wrong way round."""

    def poor(self, *_, **__):
        self.weights_ = -self.weights_
        return igeood.detectors.weighted.WeightSearch(1.0, 0.0, 0.0)

    bad = {"temperature": 1000.0, "tnr": 1.0, "auroc": 1.0}
    monkeypatch.setattr("igeood.guard.tuning.tune_temperature", lambda *_, **__: [bad])
    monkeypatch.setattr("igeood.detectors.Weighted.learn_weights", poor)
    guard = igeood.white_box(method="igeood").fit(known.train)
    scores = guard.score(known.ood)
    tuning = guard.tune(known.held_out, known.ood).tuning
    assert tuning.after == tuning.before > 0
    assert tuning.strength is None
    assert guard.detector.temperature == tuning.temperature == 1.0
    assert torch.equal(guard.score(known.ood), scores)
    assert "no more OOD validation samples are refused than before" in caplog.text


def test_the_grey_box_chooses_its_step_on_the_papers_grid_from_loaders_that_do_not_augment(model, data):
    guard = igeood.grey_box(model).fit(data.train).tune(data.held_out, data.ood)
    steps = guard.tuning.steps
    assert tuple(step["epsilon"] for step in steps) == EPSILONS == tuple(round(0.0002 * i, 4) for i in range(21))
    near = [step for step in steps if step["tnr"] >= max(step["tnr"] for step in steps) - 1 / 200]
    assert guard.epsilon == max(near, key=lambda step: (step["auroc"], step["tnr"]))["epsilon"]
    fixed = igeood.grey_box(model, epsilon=guard.epsilon, temperature=guard.detector.temperature).fit(data.train)
    torch.testing.assert_close(fixed.score(data.test), guard.score(data.test), rtol=1e-9, atol=1e-9)
    loader = type("Augmenting", (), {"__iter__": lambda _: iter([data.test + 0.01 * torch.rand(300, 3, 8, 8)])})()
    with pytest.raises(InputError, match="id_data: has other samples each time it is read; leave random augmentation"):
        fixed.tune(loader, data.ood)


def test_samples_are_chosen_by_content_and_seed():
    rows = torch.randn(20_000, 5, generator=torch.Generator().manual_seed(1))
    keys = row_keys(rows)
    for share in (0.1, 0.5, 0.9):
        used = chosen(keys, share, seed=3)
        assert abs(used.double().mean() - share) < 4 * (share * (1 - share) / 20_000) ** 0.5
    half = chosen(keys, 0.5, 3)
    assert torch.equal(chosen(row_keys(rows.flip(0)), 0.5, 3), half.flip(0))
    assert 0.48 < (half == chosen(keys, 0.5, 4)).double().mean() < 0.52
    assert chosen(keys, 1.0, 0).all()


small = st.lists(st.integers(0, 5), max_size=20).map(lambda x: np.array(x, dtype=np.uint64))


@given(small, small)
def test_unused_takes_out_as_many_as_were_used_and_merge_keeps_the_larger_count(keys, used):
    fresh = unused(keys, used).numpy()
    assert Counter(keys[fresh].tolist()) == Counter(keys.tolist()) - Counter(used.tolist())
    assert Counter(merge(keys, used).tolist()) == Counter(keys.tolist()) | Counter(used.tolist())


def test_a_budget_uses_the_same_part_however_many_steps_are_tried(model, data):
    guard = igeood.grey_box(model, method="msp").fit(data.train)
    guard.tune(data.held_out, data.ood, epsilons=(0.0, 0.001, 0.01), share=1.0, budget=6_000)
    assert 20 <= guard.tuning.n_id <= 1000 // (4 * 4)
    assert [step["epsilon"] for step in guard.tuning.steps] == [0.0, 0.001, 0.01]
    with pytest.raises(InputError, match="budget: too small"):
        guard.tune(data.held_out, data.ood, budget=0)
