"""Gram and batch-norm: pools against explicit formulas, scores against plain loops, guards of models."""

import numpy as np
import pytest
import torch
from torch import nn

import igeood
from igeood.bench.methods.batch_norm import BatchNorm, moments
from igeood.bench.methods.gram import HOLDOUT, Gram, gram
from igeood.detectors.weighted import standardised
from igeood.model.layers import Call


def explicit_gram(maps):
    """By the matrices themselves, (N, k, S) → (N, 10 k)."""
    orders = []
    for p in range(1, 11):
        rows = (maps**p @ (maps**p).transpose(1, 2)).sum(dim=2)
        orders.append(rows.sign() * rows.abs() ** (1 / p))
    return torch.cat(orders, dim=1)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_gram_sums_are_those_of_explicit_matrices(scale):
    x = scale * torch.randn(5, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    x[0] = 0.0  # an empty map
    x[1, 1] = 0.0  # a dead channel
    for layout, each in {"second": x.flatten(2), "last": x.flatten(1, 2).transpose(1, 2)}.items():
        sums = gram(Call(nn.Identity(), x, layout))
        torch.testing.assert_close(sums.double(), explicit_gram(each.double()), rtol=1e-4, atol=1e-5 * scale**2)
    uneven = (x.abs() + scale) * torch.tensor([1.0, 1e-4, 1e-9])[:, None, None]  # channels do not vanish
    sums = gram(Call(nn.Identity(), uneven, "second"))
    torch.testing.assert_close(sums.double(), explicit_gram(uneven.flatten(2).double()), rtol=1e-5, atol=0)


def terms_by_loops(train, batch):
    """Gram's terms (N, L) in NumPy."""
    is_held = train.keys < HOLDOUT
    predicted = train.logits.argmax(1).numpy()

    def deviations(outputs):
        rows = np.zeros((len(outputs), len(outputs.features)))
        for row, c in enumerate(outputs.logits.argmax(1).tolist()):
            for i, (layer, values) in enumerate(outputs.features.items()):
                of_class = ~is_held & (predicted == c)
                inside = train.features[layer].numpy().astype(float)[of_class if of_class.any() else ~is_held]
                for x, lo, hi in zip(values[row].tolist(), inside.min(0), inside.max(0), strict=True):
                    rows[row, i] += max(lo - x, 0) / abs(lo + 1e-6) + max(x - hi, 0) / abs(hi + 1e-6)
        return rows

    own = deviations(train[torch.from_numpy(is_held)])
    widths = np.array([value.shape[1] for value in train.features.values()])
    rates = np.sort(own.mean(0) / widths)
    usual = (own.sum(0) + widths * rates[(len(rates) - 1) // 2]) / (len(own) + 1)
    return deviations(batch) / (usual + 1e-7) / batch.logits.double().softmax(1).amax(1).numpy()[:, None]


@pytest.mark.parametrize("is_missed", [False, True])
def test_gram_is_what_loops_say_also_for_a_class_that_is_never_predicted(known, suited, is_missed):
    train, test = (suited(part, Gram.needs) for part in (known.train, known.test[:40]))
    if is_missed:
        train = train[train.logits.argmax(dim=1) != 3]
    detector = Gram().fit(train)
    torch.testing.assert_close(detector.terms(test), torch.from_numpy(terms_by_loops(train, test)))
    assert [finding.code for finding in detector.findings_] == (["unpredicted-classes"] if is_missed else [])


def test_gram_with_few_held_out_rows_weights_no_layer_without_limit(known, suited):
    rows = suited(known.train, Gram.needs)
    detector = Gram().fit(rows[torch.from_numpy(rows.keys >= HOLDOUT)])
    assert [finding.code for finding in detector.findings_] == ["few-held-out"]
    torch.testing.assert_close(detector.usual_, torch.tensor([6.0, 9.0]).double())


@pytest.mark.parametrize("shape", [(5, 7), (1, 1)])
def test_moments_are_those_of_the_norms_input(shape):
    """A single position has no deviation: it is 1."""
    norm = nn.BatchNorm2d(3, eps=0.5).eval()
    norm.running_mean.copy_(torch.tensor([-1.0, 0.0, 1.0]))
    norm.running_var.copy_(torch.tensor([0.5, 1.5, 2.5]))
    x = 3 + 2 * torch.randn(4, 3, *shape, generator=torch.Generator().manual_seed(0))
    x[0, 1] = 2.0  # a constant channel
    maps = x.double().flatten(2)
    std = torch.sqrt(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    m = (maps.mean(dim=2) - norm.running_mean) / std
    s = maps.std(dim=2, correction=0) / std if shape != (1, 1) else torch.ones_like(m)
    model = nn.Sequential(norm, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    features = igeood.extract(model, x, ["0"], pool=moments).features["0|moments"]
    torch.testing.assert_close(features.double(), torch.cat([m, s], dim=1), rtol=1e-5, atol=1e-5)


def distances_by_loops(outputs):
    """Fisher–Rao column of each layer by Eq. 9 as the paper writes it."""
    columns = []
    for values in outputs.features.values():
        m, s = (part.numpy().astype(float) for part in values.chunk(2, dim=1))
        s = np.maximum(s, 0.01)
        far, near = (np.sqrt(m**2 / 2 + (s + sign) ** 2) for sign in (1, -1))
        columns.append(np.sqrt((2 * np.log((far + near) / (far - near)) ** 2).mean(axis=1)))
    return torch.from_numpy(np.stack(columns, axis=1))


@pytest.mark.parametrize("columns", ["channels", "layers", "fisher-rao"])
def test_batch_norm_is_a_sum_of_distances_and_then_a_regression_on_its_columns_alone(known, suited, columns):
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415 (slow to import)

    parts = (known.train, known.held_out, known.ood, known.test)
    train, inside, outside, test = (suited(part, BatchNorm.needs) for part in parts)
    detector = BatchNorm(columns=columns).fit(train)
    centre, scale = standardised(distances_by_loops(train))
    torch.testing.assert_close(detector.terms(test), (distances_by_loops(test) - centre) / scale)

    def table(outputs):
        if columns == "fisher-rao":
            return distances_by_loops(outputs).numpy()
        halves = [part.double() for value in outputs.features.values() for part in value.chunk(2, dim=1)]
        return torch.cat([half if columns == "channels" else half.mean(1, keepdim=True) for half in halves], 1).numpy()

    strength = detector.learn_weights(inside, outside).strength
    both = np.concatenate([table(inside), table(outside)])
    oracle = LogisticRegression(C=strength, class_weight="balanced", tol=1e-9, max_iter=10_000)
    oracle.fit((both - both.mean(0)) / both.std(0), np.repeat([0, 1], [len(inside), len(outside)]))
    expected = torch.from_numpy((table(test) - both.mean(0)) / both.std(0) @ oracle.coef_[0])
    torch.testing.assert_close(detector.score(test), expected, rtol=1e-3, atol=1e-3)
