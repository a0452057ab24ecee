"""The black-box detectors against their formulas."""

import math

import numpy as np
import pytest
import torch

import igeood
from igeood.detectors import logits as family
from igeood.errors import InputError
from igeood.geometry import categorical


def reference_fr0(logits, centroids, temperature):
    """Eq. 5 by a loop in float64."""
    scores = []
    for row in logits.double():
        p = torch.softmax(row / temperature, dim=0)
        products = [(p.sqrt() * c.exp().sqrt()).sum().clamp(max=1.0) for c in centroids]
        scores.append(sum(2 * math.acos(float(v)) for v in products))
    return torch.tensor(scores, dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 30.0])
def test_classes_are_their_functions(classifier, temperature):
    train, labels, test = classifier.train, classifier.labels, classifier.test
    fr = categorical.centroids(train, labels, 10, temperature)
    kl = categorical.kl_centroids(train, labels, 10, temperature)
    expected = {
        "msp": -family.confidence(test, temperature),
        "odin": -family.confidence(test, temperature),
        "energy": family.energy(test, temperature),
        "kl-sum": -family.kl_sum(test, kl, temperature),
        "kl-min": family.kl_min(test, kl, temperature),
        "igeood-logits": -family.fr0(test, fr, temperature),
        "igeood-logits-min": family.fr_min(test, fr, temperature),
    }
    for name, score in expected.items():
        assert torch.equal(igeood.detector(name, temperature=temperature).fit(train, labels).score(test), score), name


def test_scores_against_plain_formulas(classifier):
    f = classifier.test.double()
    torch.testing.assert_close(family.confidence(f, 3.0), (f / 3).softmax(1).max(dim=1).values, rtol=1e-12, atol=0)
    torch.testing.assert_close(family.energy(f, 3.0), -3 * torch.logsumexp(f / 3, dim=1), rtol=1e-12, atol=0)
    centroids = categorical.centroids(classifier.train, classifier.labels, 10)
    torch.testing.assert_close(
        family.fr0(classifier.test, centroids), reference_fr0(classifier.test, centroids, 1.0), rtol=1e-7, atol=0
    )
    q = f.softmax(1)
    divergences = torch.stack([(q * (q.log() - c)).sum(1) for c in centroids], dim=1)
    torch.testing.assert_close(family.kl_sum(f, centroids), divergences.sum(1), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(family.kl_min(f, centroids), divergences.amin(1), rtol=1e-7, atol=1e-9)


def test_default_temperatures():
    assert igeood.Odin().temperature == 1000
    others = [igeood.detector(name).params().get("temperature", 1.0) for name in igeood.METHODS if name != "odin"]
    assert set(others) == {1.0}


def random_confident(n_classes, margin, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(n_classes, (20_000,), generator=generator)
    logits = torch.randn(20_000, n_classes, generator=generator, dtype=torch.float64)
    logits[torch.arange(20_000), labels] += margin
    return logits, labels


@pytest.mark.parametrize("n_classes", [10, 100])
def test_confident_samples_keep_distinct_scores(n_classes):
    logits, labels = random_confident(n_classes, 20.0)
    score = igeood.IgeoodLogits().fit(logits.float(), labels).score(logits.float())
    confident = torch.sort(score).values[: len(score) // 2]
    assert len(confident.unique()) >= 0.999 * len(confident)
    products = torch.softmax(logits.float(), 1).sqrt() @ torch.eye(n_classes)
    clamped = torch.acos(products.clamp(max=1.0)).sum(1)  # what a float32 arc cosine leaves
    assert len(clamped.sort().values[10_000:].unique()) < 0.5 * 10_000


@pytest.mark.parametrize("n_classes", [10, 100])
@pytest.mark.parametrize("margin", [1.0, 10.0, 30.0])
def test_fr0_of_float32_is_that_of_float64(n_classes, margin):
    logits, labels = random_confident(n_classes, margin)
    detector = igeood.IgeoodLogits().fit(logits, labels)
    apart = (detector.score(logits.float()) - detector.score(logits)).abs().max()
    assert apart <= 1e-6 * n_classes


@pytest.mark.parametrize("method", ["igeood-logits", "igeood-logits-min", "kl-sum", "energy", "msp"])
def test_gradients_agree_with_finite_differences(classifier, method):
    detector = igeood.detector(method).fit(classifier.train, classifier.labels)
    logits = torch.cat([classifier.test[:3], classifier.ood[:3]]).double().requires_grad_()
    assert torch.autograd.gradcheck(detector.score, logits, eps=1e-6, rtol=1e-4, atol=1e-8)


def test_gradient_of_fr0_is_finite_on_a_centroid_and_when_saturated(classifier):
    detector = igeood.IgeoodLogits().fit(classifier.train, classifier.labels)
    rows = torch.cat([detector.centroids_.float(), torch.eye(10) * 1e4, torch.eye(10) * -1e4]).requires_grad_()
    (gradient,) = torch.autograd.grad(detector.score(rows).sum(), rows)
    assert gradient.isfinite().all()


def test_predict_class_is_the_nearest_centroid_and_agrees_with_softmax(classifier):
    detector = igeood.IgeoodLogits().fit(classifier.train, classifier.labels)
    nearest = detector.predict_class(classifier.test)
    assert torch.equal(nearest, categorical.pairwise_distance(classifier.test, detector.centroids_).argmin(1))
    assert (nearest == classifier.test.argmax(1)).double().mean() > 0.99
    assert isinstance(detector.predict_class(classifier.test.numpy()), np.ndarray)
    assert detector.predict_class(np.empty((0, 10))).shape == (0,)


def test_fr0_is_about_28_when_confident_and_25_when_uniform(classifier):
    """Ten classes: near one centroid and π from nine others, or equally far from all."""
    vertices = torch.eye(10).log()
    assert family.fr0(torch.eye(10) * 1e3, vertices)[0].item() == pytest.approx(9 * math.pi, rel=1e-12)
    assert family.fr0(torch.zeros(1, 10), vertices).item() == pytest.approx(24.98, abs=0.01)


def test_two_classes_use_the_minimum_and_say_so(make):
    data = make(2)
    detector = igeood.IgeoodLogits().fit(data.train, data.labels)
    assert detector.reduce_ == "min"
    assert "two classes" in detector.notes_[0]
    smallest = igeood.IgeoodLogits(reduce="min").fit(data.train, data.labels)
    assert smallest.notes_ == ()
    assert torch.equal(detector.score(data.test), smallest.score(data.test))
    between = torch.tensor([[0.1, 0.0], [0.0, 0.2], [0.3, 0.0]])
    assert family.fr0(between, detector.centroids_).std() < 1e-12  # why
    assert detector.score(between).std() > 1e-3


def test_three_classes_do_not(make):
    detector = igeood.IgeoodLogits().fit(make(3).train, make(3).labels)
    assert detector.reduce_ == "sum"
    assert detector.notes_ == ()


def test_centroid_temperature_is_the_authors_rescaling(classifier):
    fitted = igeood.IgeoodLogits(temperature=5.0, centroid_temperature=1.0).fit(classifier.train, classifier.labels)
    at_one = categorical.centroids(classifier.train, classifier.labels, 10, 1.0)
    torch.testing.assert_close(fitted.centroids_, torch.log_softmax(at_one / 5.0, dim=1))
    own = igeood.IgeoodLogits(temperature=5.0).fit(classifier.train, classifier.labels)
    assert (fitted.score(classifier.test) - own.score(classifier.test)).abs().max() > 1e-3
    with pytest.raises(InputError, match=r"^centroid_temperature: "):
        igeood.IgeoodLogits(centroid_temperature=0.0)


@pytest.mark.parametrize("centroid_temperature", [None, 1.0])
def test_many_temperatures_give_what_each_alone_gives(classifier, centroid_temperature):
    train = igeood.Outputs(classifier.train, labels=classifier.labels)
    first = igeood.IgeoodLogits(centroid_temperature=centroid_temperature).fit(train)
    at = first.over_temperatures(train)
    for temperature in (0.3, 1.0, 2.345, 1000.0, 40.0, 0.9):
        many, alone = at(temperature), first.at_temperature(temperature, train)
        assert many.temperature == alone.temperature == temperature
        assert many.params() == alone.params()
        found, expected = (d.score(classifier.test) for d in (many, alone))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.std()))


def test_energy_of_extreme_logits():
    f = torch.tensor([[1e38, 0.0], [-1e38, -1e38]])
    assert family.energy(f, 0.001).isfinite().all()
    assert family.energy(torch.tensor([[3.0, -torch.inf]]), 2.0).item() == -3.0


def test_large_batches_are_scored_in_chunks(classifier, monkeypatch):
    detector = igeood.IgeoodLogits().fit(classifier.train, classifier.labels)
    whole, classes = detector.score(classifier.test), detector.predict_class(classifier.test)
    monkeypatch.setattr("igeood.geometry.precision.CHUNK_ELEMENTS", 70)
    torch.testing.assert_close(detector.score(classifier.test), whole, rtol=1e-12, atol=1e-12)
    assert torch.equal(detector.predict_class(classifier.test), classes)


@pytest.mark.parametrize("kind", [igeood.IgeoodLogits, igeood.KLDivergence])
def test_reductions_that_are_none(kind):
    with pytest.raises(InputError, match="reduce: expected 'sum' or 'min', got 'mean'"):
        kind(reduce="mean")


def test_functions_take_temperature_1_by_default(classifier):
    test, centroids = classifier.test, categorical.centroids(classifier.train, classifier.labels, 10)
    for function in (family.confidence, family.energy):
        assert torch.equal(function(test), function(test, 1.0))
        assert not torch.equal(function(test), function(test, 2.0))
    for function in (family.fr0, family.fr_min, family.kl_sum, family.kl_min):
        assert torch.equal(function(test, centroids), function(test, centroids, 1.0))
        assert not torch.equal(function(test, centroids), function(test, centroids, 2.0))


def test_energy_says_why_it_wants_logits():
    with pytest.raises(InputError, match=r"^probabilities: energy needs logits.*use another method such as 'msp'$"):
        igeood.Energy(probabilities=True)


def test_default_options():
    for kind in (igeood.IgeoodLogits, igeood.KLDivergence):
        assert (kind().reduce, kind().temperature, kind().probabilities) == ("sum", 1.0, False)
    assert igeood.IgeoodLogits().centroid_temperature is None
    assert type(igeood.Energy(temperature=2).temperature) is float


def test_the_note_on_two_classes_says_what_is_done(make):
    data = make(2)
    (note,) = igeood.IgeoodLogits().fit(data.train, data.labels).notes_
    assert note == "two classes: FR₀ is constant between the centroids, so the minimum distance is used"
