"""Layer scores combined: before and after the weights are learnt."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

import igeood
from igeood.detectors import Igeood, IgeoodPlus, MahalanobisEnsemble
from igeood.detectors import ensemble as module
from igeood.errors import InputError
from igeood.metrics import evaluate, tnr_at_tpr

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


@pytest.mark.parametrize("kind", KINDS)
def test_the_strength_is_the_best_of_the_folds(known, kind):
    """The search by hand: five folds, nine strengths, mean TNR; the first of the best. OOD samples are near ones."""
    detector = kind().fit(known.train)
    near = {layer: value * 1.15 + 0.4 for layer, value in known.test.features.items()}
    inside, outside = known.held_out[:60], igeood.Outputs(known.test.logits * 0.8, near)[:40]
    rates = np.zeros(9)
    for learn, judge in module._folds(inside, outside, 3):
        member = detector._learn_ood(learn[1])
        table = torch.cat([columns_of(member, part) for part in learn]).numpy()
        centre, scale = table.mean(0), table.std(0)
        targets = np.r_[np.zeros(len(learn[0])), np.ones(len(learn[1]))]
        for i, strength in enumerate(10.0 ** np.arange(-4, 5)):
            model = LogisticRegression(C=strength, class_weight="balanced", max_iter=2000)
            model.fit((table - centre) / scale, targets)
            known_, foreign = (model.decision_function((columns_of(member, o).numpy() - centre) / scale) for o in judge)
            rates[i] += tnr_at_tpr(known_, foreign, 0.8) / 5
    assert 0.1 < rates.max() < 0.95  # or the comparison would say nothing
    assert rates.std() > 0
    found = detector.fit_weights(inside, outside, tpr=0.8, seed=3)
    assert found.tnr == pytest.approx(rates.max(), abs=1e-12)
    assert found.strength == pytest.approx(10.0 ** (rates.argmax() - 4))


def test_the_search_is_at_95_percent_and_seed_0_by_default(known):
    inside, outside = known.held_out[:60], known.ood[:60]
    plain, said, other = (Igeood().fit(known.train) for _ in range(3))
    assert plain.fit_weights(inside, outside) == said.fit_weights(inside, outside, tpr=0.95, seed=0)
    assert torch.equal(plain.score(known.test), said.score(known.test))
    assert other.fit_weights(inside, outside, tpr=0.3).tnr >= plain.fit_weights(inside, outside).tnr
    for few in (10, 11):
        assert 0 <= other.fit_weights(inside[:few], outside[:few]).tnr <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_fitted_numbers_are_float64_and_columns_standard(known, kind):
    detector = kind().fit(known.train)
    for tensor in (detector.centre_, detector.scale_, detector.weights_):
        assert tensor.dtype == torch.float64
        assert tensor.shape == (len(detector.columns_),)
    z = (columns_of(detector, known.train) - detector.centre_) / detector.scale_
    torch.testing.assert_close(z.mean(0), torch.zeros_like(detector.centre_), rtol=0, atol=1e-6)
    torch.testing.assert_close(z.square().mean(0), torch.ones_like(detector.centre_), rtol=1e-6, atol=0)
    if kind is MahalanobisEnsemble:
        assert detector.weights_.tolist() == [1.0, 1.0]
        assert detector.columns_ == ["early", "block.late"]
    else:
        assert detector.weights_.tolist() == [1.0, 0.0, 1.0]


def test_a_flat_column_has_scale_1():
    centre, scale = module._standardise(torch.tensor([[2.0, 1.0], [2.0, 3.0]]))
    assert centre.tolist() == [2.0, 2.0]
    assert scale.tolist() == [1.0, 1.0]
    assert module._standardise(torch.tensor([[0.0], [4.0]]))[1].tolist() == [2.0]


def test_relative_mahalanobis_in_the_ensemble(known):
    plain, relative = (MahalanobisEnsemble(relative=r).fit(known.train) for r in (False, True))
    assert (plain.relative, relative.relative, MahalanobisEnsemble().relative) == (False, True, False)
    expected = igeood.Mahalanobis(relative=True).fit(known.train).layer_scores(known.test)
    torch.testing.assert_close(columns_of(relative, known.test), expected)


def test_state_of_the_parts_and_back(known):
    for kind in KINDS:
        detector = kind().fit(known.train)
        if kind is not MahalanobisEnsemble:
            assert {"output_.centroids_", "centre_", "features_.mean_:0:early"} <= set(detector.state())
        detector.fit_weights(known.held_out, known.ood[:50])
        loaded = kind().load_state(detector.state(), 10)
        assert torch.equal(loaded.score(known.test), detector.score(known.test))
        assert loaded.columns_ == detector.columns_
        for part in (loaded.output_, loaded.features_):
            assert part is None or part.n_classes_ == 10
        assert loaded.notes_ == detector.notes_


def test_notes_of_two_classes_and_dead_channels(make_known_):
    data = make_known_(2).train
    early = data.features["early"].clone()
    early[:, 1] = 3.0
    notes = (
        Igeood()
        .fit(igeood.Outputs(data.logits, {"early": early, "late": data.features["block.late"]}, data.labels))
        .notes_
    )
    assert len(notes) == 2
    assert notes[0].startswith("two classes: ")
    assert notes[1] == "layer 'early': 1 dead channels, deviation raised to a floor"


def test_a_failed_fit_changes_nothing_in_the_parts(known):
    detector = Igeood().fit(known.train)
    before = {name: value.clone() for name, value in detector.state().items()}
    with pytest.raises(InputError):
        detector.fit(known.train[known.train.labels != 3])
    assert all(torch.equal(value, before[name]) for name, value in detector.state().items())


@pytest.mark.parametrize("kind", KINDS)
def test_every_column_is_higher_for_ood_samples(known, kind):
    detector = kind().fit(known.train)
    detector.fit_weights(known.held_out, known.ood[:100])
    inside, outside = columns_of(detector, known.test), columns_of(detector, known.ood[100:])
    assert (outside.mean(dim=0) > inside.mean(dim=0)).all()
