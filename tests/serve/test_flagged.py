"""The sample of refused inputs: bounded, the same whatever the order, and for people to read, empty and keep."""

import json
import time

import numpy as np
import pytest
import torch
from safetensors import safe_open

import igeood
from igeood.serve import flagged as module
from igeood.serve.flagged import Flagged
from igeood.serve.served import Served

PATIENCE = 30


@pytest.fixture
def flagged(tmp_path):
    """Makes samples in folders; closes them at the end."""
    made = []

    def make(name="kept", keep=8, seed=0):
        made.append(Flagged(tmp_path / name, keep, seed))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def foreign(guards):
    """A guard, and 60 different rows that it refuses."""
    guard = guards.logits.guard
    rows = np.random.default_rng(0).normal(size=(400, 10)).astype(np.float32)
    rows = rows[guard.predict(rows).is_ood][:60]
    assert len(rows) == 60
    return guard, rows


def served_of(guard):
    return Served(guard, guard.calibration, None, "")


def offer(sample, guard, inputs):
    """Offer rows, or inputs by name; returns the verdict."""
    tensors = inputs if isinstance(inputs, dict) else {"logits": inputs}
    tensors = {name: torch.from_numpy(value) for name, value in tensors.items()}
    served = served_of(guard)
    verdict = served.predict(tensors)
    sample.offer(served, tensors, verdict)
    return verdict


def settled(sample):
    """Wait until everything is written; the names of the files."""
    end = time.monotonic() + PATIENCE
    while sample._waiting and time.monotonic() < end:
        time.sleep(0.005)
    return sorted(path.name for path in sample.folder.iterdir() if path.suffix == ".safetensors")


def contents(path):
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["igeood"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_it_is_bounded_and_the_same_whatever_the_order_and_the_batches(flagged, foreign):
    guard, rows = foreign
    samples = [flagged(str(i)) for i in range(3)]
    orders = [np.arange(60), np.random.default_rng(1).permutation(60), np.arange(60)[::-1]]
    for sample, order, size in zip(samples, orders, (60, 1, 7), strict=True):
        for start in range(0, 60, size):
            offer(sample, guard, rows[order[start : start + size]])
            assert len(sample._waiting) + len(sample._kept) <= 8
    first, *others = map(settled, samples)
    assert (len(first), others) == (8, [first, first])
    kept = np.stack([contents(samples[0].folder / name)[1]["logits"][0].numpy() for name in first])
    smallest = np.argsort(igeood.Outputs(rows).keys ^ samples[0]._salt)[:8]
    np.testing.assert_array_equal(kept, rows[smallest])
    assert settled_with(flagged("other", seed=1), foreign) != first
    assert samples[0].record()["kept"] == 8


def settled_with(sample, foreign):
    offer(sample, *foreign)
    return settled(sample)


def test_files_say_what_was_sent_and_why_it_was_refused(flagged, guards):
    kind, sample = guards.features, flagged()
    guard = kind.guard
    verdict = offer(sample, guard, kind.inputs)
    names = settled(sample)
    assert len(names) == 8 <= verdict.is_ood.sum()
    for name in names:
        record, tensors = contents(sample.folder / name)
        row = np.flatnonzero((kind.inputs["logits"] == tensors["logits"].numpy()).all(axis=1))[0]
        assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
            name: value[row : row + 1].tolist() for name, value in kind.inputs.items()
        }
        assert (record["kind"], record["score"], record["label"]) == ("flagged", verdict.score[row], verdict.label[row])
        assert record["p_value"] == verdict.p_value[row]
        assert record["explanation"]
        assert abs(record["time"] - time.time()) < PATIENCE
    shown = sample.record()
    assert (shown["kept"], shown["limit"], len(shown["latest"])) == (8, 8, 8)
    latest = shown["latest"][0]
    assert contents(sample.folder / latest["file"])[0]["score"] == latest["score"]
    assert (sample.folder.stat().st_mode & 0o777) == 0o700


def test_inputs_of_a_model_are_kept_by_their_names(flagged, guards):
    for kind, names in ((guards.images, {"x"}), (guards.tokens, {"input_ids", "attention_mask"})):
        sample = flagged(min(names))
        verdict = offer(sample, kind.guard, kind.inputs)
        files = settled(sample)
        assert len(files) == min(8, verdict.is_ood.sum())
        record, kept = contents(sample.folder / files[0])
        assert kept.keys() == names
        again = kind.guard.predict(kept["x"] if names == {"x"} else kept)
        assert (bool(again.is_ood[0]), int(again.label[0])) == (True, record["label"])
        np.testing.assert_allclose(float(again.score[0]), record["score"], rtol=1e-5)


def test_equal_inputs_are_kept_once_and_good_or_unread_ones_never(flagged, guards, foreign):
    guard, rows = foreign
    sample = flagged()
    good = guards.logits.inputs["logits"][:5]
    unread = np.full((2, 10), np.nan, np.float32)
    mixed = np.concatenate([good, unread, rows[:2], rows[:2]])
    for _ in range(3):
        assert offer(sample, guard, mixed).is_ood[5:].all()
        assert len(settled(sample)) == 2


def test_a_restart_goes_on_also_with_a_smaller_limit(flagged, foreign):
    guard, rows = foreign
    whole = settled_with(flagged("whole"), foreign)
    first = flagged("parts")
    offer(first, guard, rows[:30])
    settled(first)
    first.close()
    second = flagged("parts")
    assert second.record()["kept"] == 8
    before = {name: (second.folder / name).stat().st_mtime_ns for name in settled(second)}
    offer(second, guard, rows)
    assert settled(second) == whole
    kept = [name for name in whole if name in before]
    assert kept
    assert {name: (second.folder / name).stat().st_mtime_ns for name in kept} == {name: before[name] for name in kept}
    second.close()
    assert settled(flagged("parts", keep=3)) == whole[:3]


def test_people_may_empty_the_folder_or_remove_it(flagged, foreign, monkeypatch):
    monkeypatch.setattr(module, "LOOKED_EVERY", 0.0)
    sample = flagged()
    whole = settled_with(sample, foreign)
    for path in sample.folder.iterdir():
        path.unlink()
    assert settled_with(sample, foreign) == whole
    for path in sample.folder.iterdir():
        path.unlink()
    sample.folder.rmdir()
    assert settled_with(sample, foreign) == whole
    (sample.folder / whole[0]).write_bytes(b"broken")
    (sample.folder / "notes.txt").write_text("mine")
    again = flagged()
    offer(again, *foreign)
    assert settled(again) == whole
    assert again.record()["kept"] == 8  # a broken one is written again
    assert (sample.folder / "notes.txt").read_text() == "mine"


def test_closing_writes_what_waits(flagged, foreign):
    sample = flagged(keep=40)
    offer(sample, *foreign)
    sample.close()
    assert len(settled(sample)) == 40


def test_half_of_it_is_of_the_last_hour_and_since_an_alarm(flagged, foreign, monkeypatch):
    """However many were kept before: those are what people want to see."""
    guard, rows = foreign
    sample, now = flagged(keep=8), time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    offer(sample, guard, rows[:50])
    before = settled(sample)
    now += 10.0
    sample.alarmed = now  # an alarm
    offer(sample, guard, rows[50:])
    late = [name for name in settled(sample) if contents(sample.folder / name)[0]["time"] >= now]
    assert len(late) >= 4 > len(set(settled(sample)) - set(before) - set(late))
    now += 4000.0
    offer(sample, guard, rows[:1])
    assert len(settled(sample)) == 8


def test_a_failure_is_logged_and_the_next_is_kept(flagged, foreign, monkeypatch, caplog):
    def fails(*_):
        raise OSError("disk full")

    sample, (guard, rows) = flagged(), foreign
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_record", fails)
        offer(sample, guard, rows[:1])
        assert settled(sample) == []
    assert caplog.messages == ["flagged input not kept"]
    offer(sample, guard, rows[:1])
    assert len(settled(sample)) == 1
