"""Which samples are the same: by ids, by inputs, by rows that are otherwise unique; tune and calibrate share a set."""

import numpy as np
import pytest
import torch

import igeood
from igeood.errors import IgeoodWarning
from igeood.guard.identity import Seen, draw, fingerprint, occurrences
from igeood.outputs import Outputs, row_keys

TUNE = {"search": None}  # which temperature is found does not matter here


def test_tune_uses_a_share_and_calibrate_leaves_it_out_by_its_content(classifier):
    """Another order, another precision, another kind of array: still the same samples."""
    c = classifier
    guard = igeood.black_box().fit(c.train, c.labels).tune(c.held_out.double(), c.ood, **TUNE)
    keys = row_keys(c.held_out)
    used, n_used = draw(keys, np.zeros(400, np.int64), 0) < 0.5, guard.tuning.n_id
    assert 160 < int(used.sum()) == n_used < 240
    order = torch.randperm(400, generator=torch.Generator().manual_seed(1))
    left_out = guard.calibrate(c.held_out[order].numpy()).calibration.left_out
    assert np.array_equal(left_out, np.flatnonzero(used[order]))
    assert [finding.code for finding in guard.findings["calibrate"]] == ["left-out"]
    kept = guard.score(c.held_out[torch.from_numpy(~used)]).sort().values
    torch.testing.assert_close(guard.calibration.scores, kept)
    assert len(guard.calibrate(c.test).calibration.left_out) == 0
    guard.tune(c.held_out, c.ood, seed=1, **TUNE)  # a second tuning adds to the first
    also = draw(keys, np.zeros(400, np.int64), 1) < 0.5
    assert len(guard.calibrate(c.held_out).calibration.left_out) == int((used | also).sum())


def test_rows_of_probabilities_are_rows_and_no_ids(classifier):
    """A forest's rows are equal by chance: they are left out as often as they were used, and accuse nobody."""
    votes = np.random.default_rng(0).multinomial(10, [0.7, 0.1, 0.1, 0.1], size=(4, 300)) / 10
    guard = igeood.black_box(probabilities=True, method="msp").fit(votes[0])
    assert not guard.fitted_on.identified
    guard.tune(votes[1], np.full((50, 4), 0.25), **TUNE)
    assert len(guard.calibrate(votes[1]).calibration.left_out) == guard.tuning.n_id
    assert len(guard.calibrate(votes[2]).calibration.left_out) == guard.calibration.trained_on == 0
    shares = classifier.held_out.softmax(1)
    guard = igeood.black_box(probabilities=True).fit(classifier.train.softmax(1), classifier.labels)
    some = torch.cat([classifier.ood.softmax(1), shares[:20]])  # fewer than a tenth may be a chance
    assert guard.tune(shares, some, **TUNE).tuning.n_ood == 420


def test_training_samples_are_left_out_and_the_rest_keeps_the_promise(classifier, tmp_path):
    c, twice = classifier, [0, *range(400)]
    guard = igeood.black_box().fit(c.train[twice], c.labels[twice])
    guard.calibrate(torch.cat([c.train[:20], c.held_out]))
    assert guard.calibration.left_out.tolist() == [*range(20)]
    assert "400" in guard.promise
    assert [finding.code for finding in guard.health] == ["left-out"]
    guard.save(tmp_path / "guard")
    assert igeood.load(tmp_path / "guard").calibration.left_out.tolist() == [*range(20)]


def test_too_few_samples_that_were_not_used_promise_nothing(classifier, refused):
    c = classifier
    guard = igeood.black_box().fit(c.train, c.labels)
    with pytest.warns(IgeoodWarning):
        guard.calibrate(torch.cat([c.train[:300], c.held_out[:18]]))
    assert (guard.calibration.trained_on, len(guard.calibration.left_out)) == (300, 0)
    assert [finding.code for finding in guard.health] == ["trained-on"]
    guard.tune(c.held_out, c.ood, share=1.0, **TUNE)
    with refused("id_data") as raised:
        guard.calibrate(np.concatenate([c.held_out.numpy(), c.test[:18].numpy()]))
    assert all(number in str(raised.value) for number in ("18", "400", "19"))


def test_ids_say_who_is_the_same_sample_whatever_the_outputs(classifier, refused):
    c, ids, others = classifier, [f"a{i}" for i in range(400)], [f"b{i}" for i in range(400)]
    guard = igeood.black_box().fit(c.train, c.labels, ids=ids)
    noise = 0.01 * torch.randn(400, 10, generator=torch.Generator().manual_seed(0))
    with pytest.warns(IgeoodWarning):
        guard.calibrate(c.held_out + noise, ids=ids)
    assert guard.calibration.trained_on == 400
    guard.tune(c.held_out, Outputs(c.ood, ids=[f"c{i}" for i in range(400)]), ids=others, **TUNE)
    assert len(guard.calibrate(c.held_out + noise, ids=others).calibration.left_out) == guard.tuning.n_id
    guard.calibrate(c.train, ids=[f"d{i}" for i in range(400)])
    assert (len(guard.calibration.left_out), guard.calibration.trained_on) == (0, 0)  # others, if equal
    with refused("ood") as raised:
        guard.tune(c.held_out, Outputs(c.ood[:100], ids=others[:100]), ids=others, share=1.0, **TUNE)
    assert "100" in str(raised.value)
    for data, labels in ((c.held_out, ids[:3]), ([c.held_out[:200], c.held_out[200:]], ids)):
        with refused("ids"):
            guard.calibrate(data, ids=labels)


def test_samples_with_ids_cannot_be_compared_with_samples_without(classifier):
    c, ids = classifier, [f"sample {i}" for i in range(400)]
    guard = igeood.black_box().fit(c.train, c.labels, ids=ids)
    for given, codes in ((None, ["not-compared"]), ([f"new {i}" for i in range(400)], [])):
        guard.calibrate(c.held_out, ids=given)
        assert [finding.code for finding in guard.findings["calibrate"]] == codes


def test_a_guard_with_a_model_recognises_its_inputs_by_their_content(model, data, refused):
    guard = igeood.black_box(model, method="energy").fit(data.train)
    with refused("ids"):
        guard.calibrate(data.test, ids=range(300))
    with pytest.warns(IgeoodWarning):
        guard.calibrate(list(data.train)[::-1])  # in another order
    assert guard.calibration.trained_on == 800
    guard = igeood.grey_box(model, method="energy").fit(data.train)  # its outputs are of other inputs than it is given
    guard.tune(data.held_out, data.ood, epsilons=(0.001,), **TUNE)
    assert len(guard.calibrate(data.held_out).calibration.left_out) == guard.tuning.n_id


def test_equal_rows_are_split_at_random_and_left_out_as_often_as_they_were_used():
    keys = np.repeat(np.array([1, 2, 3], dtype=np.uint64), [1000, 500, 1])
    drawn = draw(keys, occurrences(keys), 0) < 0.5
    assert abs(int(drawn[:1000].sum()) - 500) < 80
    assert abs(int(drawn[1000:1500].sum()) - 250) < 60
    order = np.random.default_rng(0).permutation(len(keys))
    again = draw(keys[order], occurrences(keys[order]), 0) < 0.5
    assert np.array_equal(np.sort(keys[drawn]), np.sort(keys[order][again]))  # whatever the order
    halves = [occurrences(keys[:700]), occurrences(keys[700:], keys[:700])]  # and the batches
    assert np.array_equal(np.concatenate(halves), occurrences(keys))
    used = Seen(np.sort(keys[drawn]), False, fingerprint(keys))
    assert int(used.among(keys, False).sum()) == int(drawn.sum())  # all of them are there again
    assert not used.among(keys[:900], False).any()  # others, by chance equal
    assert not used.among(keys, True).any()  # ids are no rows
