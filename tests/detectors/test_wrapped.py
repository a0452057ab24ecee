"""Detectors of other libraries: those of pytorch-ood give the same scores inside a guard as alone."""

import copy
import sys
import types
from unittest.mock import patch

import numpy as np
import pytest
import torch
from sklearn.neighbors import LocalOutlierFactor
from torch import nn

import igeood
from igeood.errors import InputError
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
    with patch.dict(sys.modules, {f"torchvision{part}": Absent(f"torchvision{part}") for part in parts}):
        yield pytest.importorskip("pytorch_ood.detector", reason="pytorch-ood is not installed: make test installs it")


@pytest.fixture(scope="module")
def read(model, data):
    return {name: igeood.extract(model, getattr(data, name), (), head=True) for name in ("train", "test", "ood")}


def test_pytorch_ood(theirs, model, data, read):
    head = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    z, y = read["train"].features[HEAD], read["train"].labels
    cases = {
        "energy": (theirs.EnergyBased(None), igeood.black_box, lambda d: d.predict_logits(read["test"].logits)),
        "knn": (theirs.KNN(None, k=5), igeood.white_box, lambda d: d.predict_features(read["test"].features[HEAD])),
        "vim": (
            theirs.ViM(None, d=16, w=head.weight, b=head.bias), igeood.white_box,
            lambda d: d.predict_features(read["test"].features[HEAD]),
        ),
        "odin": (theirs.ODIN(model), igeood.black_box, lambda d: d.predict(data.test)),
    }  # fmt: skip
    for name, (detector, box, scores) in cases.items():
        guard = box(model, method=igeood.wrap(detector, higher_is="ood")).fit(data.train).calibrate(data.held_out)
        if name in ("knn", "vim"):
            detector.fit_features(z, y)
        # in their float32 ViM takes a term of about 10 from another: 1e-5 is left of it, more or less by the processor
        torch.testing.assert_close(guard.score(data.test), scores(detector).detach().double(), rtol=1e-4, atol=1e-4)
        assert 0.8 < 1 - guard.predict(data.test).is_ood.double().mean() <= 1, name
        again = guard.score(data.test)
        assert torch.equal(guard.fit(data.train).score(data.test), again)  # a fit starts anew


def test_objects_and_functions(known):
    logits, labels = known.train.logits, known.train.labels
    plain = igeood.black_box(method=igeood.wrap(lambda f: f.amax(dim=1), higher_is="id")).fit(logits, labels)
    torch.testing.assert_close(plain.score(known.test.logits), -known.test.logits.amax(dim=1).double())
    turned = igeood.black_box(method=igeood.wrap(lambda f: f.amax(dim=1), higher_is="ood")).fit(logits, labels)
    torch.testing.assert_close(turned.score(known.test.logits), -plain.score(known.test.logits))
    factor = LocalOutlierFactor(novelty=True, n_neighbors=10)  # scored by its scores, not by its verdict
    wrapped = igeood.wrap(factor, higher_is="id", on="features")
    guard = igeood.white_box(method=wrapped).fit(known.train).calibrate(known.held_out)
    train, test = (list(part.features.values())[-1].numpy() for part in (known.train, known.test))
    np.testing.assert_allclose(guard.score(known.test), -factor.fit(train).score_samples(test))
    assert guard.predict(known.ood).is_ood.double().mean() > 0.5
    assert guard.explain(known.test[:2]).columns == ["output"]


def test_what_cannot_be(known, tmp_path):
    wrapped = igeood.wrap(lambda f: f.amax(dim=1), higher_is="id")
    guard = igeood.black_box(method=wrapped).fit(known.train.logits)
    with pytest.raises(InputError, match=r"^detector: <lambda> is not ours, and cannot be saved; keep"):
        guard.save(tmp_path / "guard")
    assert not list(tmp_path.iterdir())
    for options, message in (
        ({"higher_is": "up"}, "higher_is: expected 'ood' or 'id', got 'up'; say what"),
        ({"higher_is": "id", "on": "pixels"}, "on: no 'pixels'; there are logits, features, inputs"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            igeood.wrap(lambda f: f, **options)
    with pytest.raises(InputError, match=r"^detector: 3 has no `predict` and is no function; give an object"):
        igeood.wrap(3, higher_is="id")
    with pytest.raises(InputError, match=r"^method: <lambda> is not one for a black box"):
        igeood.black_box(method=igeood.wrap(lambda features: features[:, 0], higher_is="id"))
    for result, problem in ((lambda f: f, r"shape \(400, 10\)"), (lambda f: f[:, 0] * torch.nan, "NaN")):
        with pytest.raises(InputError, match=f"^detector: <lambda> returned {problem} for 400 samples; it has to"):
            igeood.wrap(result, higher_is="id").fit(known.train.logits).score(known.test.logits)


class Stepping:
    """Runs a model of its own, with a gradient."""

    def __init__(self, model):
        self.model = model

    def predict(self, x):
        x = x.clone().requires_grad_()
        self.model(x).logsumexp(dim=1).sum().backward()
        return self.model(x - 0.01 * x.grad.sign()).amax(dim=1)


def test_a_model_inside_a_detector_is_left_as_found(model, data):
    inner = copy.deepcopy(model).train()
    for weight in inner.parameters():
        weight.grad = torch.ones_like(weight)
    before = copy.deepcopy(inner.state_dict())
    guard = igeood.black_box(model, method=igeood.wrap(Stepping(inner), higher_is="id")).fit(data.train)
    assert guard.summary.samples == {}  # it learns nothing
    assert torch.equal(guard.score(data.test), guard.score(data.test))
    assert inner.training
    assert all((weight.grad == 1).all() for weight in inner.parameters())
    assert all(torch.equal(value, before[name]) for name, value in inner.state_dict().items())


class Older:
    """Logits by the name of features, beside a way through its model."""

    def fit(self, data_loader):  # noqa: ARG002
        raise AssertionError

    def fit_features(self, logits, labels):  # noqa: ARG002
        self.shift = logits.mean()

    def predict_features(self, logits):
        return self.shift - logits.amax(dim=1)


def test_what_is_called_features_may_be_logits(known):
    guard = igeood.black_box(method=igeood.wrap(Older(), higher_is="ood")).fit(known.train.logits)
    expected = known.train.logits.mean() - known.test.logits.amax(dim=1)
    torch.testing.assert_close(guard.score(known.test.logits), expected.double(), rtol=1e-5, atol=1e-5)
