"""A guard's file: what it keeps, which models it serves, and what is refused."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import igeood
from igeood.errors import GuardFileError, InputError, NotReadyError
from igeood.files import read_record, write_record


@pytest.fixture(scope="module")
def guard(model, data):
    guard = igeood.white_box(model, method="igeood", std=(0.2, 0.3, 0.4), mean=0.5)
    return guard.fit(data.train).calibrate(data.held_out, tpr=0.9)


@pytest.fixture
def path(guard, tmp_path):
    guard.save(tmp_path / "guard.safetensors")
    return tmp_path / "guard.safetensors"


def test_everything_but_the_training_sample_comes_back(guard, model, data, path):
    for same in (model, nn.DataParallel(model)):
        loaded = igeood.load(path, same)
        assert torch.equal(loaded.predict(data.test).p_value, guard.predict(data.test).p_value)
    assert (loaded.calibration.tpr, loaded.promise) == (0.9, guard.promise)
    assert (loaded.inputs.mean, loaded.inputs.std) == (0.5, [0.2, 0.3, 0.4])
    assert np.array_equal(loaded.fitted_on.keys, guard.fitted_on.keys)  # so that calibrating on them is noticed
    with pytest.raises(NotReadyError, match="tune: a loaded guard has no training sample; call fit again first"):
        loaded.tune(data.held_out, data.ood)
    loaded.fit(data.train).tune(data.held_out, data.ood)
    record = read_record(path)[0]
    assert (record["schema"], record["kind"], record["method"]) == (2, "guard", "igeood")
    assert (record["layers"], record["n_classes"], record["model"]) == (["2", "6"], 4, guard.inputs.fingerprint)


def test_another_model_is_refused_by_its_fingerprint(guard, model, data, path, tmp_path):
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed[0].weight[0, 0, 0, 0] += 1e-3
    both = r"^model: its fingerprint is [0-9a-f]{16}, .* made with [0-9a-f]{16}.*strict=False"
    with pytest.raises(InputError, match=both):
        igeood.load(path, changed)
    assert not torch.equal(igeood.load(path, changed, strict=False).score(data.test), guard.score(data.test))
    with pytest.raises(InputError, match=r"^model: the guard in .* needs its model: load\(path, model\)"):
        igeood.load(path)
    with pytest.raises((InputError, GuardFileError), match="the model has no '2'"):
        igeood.load(path, nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), strict=False)
    igeood.black_box().fit(5 * np.eye(3), [0, 1, 2]).save(tmp_path / "arrays.safetensors")
    with pytest.raises(InputError, match="has no model; leave it out"):
        igeood.load(tmp_path / "arrays.safetensors", model)


def test_a_file_without_health_is_read_and_a_false_finding_is_refused(guard, model, data, path):
    record, tensors = read_record(path)
    older = {name: value for name, value in record.items() if name not in ("known", "health", "sha256")}
    write_record(path, older, {name: value for name, value in tensors.items() if name != "training_scores"})
    loaded = igeood.load(path, model)
    assert torch.equal(loaded.score(data.test), guard.score(data.test))
    assert (loaded.health, loaded.fitted_on.identified) == ([], True)
    finding = {"code": "a", "level": "info", "message": "b", "cure": "c"}
    for name, value in (
        ("health", {"fit": [{**finding, "level": "error"}]}),
        ("health", {"fit": [{**finding, "message": "\x1b[2J"}]}),
        ("health", {"fit": [{**finding, "cure": ""}]}),
        ("known", {"fitted_on": [1, 2, True, []]}),
    ):
        write_record(path, {**older, name: value}, tensors)
        with pytest.raises(GuardFileError, match=name):
            igeood.load(path, model)


def test_files_that_are_refused(model, path):
    record, tensors = read_record(path)
    forged = {
        "n_classes": 5,
        "classes": ["a"] * 5,
        "layers": None,
        "epsilon": "x",
        "calibration": {"tpr": 0.95},
        "preparation": {"size": 0},
    }
    for name, value in forged.items():
        write_record(path, {**record, name: value}, tensors)
        with pytest.raises(GuardFileError, match="does not describe a guard"):
            igeood.load(path, model)
    tensors["detector.scale_"] *= torch.nan
    write_record(path, record, tensors)
    with pytest.raises(GuardFileError, match="values that are not finite"):
        igeood.load(path, model)


def test_only_guards_and_empty_files_are_written_over(guard, path, data, model, tmp_path):
    other, summary = tmp_path / "other", tmp_path / "summary"
    igeood.summarise(guard, data.held_out).save(summary)
    damaged = path.read_bytes()[:-9]
    for content in (b"precious", damaged, summary.read_bytes()):
        other.write_bytes(content)
        with pytest.raises(InputError, match="other is there, and is no guard's file; name another file, or remove"):
            guard.save(other)
        assert other.read_bytes() == content
    other.write_bytes(b"")
    record, tensors = read_record(path)
    del record["classes"]  # as older versions wrote it
    write_record(path, record, tensors)
    assert igeood.load(path, model).classes is None
    for there in (other, path):
        guard.save(there)
    assert path.read_bytes() == other.read_bytes()


def test_a_guard_that_is_loaded_in_inference_mode_can_still_take_the_input_step(model, data, tmp_path):
    guard = igeood.grey_box(model, epsilon=0.001).fit(data.train)
    guard.save(tmp_path / "guard.safetensors")
    with torch.inference_mode():
        loaded = igeood.load(tmp_path / "guard.safetensors", model)
        inside = loaded.score(data.test)
    assert torch.equal(inside, guard.score(data.test))
    assert torch.equal(loaded.score(data.test), inside)
