"""The per-layer detectors against float64 loops and NumPy's pseudo-inverse, and with awkward channels."""

import numpy as np
import pytest
import torch

import igeood
from igeood.detectors import IgeoodFeatures, Mahalanobis
from igeood.detectors import gaussians as module
from igeood.detectors.gaussians import OodFeatures
from igeood.geometry import precision
from igeood.outputs import Outputs
from igeood.summary import ClassSums

from .oracles import inverse_covariance


def arrays(known, layer):
    """Features of a layer in float64: training, class means, deviations from them, and test."""
    train, labels = known.train.features[layer].double().numpy(), known.train.labels.numpy()
    means = np.stack([train[labels == c].mean(0) for c in range(10)])
    return train, means, train - means[labels], known.test.features[layer].double().numpy()


def loop_fr(x, means, std):
    """FR_ℓ by a loop over samples and classes: Eq. 9 for equal deviations, Eq. 10, Eq. 11."""
    rho = [[2 * np.sqrt(2) * np.arcsinh(np.abs(row - mean) / (2 * np.sqrt(2) * std)) for mean in means] for row in x]
    return np.sqrt(np.square(rho).sum(-1)).min(1)


def with_layer(outputs, features):
    return Outputs(outputs.logits, {"l": features}, outputs.labels)


def test_fr_layer_is_the_papers(known):
    detector = IgeoodFeatures().fit(known.train)
    for layer, distance in zip(detector.term_names, detector.terms(known.test).T, strict=True):
        _, means, apart, test = arrays(known, layer)
        np.testing.assert_allclose(distance, loop_fr(test, means, np.sqrt((apart**2).mean(0))), rtol=1e-6)


@pytest.mark.parametrize("sigma", ["printed", "both"])
@pytest.mark.parametrize("means", ["one", "predicted"])
def test_readings_of_equation_12(known, sigma, means):
    """Eq. 9 as the paper prints it, with unequal deviations, by a loop over the means."""
    detector, ood = IgeoodFeatures().fit(known.train), known.ood[:300]
    against = OodFeatures(ood_sigma=sigma, ood_means=means).fit(ood).beside(detector)
    predicted = ood.logits.argmax(dim=1).numpy() * (means == "predicted")
    scores = against.terms(known.test)
    for i, layer in enumerate(detector.term_names):
        _, _, apart, test = arrays(known, layer)
        x = ood.features[layer].double().numpy()
        centres = {c: x[predicted == c].mean(0) for c in set(predicted.tolist())}
        theirs = np.sqrt(np.mean([(row - centres[c]) ** 2 for row, c in zip(x, predicted, strict=True)], axis=0))
        own = np.sqrt((apart**2).mean(0)) if sigma == "printed" else theirs
        distances = []
        for centre in centres.values():
            minus, plus = (np.hypot((test - centre) / np.sqrt(2), own + sign * theirs) for sign in (-1, 1))
            rho = np.sqrt(2) * np.log((plus + minus) / (plus - minus))
            distances.append(np.sqrt((rho**2).sum(1)))
        np.testing.assert_allclose(-scores[:, i], np.min(distances, axis=0), rtol=1e-6)


def squared_distances(x, means, inverse):
    apart = x[:, None] - means
    return np.einsum("nci,ij,ncj->nc", apart, inverse, apart).min(1)


@pytest.mark.parametrize("rows", [400, 12, 10])
@pytest.mark.parametrize("relative", [False, True])
def test_mahalanobis_is_that_of_an_independent_covariance(known, relative, rows):
    """Of many rows, of a few, and of one row a class."""
    some = known.train[:rows]
    scores = Mahalanobis(relative=relative).fit(some).terms(known.test)
    labels = some.labels.numpy()
    for i, layer in enumerate(known.train.features):
        train, test = (part.features[layer].double().numpy() for part in (some, known.test))
        means = np.stack([train[labels == c].mean(0) for c in range(10)])
        expected = squared_distances(test, means, inverse_covariance(train, labels))
        if relative:
            background = inverse_covariance(train, np.zeros(len(train), dtype=int))
            expected = expected - squared_distances(test, train.mean(0)[None], background)
        np.testing.assert_allclose(scores[:, i], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1e9])
def test_whitening_goes_with_the_scale(known, scale):
    covariance = torch.cov(known.train.features["early"].double().T)
    root, scaled = module.whiten(covariance), module.whiten(scale * covariance)
    torch.testing.assert_close(root @ root.T, torch.linalg.inv(covariance))
    torch.testing.assert_close(scaled @ scaled.T * scale, root @ root.T)
    for share, rank in ((3.0, 2), (1.5, 1), (0.0, 1)):  # what is within the features' rounding is left out
        noisy = torch.diag(torch.tensor([4.0, 4.0 * share * module.NOISE], dtype=torch.float64))
        assert module.whiten(scale * noisy).shape == (2, rank)
    assert module.whiten(0.0 * covariance).shape == (6, 0)


@pytest.mark.parametrize("kind", [IgeoodFeatures, Mahalanobis])
def test_chunks_do_not_matter_and_gradients_agree_with_finite_differences(known, kind, monkeypatch):
    detector = kind().fit(known.train)
    whole = detector.terms(known.test), detector.explain(known.test, 4)
    monkeypatch.setattr(precision, "CHUNK_ELEMENTS", 64)
    torch.testing.assert_close((detector.terms(known.test), detector.explain(known.test, 4)), whole)
    detector = kind().fit(with_layer(known.train, known.train.features["early"]))
    x = known.test.features["early"][:9].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: detector(with_layer(known.test[:9], x)), x, rtol=1e-4)


def test_the_floor_of_deviations_and_channels_that_are_constant_up_to_rounding(known):
    """A ten-thousandth of the median of those that vary; a channel just on it is not dead."""
    for deviations, means, expected, dead in (
        ([1, 1, 1, 1e-4, 0.9e-4, 0], [0] * 6, [1, 1, 1, 1e-4, 1e-4, 1e-4], [4, 5]),
        ([0, 0], [0, 0], [1, 1], [0, 1]),
        ([1, 1], [1e9, 1], [1e-4, 1], [0]),  # the first is a mean's rounding
    ):
        apart, centre = torch.tensor(deviations, dtype=torch.float64), torch.tensor(means, dtype=torch.float64)
        x = torch.stack([centre + apart, apart, centre - apart, -apart])  # two classes, the second about 0
        std, is_dead = module.floored_std(ClassSums.of(x, torch.tensor([0, 1, 0, 1]), 2))
        assert is_dead.nonzero()[:, 0].tolist() == dead
        assert std.tolist() == pytest.approx(expected)
    x = torch.randn(400, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[:, 3:] = 0.3  # a constant that has no exact float: its variance comes out as 1e-34, not as 0
    detector = IgeoodFeatures().fit(with_layer(known.train, x))
    assert [(finding.code, " 7 " in finding.message) for finding in detector.findings_] == [("dead-channels", True)]
    scores = [detector(with_layer(known.train, x + shift)) for shift in (0.0, 1e-12)]
    torch.testing.assert_close(*scores, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["igeood", "mahalanobis"])
def test_one_sample_in_a_class_is_a_finding(known, method):
    rows = torch.cat([(known.train.labels != 4).nonzero()[:, 0], (known.train.labels == 4).nonzero()[:1, 0]])
    detector = igeood.detector(method).fit(known.train[rows])
    assert [(f.code, "class 4" in f.message) for f in detector.findings_] == [("single-sample", True)]
    assert detector(known.test).isfinite().all()
