"""The sample of refused inputs: bounded, the same whatever the order, and for people to read, empty and keep."""

import base64
import io
import shutil
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

import igeood
from igeood.files import read_record, record_head
from igeood.monitor import Monitor
from igeood.serve import flagged as module
from igeood.serve.flagged import Flagged, _picture
from igeood.serve.served import Served

PATIENCE = 30


@pytest.fixture
def flagged(tmp_path):
    """Makes samples in folders; closes them at the end."""
    samples = []

    def make(name="kept", keep=8, seed=0):
        samples.append(Flagged(tmp_path / name, keep, seed))
        return samples[-1]

    yield make
    for sample in samples:
        sample.close()


@pytest.fixture(scope="module")
def foreign(guards):
    """A guard, and 60 different rows that it refuses."""
    guard = guards.logits.guard
    rows = np.random.default_rng(0).normal(size=(400, 10)).astype(np.float32)
    rows = rows[guard.predict(rows).is_ood][:60]
    assert len(rows) == 60
    return guard, rows


def offer(sample, guard, inputs):
    """Offer rows, or inputs by name; returns the verdict and the names of the files, once all are written."""
    tensors = inputs if isinstance(inputs, dict) else {"logits": inputs}
    tensors = {name: torch.from_numpy(value) for name, value in tensors.items()}
    served = Served(guard, Monitor(guard), "")
    verdict = served.predict(tensors)
    sample.offer(served, tensors, verdict)
    return verdict, settled(sample)


def settled(sample):
    """Names of the files, once all are written."""
    sample._writer.submit(str).result(PATIENCE)  # one thread writes them in order
    return sorted(path.name for path in sample.folder.glob("*.safetensors"))


def test_it_is_bounded_and_the_same_whatever_the_order_and_the_batches(flagged, foreign):
    guard, rows = foreign
    samples = [flagged(str(i)) for i in range(3)]
    orders = [np.arange(60), np.random.default_rng(1).permutation(60), np.arange(60)[::-1]]
    for sample, order, size in zip(samples, orders, (60, 20, 7), strict=True):
        for start in range(0, 60, size):
            assert len(offer(sample, guard, rows[order[start : start + size]])[1]) <= 8
    whole, *others = map(settled, samples)
    assert (len(whole), others) == (8, [whole, whole])
    kept = np.stack([read_record(samples[0].folder / name, "flagged")[1]["logits"][0].numpy() for name in whole])
    smallest = np.argsort(igeood.Outputs(rows).keys ^ samples[0]._salt)[:8]
    np.testing.assert_array_equal(kept, rows[smallest])
    assert offer(flagged("other", seed=1), *foreign)[1] != whole


@pytest.mark.parametrize("kind", ["features", "images", "tokens"])
def test_files_say_what_was_sent_and_why_it_was_refused(flagged, guards, kind):
    kind, sample = getattr(guards, kind), flagged()
    verdict, names = offer(sample, kind.guard, kind.inputs)
    assert len(names) == min(8, verdict.is_ood.sum())
    for name in names:
        record, tensors = read_record(sample.folder / name, "flagged")
        is_row = [
            (value == tensors[key].numpy()).reshape(len(value), -1).all(axis=1) for key, value in kind.inputs.items()
        ]
        row = np.flatnonzero(np.all(is_row, axis=0))[0]
        assert tensors.keys() == kind.inputs.keys()
        assert (record["score"], record["p_value"], record["label"]) == verdict[int(row)][1:4]
        assert record["reason"] in record["explanation"]
        assert (record["picture"] is None) == ("x" not in tensors)
        assert abs(record["time"] - time.time()) < PATIENCE
    shown = sample.record()
    assert (shown["kept"], shown["limit"], {one["file"] for one in shown["latest"]}) == (len(names), 8, {*names})
    assert {one["score"] for one in shown["latest"]} == {record_head(sample.folder / name)["score"] for name in names}
    assert (sample.folder.stat().st_mode & 0o777) == 0o700


def test_equal_inputs_are_kept_once_and_good_or_unread_ones_never(flagged, guards, foreign):
    guard, rows = foreign
    sample = flagged()
    unread = np.full((2, 10), np.nan, np.float32)
    mixed = np.concatenate([guards.logits.inputs["logits"][:5], unread, rows[:2], rows[:2]])
    for _ in range(3):
        assert len(offer(sample, guard, mixed)[1]) == 2


def test_a_restart_goes_on_also_with_a_smaller_limit_and_people_may_remove_the_folder(flagged, foreign):
    guard, rows = foreign
    _, whole = offer(flagged("whole"), *foreign)
    before = flagged("parts")
    offer(before, guard, rows[:30])
    before.close()
    after = flagged("parts")
    assert offer(after, guard, rows)[1] == whole
    (after.folder / "notes.txt").write_text("mine")
    assert settled(flagged("parts", keep=3)) == whole[:3]
    assert (after.folder / "notes.txt").read_text() == "mine"
    shutil.rmtree(after.folder)
    assert offer(after, guard, rows)[1] == whole


def test_a_failure_is_logged_and_the_next_is_kept(flagged, foreign, monkeypatch, caplog):
    def fails(*_):
        raise OSError("disk full")

    sample, (guard, rows) = flagged(), foreign
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_record", fails)
        assert offer(sample, guard, rows[:1])[1] == []
    assert caplog.messages == ["flagged input not kept"]
    assert len(offer(sample, guard, rows[:1])[1]) == 1


@pytest.mark.parametrize(("shape", "size"), [((1, 8, 6), (6, 8)), ((3, 300, 200), (64, 96)), ((4, 5, 5), (5, 5))])
@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8])
def test_a_picture_is_small_and_goes_from_the_least_to_the_largest_value(shape, size, dtype):
    x = torch.zeros(1, *shape, dtype=dtype)
    x[..., 0, :] = 7
    drawn = Image.open(io.BytesIO(base64.b64decode(_picture({"x": x}).partition(",")[2])))
    assert (drawn.size, drawn.mode) == (size, "RGB")
    assert drawn.getpixel((0, size[1] - 1)) == (0, 0, 0)
    assert size[1] == 96 or drawn.getpixel((0, 0)) == (255, 255, 255)


def test_other_inputs_have_no_picture_nor_has_any_without_pillow(monkeypatch):
    image = torch.ones(1, 3, 4, 4)
    assert _picture({"x": image}) is not None  # all of one value
    assert [_picture(x) for x in ({"x": image[:, 0]}, {"x": torch.ones(1, 5, 4, 4)}, {"x": image, "y": image})] == [
        None
    ] * 3
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert _picture({"x": image}) is None
