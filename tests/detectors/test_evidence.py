"""Evidence against an independent implementation, and what it makes of rows that are few, dead or odd."""

import copy
import math
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import igeood
from igeood.detectors.evidence import tail, usual_rows
from igeood.geometry import categorical
from igeood.metrics import evaluate
from igeood.outputs import HEAD, Outputs
from igeood.summary import Summary, held_back

from .oracles import inverse_covariance

# An independent implementation in plain loops: METHOD in float64, without torch


def oracle_nearest(rows, labels, inverse, x):
    means = [rows[labels == c].mean(axis=0) for c in sorted(set(labels.tolist()))]
    return np.array([min(math.sqrt((row - mean) @ inverse @ (row - mean)) for mean in means) for row in x])


def oracle_roots(logits):
    q = np.exp(logits / 5 - (logits / 5).max(axis=1, keepdims=True))
    return np.sqrt(q / q.sum(axis=1, keepdims=True))


def oracle_energy(logits):
    apart = logits - logits.mean(axis=1, keepdims=True)
    return np.log(np.exp(apart).sum(axis=1))


def oracle_values(train, test):
    """The terms before their surprise, (N, P), of NumPy outputs: (logits, features, labels)."""
    logits, features, labels = train
    columns = []
    for unit in (False, True):
        for layer, rows in features.items():
            x = test[1][layer]
            if unit:
                x = x / np.linalg.norm(x, axis=1, keepdims=True)
            learnt = rows / np.linalg.norm(rows, axis=1, keepdims=True) if unit else rows
            columns.append(np.log(oracle_nearest(learnt, labels, inverse_covariance(learnt, labels), x)))
    columns.append(-np.log(oracle_energy(test[0])))
    roots = oracle_roots(test[0])
    centres = categorical.centroids(torch.from_numpy(logits), torch.from_numpy(labels), logits.shape[1], 5.0)
    centres = np.exp(centres.numpy() / 2)  # the geometry's own test is the optimum of another solver
    distances = [min(4 * math.asin(np.linalg.norm(root - centre) / 2) for centre in centres) for root in roots]
    return np.stack([*columns, np.log(distances)], axis=1)


def oracle_surprise(usual, t):
    """Linear between 128 quantiles of the usual values, exponential beyond the 90th percentile."""
    ordered = np.sort(usual)
    knots = sorted({ordered[max(math.ceil(p * len(ordered) - 1e-9) - 1, 0)] for p in np.linspace(0, 0.9, 128)})
    levels = [-math.log((ordered >= knot).mean()) for knot in knots]
    over = ordered[ordered > knots[-1]] - knots[-1]
    if t >= knots[-1]:  # as if five more rows had what a Gaussian's tail has
        return levels[-1] + (t - knots[-1]) / ((over.sum() + 5 * 0.5 * usual.std()) / (len(over) + 5))
    return float(np.interp(t, knots, levels))


def plain(outputs, rows=slice(None)):
    features = {layer: value.double().numpy()[rows] for layer, value in outputs.features.items()}
    labels = None if outputs.labels is None else outputs.labels.numpy()[rows]
    return outputs.logits.double().numpy()[rows], features, labels


@pytest.fixture(scope="module")
def known(make_known_):
    return make_known_(n_classes=5, n=600)


@pytest.fixture(scope="module")
def fitted(known):
    return igeood.detector("evidence").fit(known.train)


def test_terms_are_those_of_an_independent_implementation(known, fitted):
    held = held_back(known.train).numpy()
    assert 30 < held.sum() < 90
    learnt, usual, test = plain(known.train, ~held), plain(known.train, held), plain(known.test, slice(0, 200))
    expected, reference = oracle_values(learnt, test), oracle_values(learnt, usual)
    part = known.test[:200]
    np.testing.assert_allclose(fitted.values(part).numpy(), expected, rtol=0, atol=1e-9)
    surprises = np.array([[oracle_surprise(reference[:, p], t) for p, t in enumerate(row)] for row in expected])
    np.testing.assert_allclose(fitted.surprises(part).numpy(), surprises, rtol=1e-9, atol=1e-9)
    weights = np.array([0.5, 0.5, 0.5, 0.5, 0.5, 0.5])  # two layers: their means, and half of each of the output's
    np.testing.assert_allclose(fitted(part).numpy(), surprises @ weights, rtol=1e-9, atol=1e-9)


def test_of_logits_alone_it_is_the_last_two_terms(known):
    train, test, ood = (part.only(()) for part in (known.train, known.test, known.ood))
    keyed = train.replace(_keys=known.train.keys)
    detector = igeood.detector("evidence").fit(keyed)
    whole = igeood.detector("evidence").fit(known.train)
    assert detector.term_names == whole.term_names[-2:]
    torch.testing.assert_close(detector.terms(test), whole.terms(known.test)[:, -2:], rtol=1e-9, atol=1e-9)
    assert igeood.metrics.auroc(detector(test), detector(ood)) > 0.9


def test_a_surprise_is_the_share_of_rows_that_are_as_extreme():
    values = torch.tensor([3.0, 1.0, 1.0, 2.0, 5.0, 4.0, 7.0, 6.0, 9.0, 8.0]).double()
    knots, surprises, excess = tail(values, torch.ones(10))
    assert knots[knots.isfinite()].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    shares = surprises[: int(knots.isfinite().sum())].neg().exp()
    torch.testing.assert_close(shares, torch.tensor([10, 8, 7, 6, 5, 4, 3, 2]).double() / 10)
    assert float(excess) == pytest.approx((1.0 + 5 * 0.5 * float(values.std(correction=0))) / 6)
    doubled = tail(values, torch.full((10,), 2))
    assert all(torch.equal(one, other) for one, other in zip(doubled, (knots, surprises, excess), strict=True))


@pytest.mark.parametrize("per_class", [1, 2, 5])
@pytest.mark.parametrize(
    "method", ["evidence", "mahalanobis", "mahalanobis++", "relative-mahalanobis", "relative-mahalanobis++", "vim"]
)
def test_few_rows_a_class_tell_inputs_apart(method, per_class):
    """240 classes. With one row of each, 24 rows say what is usual to `evidence`: its AUROC is 0.86 to 0.94 over draws.

    Which rows these are depends on the last bits of the logits, so on the processor.
    """
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(240, 300, generator=draw)
    means = 3.0 * torch.randn(240, 300, generator=draw)

    def make(labels, spread):
        z = means[labels] * (spread == 0.7) + spread * torch.randn(len(labels), 300, generator=draw)
        return Outputs(z @ weight.T, {"late": z, HEAD: z}, labels)

    labels = torch.arange(240).repeat(5)
    train, test, ood = make(torch.arange(240).repeat(per_class), 0.7), make(labels, 0.7), make(labels, 3.0)
    with warnings.catch_warnings(action="ignore"):
        guard = igeood.white_box(method=method).fit(train).calibrate(test)
    scores, foreign = guard.score(test), guard.score(ood)
    assert scores.isfinite().all()
    assert len(scores.unique()) > 1000
    assert igeood.metrics.auroc(scores, foreign) > (0.8 if (method, per_class) == ("evidence", 1) else 0.9)


def test_a_class_whose_rows_are_all_held_back_is_known_by_them(known):
    held = held_back(known.train)
    guard = igeood.white_box().fit(known.train[held | (known.train.labels != 4)])
    assert guard.health == []
    assert guard.detector.classes_.tolist() == [0, 1, 2, 3, 4]
    mean = known.train.features["early"][held & (known.train.labels == 4)].double().mean(dim=0)
    torch.testing.assert_close(guard.detector.mean_["early"][4], mean)
    assert (guard.explain(known.test).nearest["early"] == known.test.labels).double().mean() > 0.9


@pytest.mark.parametrize("rows", [10, 150])
def test_of_few_rows_fewer_say_what_is_usual(known, rows):
    guard = igeood.white_box().fit(known.train[:rows])
    assert [finding.code for finding in guard.health][:1] == ["few-rows"]
    ends = (0, rows // 4, rows // 2, rows)
    shards = [Summary.of(known.train[a:b], guard.detector.needs) for a, b in pairwise(ends)]
    again = igeood.white_box().fit(shards[2] + shards[0] + shards[1])
    torch.testing.assert_close(again.score(known.test), guard.score(known.test), rtol=1e-9, atol=1e-9)


def test_a_sample_of_few_rows_leaves_the_classes_as_they_are():
    """Means are those of the sums, whatever the sample keeps; the rows that say what is usual are of all classes.

    Multiples of 1/8, whose products are exact on every processor: which rows are held back depends on all bits.
    """
    draw = torch.Generator().manual_seed(0)
    labels = torch.cat([torch.arange(60).repeat(40), torch.zeros(3000, dtype=torch.int64)])
    centres = torch.randint(-64, 65, (60, 8), generator=draw) / 8
    features = centres[labels] + torch.randint(-12, 13, (len(labels), 8), generator=draw) / 8
    train = Outputs(features @ centres.T / 8, {"late": features}, labels)
    needs = igeood.detector("evidence").needs
    whole, part = (igeood.detector("evidence").learn(Summary.of(train, needs, budget=b)) for b in (1 << 28, 120_000))
    assert part.classes_.tolist() == list(range(60))
    torch.testing.assert_close(part.mean_, whole.mean_)
    torch.testing.assert_close(part.whitening_, whole.whitening_)
    rows, weights = usual_rows(Summary.of(train, needs, budget=1_200_000).samples["features"], is_split=True)
    assert float(weights[rows.labels == 0].sum() / weights.sum()) == pytest.approx(3040 / 5400, abs=0.1)


def test_more_rows_than_say_what_is_usual_are_cut_alike():
    draw = torch.Generator().manual_seed(0)
    labels = (torch.arange(40_000) % 20 == 0).long()
    logits = 8.0 * nn.functional.one_hot(labels, 2) + torch.randn(40_000, 2, generator=draw)
    sample = Summary.of(Outputs(logits, labels=labels), igeood.detector("evidence").needs).samples["features"]
    rows, weights = usual_rows(sample, is_split=True)
    assert len(rows) <= 3000
    assert float(weights[rows.labels == 1].sum() / weights.sum()) == pytest.approx(0.05, abs=0.01)


OUTPUT = ["output: energy", "output: centroid"]
ODD = {  # what is done to logits and features, and the terms that are the same for all rows then
    "dead layer": (lambda _, features: features["early"].zero_(), ["early: distance", "early: direction"]),
    "dead channels": (lambda _, features: features["early"][:, :4].zero_(), []),
    "zero rows": (lambda _, features: features["early"][::3].zero_(), []),
    "masked logits": (lambda logits, _: logits[::2, 3].fill_(-torch.inf), []),
    "constant logits": (lambda logits, _: logits.fill_(1.0), OUTPUT),
    "the same logits": (lambda logits, _: logits.copy_(logits[0].clone()), OUTPUT),
}


@pytest.mark.parametrize("name", ODD)
def test_dead_layers_and_odd_logits_leave_finite_scores_and_findings(known, name):
    change, left_out = ODD[name]
    parts = {part: copy.deepcopy(getattr(known, part)) for part in ("train", "held_out", "test")}
    for part in parts.values():
        change(part.logits, part.features)
    train, held_out, test = (Outputs(part.logits, part.features, part.labels) for part in parts.values())
    ood = known.ood
    with warnings.catch_warnings(action="ignore"):
        guard = igeood.white_box().fit(train).calibrate(held_out)
    out = guard.detector.weights_ == 0
    assert (guard.explain(ood).rarity[:, out] == 1).all()
    constant = [finding.message for finding in guard.health if finding.code == "constant-term"]
    assert [message.rpartition(": ")[0] for message in constant] == left_out
    for part in (test, ood):
        assert guard.score(part).isfinite().all()
    assert evaluate(guard.score(test), guard.score(ood)).auroc > 0.9


@pytest.mark.parametrize("n_classes", [2, 3])
def test_two_classes_and_probabilities_with_zeros(make, n_classes):
    c = make(n_classes=n_classes)
    probabilities = [(2.0 * side).softmax(dim=1) for side in (c.train, c.held_out, c.ood)]
    probabilities = [torch.where(p < 6e-8, 0.0, p) for p in probabilities]  # as float16 has them
    probabilities = [p / p.sum(dim=1, keepdim=True) for p in probabilities]
    guard = igeood.black_box(probabilities=True).fit(probabilities[0], c.labels).calibrate(probabilities[1])
    assert guard.score(probabilities[2]).isfinite().all()
    assert guard.predict(probabilities[2]).is_ood.double().mean() > 0.2


def test_one_class_alone(known):
    rows = known.train.labels == 2
    with pytest.warns(UserWarning, match="no training row"):
        guard = igeood.white_box().fit(known.train[rows][:100])
    assert (guard.explain(known.test).nearest["early"] == 2).all()
    assert guard.score(known.test).isfinite().all()


class Twice(nn.Module):
    """A network whose last block is the head's input."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 12, 3), nn.ReLU())
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        return self.head(self.second(self.first(x)).mean(dim=(2, 3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_of_a_model_the_heads_input_counts_once(dtype):
    torch.manual_seed(0)
    model = Twice().to(dtype)
    images = torch.rand(400, 3, 10, 10)
    guard = igeood.white_box(model).fit([(images, torch.arange(400) % 4)])
    assert guard.layers == ["first", "second"]
    assert guard.detector.term_names[:2] == ["first: distance", "second: distance"]
    assert guard.score(images * 255).min() > guard.score(images).max()
    alone = igeood.white_box(model, layers=["first"]).fit([(images, torch.arange(400) % 4)])
    assert alone.layers == ["first"]


def test_layers_can_be_given_back_and_a_probe_of_them_is_saved(tmp_path):
    torch.manual_seed(0)
    model, batches = Twice(), [(torch.rand(400, 3, 10, 10), torch.arange(400) % 4)]
    probe = igeood.white_box(model, method="probe").fit(batches)
    assert HEAD in probe.layers
    again = igeood.white_box(model, method="probe", layers=probe.layers).fit(batches)
    assert again.layers == probe.layers
    probe.save(tmp_path / "guard")
    images = batches[0][0]
    assert torch.equal(igeood.load(tmp_path / "guard", model).score(images), probe.score(images))
    table = igeood.compare(model, batches, images, {"ood": 255 * images}, methods=["evidence", "probe"])
    assert set(table.tnr) == {"evidence", "evidence (logits)", "probe"}


def test_explanations_are_shares_that_lead_back_to_the_score(known):
    guard = igeood.white_box().fit(known.train)
    reasons = guard.explain(known.ood[:50])
    weights = guard.detector.weights_
    torch.testing.assert_close((weights * -reasons.rarity.log()).sum(dim=1), reasons.score)
    assert ((reasons.rarity > 0) & (reasons.rarity <= 1)).all()
    assert reasons.rarity[:, :4].mean() < guard.explain(known.test).rarity[:, :4].mean()
    shares = guard.explain(known.held_out).rarity.mean(dim=0)  # of p-values, one half on average
    assert ((shares > 0.35) & (shares < 0.65)).all()


def test_a_guard_without_features_is_told_so(known, refused):
    with refused("outputs"):
        igeood.white_box().fit(known.train.only(()))
