"""The per-layer detectors against float64 loops, scipy, and awkward channels."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import mahalanobis

import igeood
from igeood.detectors import features as module
from igeood.detectors.features import (
    ClassSums,
    IgeoodFeatures,
    Mahalanobis,
    floored_std,
    mahalanobis_distance,
    sum_layers,
)
from igeood.errors import IgeoodWarning, InputError
from igeood.geometry import precision
from igeood.outputs import Outputs


def loop_fr(x, means, std):
    """FR_ℓ by a loop over samples, classes and channels: Eq. 9 in its stable form, Eq. 10, Eq. 11."""
    found = []
    for row in x:
        distances = []
        for mean in means:
            rho = 2 * np.sqrt(2) * np.arcsinh(np.abs(row - mean) / (2 * np.sqrt(2) * std))
            distances.append(np.sqrt((rho**2).sum()))
        found.append(min(distances))
    return np.array(found)


def test_fr_layer_and_fr_layer_ood_are_the_papers(known):
    detector = IgeoodFeatures().fit(known.train)
    detector.fit_ood(known.ood)
    columns, nearest = detector.fr_layer(known.test)
    primed = detector.fr_layer_ood(known.test)
    for i, layer in enumerate(detector.layers_):
        train, test = (o.features[layer].double().numpy() for o in (known.train, known.test))
        labels = known.train.labels.numpy()
        means = np.stack([train[labels == c].mean(0) for c in range(10)])
        std = np.sqrt(((train - means[labels]) ** 2).mean(0))
        np.testing.assert_allclose(columns[:, i], loop_fr(test, means, std), rtol=1e-5)
        ood = known.ood.features[layer].double().numpy()
        np.testing.assert_allclose(primed[:, i], loop_fr(test, ood.mean(0)[None], ood.std(0)), rtol=1e-5)
        assert (nearest[:, i] == known.test.labels).double().mean() > 0.5
    ood_columns, ood_primed = detector.fr_layer(known.ood)[0], detector.fr_layer_ood(known.ood)
    assert (ood_columns.mean(0) > columns.mean(0)).all()  # FR is higher for OOD,
    assert (ood_primed.mean(0) < primed.mean(0)).all()  # FR′ is lower


def test_mahalanobis_is_scipys(known):
    detector = Mahalanobis().fit(known.train)
    scores = detector.layer_scores(known.test)
    for i, layer in enumerate(detector.layers_):
        train, test = (o.features[layer].double().numpy() for o in (known.train, known.test))
        labels = known.train.labels.numpy()
        means = np.stack([train[labels == c].mean(0) for c in range(10)])
        residual = train - means[labels]
        precision = np.linalg.inv(residual.T @ residual / len(train))
        expected = [min(mahalanobis(row, mean, precision) ** 2 for mean in means) for row in test[:60]]
        np.testing.assert_allclose(scores[:60, i], expected, rtol=1e-6)


def test_relative_mahalanobis_takes_off_the_background(known):
    plain, relative = (Mahalanobis(relative=r).fit(known.train) for r in (False, True))
    layer = plain.layers_[0]
    train = known.train.features[layer].double().numpy()
    precision = np.linalg.inv(np.cov(train.T, bias=True))
    background = [
        mahalanobis(row, train.mean(0), precision) ** 2 for row in known.test.features[layer].double().numpy()
    ]
    difference = plain.layer_scores(known.test)[:, 0] - relative.layer_scores(known.test)[:, 0]
    np.testing.assert_allclose(difference, background, rtol=1e-6)


def test_mahalanobis_of_rank_deficient_features(known):
    """A copied channel and a constant one: the pseudo-inverse ignores the directions that never vary."""

    def widened(outputs):
        extra = {k: torch.cat([v, v[:, :1], torch.ones(len(v), 1)], 1) for k, v in outputs.features.items()}
        return Outputs(outputs.logits, extra, outputs.labels)

    plain = Mahalanobis().fit(known.train).layer_scores(known.test)
    wide = Mahalanobis().fit(widened(known.train)).layer_scores(widened(known.test))
    torch.testing.assert_close(wide, plain, rtol=1e-6, atol=1e-8)


def test_directions_of_rounding_noise_are_left_out(known):
    """A channel that is a sum of two others in float32: what is left in between is rounding, not signal."""

    def with_sum(outputs, noise):
        early = outputs.features["early"]
        features = {"l": torch.cat([early, early[:, :1] + early[:, 1:2] + noise], 1)}
        return Outputs(outputs.logits, features, outputs.labels)

    generator = torch.Generator().manual_seed(0)
    noise = 1e-7 * torch.randn(400, 1, generator=generator)
    detector = Mahalanobis().fit(with_sum(known.train, noise))
    assert detector.whitening_["l"].shape == (7, 6)
    exact, moved = (detector.score(with_sum(known.test, n)) for n in (0.0, noise))
    torch.testing.assert_close(exact, moved, rtol=1e-4, atol=1e-4)
    wide = Mahalanobis().fit(converted_to_double(with_sum(known.train, 1e-5)))
    assert wide.whitening_["l"].shape[0] == 7


def converted_to_double(outputs):
    return Outputs(outputs.logits, {k: v.double() for k, v in outputs.features.items()}, outputs.labels)


@given(cuts=st.lists(st.integers(1, 399), max_size=4), full=st.booleans())
@settings(max_examples=25)
def test_law_sums_of_shards_are_those_of_the_whole(known, cuts, full):
    x, labels = known.train.features["early"].double() + 1e5, known.train.labels
    edges = [0, *sorted(cuts), 400]
    parts = [ClassSums.of(x[a:b], labels[a:b], 10, full=full) for a, b in itertools.pairwise(edges) if b > a]
    merged = sum(parts[1:], parts[0])
    whole = ClassSums.of(x, labels, 10, full=full)
    torch.testing.assert_close(merged.mean, whole.mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(merged.covariance, whole.covariance, rtol=1e-9, atol=1e-9)


def test_one_pass_variance_survives_a_large_offset(known):
    x = known.train.features["early"].double()
    found = sum(
        (ClassSums.of(x[i : i + 7] + 1e5, known.train.labels[i : i + 7], 10) for i in range(7, 400, 7)),
        ClassSums.of(x[:7] + 1e5, known.train.labels[:7], 10),
    )
    expected = ClassSums.of(x, known.train.labels, 10).covariance
    torch.testing.assert_close(found.covariance, expected, rtol=1e-8, atol=0)


def exact_variance(x, labels):
    """Pooled variance (k,) in rational numbers."""
    values = [[Fraction(v) for v in row] for row in x.double().tolist()]
    total = [Fraction(0)] * x.shape[1]
    for label in set(labels.tolist()):
        rows = [row for row, y in zip(values, labels.tolist(), strict=True) if y == label]
        for j, column in enumerate(zip(*rows, strict=True)):
            mean = sum(column) / len(column)
            total[j] += sum((v - mean) ** 2 for v in column)
    return torch.tensor([float(t / len(values)) for t in total], dtype=torch.float64)


def in_pairs(parts):
    """Add neighbours until one is left."""
    while len(parts) > 1:
        parts = [sum(parts[i + 1 : i + 2], parts[i]) for i in range(0, len(parts), 2)]
    return parts[0]


def in_turn(parts):
    return sum(parts[1:], parts[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 1e5, -1e7])
@pytest.mark.parametrize("add", [in_pairs, in_turn])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_variance_of_shards_is_exact_whatever_the_offset(known, dtype, offset, add, size):
    x = (known.train.features["early"].double() * torch.tensor([1.0, 0.1, 3.0, 10.0, 1.0, 30.0]) + offset).to(dtype)
    x[:, 1] = offset  # never varies
    labels = known.train.labels
    sums = add([ClassSums.of(x[i : i + size], labels[i : i + size], 10) for i in range(0, 400, size)])
    torch.testing.assert_close(sums.covariance, exact_variance(x, labels), rtol=1e-12, atol=1e-20)
    full = add([ClassSums.of(x[i : i + size], labels[i : i + size], 10, full=True) for i in range(0, 400, size)])
    torch.testing.assert_close(full.covariance.diagonal(), sums.covariance, rtol=1e-12, atol=1e-20)
    assert torch.equal(full.mean, sums.mean)


@pytest.mark.parametrize("full", [False, True])
def test_sums_of_nothing_add_nothing(known, full):
    x, labels = known.train.features["early"] + 1e5, known.train.labels
    nothing, whole = ClassSums.of(x[:0], labels[:0], 10, full=full), ClassSums.of(x, labels, 10, full=full)
    assert nothing.count.sum() == nothing.scatter.abs().sum() == 0
    for sums in (nothing + whole, whole + nothing):
        torch.testing.assert_close(sums.mean, whole.mean, rtol=1e-15, atol=0)
        torch.testing.assert_close(sums.scatter, whole.scatter, rtol=1e-12, atol=0)


def test_small_batches_are_gathered_and_large_ones_are_not_copied(known):
    batches = [known.train[i : i + 16] for i in range(0, 400, 16)] * 4
    sizes = [len(part.labels) for part in module._gathered(batches)]
    assert sizes == [1024, 576]
    large = Outputs(known.train.logits.repeat(3, 1), {"l": torch.randn(1200, 2)}, known.train.labels.repeat(3))
    (part,) = module._gathered([large])
    assert part.features["l"].data_ptr() == large.features["l"].data_ptr()
    found, whole = sum_layers(batches)["early"], sum_layers([Outputs.concat(batches)])["early"]
    torch.testing.assert_close(found.mean, whole.mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.covariance, whole.covariance, rtol=1e-12, atol=0)


def test_what_is_held_of_wide_batches_is_bounded(monkeypatch, known):
    monkeypatch.setattr(module, "HELD", 100 * sum(f.shape[1] for f in known.train.features.values()))
    sizes = [len(part.labels) for part in module._gathered(known.train[i : i + 16] for i in range(0, 400, 16))]
    assert max(sizes) == 112


@pytest.mark.parametrize("kind", [IgeoodFeatures, Mahalanobis])
def test_chunks_do_not_matter(monkeypatch, known, kind):
    def found():
        detector = kind().fit(known.train)
        shares = [detector.channel_shares(known.test, layer) for layer in detector.layers_]
        return [detector.mean_, detector.layer_scores(known.test), shares]

    whole = found()
    monkeypatch.setattr(precision, "CHUNK_ELEMENTS", 64)
    torch.testing.assert_close(found(), whole, rtol=1e-10, atol=1e-12)


def test_mahalanobis_distance_of_awkward_shapes():
    generator = torch.Generator().manual_seed(0)
    for n, n_classes, k, rank in ((0, 3, 2, 2), (5, 1, 1, 1), (700, 2, 2048, 3), (300, 1000, 4, 4), (4, 3, 5, 0)):
        x = torch.randn(k, n, generator=generator).T  # not contiguous
        means = torch.randn(n_classes, k, generator=generator).double()
        whitening = torch.randn(k, rank, generator=generator).double()
        distance, nearest = mahalanobis_distance(x, means, whitening)
        apart = torch.cdist(x.double() @ whitening, means @ whitening, compute_mode="donot_use_mm_for_euclid_dist")
        torch.testing.assert_close(distance, apart.amin(dim=1).square(), rtol=1e-9, atol=1e-9)
        assert nearest.shape == (n,)
        torch.testing.assert_close(apart.gather(1, nearest[:, None])[:, 0], apart.amin(dim=1), rtol=1e-9, atol=1e-9)


def test_mahalanobis_distance_has_its_gradient_in_every_chunk(monkeypatch):
    monkeypatch.setattr(precision, "CHUNK_ELEMENTS", 8)
    x = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    means, whitening = torch.eye(4, dtype=torch.float64)[:3], torch.eye(4, dtype=torch.float64)[:, :3] * 2.0
    distance, nearest = mahalanobis_distance(x, means, whitening)
    (gradient,) = torch.autograd.grad(distance.sum(), x)
    torch.testing.assert_close(gradient, 2.0 * (x - means[nearest]) @ whitening @ whitening.T)


def dead_channel(outputs, value=0.5):
    features = {k: v.clone() for k, v in outputs.features.items()}
    features["early"][:, 2] = value
    return Outputs(outputs.logits, features, outputs.labels)


def test_dead_channels_are_floored_counted_and_finite(known):
    detector = igeood.Igeood().fit(dead_channel(known.train))
    assert {k: int(v) for k, v in detector.features_.dead_.items()} == {"early": 1, "block.late": 0}
    assert detector.notes_ == ("layer 'early': 1 dead channels, deviation raised to a floor",)
    assert detector.score(known.test).isfinite().all()  # where the channel is alive again
    assert (detector.features_.std_["early"] > 0).all()


def test_channels_that_are_constant_up_to_rounding_are_dead(known):
    """A constant that has no exact float: its variance comes out as 1e-34, not as 0."""
    x = torch.randn(400, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[:, 3:] = 0.3
    outputs = Outputs(known.train.logits, {"l": x}, known.train.labels)
    batches = [outputs[i : i + 7] for i in range(0, 400, 7)]
    detector = IgeoodFeatures().fit_batches(batches)
    assert int(detector.dead_["l"]) == 7
    shifted = Outputs(known.train.logits, {"l": x + 1e-12})
    torch.testing.assert_close(detector.score(shifted), detector.score(outputs), rtol=1e-6, atol=1e-6)


def test_all_channels_dead():
    std, dead = floored_std(torch.zeros(3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64))
    assert std.tolist() == [1.0, 1.0, 1.0]
    assert dead.all()


def test_one_sample_in_a_class_is_a_warning(known):
    rows = torch.cat([(known.train.labels != 4).nonzero()[:, 0], (known.train.labels == 4).nonzero()[:1, 0]])
    with pytest.warns(IgeoodWarning, match="class 4 has a single sample"):
        detector = igeood.Igeood().fit(known.train[rows])
    assert detector.score(known.test).isfinite().all()


def test_missing_features(known):
    detector = IgeoodFeatures().fit(known.train)
    with pytest.raises(InputError, match="needs the features of layer 'early'; these have none"):
        detector.score(known.test.logits)
    wider = Outputs(known.test.logits, {k: torch.cat([v, v], 1) for k, v in known.test.features.items()})
    for name in ("igeood", "mahalanobis"):
        with pytest.raises(InputError, match=r"features\['early'\]: 12 channels, but .* was fitted on 6"):
            igeood.detector(name).fit(known.train).score(wider)
    with pytest.raises(InputError, match="no features to learn from"):
        IgeoodFeatures().fit(known.train.logits, known.train.labels)
    with pytest.raises(InputError, match="need at least 2"):
        detector.fit_ood(known.ood[:1])


@pytest.mark.parametrize("kind", [IgeoodFeatures, Mahalanobis])
def test_channel_shares_add_up_to_the_squared_distance(known, kind):
    detector = kind().fit(known.train)
    for i, layer in enumerate(detector.layers_):
        shares, _ = detector.channel_shares(known.test, layer)
        distance = detector.layer_scores(known.test)[:, i]
        squared = distance.square() if kind is IgeoodFeatures else distance
        torch.testing.assert_close(shares.sum(1), squared, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(detector.score(known.test), detector.layer_scores(known.test).sum(1))


def test_one_class_of_many_channels_and_one_channel(make):
    data = make(3, n=60)
    outputs = Outputs(data.train, {"one": torch.randn(60, 1, generator=torch.Generator().manual_seed(0))}, data.labels)
    for kind in (IgeoodFeatures, Mahalanobis):
        assert kind().fit(outputs).score(outputs).isfinite().all()


def test_batches_may_come_in_the_same_memory(known):
    """Batches are read one at a time: a caller that fills one buffer again and again is right to do so."""
    one = Outputs(known.train.logits[:40].clone(), {k: v[:40].clone() for k, v in known.train.features.items()},
                  known.train.labels[:40].clone())  # fmt: skip

    def refilled():
        for start in range(0, 400, 40):
            rows = slice(start, start + 40)
            one.logits.copy_(known.train.logits[rows])
            one.labels.copy_(known.train.labels[rows])
            for layer, values in one.features.items():
                values.copy_(known.train.features[layer][rows])
            yield one

    found, expected = igeood.IgeoodFeatures().fit_batches(refilled()), igeood.IgeoodFeatures().fit(known.train)
    for layer, mean in expected.mean_.items():
        torch.testing.assert_close(found.mean_[layer], mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.std_[layer], expected.std_[layer], rtol=1e-10, atol=0)


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1e9])
def test_whitening_goes_with_the_scale(known, scale):
    covariance = torch.cov(known.train.features["early"].double().T)
    root, scaled = module.whiten(covariance), module.whiten(scale * covariance)
    assert root.shape == scaled.shape == (6, 6)
    torch.testing.assert_close(root @ root.T, torch.linalg.inv(covariance))
    torch.testing.assert_close(scaled @ scaled.T * scale, root @ root.T)
    assert module.whiten(torch.zeros(3, 3, dtype=torch.float64)).shape == (3, 0)


def test_pooled_sums_are_those_of_one_class(known):
    x, labels = known.train.features["early"].double() + 50.0, known.train.labels
    for full in (False, True):
        pooled, one = ClassSums.of(x, labels, 10, full=full).pooled(), ClassSums.of(x, labels * 0, 1, full=full)
        torch.testing.assert_close(pooled.mean, one.mean, rtol=1e-12, atol=0)
        torch.testing.assert_close(pooled.covariance, one.covariance, rtol=1e-9, atol=1e-9)
        assert pooled.count.tolist() == [400.0]


def test_the_background_too_leaves_out_rounding_noise(known):
    early = known.train.features["early"]
    wide = Outputs(known.train.logits, {"l": torch.cat([early, early[:, :1] + early[:, 1:2]], 1)}, known.train.labels)
    detector = Mahalanobis(relative=True).fit(wide)
    assert detector.background_whitening_["l"].shape == detector.whitening_["l"].shape == (7, 6)
    assert detector.background_mean_["l"].shape == (7,)
    assert Mahalanobis().fit(wide).background_mean_ == {}


def test_the_floor_of_deviations():
    """A ten-thousandth of the median of those that vary; a channel just on it is not dead."""
    means = torch.zeros(2, 6, dtype=torch.float64)
    wanted = torch.tensor([1.0, 1.0, 1.0, 1e-4, 0.9e-4, 0.0], dtype=torch.float64)
    std, dead = floored_std(wanted.square(), means)
    assert std.tolist() == [1.0, 1.0, 1.0, 1e-4, 1e-4, 1e-4]
    assert dead.tolist() == [False] * 4 + [True] * 2
    _, dead = floored_std(torch.tensor([4.0, 4.0, 4.0, 0.0], dtype=torch.float64), means[:, :4])
    assert dead.tolist() == [False, False, False, True]
    std, dead = floored_std(torch.tensor([1e-20, -1e-20], dtype=torch.float64), means[:, :2])
    assert std.tolist() == pytest.approx([1e-10, 1e-14])
    assert dead.tolist() == [False, True]
    std, dead = floored_std(torch.ones(2, dtype=torch.float64), torch.tensor([[1e9, 1.0], [0.0, 0.0]]))
    assert dead.tolist() == [True, False]


@pytest.mark.parametrize("kind", [IgeoodFeatures, Mahalanobis])
def test_channel_shares_come_with_the_nearest_class_in_any_chunks(known, kind, monkeypatch):
    detector = kind().fit(known.train)
    whole, nearest = detector.channel_shares(known.test, "early")
    means = detector.mean_["early"]
    apart = known.test.features["early"].double()[:, None] - means
    if kind is Mahalanobis:
        squared = (apart @ detector.whitening_["early"]).square().sum(dim=-1)
    else:
        squared = torch.asinh(apart / (8**0.5 * detector.std_["early"])).square().sum(dim=-1)
    assert torch.equal(nearest, squared.argmin(dim=1))
    monkeypatch.setattr(precision, "CHUNK_ELEMENTS", 50)
    for found, expected in zip(detector.channel_shares(known.test, "early"), (whole, nearest), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_errors_say_what_is_missing(known):
    with pytest.raises(
        InputError, match=r"^outputs: no features to learn from; give Outputs\(logits, features, labels\)$"
    ):
        sum_layers([Outputs(known.train.logits, {}, known.train.labels)])
    with pytest.raises(InputError, match=r"^outputs: no features to learn from"):
        sum_layers([Outputs(known.train.logits, known.train.features)])
    with pytest.raises(InputError, match=r"^labels: no sample of class 7 \(1 of 10 classes have none\); "):
        sum_layers([known.train[known.train.labels != 7]])
    some = Outputs(known.test.logits, {"late": known.test.features["early"], "x": known.test.features["early"]})
    for detector in (IgeoodFeatures().fit(known.train), igeood.Igeood().fit(known.train)):
        kind = type(detector).__name__
        with pytest.raises(InputError, match=rf"^outputs: {kind} needs the features of layer 'early'; .*'late', 'x'"):
            detector.score(some)
    with pytest.raises(InputError, match=r"^ood: 1 sample\(s\); a mean and a deviation need at least 2"):
        IgeoodFeatures().fit(known.train).fit_ood(known.ood[:1])
    assert len(IgeoodFeatures().fit(known.train).fit_ood(known.ood[:2]).ood_mean_) == 2


def test_small_batches_are_joined_until_there_are_a_few_samples_a_class(known, monkeypatch):
    """1,024 samples together, or fewer where they are wide."""
    sizes = []
    plain = ClassSums.of.__func__

    def counted(cls, features, labels, n_classes, *, full=False):
        sizes.append(len(features))
        return plain(cls, features, labels, n_classes, full=full)

    monkeypatch.setattr(ClassSums, "of", classmethod(counted))
    one = Outputs(known.train.logits, {"early": known.train.features["early"]}, known.train.labels)
    sum_layers([one[i : i + 100] for _ in range(6) for i in range(0, 400, 100)])
    assert sizes == [1100, 1100, 200]
    sizes.clear()
    twice = Outputs.concat([one] * 6)
    sum_layers([twice[:1023], twice[:1], twice[:1023], twice[:1]])
    assert sizes == [1024, 1024]
    sizes.clear()
    monkeypatch.setattr(module, "HELD", 6 * 150)
    sum_layers([one[i : i + 50] for i in range(0, 400, 50)])
    assert sizes == [150, 150, 100]


@pytest.mark.parametrize("full", [False, True])
def test_sums_in_chunks_are_those_of_the_whole(known, full, monkeypatch):
    x, labels = known.train.features["early"], known.train.labels
    whole = ClassSums.of(x, labels, 10, full=full)
    monkeypatch.setattr(precision, "CHUNK_ELEMENTS", 60)
    found = ClassSums.of(x, labels, 10, full=full)
    torch.testing.assert_close(found.mean, whole.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.scatter, whole.scatter, rtol=1e-12, atol=1e-9)


def test_directions_within_the_rounding_of_the_features_are_left_out():
    """No more than NOISE of the greatest variance for each channel."""
    for share, rank in ((3.0, 2), (1.5, 1), (0.0, 1)):
        covariance = torch.diag(torch.tensor([4.0, 4.0 * share * module.NOISE], dtype=torch.float64))
        assert module.whiten(covariance).shape == (2, rank)
