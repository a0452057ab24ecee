"""Detectors of feature maps' statistics, gram and batch-norm, against plain loops; and as guards of models."""

import numpy as np
import pytest
import torch

import igeood
from igeood.detectors.weighted import standardise
from igeood.errors import InputError
from igeood.metrics import auroc
from igeood.outputs import Outputs
from igeood.summary import Summary
from igeood.summary.total import HOLDOUT


def gram_by_loops(train, batch):
    """Deviations (N, L) and confidences (N,) in NumPy."""
    inside, held = train.keys >= HOLDOUT, train.keys < HOLDOUT
    predicted = train.logits.argmax(1).numpy()

    def deviations(outputs):
        rows = np.zeros((len(outputs), len(outputs.features)))
        for row, c in enumerate(outputs.logits.argmax(1).tolist()):
            for i, (layer, values) in enumerate(outputs.features.items()):
                of_class = inside & (predicted == c)
                known = train.features[layer].numpy().astype(float)[of_class if of_class.any() else inside]
                for x, lo, hi in zip(values[row].tolist(), known.min(0), known.max(0), strict=True):
                    rows[row, i] += max(lo - x, 0) / abs(lo + 1e-6) + max(x - hi, 0) / abs(hi + 1e-6)
        return rows

    own = deviations(train[torch.from_numpy(held)])
    widths = np.array([value.shape[1] for value in train.features.values()])
    rates = np.sort(own.mean(0) / widths)
    usual = (own.sum(0) + widths * rates[(len(rates) - 1) // 2]) / (len(own) + 1)
    return deviations(batch) / (usual + 1e-7) / batch.logits.double().softmax(1).amax(1).numpy()[:, None]


@pytest.mark.parametrize("is_missed", [False, True])
def test_gram_is_what_loops_say_also_for_a_class_that_is_never_predicted(known, suited, is_missed):
    needs = igeood.METHODS["gram"].needs
    train, test = (suited(part, needs) for part in (known.train, known.test[:40]))
    if is_missed:
        train = train[train.logits.argmax(dim=1) != 3]
    detector = igeood.detector("gram").fit(train)
    torch.testing.assert_close(detector.contributions(test), torch.from_numpy(gram_by_loops(train.keyed(), test)))
    assert detector.columns_ == ["early", "block.late"]
    notes = ["data: 1 of 10 classes are never predicted, the first is 3; the range of all classes stands for theirs"]
    assert list(detector.notes_) == notes * is_missed
    halves = [Summary.of(train.keyed()[i::2], needs) for i in (0, 1)]
    merged = igeood.detector("gram").learn(halves[1] + halves[0])
    torch.testing.assert_close(merged.score(test), detector.score(test))


def test_gram_with_few_held_out_rows_says_so_and_weights_no_layer_without_limit(known, suited):
    rows = suited(known.train, igeood.METHODS["gram"].needs).keyed()
    inside, held = (np.flatnonzero(side) for side in (rows.keys >= HOLDOUT, rows.keys < HOLDOUT))
    detector = igeood.detector("gram").fit(rows[torch.from_numpy(inside)])
    assert f"data: 0 of {len(inside)} training rows are held out to scale the layers" in detector.notes_[0]
    torch.testing.assert_close(detector.usual_, torch.tensor([6.0, 9.0]).double())
    assert 0 < detector.score(suited(known.ood, detector.needs)).median() < 1e3
    with pytest.raises(InputError, match="data: every training row is held out to scale the layers; give more"):
        igeood.detector("gram").fit(rows[torch.from_numpy(held)])


def distances_by_loops(outputs):
    """Fisher–Rao column of each layer by Eq. 9 as the paper writes it."""
    columns = []
    for values in outputs.features.values():
        m, s = (part.numpy().astype(float) for part in values.chunk(2, dim=1))
        s = np.maximum(s, 0.01)
        far, near = (np.sqrt(m**2 / 2 + (s + sign) ** 2) for sign in (1, -1))
        rho = np.sqrt(2) * np.log((far + near) / (far - near))
        columns.append(np.sqrt((rho**2).mean(axis=1)))
    return torch.from_numpy(np.stack(columns, axis=1))


def moments_of(outputs, suited):
    return suited(outputs, igeood.METHODS["batch-norm"].needs)


def test_batch_norm_before_tuning_is_the_sum_of_standardised_distances(known, suited):
    train, test = (moments_of(part, suited) for part in (known.train, known.test))
    centre, scale = standardise(distances_by_loops(train))
    expected = (distances_by_loops(test) - centre) / scale
    for columns in ("channels", "layers", "fisher-rao"):
        detector = igeood.detector("batch-norm", columns=columns).fit(train)
        torch.testing.assert_close(detector.contributions(test), expected)
        torch.testing.assert_close(detector.score(test), expected.sum(dim=1))


@pytest.mark.parametrize("columns", ["channels", "layers", "fisher-rao"])
def test_batch_norm_after_tuning_is_the_regression_on_its_columns_alone(known, suited, columns):
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415 (slow to import)

    train, inside, outside, test = (moments_of(p, suited) for p in (known.train, known.held_out, known.ood, known.test))

    def table(outputs):
        if columns == "fisher-rao":
            return distances_by_loops(outputs).numpy()
        halves = [part.double() for value in outputs.features.values() for part in value.chunk(2, dim=1)]
        return torch.cat([half if columns == "channels" else half.mean(1, keepdim=True) for half in halves], 1).numpy()

    detector = igeood.detector("batch-norm", columns=columns).fit(train)
    found = detector.learn_weights(inside, outside)
    both = np.concatenate([table(inside), table(outside)])
    centre, scale = both.mean(0), both.std(0)
    oracle = LogisticRegression(C=found.strength, class_weight="balanced", tol=1e-9, max_iter=10_000)
    oracle.fit((both - centre) / scale, np.repeat([0, 1], [len(inside), len(outside)]))
    expected = torch.from_numpy((table(test) - centre) / scale @ oracle.coef_[0])
    torch.testing.assert_close(detector.score(test), expected, rtol=1e-3, atol=1e-3)
    assert detector.contributions(test).shape == (len(test), 2)
    again = igeood.detector("batch-norm", columns=columns).load_state(detector.state(), 10, detector.widths_)
    assert torch.equal(again.score(test), detector.score(test))


def test_moments_are_pairs(known):
    rows = Outputs(known.train.logits, {"a|moments": known.train.features["block.late"]})
    with pytest.raises(InputError, match=r"features\['a\|moments'\]: 9 columns, not a mean and a deviation for each"):
        igeood.detector("batch-norm").fit(rows)


@pytest.mark.parametrize("method", ["gram", "batch-norm"])
def test_guards_of_a_model_fit_save_load_step_and_explain(method, model, data, tmp_path):
    guard = igeood.white_box(model, method=method).fit(data.train).calibrate(data.held_out)
    guard.save(tmp_path / "guard")
    loaded = igeood.load(tmp_path / "guard", model)
    assert torch.equal(loaded.score(data.foreign), guard.score(data.foreign))
    layers = ["3"] if method == "gram" else ["1", "4"]
    assert guard.layers == guard.explain(data.test[:3]).columns == layers
    shards = [igeood.summarise(guard, [batch]) for batch in data.train]
    fitted = igeood.white_box(model, method=method, layers=layers).fit(sum(shards[1:], shards[0]))
    torch.testing.assert_close(fitted.score(data.test), guard.score(data.test), rtol=1e-5, atol=1e-5)
    stepped = igeood.white_box(model, method=method, epsilon=0.01).fit(data.train)
    assert stepped.score(data.test).mean() < guard.score(data.test).mean()
    if method == "batch-norm":
        before = auroc(guard.score(data.test), guard.score(data.foreign))
        guard.tune(data.held_out, ood=data.ood)
        assert auroc(guard.score(data.test), guard.score(data.foreign)) > max(before, 0.9)
