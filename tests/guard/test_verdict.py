"""Verdicts as sequences, the classes' names in them, and reasons in words."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import igeood
from igeood.errors import InputError, MissingExtraError
from igeood.geometry import categorical

NAMES = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen", "ibis", "jay")


@pytest.fixture(scope="module")
def guard(classifier):
    return igeood.black_box().fit(classifier.train, classifier.labels, classes=NAMES).calibrate(classifier.held_out)


@pytest.mark.parametrize("as_kind", [torch.Tensor.clone, torch.Tensor.numpy])
def test_a_verdict_is_a_sequence(guard, classifier, as_kind, monkeypatch):
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
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"pandas is needed; pip install pandas, or use to_dict\(\)"):
        verdict.to_pandas()


def test_the_text_of_a_verdict(guard, classifier):
    logits = classifier.ood[:9].clone()
    logits[1] = torch.nan
    verdict = guard.predict(logits, on_error="refuse")
    title, header, *rows, more = repr(verdict).splitlines()
    assert title == f"Verdict(9 judged, {int(verdict.is_ood.sum())} out-of-distribution, 1 not read)"
    assert header.split() == ["is_ood", "score", "p_value", "label", "name", "reason"]
    assert rows[1].split()[:5] == ["True", "inf", "0.002494", "-1", "None"]
    assert (len({len(row) for row in rows}), len(rows), more) == (1, 5, "  … 4 more")
    assert (verdict[1].name, verdict[2:].reason) == (None, None)
    assert repr(guard.predict(logits[:0])).startswith("Verdict(0 judged, 0 out-of-distribution)\n")


def test_names_come_from_the_argument_the_loader_or_the_model_and_travel(guard, model, data, classifier, tmp_path):
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
    for labels, expected in (
        ({0: "ant", 1: "bee", 2: "cat", 3: "dog"}, NAMES[:4]),
        ({str(i): name for i, name in enumerate(NAMES[:4])}, NAMES[:4]),
        ({i: f"LABEL_{i}" for i in range(4)}, None),
        ({1: "ant"}, None),
    ):
        model.config = SimpleNamespace(id2label=labels)
        assert igeood.black_box(model).fit(data.train).classes == expected
    for classes, message in (
        (NAMES[:9], "9 names for 10 classes; give one for each column"),
        ([*NAMES[:9], "a\nb"], "is empty, not printable, or of more than 1000 characters"),
        (range(10), "expected a list of 10 names, got range"),
    ):
        with pytest.raises(InputError, match=f"^classes: .*{message}"):
            igeood.black_box().fit(classifier.train, classifier.labels, classes=classes)


@pytest.mark.parametrize("method", ["igeood-logits", "igeood-logits-min", "logits-product"])
def test_a_black_box_names_the_nearest_centroids_and_what_is_usual(classifier, method):
    guard = igeood.black_box(method=method).fit(classifier.train, classifier.labels, classes=NAMES)
    told, detector = guard.explain(classifier.ood[:2].numpy()), guard.detector
    apart = categorical.pairwise_distance(classifier.train, detector.centroids_, detector.temperature)
    own = apart[torch.arange(400), classifier.labels].double().numpy()
    usual = [own[classifier.labels.numpy() == c].mean() for c in range(10)]
    np.testing.assert_allclose(told.centroid_usual, usual, rtol=1e-5)
    first, second = np.argsort(told.centroid_distance[1])[:2]
    text = str(told).splitlines()[1]
    distance = f"{told.centroid_distance[1, first]:.3g} ({usual[first]:.3g}), {NAMES[second]} at "
    assert f"; nearest centroids (usual distance) {NAMES[first]} at {distance}" in text
    del detector.usual_  # as in older files
    assert f"; nearest centroids {NAMES[first]} at " in str(guard.explain(classifier.ood[:2]))


def test_other_methods_name_the_likeliest_classes(classifier, known):
    guard = igeood.black_box(method="energy").fit(classifier.train)
    told, shares = guard.explain(classifier.ood[:3], top=2), classifier.ood[:3].double().softmax(1)
    torch.testing.assert_close(told.probability, shares.sort(descending=True).values[:, :2])
    likeliest = int(shares[0].argmax())
    assert str(told).startswith(f"sample 0: score {told.score[0]:.4g}; likeliest {likeliest} {shares[0].max():.1%}, ")
    white = igeood.white_box(method="igeood").fit(known.train, classes=NAMES)
    text = str(white.explain(known.test[:1]))
    assert any(f"(nearest class {name})" in text for name in NAMES)
    assert "likeliest" not in text
