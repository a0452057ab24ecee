"""Detectors of other libraries: those of pytorch-ood give the same scores inside a guard as alone."""

import sys
import types

import numpy as np
import pytest
import torch
from sklearn.neighbors import LocalOutlierFactor

import igeood
from igeood.outputs import HEAD


class Absent(types.ModuleType):
    """In place of torchvision: pytorch-ood imports it, and its detectors do not use it."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}", type(name, (), {}))


@pytest.fixture(scope="module")
def theirs():
    parts = ("", ".datasets", ".datasets.utils", ".models", ".models.resnet", ".transforms", ".transforms.functional")
    with pytest.MonkeyPatch.context() as patch:  # of these names alone: what torch imports meanwhile stays
        for part in parts:
            patch.setitem(sys.modules, f"torchvision{part}", Absent(f"torchvision{part}"))
        yield pytest.importorskip("pytorch_ood.detector", reason="pytorch-ood is not installed: make test installs it")


@pytest.fixture(scope="module")
def read(model, data):
    return {name: igeood.extract(model, getattr(data, name), (), head=True) for name in ("train", "test")}


@pytest.mark.parametrize("name", ["EnergyBased", "KNN", "ViM"])
def test_pytorch_ood(name, theirs, model, data, read):
    head = model[-1]
    options = {"KNN": {"k": 5}, "ViM": {"d": 16, "w": head.weight, "b": head.bias}}.get(name, {})
    detector = getattr(theirs, name)(None, **options)
    box = igeood.black_box if name == "EnergyBased" else igeood.white_box
    guard = box(model, method=igeood.wrap(detector, higher_is="ood")).fit(data.train).calibrate(data.held_out)
    if name == "EnergyBased":
        expected = detector.predict_logits(read["test"].logits)
    else:
        detector.fit_features(read["train"].features[HEAD], read["train"].labels)
        expected = detector.predict_features(read["test"].features[HEAD])
    # in their float32 ViM takes a term of about 10 from another: 1e-5 is left of it, more or less by the processor
    scores = guard.score(data.test)
    torch.testing.assert_close(scores, expected.detach().double(), rtol=1e-4, atol=1e-4)
    assert torch.equal(guard.predict(data.test).is_ood, scores > guard.threshold)
    assert torch.equal(guard.fit(data.train).score(data.test), scores)  # a fit starts anew


def test_functions_and_scikit_learn(known):
    for side, sign in (("id", -1), ("ood", 1)):
        scores = igeood.wrap(lambda f: f.amax(dim=1), higher_is=side).fit(known.train.logits)(known.test.logits)
        torch.testing.assert_close(scores, sign * known.test.logits.amax(dim=1).double())
    factor = LocalOutlierFactor(novelty=True, n_neighbors=10)  # scored by its scores, not by its verdict
    wrapped = igeood.wrap(factor, higher_is="id", on="features")
    guard = igeood.white_box(method=wrapped).fit(known.train)
    train, test = (list(part.features.values())[-1].numpy() for part in (known.train, known.test))
    np.testing.assert_allclose(guard.score(known.test), -factor.fit(train).score_samples(test))


def test_what_cannot_be(known, tmp_path, refused):
    guard = igeood.black_box(method=igeood.wrap(lambda f: f.amax(dim=1), higher_is="id")).fit(known.train.logits)
    with refused("detector"):
        guard.save(tmp_path / "guard")
    assert not list(tmp_path.iterdir())
    with refused("method"):
        igeood.black_box(method=igeood.wrap(lambda features: features[:, 0], higher_is="id"))
    for result in (lambda f: f, lambda f: f[:, 0] * torch.nan):
        with refused("detector"):
            igeood.wrap(result, higher_is="id").fit(known.train.logits)(known.test.logits)
    for argument, thing, options in (
        ("higher_is", abs, {"higher_is": "up"}),
        ("on", abs, {"higher_is": "id", "on": "inputs"}),
        ("detector", 3, {"higher_is": "id"}),
        ("detector", LocalOutlierFactor, {"higher_is": "id"}),  # a class is no detector yet
    ):
        with refused(argument):
            igeood.wrap(thing, **options)


class OfOneLayer:
    """Reads features by the name of its method, and fits with a loader."""

    def fit_features(self, loader):
        ((self.rows, self.labels),) = loader

    def predict_features(self, features):
        with torch.enable_grad():
            slope = torch.autograd.grad(features.requires_grad_().square().sum(), features)[0]
        return slope.sum(dim=1) - self.rows.mean()


def test_a_detector_of_features_that_fits_with_a_loader_and_needs_slopes(known):
    train, test = known.train.features["block.late"], known.test.features["block.late"]
    fitted = igeood.wrap(OfOneLayer(), higher_is="ood").fit(known.train)
    expected = (2 * test.sum(dim=1) - train.mean()).double()
    with torch.inference_mode():
        torch.testing.assert_close(fitted(known.test), expected, rtol=1e-5, atol=1e-4)
    fitted(known.test)
    assert not test.requires_grad  # the caller's rows are as they were
