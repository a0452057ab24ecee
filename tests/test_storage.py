"""One safe file: whole or refused, and never executed."""

import os
import pickle
import stat
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import igeood
from igeood import storage
from igeood.errors import GuardFileError, InputError
from igeood.outputs import row_keys


@pytest.fixture
def saved(make, tmp_path):
    """A small tuned and calibrated guard, and its file."""
    data = make(3, n=90, margin=4.0)
    guard = igeood.black_box().fit(data.train, data.labels).tune(data.held_out, data.ood).calibrate(data.held_out)
    path = tmp_path / "guard.safetensors"
    guard.save(path)
    return guard, path, data


def test_round_trip_is_bit_identical(saved, tmp_path):
    guard, path, data = saved
    loaded = igeood.load(path)
    for batch in (data.test, data.ood):
        one, other = guard.predict(batch), loaded.predict(batch)
        for name in ("is_ood", "score", "p_value", "label"):
            assert torch.equal(getattr(one, name), getattr(other, name))
    assert loaded.tuning == guard.tuning
    assert loaded.calibration.promise == guard.calibration.promise
    assert loaded.calibration.left_out == guard.calibration.left_out == guard.tuning.n_id
    loaded.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_a_guard_saved_before_training_samples_were_counted_is_read(saved):
    guard, path, data = saved
    record, tensors = storage.read(path)
    assert record["calibration"].pop("trained_on") == 0
    storage.write(path, record, tensors)
    loaded = igeood.load(path)
    assert loaded.promise == guard.promise
    assert torch.equal(loaded.predict(data.ood).is_ood, guard.predict(data.ood).is_ood)


def test_a_model_that_is_none_and_swapped_arguments(saved):
    _, path, _ = saved
    with pytest.raises(InputError, match=r"^model: expected a torch.nn.Module, got dict; "):
        igeood.load(path, {})
    with pytest.raises(InputError, match=r"^path: expected the guard's file, got Linear; "):
        igeood.load(torch.nn.Linear(2, 2), path)


def test_a_loaded_guard_remembers_what_tune_used(saved):
    _, path, data = saved
    loaded = igeood.load(path).calibrate(data.held_out)
    assert loaded.calibration.left_out == loaded.tuning.n_id > 0
    with pytest.raises(igeood.errors.NotReadyError, match="call fit again"):
        loaded.tune(data.held_out, data.ood)


def test_a_loaded_guard_knows_its_training_samples(saved, tmp_path):
    guard, path, data = saved
    loaded = igeood.load(path)
    assert np.array_equal(loaded.fitted_on, np.unique(row_keys(data.train)))
    with pytest.warns(igeood.errors.IgeoodWarning, match="id_data: 90 of 90 samples are training samples"):
        loaded.calibrate(data.train)
    record, tensors = storage.read(path)
    del tensors["fitted_on"]
    storage.write(tmp_path / "earlier.safetensors", record, tensors)
    earlier = igeood.load(tmp_path / "earlier.safetensors")
    assert len(earlier.fitted_on) == 0
    assert torch.equal(earlier.predict(data.test).score, guard.predict(data.test).score)


def test_an_uncalibrated_guard_can_be_saved(make, tmp_path):
    data = make(3, n=60)
    igeood.black_box(method="energy").fit(data.train).save(tmp_path / "g.safetensors")
    loaded = igeood.load(tmp_path / "g.safetensors")
    assert loaded.calibration is None
    assert loaded.calibrate(data.held_out).predict(data.test).is_ood.shape == (60,)


def test_the_metadata_is_readable_json(saved):
    guard, path, _ = saved
    record, tensors = storage.read(path)
    assert record["schema"] == storage.SCHEMA
    assert record["igeood"] == igeood.__version__
    assert (record["method"], record["n_classes"]) == ("igeood-logits", 3)
    assert record["params"] == guard.detector.params()
    assert record["calibration"]["threshold"] == guard.calibration.threshold
    assert record["calibration"]["n"] == len(guard.calibration.scores)
    assert set(tensors) == {"detector.centroids_", "calibration.scores", "fitted_on", "tuned_on"}


def test_every_truncation_is_refused(saved, tmp_path):
    _, path, _ = saved
    content, cut = path.read_bytes(), tmp_path / "cut.safetensors"
    for size in [*range(0, len(content), 97), len(content) - 1]:
        cut.write_bytes(content[:size])
        with pytest.raises(GuardFileError, match=r"cut\.safetensors"):
            igeood.load(cut)
    cut.write_bytes(content + b"\0")
    with pytest.raises(GuardFileError):
        igeood.load(cut)


def test_every_flipped_byte_is_refused(saved, tmp_path):
    _, path, _ = saved
    content, flipped = path.read_bytes(), tmp_path / "flipped.safetensors"
    for position in range(0, len(content), 3):
        changed = bytearray(content)
        changed[position] ^= 1 << (position % 8)
        flipped.write_bytes(changed)
        with pytest.raises(GuardFileError):
            igeood.load(flipped)


def test_a_changed_digit_that_stands_for_the_same_number_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    storage.write(path, {"share": 0.06666666666666667}, {"x": torch.zeros(2)})
    content = path.read_bytes()
    assert float("0.06666666666666666") == 0.06666666666666667
    path.write_bytes(content.replace(b"0.06666666666666667", b"0.06666666666666666"))
    with pytest.raises(GuardFileError, match="damaged"):
        storage.read(path)
    path.write_bytes(content)
    assert storage.read(path)[0]["share"] == 0.06666666666666667


class Bomb:
    """A pickle that would leave a trace if anything ran it."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return (os.mkdir, (str(self.trace),))


def test_a_renamed_pickle_is_refused_and_not_run(tmp_path):
    trace, path = tmp_path / "trace", tmp_path / "guard.safetensors"
    path.write_bytes(pickle.dumps(Bomb(trace)))
    with pytest.raises(GuardFileError, match="no guard file"):
        igeood.load(path)
    torch.save({"x": Bomb(trace)}, path)
    with pytest.raises(GuardFileError, match="no guard file"):
        igeood.load(path)
    assert not trace.exists()
    pickle.loads(pickle.dumps(Bomb(trace)))  # the bomb works
    assert trace.exists()


def test_a_newer_schema_asks_to_upgrade(saved, monkeypatch, tmp_path):
    guard, _, _ = saved
    monkeypatch.setattr(storage, "SCHEMA", storage.SCHEMA + 1)
    guard.save(tmp_path / "newer.safetensors")
    monkeypatch.undo()
    with pytest.raises(GuardFileError, match=r"has schema 2, .* reads up to 1: upgrade igeood"):
        igeood.load(tmp_path / "newer.safetensors")


def test_other_safetensors_files_are_no_guards(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"w": torch.zeros(2)}, path)
    with pytest.raises(GuardFileError, match="no guard"):
        igeood.load(path)
    save_file({"w": torch.zeros(2)}, path, {"igeood": "[]"})
    with pytest.raises(GuardFileError, match="no guard"):
        igeood.load(path)
    storage.write(path, {"method": "nonsense"}, {})
    with pytest.raises(GuardFileError, match="does not describe a guard"):
        igeood.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"detector.centroids_": torch.zeros(7)},
        {"detector.centroids_": torch.zeros(3, 4)},
        {"detector.centroids_": torch.full((3, 3), torch.nan)},
        {"detector.weights_": torch.zeros(3)},
        {"tuned_on": torch.zeros(3, dtype=torch.int8)},
        {"fitted_on": torch.zeros(3)},
        {"fitted_on": torch.zeros(3, 2, dtype=torch.int64)},
        {"calibration.scores": torch.zeros(2)},
    ],
)
def test_contents_that_do_not_fit_are_refused(saved, tmp_path, change):
    record, tensors = storage.read(saved[1])
    storage.write(tmp_path / "odd.safetensors", record, {**tensors, **change})
    with pytest.raises(GuardFileError, match="does not describe a guard"):
        igeood.load(tmp_path / "odd.safetensors")


ODD = [
    {"preparation": odd}
    for odd in (
        {},
        [],
        {"size": 0, "mean": [0.5], "std": [0.5]},
        {"size": "16", "mean": [0.5], "std": [0.5]},
        {"size": 16, "mean": [0.5, 0.5], "std": [0.5]},
        {"size": 16, "mean": [0.5], "std": [0.0]},
        {"size": 16, "mean": 0.5, "std": [0.5]},
    )
]


@pytest.mark.parametrize("change", [{"n_classes": 5}, {"n_classes": "x"}, {"params": {}}, {"method": "energy"}, *ODD])
def test_records_that_do_not_fit_are_refused(saved, tmp_path, change):
    record, tensors = storage.read(saved[1])
    if change == {"params": {}}:
        change = {"params": {"temperature": -1.0}}
    storage.write(tmp_path / "odd.safetensors", {**record, **change}, tensors)
    with pytest.raises(GuardFileError, match="does not describe a guard"):
        igeood.load(tmp_path / "odd.safetensors")


def test_nested_and_foreign_metadata(tmp_path):
    path = tmp_path / "deep.safetensors"
    save_file({"w": torch.zeros(2)}, path, {"igeood": "[" * 100_000})
    with pytest.raises(GuardFileError, match="no guard"):
        igeood.load(path)
    save_file({"w": torch.zeros(2, dtype=torch.bfloat16)}, path, {"igeood": '{"schema": 1}'})
    with pytest.raises(GuardFileError, match="SHA-256"):
        igeood.load(path)


def test_a_header_of_absurd_size_is_refused(tmp_path):
    path = tmp_path / "guard.safetensors"
    path.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(GuardFileError):
        igeood.load(path)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(GuardFileError, match="there is no guard file"):
        igeood.load(tmp_path / "none.safetensors")
    with pytest.raises(GuardFileError, match="there is no guard file"):
        igeood.load(tmp_path)


def test_a_save_that_fails_leaves_the_old_file(saved, monkeypatch):
    guard, path, _ = saved
    before = path.read_bytes()

    def broken(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="No space"):
        guard.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_saving_to_no_name(saved):
    with pytest.raises(InputError, match="names no file"):
        saved[0].save(".")


def test_saving_into_a_folder_that_is_not_there(saved, tmp_path):
    with pytest.raises(InputError, match="is no folder; make it first"):
        saved[0].save(tmp_path / "none" / "guard.safetensors")


def test_the_file_has_the_usual_permissions(saved):
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(saved[1].stat().st_mode) == 0o666 & ~umask


def test_a_file_that_is_replaced_keeps_its_permissions(saved):
    guard, path, _ = saved
    for mode in (0o600, 0o664):
        path.chmod(mode)
        guard.save(path)
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_saving_through_a_link(saved, tmp_path):
    guard, path, _ = saved
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far" / "guard.safetensors")
    for _ in range(2):  # the first makes what the link leads to
        guard.save(tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "far" / "guard.safetensors").read_bytes() == path.read_bytes()
    assert [p.name for p in (tmp_path / "far").iterdir()] == ["guard.safetensors"]


def test_what_is_no_file_is_not_replaced(saved, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is no ordinary file"):
        saved[0].save(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_the_digest_covers_names_and_shapes():
    base = storage._digest({}, {"a": torch.zeros(4)})
    assert base != storage._digest({}, {"b": torch.zeros(4)})
    assert base != storage._digest({}, {"a": torch.zeros(2, 2)})
    assert base != storage._digest({"x": 1}, {"a": torch.zeros(4)})
