"""Guards without a model: arrays of logits, and outputs with features."""

from functools import partial

import numpy as np
import pytest
import torch

import igeood
from igeood.errors import InputError, NotReadyError


@pytest.fixture
def guard(classifier):
    return igeood.black_box(method="igeood-logits").fit(classifier.train, classifier.labels)


def test_the_whole_way(guard, classifier):
    guard.calibrate(classifier.held_out, tpr=0.9, guarantee="tolerance", confidence=0.99)
    raised = guard.score(classifier.held_out) + guard.calibration.margin  # for rounding
    assert guard.threshold == igeood.calibration.threshold(raised, 0.9, "tolerance", 0.99)
    verdict = guard.calibrate(classifier.held_out).predict(classifier.test)
    assert verdict.is_ood.double().mean() < 0.1
    assert guard.predict(classifier.ood).is_ood.double().mean() > 0.8
    assert torch.equal(verdict.p_value, igeood.calibration.p_values(guard.score(classifier.held_out), verdict.score))
    verdict = guard.calibrate(classifier.held_out.numpy()).predict(classifier.test.numpy())
    dtypes = {"is_ood": bool, "score": np.float64, "p_value": np.float64, "label": np.int64}
    assert {name: getattr(verdict, name).dtype for name in dtypes} == dtypes
    assert not guard.score(classifier.test.clone().requires_grad_()).requires_grad


NAMES = ["zebra", *map(chr, range(97, 106))]


def test_labels_may_be_names(classifier, refused):
    names = np.array(NAMES)[classifier.labels]
    expected = igeood.black_box().fit(classifier.train, classifier.labels).score(classifier.test)
    pairs = [(classifier.train[half], names[half].tolist()) for half in (slice(0, 200), slice(200, None))]
    for arguments in ((classifier.train, names), ((classifier.train, names.astype(object)),), (pairs,), (iter(pairs),)):
        guard = igeood.black_box().fit(*arguments, classes=np.array(NAMES))
        assert guard.classes == tuple(NAMES)
        torch.testing.assert_close(guard.score(classifier.test), expected)
    numbers = torch.argsort(torch.tensor([9, *range(9)]))
    summary = igeood.summarise(igeood.black_box(), classifier.train[:, numbers], names.tolist())  # sorted
    assert igeood.black_box().fit(summary).classes == tuple(sorted(NAMES))
    wrong = {"labels": (pairs, None, None), "3 classes": (classifier.train[:, :3], names, None)}
    wrong |= {"classes": (classifier.train, names, NAMES[1:]), "twice": (classifier.train, names, [*NAMES[:9], "a"])}
    for bad in (3, None, "", "emu"):
        wrong[f"row 7 has {bad!r}"] = (classifier.train, [*names[:7].tolist(), bad, *names[8:].tolist()], NAMES)
    for case, (data, labels, classes) in wrong.items():
        with pytest.raises(InputError) as caught:
            igeood.black_box().fit(data, labels, classes=classes)
        assert caught.value.argument == ("labels" if case[0] in "lr" else "classes"), case
        assert "classes" in caught.value.cure
        assert not case.startswith("row") or case in caught.value.what


def test_texts_that_are_numbers_are_numbers():
    labels = torch.arange(11).repeat(20)  # "10" sorts before "2"
    logits = 5.0 * torch.eye(11)[labels] + torch.rand(220, 11, generator=torch.Generator().manual_seed(0))
    black_box = partial(igeood.black_box, method="igeood-logits")
    texts = labels.numpy().astype(str)
    expected = black_box().fit(logits, labels).score(logits)
    order = sorted(map(str, range(11)))  # of a classifier that sorts texts
    sorted_logits = logits[:, [int(name) for name in order]]
    guard = black_box().fit([(logits, texts)])
    torch.testing.assert_close(guard.score(logits), expected)
    assert guard.classes is None
    guard = black_box().fit(sorted_logits, texts, classes=order)
    torch.testing.assert_close(guard.score(sorted_logits), expected)


def test_only_training_checks_labels(classifier, model, data, tmp_path):
    names = np.array(NAMES)
    guard = igeood.black_box(method="igeood-logits").fit(classifier.train, names[classifier.labels], classes=NAMES)
    guard.save(tmp_path / "g.safetensors")
    for one in (guard, igeood.load(tmp_path / "g.safetensors")):
        for labels in (np.full(len(classifier.held_out), "emu"), np.full(len(classifier.held_out), 99)):
            pair = (classifier.held_out, labels)
            assert len(one.calibrate(pair).predict(pair)) == len(labels)
            assert next(one.source.items(pair)).labels is None
        (item,) = one.source.items((classifier.held_out[:3], names[[4, 0, 9]]))
        assert item.labels.tolist() == [4, 0, 9]
    guard.tune(classifier.held_out, (classifier.ood, np.full(len(classifier.ood), "emu")))
    x, y = data.images(300, 1)
    guard = igeood.black_box(model).fit((x, names[y]), classes=NAMES[:4])
    assert len(guard.score((x, np.full(300, "emu")))) == 300
    assert torch.cat([batch.labels for batch in guard.source.items((x, names[y]))]).tolist() == y.tolist()
    assert [batch.labels for batch in guard.source.items([(x, ["emu"] * 300)])] == [None]


def test_features_are_read_by_layer(known, refused):
    guard = igeood.white_box(layers=["early"]).fit(known.train)
    assert guard.layers == ["early"]
    assert igeood.white_box().fit(known.train).layers == ["early", "block.late"]
    with refused("outputs"):
        guard.score(known.test.logits)


def blocks(logits, labels=None):
    """Blocks of 70 rows in one buffer, which is used again."""
    buffer = np.empty((70, logits.shape[1]), np.float32)
    for rows in torch.arange(len(logits)).split(70):
        buffer[: len(rows)] = logits[rows]
        yield buffer[: len(rows)] if labels is None else (buffer[: len(rows)], labels[rows].numpy())


def test_generators_of_blocks_that_reuse_their_memory(guard, classifier, refused):
    blockwise = igeood.black_box(method="igeood-logits").fit(blocks(classifier.train, classifier.labels))
    assert torch.equal(blockwise.score(blocks(classifier.test)), guard.score(classifier.test))
    blockwise.calibrate(blocks(classifier.held_out))
    assert torch.equal(blockwise.calibration.scores, guard.calibrate(classifier.held_out).calibration.scores)
    with refused("ood"):
        guard.tune(classifier.held_out, blocks(classifier.ood))
    with refused("logits"):
        guard.score(iter([]))


def test_fitting_again_forgets(guard, classifier, tmp_path):
    guard.tune(classifier.held_out, classifier.ood).calibrate(classifier.held_out).save(tmp_path / "guard.safetensors")
    assert guard.detector.temperature != 1.0
    loaded = igeood.load(tmp_path / "guard.safetensors")
    assert loaded.detector.params() == guard.detector.params()
    for each in (guard, loaded):
        each.fit(classifier.train, classifier.labels)
        assert (each.calibration, each.tuning, each.detector.temperature) == (None, None, 1.0)
        assert len(each.calibrate(classifier.held_out).calibration.left_out) == 0


FAILING = {
    "labels": lambda g, c: g.fit(c.train, c.labels + 1),
    "budget": lambda g, c: g.fit(c.train, c.labels, budget=1.5),
    "id_data": lambda g, c: g.tune(c.test[:10], c.ood),
    "ood": lambda g, c: g.tune(c.test, c.test),
    "share": lambda g, c: g.tune(c.test, c.ood, share=1.5),
    "epsilons": lambda g, c: g.tune(c.test, c.ood, epsilons=[-0.1]),
    "epsilons of arrays": lambda g, c: g.tune(c.test, c.ood, epsilons=[0.1]),
    "no epsilons": lambda g, c: g.tune(c.test, c.ood, epsilons=[]),
    "ids": lambda g, c: g.calibrate(c.test, ids=[1, 2]),
    "tpr": lambda g, c: g.tune(c.test, c.ood, tpr=1.0),
    "tpr of calibrate": lambda g, c: g.calibrate(c.test, tpr="x"),
    "top": lambda g, c: g.explain(c.test, top=0),
    "logits": lambda g, c: g.score(c.test[:, :9]),
}


def test_a_step_that_fails_leaves_the_guard_as_it_was(guard, classifier):
    for step in (guard.predict, igeood.black_box().score, igeood.black_box().calibrate, igeood.black_box().save):
        with pytest.raises(NotReadyError):
            step(classifier.test)
    guard.tune(classifier.held_out, classifier.ood).calibrate(classifier.held_out)
    tuning, before = guard.tuning, guard.predict(classifier.test)
    for name, step in FAILING.items():
        with pytest.raises(InputError) as raised:
            step(guard, classifier)
        assert name.removeprefix("no ").split()[0] in str(raised.value).split(";")[0], name
        torch.testing.assert_close(vars(guard.predict(classifier.test)), vars(before), rtol=0, atol=0)
        assert guard.tuning is tuning, name


def test_methods_and_options(refused):
    own = igeood.IgeoodLogits(centroid_temperature=1.0)
    assert igeood.black_box(method=own).detector is own
    for build, options, argument in (
        (igeood.black_box, {"method": own, "temperature": 2.0}, "method"),
        (igeood.white_box, {"method": igeood.detector("knn"), "k": 3}, "method"),
        (igeood.white_box, {"method": "knn", "temperature": 2.0}, "temperature"),
        (igeood.white_box, {"method": "knn", "k": -1}, "k"),
        (igeood.black_box, {"layers": ["early"]}, "layers"),
        (igeood.black_box, {"method": igeood.Igeood()}, "method"),
        (igeood.white_box, {"method": "energy"}, "method"),
        (igeood.white_box, {"epsilon": 0.1}, "epsilon"),
        (igeood.white_box, {"layers": []}, "layers"),
    ):
        with refused(argument):
            build(**options)
    assert igeood.white_box(method="knn", k=5).detector.k == 5
    built = igeood.black_box(method="igeood-logits", temperature=2.0, centroid_temperature=1.0)
    changed = igeood.black_box(method="igeood-logits", temperature=2.0).with_options(centroid_temperature=1.0)
    for guard in (built, changed):
        assert (guard.detector.temperature, guard.detector.centroid_temperature) == (2.0, 1.0)


def test_a_white_box_of_probabilities(known):
    train, held_out = (igeood.Outputs(p.logits.softmax(1), p.features, p.labels) for p in (known.train, known.held_out))
    guard = igeood.white_box(probabilities=True).fit(train).calibrate(held_out)
    assert guard.layers == ["early", "block.late"]
    assert guard.predict(known.ood.replace(logits=known.ood.logits.softmax(1))).is_ood.float().mean() > 0.9
