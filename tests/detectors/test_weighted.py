"""Columns combined: before and after the weights are learnt."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

import igeood
from igeood.detectors import Energy, Igeood, IgeoodPlus, MahalanobisLayers, MaxSoftmax, Weighted
from igeood.detectors import weighted as module
from igeood.detectors.gaussians import OodFeatures
from igeood.metrics import auroc, tnr_at_tpr
from igeood.summary import Needs


class Any3(Weighted):
    """Detectors that have nothing to do with one another."""

    needs = Needs(layers="all", labels=True, sums="full", samples=("logits", "features"))

    def make_parts(self):
        return {"energy": Energy(temperature=2.0), "far": igeood.Mahalanobis(), "sure": MaxSoftmax(temperature=3.0)}


@pytest.fixture(params=[Igeood, IgeoodPlus, MahalanobisLayers, Any3])
def fitted(request, known):
    return request.param().fit(known.train)


@pytest.mark.parametrize("kind", [Igeood, IgeoodPlus])
def test_before_tuning_it_is_the_output_and_the_last_layer(known, kind):
    fr0, last = igeood.IgeoodLogits().fit(known.train), igeood.IgeoodFeatures().fit(known.train)

    def z(column, train_column):
        return (column - train_column.mean()) / train_column.std(correction=0)

    output = z(fr0(known.test), fr0(known.train))
    layer = z(*(last.terms(part)[:, -1] for part in (known.test, known.train)))
    detector = kind().fit(known.train)
    torch.testing.assert_close(detector(known.test), output + layer, rtol=1e-6, atol=1e-6)
    assert detector.term_names == ["output", "early", "block.late"]
    assert detector.weights_.tolist() == [1.0, 0.0, 1.0]


def test_columns_are_those_of_the_parts(known):
    detector, relative = Any3().fit(known.train), MahalanobisLayers(relative=True).fit(known.train)
    assert detector.term_names == ["energy", "early", "block.late", "sure"]
    parts = [Energy(temperature=2.0), igeood.Mahalanobis(), MaxSoftmax(temperature=3.0)]
    for each, own in ((detector, parts), (relative, [igeood.Mahalanobis(relative=True)])):
        expected = torch.cat([part.fit(known.train).terms(known.test) for part in own], dim=1)
        torch.testing.assert_close(each.part_terms(known.test), expected, rtol=1e-9, atol=1e-9)
    assert detector.softmax is detector.parts["energy"]


def test_rows_of_a_sample_are_standardised_by_what_they_stand_for():
    columns, weights = torch.tensor([[1.0, 5.0], [2.0, 5.0], [4.0, 5.0]]).double(), torch.tensor([1.0, 3.0, 2.0])
    centre, scale = module.standardised(columns, weights)
    repeated = columns[[0, 1, 1, 1, 2, 2]]
    torch.testing.assert_close(centre, repeated.mean(0))
    assert scale.tolist() == pytest.approx([repeated[:, 0].std(correction=0), 1.0])  # of a flat column it is 1


def test_weights_are_those_of_the_regression_and_separate_samples_of_their_own(fitted, known):
    before = auroc(fitted(known.test), fitted(known.ood[200:]))
    search = fitted.learn_weights(known.held_out, known.ood[:200], seed=1)
    table = torch.cat([fitted.part_terms(part) for part in (known.held_out, known.ood[:200])]).numpy()
    table = (table - table.mean(0)) / table.std(0)
    model = LogisticRegression(C=search.strength, class_weight="balanced", max_iter=20000, tol=1e-10)
    weights = model.fit(table, np.repeat([0.0, 1.0], [400, 200])).coef_[0]
    np.testing.assert_allclose(fitted.weights_.numpy(), weights, rtol=1e-5, atol=1e-8)
    after = auroc(fitted(known.test), fitted(known.ood[200:]))
    assert after > max(0.95, before - 0.01)


@pytest.mark.parametrize("kind", [Igeood, IgeoodPlus, MahalanobisLayers])
def test_the_strength_is_the_best_of_the_folds(known, kind):
    """The search by hand: five folds, nine strengths, mean TNR; the first of the best."""
    detector = kind().fit(known.train)
    near = {layer: value * 1.15 + 0.4 for layer, value in known.test.features.items()}  # hard to tell: rates differ
    pair = known.held_out[:60], igeood.Outputs(known.test.logits * 0.8, near)[:40]
    rates = np.zeros(9)
    for learn, judge in module._folds((range(60), range(40)), 3):
        parts = list(detector.parts.values())
        if kind is IgeoodPlus:
            parts.append(OodFeatures().fit(pair[1][torch.from_numpy(learn[1])]).beside(parts[1]))
        tables = [np.concatenate([each.terms(part) for each in parts], axis=1) for part in pair]
        x = np.concatenate([table[rows] for table, rows in zip(tables, learn, strict=True)])
        centre, scale = x.mean(0), x.std(0)
        for i, strength in enumerate(10.0 ** np.arange(-4, 5)):
            model = LogisticRegression(C=strength, class_weight="balanced", max_iter=2000)
            model.fit((x - centre) / scale, np.repeat([0.0, 1.0], [len(learn[0]), len(learn[1])]))
            sides = [(table[rows] - centre) / scale for table, rows in zip(tables, judge, strict=True)]
            rates[i] += tnr_at_tpr(*(model.decision_function(side) for side in sides), 0.8) / 5
    assert 0.1 < rates.max() < 0.95  # or the comparison would say nothing
    assert rates.std() > 0
    search = detector.learn_weights(*pair, tpr=0.8, seed=3)
    assert search.tnr == pytest.approx(rates.max(), abs=1e-12)
    assert search.strength == pytest.approx(10.0 ** (rates.argmax() - 4))


def test_a_sample_and_its_attack_are_in_one_fold():
    for learn, judge in module._folds((range(60), range(60)), 2):
        assert np.array_equal(learn[0], learn[1])
        assert np.array_equal(judge[0], judge[1])
    assert [len(part) for part in (*learn, *judge)] == [48, 48, 12, 12]


def test_too_few_samples_for_the_regression(known, refused):
    fitted = Igeood().fit(known.train)
    before = fitted(known.test)
    for name, pair in (("ood", (known.held_out, known.ood[:9])), ("id", (known.held_out[:9], known.ood))):
        with refused(name):
            fitted.learn_weights(*pair)
    assert torch.equal(fitted(known.test), before)
    assert 0 <= fitted.learn_weights(known.held_out[:10], known.ood[:10]).tnr <= 1


def test_plus_learns_the_ood_gaussian_and_only_then(known):
    detector = IgeoodPlus().fit(known.train)
    for ood in (known.ood[:200], known.ood[200:]):  # again: of other OOD samples alone
        detector.learn_weights(known.held_out, ood)
        assert detector.term_names == ["output", "early", "block.late", "early (OOD)", "block.late (OOD)"]
        part = OodFeatures().fit(ood).beside(detector.parts["layers"])
        torch.testing.assert_close(detector.part_terms(known.test)[:, 3:], part.terms(known.test))
    loaded = IgeoodPlus().load_state(detector.state(), 10, detector.widths_)
    assert loaded.term_names == detector.term_names
    assert torch.equal(loaded(known.test), detector(known.test))
    assert detector.fit(known.train).term_names == ["output", "early", "block.late"]
