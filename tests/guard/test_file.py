"""A guard's file: what it keeps, which models it serves, and what is refused."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import igeood
from igeood.errors import GuardFileError, InputError, NotReadyError
from igeood.files import SCHEMA, read_record, write_record


@pytest.fixture(scope="module")
def guard(model, data):
    guard = igeood.white_box(model, method="igeood", std=(0.2, 0.3, 0.4))
    return guard.fit(data.train).calibrate(data.held_out, tpr=0.9)


@pytest.fixture
def path(guard, tmp_path):
    guard.save(tmp_path / "guard.safetensors")
    return tmp_path / "guard.safetensors"


def test_everything_but_the_training_sample_comes_back(guard, model, data, path):
    for same in (model, nn.DataParallel(model)):
        loaded = igeood.load(path, same)
        assert torch.equal(loaded.predict(data.test).p_value, guard.predict(data.test).p_value)
    assert (loaded.calibration.tpr, loaded.promise, loaded.source.std) == (0.9, guard.promise, [0.2, 0.3, 0.4])
    assert np.array_equal(loaded.fitted_on.keys, guard.fitted_on.keys)  # so that calibrating on them is noticed
    with pytest.raises(NotReadyError):
        loaded.tune(data.held_out, data.ood)
    loaded.fit(data.train).tune(data.held_out, data.ood, search=None)
    white = igeood.white_box(model, layers=["0"], method="igeood").fit(data.train)
    white.save(path.with_name("white"))
    assert igeood.load(path.with_name("white"), model).fit(data.train).layers == ["0"]
    assert torch.equal(copy.deepcopy(white).score(data.test), white.score(data.test))
    record = read_record(path)[0]
    assert (record["schema"], record["kind"], record["method"]) == (SCHEMA, "guard", "igeood")
    assert (record["layers"], record["n_classes"], record["model"]) == (["2", "6"], 4, guard.source.fingerprint)


def test_another_model_is_refused_by_its_fingerprint(guard, model, data, path, tmp_path, refused):
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed[0].weight[0, 0, 0, 0] += 0.1
    with refused("model") as raised:
        igeood.load(path, changed)
    assert all(igeood.model.fingerprint.fingerprint(each) in str(raised.value) for each in (model, changed))
    assert not torch.equal(igeood.load(path, changed, strict=False).score(data.test), guard.score(data.test))
    with pytest.raises((InputError, GuardFileError), match="'2'"):  # a layer that it does not have
        igeood.load(path, nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), strict=False)
    igeood.black_box().fit(5 * np.eye(3), [0, 1, 2]).save(tmp_path / "arrays.safetensors")
    for file, wrong in ((path, None), (path, "model"), (tmp_path / "arrays.safetensors", model)):
        with refused("model"):
            igeood.load(file, wrong)


FINDING = {"code": "a", "level": "info", "message": "b", "cure": "c"}
FORGED = {
    "schema": [SCHEMA - 1, SCHEMA + 1, None],
    "kind": ["summary"],
    "method": ["no such method", None],
    "n_classes": [5, 1, True],
    "classes": [["a"] * 5],
    "layers": [None],
    "epsilon": ["x"],
    "device": [1, "\x1b[2J", "c" * 999],
    "autocast": [16, ["bfloat16"], ""],
    "calibration": [{"tpr": 0.95}],
    "preparation": [{"size": 0}],
    "health": [{"fit": [{**FINDING, **change}]} for change in ({"level": "x"}, {"message": "\x1b[2J"}, {"cure": ""})],
    "seen": [{"fitted_on": [1, 2]}, {}],
}


def test_files_that_are_refused(model, path):
    record, tensors = read_record(path)
    for name, values in FORGED.items():
        for value in values:
            write_record(path, {**record, name: value}, tensors)
            if name == "schema":  # the writer puts its own
                path.write_bytes(
                    path.read_bytes().replace(f'schema\\": {SCHEMA}'.encode(), f'schema\\": {value}'.encode())
                )
            with pytest.raises(GuardFileError) as raised:
                igeood.load(path, model)
            assert "\n" not in str(raised.value), name
    tensors["detector.scale_"] *= torch.nan
    write_record(path, record, tensors)
    with pytest.raises(GuardFileError):
        igeood.load(path, model)


def test_only_guards_and_empty_files_are_written_over(guard, path, data, tmp_path, refused):
    other, summary = tmp_path / "other", tmp_path / "summary"
    igeood.summarise(guard, data.held_out).save(summary)
    for content in (b"precious", path.read_bytes()[:-9], summary.read_bytes()):
        other.write_bytes(content)
        with refused("path"):
            guard.save(other)
        assert other.read_bytes() == content
    other.write_bytes(b"")
    for there in (other, path):
        guard.save(there)
    assert path.read_bytes() == other.read_bytes()
