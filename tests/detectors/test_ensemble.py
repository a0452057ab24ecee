"""Layer scores combined: before and after the weights are learnt."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

import igeood
from igeood.detectors import Igeood, IgeoodPlus, MahalanobisEnsemble
from igeood.detectors import ensemble as module
from igeood.errors import InputError
from igeood.metrics import evaluate

KINDS = [Igeood, IgeoodPlus, MahalanobisEnsemble]


def columns_of(detector, outputs):
    return detector._columns(outputs).detach()


@pytest.mark.parametrize("kind", [Igeood, IgeoodPlus])
def test_before_tuning_it_is_the_output_and_the_last_layer(known, kind):
    detector = kind().fit(known.train)
    fr0 = igeood.IgeoodLogits().fit(known.train)
    last = igeood.IgeoodFeatures().fit(known.train)

    def z(column, train_column):
        return (column - train_column.mean()) / train_column.std(correction=0)

    expected = z(fr0.score(known.test), fr0.score(known.train)) + z(
        last.layer_scores(known.test)[:, -1], last.layer_scores(known.train)[:, -1]
    )
    torch.testing.assert_close(detector.score(known.test), expected, rtol=1e-6, atol=1e-6)
    assert detector.columns_ == ["output", "early", "block.late"]


@pytest.mark.parametrize("kind", KINDS)
def test_contributions_add_up_to_the_score(known, kind):
    detector = kind().fit(known.train)
    for _ in range(2):
        parts = detector.contributions(known.test)
        assert parts.shape == (400, len(detector.columns_))
        torch.testing.assert_close(parts.sum(1), detector.score(known.test), rtol=1e-12, atol=1e-12)
        detector.fit_weights(known.held_out, known.ood[:200])


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_regression(known, kind):
    detector = kind().fit(known.train)
    found = detector.fit_weights(known.held_out, known.ood[:200], seed=1)
    inside, outside = columns_of(detector, known.held_out), columns_of(detector, known.ood[:200])
    table = torch.cat([inside, outside]).numpy()
    table = (table - table.mean(0)) / table.std(0)
    targets = np.r_[np.zeros(len(inside)), np.ones(len(outside))]
    model = LogisticRegression(C=found.strength, class_weight="balanced", max_iter=2000).fit(table, targets)
    np.testing.assert_allclose(detector.weights_.numpy(), model.coef_[0], rtol=1e-6, atol=1e-9)
    assert found.strength in module.STRENGTHS
    assert 0 <= found.tnr <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_learning_weights_helps_on_samples_of_its_own(known, kind):
    detector = kind().fit(known.train)
    before = evaluate(detector.score(known.test), detector.score(known.ood[200:]))
    detector.fit_weights(known.held_out, known.ood[:200])
    after = evaluate(detector.score(known.test), detector.score(known.ood[200:]))
    assert after.auroc >= before.auroc - 0.01
    assert after.auroc > 0.95


def test_plus_learns_the_ood_gaussian_and_only_then(known):
    detector = IgeoodPlus().fit(known.train)
    assert len(detector.columns_) == 3
    detector.fit_weights(known.held_out, known.ood[:200])
    assert detector.columns_ == ["output", "early", "block.late", "early (OOD)", "block.late (OOD)"]
    expected = known.ood[:200].features["early"].double().mean(0)
    torch.testing.assert_close(detector.features_.ood_mean_["early"], expected)


def test_folds_take_ood_statistics_from_their_own_training_part(known, monkeypatch):
    sizes = []
    original = IgeoodPlus._learn_ood

    def watched(self, ood):
        sizes.append(len(ood))
        return original(self, ood)

    monkeypatch.setattr(IgeoodPlus, "_learn_ood", watched)
    IgeoodPlus().fit(known.train).fit_weights(known.held_out, known.ood[:200])
    assert sizes == [160] * 5 + [200]


def test_folds_are_seeded_disjoint_and_complete(known):
    seen = []
    for learn, judge in module._folds(known.held_out, known.ood, seed=0):
        assert [len(part) for part in learn] == [320, 320]
        assert [len(part) for part in judge] == [80, 80]
        seen.append(judge[0].logits)
    rows = {tuple(row.tolist()) for part in seen for row in part}
    assert rows == {tuple(row.tolist()) for row in known.held_out.logits}
    for learn, judge in module._folds(known.held_out, known.held_out, seed=2):  # a sample and its attack stay together
        assert torch.equal(learn[0].logits, learn[1].logits)
        assert torch.equal(judge[0].logits, judge[1].logits)
    again = next(iter(module._folds(known.held_out, known.ood, seed=0)))[1][0].logits
    other = next(iter(module._folds(known.held_out, known.ood, seed=1)))[1][0].logits
    assert torch.equal(seen[0], again)
    assert not torch.equal(seen[0], other)


@pytest.mark.parametrize("kind", KINDS)
def test_too_few_samples_for_the_regression(known, kind):
    detector = kind().fit(known.train)
    before = detector.score(known.test)
    with pytest.raises(InputError, match="ood: 9 samples; the regression needs at least 10"):
        detector.fit_weights(known.held_out, known.ood[:9])
    with pytest.raises(InputError, match="id: 9 samples"):
        detector.fit_weights(known.held_out[:9], known.ood)
    assert torch.equal(detector.score(known.test), before)


def test_the_sample_for_standardising_is_bounded_and_ignores_order(known, monkeypatch):
    monkeypatch.setattr(module, "SAMPLE", 50)
    pieces = [known.train[i : i + 30] for i in range(0, 400, 30)]
    forward, backward = Igeood().fit_batches(pieces), Igeood().fit_batches(pieces[::-1])
    torch.testing.assert_close(forward.centre_, backward.centre_, rtol=1e-6, atol=1e-9)
    watch = module._Sample()
    list(watch.watch(pieces))
    assert len(watch.outputs) == 50


def test_a_constant_column_does_no_harm(known):
    flat = igeood.Outputs(known.train.logits, {**known.train.features, "flat": torch.ones(400, 2)}, known.train.labels)
    detector = Igeood().fit(flat)
    assert detector.score(flat).isfinite().all()
    assert int(detector.features_.dead_["flat"]) == 2 or (detector.scale_ > 0).all()


def test_another_temperature_keeps_the_layers(known):
    detector = Igeood().fit(known.train)
    train = igeood.Outputs(known.train.logits, labels=known.train.labels)
    other = detector.at_temperature(3.0, train)
    assert (detector.temperature, other.temperature, other.output_.temperature) == (1.0, 3.0, 3.0)
    assert other.features_ is detector.features_
    fresh = igeood.IgeoodLogits(temperature=3.0).fit(train)
    torch.testing.assert_close(other.output_.score(known.test), fresh.score(known.test))
