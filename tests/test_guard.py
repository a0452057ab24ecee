"""The guard of whoever has logits only, from fit to predict."""

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import igeood
from igeood import validation
from igeood.errors import IgeoodWarning, InputError, NotReadyError
from igeood.outputs import row_keys


@pytest.fixture
def guard(classifier):
    return igeood.black_box().fit(classifier.train, classifier.labels)


def test_the_whole_way(guard, classifier):
    verdict = guard.calibrate(classifier.held_out).predict(classifier.test)
    assert isinstance(verdict, igeood.Verdict)
    assert verdict.is_ood.double().mean() < 0.1
    assert guard.predict(classifier.ood).is_ood.double().mean() > 0.8
    assert torch.equal(verdict.is_ood, verdict.score > guard.calibration.threshold)
    assert torch.equal(verdict.label, classifier.test.argmax(1))
    expected = igeood.calibration.p_values(guard.score(classifier.held_out), verdict.score)
    assert torch.equal(verdict.p_value, expected)


def test_it_is_its_detector_and_threshold(guard, classifier):
    detector = igeood.IgeoodLogits().fit(classifier.train, classifier.labels)
    guard.calibrate(classifier.held_out, tpr=0.9, guarantee="tolerance", confidence=0.99)
    assert torch.equal(guard.score(classifier.test), detector.score(classifier.test))
    held_out = detector.score(classifier.held_out)
    raised = held_out + guard.calibration.margin  # for rounding
    assert guard.calibration.threshold == igeood.calibration.threshold(raised, 0.9, "tolerance", 0.99)
    assert 0.0 < guard.calibration.margin < 1e-8 * float(held_out.abs().max())


def test_numpy_in_numpy_out(guard, classifier):
    verdict = guard.calibrate(classifier.held_out.numpy()).predict(classifier.test.numpy())
    for value, dtype in (
        (verdict.is_ood, bool),
        (verdict.score, float),
        (verdict.p_value, float),
        (verdict.label, int),
    ):
        assert isinstance(value, np.ndarray)
        assert value.dtype == dtype
    assert len(guard.predict(np.empty((0, 10))).is_ood) == 0


def test_a_score_at_the_threshold_is_kept(classifier):
    guard = igeood.black_box(method="msp").fit(classifier.train, classifier.labels)
    guard.calibrate(np.zeros((30, 10)))
    assert not guard.predict(np.zeros((5, 10))).is_ood.any()


def test_scores_need_no_gradient(guard, classifier):
    assert not guard.score(classifier.test.clone().requires_grad_()).requires_grad


def test_fit_keeps_its_own_copy(classifier):
    train = classifier.train.numpy().copy()
    guard = igeood.black_box().fit(train, classifier.labels.numpy())
    train[:] = 0.0
    tuned = guard.tune(classifier.held_out, classifier.ood)
    fresh = igeood.black_box().fit(classifier.train, classifier.labels).tune(classifier.held_out, classifier.ood)
    assert torch.equal(tuned.score(classifier.test), fresh.score(classifier.test))


def test_tune_uses_a_share_and_calibrate_leaves_it_out(guard, classifier, caplog):
    guard.tune(classifier.held_out, classifier.ood)
    used = validation.chosen(row_keys(classifier.held_out), 0.5, 0)
    n = int(used.sum())
    assert 160 < n < 240
    assert guard.tuning.n_id == n
    with caplog.at_level(logging.INFO, "igeood"):
        guard.calibrate(classifier.held_out)
    assert f"left out {n} of 400 samples" in caplog.text
    assert guard.calibration.left_out == n
    torch.testing.assert_close(guard.calibration.scores, guard.score(classifier.held_out[~used]).sort().values)


def test_samples_are_known_by_content(guard, classifier):
    """Another order, another precision, another kind of array: still the same samples."""
    guard.tune(classifier.held_out.double() + 1e-12, classifier.ood)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(1))
    guard.calibrate(classifier.held_out[order].numpy())
    assert guard.calibration.left_out == guard.tuning.n_id
    guard.calibrate(classifier.test)
    assert guard.calibration.left_out == 0


def test_calibrating_on_nothing_but_used_samples(guard, classifier):
    guard.tune(classifier.held_out, classifier.ood, share=1.0)
    with pytest.raises(InputError, match=r"id_data: 0 samples \(400 more were used by tune\) cannot promise"):
        guard.calibrate(classifier.held_out)
    with pytest.raises(InputError, match=r"id_data: 18 samples \(400 more .* at least 19 are needed"):
        guard.calibrate(np.concatenate([classifier.held_out.numpy(), classifier.test[:18].numpy()]))


def test_tuning_twice_remembers_both(guard, classifier):
    guard.tune(classifier.held_out, classifier.ood)
    first = guard.tuning.n_id
    guard.tune(classifier.test, classifier.ood)
    both = torch.cat([classifier.held_out, classifier.test])
    assert guard.calibrate(both).calibration.left_out == first + guard.tuning.n_id


def test_tuning_improves_the_validation_score_and_needs_calibration_again(guard, classifier):
    guard.calibrate(classifier.held_out)
    guard.tune(classifier.held_out, classifier.ood)
    assert guard.calibration is None
    found = guard.tuning.temperature
    at_one = next(t for t in found.trials if t.temperature == 1.0)
    assert found.best.rank() >= at_one.rank()
    assert guard.detector.temperature == found.best.temperature
    direct = igeood.IgeoodLogits(temperature=guard.detector.temperature).fit(classifier.train, classifier.labels)
    assert torch.equal(guard.score(classifier.test), direct.score(classifier.test))


def test_fitting_again_forgets(guard, classifier):
    guard.tune(classifier.held_out, classifier.ood).calibrate(classifier.held_out)
    guard.fit(classifier.train, classifier.labels)
    assert guard.calibration is None
    assert guard.tuning is None
    assert guard.detector.temperature == 1.0  # what tune had chosen is undone, so its samples are free again
    assert guard.calibrate(classifier.held_out).calibration.left_out == 0


def test_a_loaded_guard_that_is_fitted_again_still_knows_what_tune_used(guard, classifier, tmp_path):
    guard.tune(classifier.held_out, classifier.ood).save(tmp_path / "g.safetensors")
    loaded = igeood.load(tmp_path / "g.safetensors").fit(classifier.train, classifier.labels)
    assert loaded.detector.temperature == guard.detector.temperature != 1.0
    assert loaded.calibrate(classifier.held_out).calibration.left_out == guard.tuning.n_id


def test_steps_out_of_order(classifier):
    guard = igeood.black_box()
    for step in (guard.score, guard.predict, guard.calibrate):
        with pytest.raises(NotReadyError, match="not fitted yet"):
            step(classifier.test)
    with pytest.raises(NotReadyError, match="not fitted yet"):
        guard.tune(classifier.test, classifier.ood)
    with pytest.raises(NotReadyError, match="not fitted yet"):
        guard.save("nowhere.safetensors")
    with pytest.raises(NotReadyError, match="call calibrate"):
        guard.fit(classifier.train, classifier.labels).predict(classifier.test)


def test_a_step_that_fails_leaves_the_guard_as_it_was(guard, classifier):
    guard.tune(classifier.held_out, classifier.ood).calibrate(classifier.held_out)
    before = guard.predict(classifier.test)
    bad = classifier.test * torch.nan
    for step in (
        lambda: guard.fit(bad, classifier.labels),
        lambda: guard.fit(classifier.train, classifier.labels + 1),
        lambda: guard.tune(bad, classifier.ood),
        lambda: guard.tune(classifier.held_out, bad),
        lambda: guard.tune(classifier.held_out, classifier.ood[:, :9]),
        lambda: guard.tune(classifier.held_out[:0], classifier.ood),
        lambda: guard.tune(classifier.held_out, classifier.ood[:0]),
        lambda: guard.tune(classifier.held_out, classifier.ood, search="random"),
        lambda: guard.tune(classifier.held_out, classifier.ood, seed=-1),
        lambda: guard.tune(classifier.held_out, classifier.ood, share="half"),
        lambda: guard.tune(classifier.held_out, classifier.ood, epsilons=[0.1]),
        lambda: guard.tune(classifier.held_out, classifier.ood, epsilons=[-0.1]),
        lambda: guard.tune(classifier.held_out, classifier.ood, epsilons=()),
        lambda: guard.tune(classifier.held_out, classifier.ood, epsilons=0.1),
        lambda: guard.tune(classifier.held_out, classifier.ood, attack=-1.0),
        lambda: guard.explain(classifier.test, top=0),
        lambda: guard.tune(classifier.held_out, "fgsm"),
        lambda: guard.tune(classifier.held_out[:10], classifier.ood),
        lambda: guard.tune(classifier.held_out, classifier.ood[:9]),
        lambda: guard.calibrate(np.empty((0, 10))),
        lambda: guard.calibrate(bad),
        lambda: guard.calibrate(classifier.test[:18]),
        lambda: guard.calibrate(classifier.test, guarantee="none"),
        lambda: guard.predict(classifier.test[:, :9]),
    ):
        with pytest.raises(InputError):
            step()
    after = guard.predict(classifier.test)
    assert torch.equal(before.is_ood, after.is_ood)
    assert torch.equal(before.score, after.score)


def test_methods_and_options(classifier):
    assert igeood.black_box(method="energy", temperature=2.0).detector.temperature == 2.0
    assert igeood.black_box(method="odin").detector.temperature == 1000.0
    own = igeood.IgeoodLogits(centroid_temperature=1.0)
    assert igeood.black_box(method=own).detector is own
    with pytest.raises(InputError, match="a detector has its own options"):
        igeood.black_box(method=own, temperature=2.0)
    with pytest.raises(InputError, match="did you mean 'igeood-logits'"):
        igeood.black_box(method="igeood-logit")


def test_probabilities(classifier):
    guard = igeood.black_box(probabilities=True).fit(classifier.train.softmax(1), classifier.labels)
    verdict = guard.calibrate(classifier.held_out.softmax(1)).predict(classifier.ood.softmax(1))
    assert verdict.is_ood.double().mean() > 0.8


def test_probabilities_that_were_not_declared_are_a_warning(classifier):
    with pytest.warns(IgeoodWarning, match="are these probabilities"):
        igeood.black_box().fit(classifier.train.softmax(1), classifier.labels)


def test_threshold_and_promise_at_hand(guard, classifier):
    for name in ("threshold", "promise"):
        with pytest.raises(NotReadyError, match=f"{name}: no threshold yet"):
            getattr(guard, name)
    guard.calibrate(classifier.held_out)
    assert guard.threshold == guard.calibration.threshold
    assert guard.promise == guard.calibration.promise
    assert "tensor" not in repr(guard.calibration)
    assert len(guard.predict(classifier.test[:7])) == 7


def test_two_classes_say_that_the_minimum_is_used(make, caplog):
    with caplog.at_level(logging.WARNING, "igeood"):
        igeood.black_box().fit(make(2).train, make(2).labels)
    assert "two classes" in caplog.text


def test_many_threads_predict_the_same(guard, classifier):
    guard.calibrate(classifier.held_out)
    alone = guard.predict(classifier.test).score
    with ThreadPoolExecutor(8) as pool:
        for score in pool.map(lambda _: guard.predict(classifier.test).score, range(32)):
            assert torch.equal(score, alone)


def test_repr_states_the_promise(guard, classifier):
    assert "not calibrated" in repr(guard)
    assert "at least 95%" in repr(guard.calibrate(classifier.held_out))
