"""Verdicts as sequences, the classes' names in them, and reasons in words."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import igeood

NAMES = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen", "ibis", "jay")


@pytest.fixture(scope="module")
def guard(classifier):
    return igeood.black_box().fit(classifier.train, classifier.labels, classes=NAMES).calibrate(classifier.held_out)


@pytest.mark.parametrize("as_kind", [torch.Tensor.clone, torch.Tensor.numpy])
def test_a_verdict_is_a_sequence(guard, classifier, as_kind):
    verdict = guard.predict(as_kind(classifier.ood[:40]))
    rows = list(verdict)
    assert rows[3] == verdict[3] == verdict[-37] == verdict[np.int64(3)]
    assert list(map(type, rows[3])) == [bool, float, float, int, str, type(None)]
    assert rows[3].name == NAMES[int(classifier.ood[3].argmax())] == verdict.name[3]
    for part, kept in ((slice(2, 9), range(2, 9)), ([5, 1], [5, 1]), (verdict.is_ood, np.flatnonzero(verdict.is_ood))):
        assert list(verdict[part]) == [rows[row] for row in kept]
        assert type(verdict[part].score) is type(verdict.score)
    with pytest.raises(IndexError):
        verdict[40]
    columns = verdict.to_dict()
    assert list(columns) == ["is_ood", "score", "p_value", "label", "name"]
    assert columns["score"] == verdict.score.tolist()
    assert verdict.to_pandas().to_dict("list") == columns
    assert all(str(count) in repr(verdict) for count in (40, int(verdict.is_ood.sum())))


def test_names_come_from_the_user_the_loader_or_the_model_and_travel(guard, model, data, classifier, tmp_path, refused):
    guard.save(tmp_path / "guard.safetensors")
    loaded = igeood.load(tmp_path / "guard.safetensors")
    assert loaded.classes == loaded.fit(classifier.train, classifier.labels).classes == NAMES
    assert loaded.fit(classifier.train[:, :3], classifier.labels % 3).classes is None  # of other classes

    named = TensorDataset(*data.images(200, 1))
    named.classes = list(NAMES[:4])
    for loader in (DataLoader(named, 64), DataLoader(Subset(named, range(100)), 64)):
        assert igeood.black_box(model).fit(loader).classes == NAMES[:4]
    for classes in (NAMES, ["a", "b", "c", "\x1b"], [0, 1, 2, 3], 4):  # guesses that do not fit
        named.classes = classes
        assert igeood.black_box(model).fit(DataLoader(named, 64)).classes is None
    model = torch.nn.Sequential(model)
    for labels, expected in (({str(i): name for i, name in enumerate(NAMES[:4])}, NAMES[:4]), ({1: "ant"}, None)):
        model.config = SimpleNamespace(id2label=labels)
        assert igeood.black_box(model).fit(data.train).classes == expected
    for classes in (NAMES[:9], [*NAMES[:9], "a\nb"], range(10)):
        with refused("classes"):
            igeood.black_box().fit(classifier.train, classifier.labels, classes=classes)


def test_other_methods_name_the_likeliest_classes(classifier):
    guard = igeood.black_box(method="energy").fit(classifier.train, classes=NAMES)
    reasons, shares = guard.explain(classifier.ood[:3], top=2), classifier.ood[:3].double().softmax(1)
    torch.testing.assert_close(reasons.probability, shares.sort(descending=True).values[:, :2])
    assert NAMES[int(shares[0].argmax())] in str(reasons).splitlines()[0]
