"""Guards without a model: arrays of logits, and outputs with features."""

import numpy as np
import pytest
import torch

import igeood
from igeood.errors import IgeoodWarning, InputError, NotReadyError
from igeood.guard.tuning import chosen
from igeood.outputs import row_keys


@pytest.fixture
def guard(classifier):
    return igeood.black_box().fit(classifier.train, classifier.labels)


def test_the_whole_way(guard, classifier):
    detector = igeood.IgeoodLogits().fit(classifier.train, classifier.labels)
    assert torch.equal(guard.score(classifier.test), detector.score(classifier.test))
    guard.calibrate(classifier.held_out, tpr=0.9, guarantee="tolerance", confidence=0.99)
    raised = detector.score(classifier.held_out) + guard.calibration.margin  # for rounding
    assert guard.threshold == igeood.calibration.threshold(raised, 0.9, "tolerance", 0.99)
    verdict = guard.calibrate(classifier.held_out).predict(classifier.test)
    assert verdict.is_ood.double().mean() < 0.1
    assert guard.predict(classifier.ood).is_ood.double().mean() > 0.8
    assert torch.equal(verdict.is_ood, verdict.score > guard.threshold)
    assert torch.equal(verdict.label, classifier.test.argmax(1))
    assert torch.equal(verdict.p_value, igeood.calibration.p_values(guard.score(classifier.held_out), verdict.score))
    verdict = guard.calibrate(classifier.held_out.numpy()).predict(classifier.test.numpy())
    kinds = {"is_ood": bool, "score": np.float64, "p_value": np.float64, "label": np.int64}
    assert {name: getattr(verdict, name).dtype for name in kinds} == kinds
    assert len(guard.predict(np.empty((0, 10)))) == 0
    assert not guard.score(classifier.test.clone().requires_grad_()).requires_grad


def test_features_are_read_by_layer(known):
    guard = igeood.white_box().fit(known.train).calibrate(known.held_out)
    assert guard.layers == ["early", "block.late"]
    assert guard.predict(known.ood).is_ood.double().mean() > 0.8
    assert guard.predict(known.test).is_ood.double().mean() < 0.12
    only = igeood.white_box(layers=["early"]).fit(known.train)
    assert only.layers == ["early"]
    with pytest.raises(InputError, match="no features of layer 'early', which the guard reads; these have none"):
        only.score(known.test.logits)


def blocks(logits, labels=None):
    """Blocks of 70 rows in one buffer, which is used again."""
    buffer = np.empty((70, logits.shape[1]), np.float32)
    for rows in torch.arange(len(logits)).split(70):
        buffer[: len(rows)] = logits[rows]
        yield buffer[: len(rows)] if labels is None else (buffer[: len(rows)], labels[rows].numpy())


def test_generators_of_blocks_that_reuse_their_memory(guard, classifier):
    blockwise = igeood.black_box().fit(blocks(classifier.train, classifier.labels))
    assert torch.equal(blockwise.score(blocks(classifier.test)), guard.score(classifier.test))
    blockwise.calibrate(blocks(classifier.held_out))
    assert torch.equal(blockwise.calibration.scores, guard.calibrate(classifier.held_out).calibration.scores)
    with pytest.raises(InputError, match="ood: is read more than once"):
        guard.tune(classifier.held_out, blocks(classifier.ood))
    with pytest.raises(InputError, match="logits: empty: no block of logits"):
        guard.score(iter([]))


def test_tune_uses_a_share_and_calibrate_leaves_it_out_by_its_content(guard, classifier, caplog):
    """Another order, another precision, another kind of array: still the same samples."""
    guard.tune(classifier.held_out.double(), classifier.ood)
    used, first = chosen(row_keys(classifier.held_out), 0.5, 0), guard.tuning.n_id
    assert 160 < int(used.sum()) == first < 240
    order = torch.randperm(400, generator=torch.Generator().manual_seed(1))
    assert guard.calibrate(classifier.held_out[order].numpy()).calibration.left_out == first
    assert f"left out {first} of 400 samples" in caplog.text
    torch.testing.assert_close(guard.calibration.scores, guard.score(classifier.held_out[~used]).sort().values)
    assert guard.calibrate(classifier.test).calibration.left_out == 0
    guard.tune(classifier.test, classifier.ood)  # a second tuning adds to the first
    both = torch.cat([classifier.held_out, classifier.test])
    assert guard.calibrate(both).calibration.left_out == first + guard.tuning.n_id


def test_calibrating_on_samples_that_were_used(guard, classifier):
    with pytest.warns(
        IgeoodWarning, match="id_data: 300 of 400 samples and training samples have equal outputs, perhaps"
    ):
        guard.calibrate(torch.cat([classifier.train[:300], classifier.held_out[:100]]))
    assert guard.promise == "nothing is promised: of 400 calibration samples 300 equal training samples"
    guard.tune(classifier.held_out, classifier.ood, share=1.0)
    with pytest.raises(InputError, match=r"id_data: 18 samples \(400 more were used by tune\) cannot promise tpr=0.95"):
        guard.calibrate(np.concatenate([classifier.held_out.numpy(), classifier.test[:18].numpy()]))


def test_fitting_again_forgets(guard, classifier, tmp_path):
    guard.tune(classifier.held_out, classifier.ood).calibrate(classifier.held_out).save(tmp_path / "guard.safetensors")
    tuned, n_id = guard.detector.temperature, guard.tuning.n_id
    guard.fit(classifier.train, classifier.labels)
    assert (guard.calibration, guard.tuning, guard.detector.temperature) == (None, None, 1.0)
    assert guard.calibrate(classifier.held_out).calibration.left_out == 0
    loaded = igeood.load(tmp_path / "guard.safetensors").fit(classifier.train, classifier.labels)
    assert loaded.detector.temperature == tuned != 1.0  # the file's own: so its samples are still left out
    assert loaded.calibrate(classifier.held_out).calibration.left_out == n_id


def test_steps_out_of_order(classifier):
    guard = igeood.black_box()
    for name in ("score", "predict", "calibrate", "explain", "save", "tune"):
        given = [classifier.test, classifier.ood][: 1 + (name == "tune")]
        with pytest.raises(NotReadyError, match=rf"{name}: the guard is not fitted yet; call fit\(logits, labels\)"):
            getattr(guard, name)(*given)
    guard.fit(classifier.train, classifier.labels)
    assert "not calibrated" in repr(guard)
    with pytest.raises(NotReadyError, match="predict: no threshold yet; call calibrate"):
        guard.predict(classifier.test)
    with pytest.raises(NotReadyError, match="promise: no threshold yet"):
        guard.promise  # noqa: B018


def test_a_step_that_fails_leaves_the_guard_as_it_was(guard, classifier):
    guard.tune(classifier.held_out, classifier.ood).calibrate(classifier.held_out)
    tuning, before = guard.tuning, guard.predict(classifier.test)
    for step, message in (
        (lambda g, c: g.fit(c.train, c.labels + 1), "labels: row 9 has a class outside 0…9"),
        (lambda g, c: g.fit(c.train, c.labels, budget=1.5), "budget: expected a number of bytes"),
        (lambda g, c: g.tune(c.test[:10], c.ood), "id_data: . samples in the share that tune uses"),
        (
            lambda g, c: g.tune(c.test, c.test),
            r"ood: \d+ of 400 samples and in-distribution ones have equal outputs, perhaps the same",
        ),
        (lambda g, c: g.tune(c.test, "fgsm"), "ood: 'fgsm' makes samples with the model's gradient"),
        (lambda g, c: g.tune(c.test, c.ood, search="grid"), "search: expected 'sweep' or 'bayes'"),
        (lambda g, c: g.tune(c.test, c.ood, tpr=1.0), "tpr: must lie strictly between 0 and 1"),
        (lambda g, c: g.tune(c.test, c.ood, share=1.5), r"share: must lie in \(0, 1\]"),
        (lambda g, c: g.tune(c.test, c.ood, epsilons=[-0.1]), "epsilons: must be a finite number ≥ 0"),
        (lambda g, c: g.tune(c.test, c.ood, attack=-1.0), "attack: must be a finite number ≥ 0"),
        (lambda g, c: g.calibrate(c.test, tpr="x"), "tpr: must lie strictly between 0 and 1"),
        (lambda g, c: g.explain(c.test, top=0), "top: must be a number of channels, at least 1"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            step(guard, classifier)
        after = guard.predict(classifier.test)
        assert torch.equal(before.p_value, after.p_value), message
        assert torch.equal(before.score, after.score), message
        assert guard.tuning is tuning, message


def test_methods_and_options():
    assert igeood.black_box(method="energy", temperature=2.0).detector.temperature == 2.0
    own = igeood.IgeoodLogits(centroid_temperature=1.0)
    assert igeood.black_box(method=own).detector is own
    for build, options, message in (
        (igeood.black_box, {"method": own, "temperature": 2.0}, "method: a detector has its own options"),
        (igeood.black_box, {"method": igeood.Igeood()}, "method: Igeood is not one for a black box; use white_box"),
        (igeood.white_box, {"method": "energy"}, "method: 'energy' is not one for a white box; use black_box"),
        (igeood.white_box, {"epsilon": 0.1}, "epsilon: an input step needs the model"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            build(**options)
