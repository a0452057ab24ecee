"""Every data set of the catalogue, read right and read wrong: right images, or one clear error that names the file."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import messages
import numpy as np
import pytest
from calls import as_nobody, cured, open_folder
from PIL import Image
from scipy.io import savemat

from igeood.datasets import DATASETS, EMBEDDED, load
from igeood.datasets.catalog import data_root
from igeood.datasets.store import OWN, status
from igeood.errors import IgeoodError

N = 12  # images of a made set


def pixels(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)


def write_cifar(path, dataset, seed):
    header = 2 if dataset.classes == 100 else 1
    labels = np.arange(N, dtype=np.uint8)[:, None] % dataset.classes
    np.concatenate([*[labels] * header, pixels(N, seed).reshape(N, -1)], axis=1).tofile(path)


def write_mat(path, _, seed):
    y = np.arange(N, dtype=np.uint8)[:, None] % 10 + 1
    savemat(path, {"X": pixels(N, seed).transpose(2, 3, 1, 0), "y": y})


def write_images(path, _, seed):
    path.mkdir()
    for i, image in enumerate(pixels(N, seed)):
        Image.fromarray(image.transpose(1, 2, 0)).save(path / f"{i:02}.png")


WRITERS = {"cifar": write_cifar, "mat": write_mat, "images": write_images}  # by the catalogue's kind


def made(name, split, root):
    """Write a set of the catalogue in its official layout; gives its files or folders."""
    dataset = DATASETS[name]
    places = [root / place for place in dataset.layouts[split][0]]
    for seed, place in enumerate(places):
        place.parent.mkdir(parents=True, exist_ok=True)
        WRITERS[dataset.kind](place, dataset, seed)
    return places


def idx(path, array):
    path.write_bytes(bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes())


def made_idx(root):
    root.mkdir(exist_ok=True)
    for stem in ("train", "t10k"):
        idx(root / f"{stem}-images-idx3-ubyte", pixels(N)[:, 0, :28, :28])
        idx(root / f"{stem}-labels-idx1-ubyte", np.arange(N, dtype=np.uint8) % 10)


ON_DISK = [(name, split) for name, dataset in DATASETS.items() if dataset.kind != "noise" for split in dataset.counts]
MADE = [(name, split) for name, dataset in DATASETS.items() if dataset.kind == "noise" for split in dataset.counts]
MADE += [(name, "test") for name in EMBEDDED]
OWN_FILES = [("folder:pictures", "test"), ("idx:digits", "train"), ("idx:digits", "test")]
ALL = [*ON_DISK, *MADE, *OWN_FILES]


def make_any(name, split, root):
    if name.startswith("folder:"):
        write_images(root / "pictures", None, 0)
    elif name.startswith("idx:"):
        made_idx(root / "digits")
    elif (name, split) in ON_DISK:
        made(name, split, root)


@pytest.fixture(params=ALL, ids=" ".join)
def opened(request, tmp_path, monkeypatch):
    """Any set, and how it is loaded."""
    name, split = request.param
    monkeypatch.chdir(tmp_path)
    make_any(name, split, tmp_path)
    return lambda **options: load(name, **{"root": tmp_path, "split": split, "limit": 60, **options})


def clear(error, *starts):
    """The library's own error in one line: it begins with one of these, and says what to do."""
    told = str(error.value)
    assert not starts or any(told.startswith(f"{start}: ") for start in starts), f"begins with none of {starts}: {told}"
    assert "\n" not in told
    assert len(told) <= messages.LONGEST, told
    assert cured(told), told


def test_images_are_bytes_and_labels_are_classes(opened):
    found = opened()
    images = found.images()
    assert (images.dtype, images.shape) == (np.uint8, (len(found), 3, 32, 32))
    assert len(found) > 0
    assert images.min() < 64  # of all that a byte holds, not 0 … 1
    assert images.max() > 192
    if found.labels is not None:
        assert (found.labels.dtype, found.labels.shape) == (np.int64, (len(found),))
        assert 0 <= found.labels.min() <= found.labels.max() < found.classes


def test_every_way_of_reading_gives_the_same(opened):
    found = opened()
    images = found.images()
    for size in (1, 7, len(found), 10**30):
        assert np.array_equal(np.concatenate(list(found.batches(size))), images)
    again = opened()
    assert np.array_equal(again.images(), images)
    assert again.digest() == found.digest()
    assert np.array_equal(found[::-1].images(), images[::-1])
    assert np.array_equal(found[[2, 0, 2]].images(), images[[2, 0, 2]])
    assert np.array_equal(found[np.arange(len(found)) == 1].images(), images[1:2])
    assert found[[]].images().shape == (0, 3, 32, 32)
    if found.labels is not None:
        assert np.array_equal(found[::-1].labels, found.labels[::-1])


def test_a_limit_takes_its_images_from_the_whole_set(opened):
    found = opened(limit=None)
    part = opened(limit=3)
    chosen = np.linspace(0, len(found) - 1, 3).round().astype(int)
    assert np.array_equal(part.images(), found[chosen].images())
    assert len(opened(limit=10**30)) == len(found)
    assert len(opened(limit=len(found))) == len(found)
    assert opened(side=16).images().shape == (len(opened()), 3, 16, 16)


WRONG = [
    *(("limit", value) for value in (0, -1, True, 1.5, "3", float("nan"), [2])),
    *(("side", value) for value in (0, -1, 4097, True, 1.5, "32", None, float("nan"))),
    *(("split", value) for value in ("zzz", "", "TEST", None, 3, ["test"])),
]


@pytest.mark.parametrize(("option", "value"), WRONG, ids=str)
def test_a_wrong_option_is_told(opened, option, value):
    if option == "split" and isinstance(value, str) and opened().name.startswith("folder:"):
        pytest.skip("a folder has no splits")
    with pytest.raises(IgeoodError) as error:
        opened(**{option: value})
    clear(error, option)


def test_a_wrong_batch_or_index_is_told(opened):
    found = opened()
    for size in (0, -1, 1.5, "3", None):
        with pytest.raises(IgeoodError) as error:
            found.batches(size)
        clear(error, "size")
    n = len(found)
    for index in ([n], [-n - 1], [0, n], [0.5], ["a"], [[0]], np.ones(n + 1, bool), np.array([2**40])):
        with pytest.raises(IgeoodError) as error:
            found[index].images()
        clear(error, "index")


# ---- files that are not what they should be


def files_of(places):
    return sorted(path for place in places for path in ([place] if place.is_file() else place.rglob("*.png")))


def emptied(places):
    for path in files_of(places):
        path.write_bytes(b"")


def cut(places):
    path = files_of(places)[-1]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 + 1])


def garbage(places):
    path = files_of(places)[-1]
    path.write_bytes(np.random.default_rng(1).bytes(path.stat().st_size))


def text(places):
    files_of(places)[0].write_text("404 not found\n" * 9)


def web_page(places):
    files_of(places)[0].write_bytes(b"<!doctype html><title>Moved</title>" + b" " * 5000)


def turned_round(places):
    """Folders where files should be, and a file where a folder should."""
    for place in places:
        if place.is_dir():
            shutil.rmtree(place)
            place.write_bytes(b"no folder")
        else:
            place.unlink()
            place.mkdir()


def broken_in_the_middle(places):
    path = files_of(places)[len(files_of(places)) // 2]
    content = bytearray(path.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    content[:8] = bytes(255 for _ in range(8))
    path.write_bytes(content)


def linked_to_nothing(places):
    path = files_of(places)[0]
    path.unlink()
    path.symlink_to("nowhere.png")
    if path.parent in places:  # of the image files of a folder, only what is there is a file
        path.unlink()
        path.symlink_to(path.name)


def unreadable(places):
    for place in places:
        for path in [place, *files_of([place])]:
            path.chmod(0)


def unreadable_file(places):
    files_of(places)[-1].chmod(0)


DAMAGE = [emptied, cut, garbage, text, web_page, turned_round, broken_in_the_middle, unreadable, unreadable_file]


def loaded(name, split, root):
    return load(name, root=root, split=split).images()


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize(("name", "split"), ON_DISK, ids=str)
def test_damaged_files_are_told_by_name(name, split, damage):
    with open_folder() as root:
        places = made(name, split, root)
        assert len(loaded(name, split, root)) == N * len(places)
        files = files_of(places)
        damage(places)
        with as_nobody(), pytest.raises(IgeoodError) as error:
            loaded(name, split, root)
        clear(error, *places, *files)


@pytest.mark.parametrize(("name", "split"), ON_DISK, ids=str)
def test_what_is_not_there_is_told_with_the_way_to_get_it(name, split, tmp_path):
    place = tmp_path / DATASETS[name].layouts[split][0][0]
    for step in ("no root", "an empty root", "an empty folder"):
        root = tmp_path / "none" if step == "no root" else tmp_path
        if step == "an empty folder":
            (place if DATASETS[name].kind == "images" else place.parent).mkdir(parents=True)
        with pytest.raises(IgeoodError) as error:
            loaded(name, split, root)
        assert str(root) in str(error.value)
        clear(error)
        assert "igeood data get" in str(error.value) or step == "an empty folder"
        assert status(DATASETS[name], root).state == (
            "damaged" if step == "an empty folder" and place.exists() else "missing"
        )


@pytest.mark.parametrize(("name", "split"), ON_DISK, ids=str)
def test_a_wrong_number_of_images_is_told(name, split, tmp_path, monkeypatch):
    made(name, split, tmp_path)
    found = load(name, root=tmp_path, split=split)
    expected = DATASETS[name].counts[split]
    assert found.note == f"{len(found):,} of {expected:,} images"
    few = status(DATASETS[name], tmp_path, deep=True)
    assert (few.state, few.found) == ("partial", len(found))
    assert f"{split} {len(found):,} of {expected:,}" in few.detail
    monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], counts={split: len(found) - 1}))
    many = status(DATASETS[name], tmp_path, deep=True)
    if DATASETS[name].kind == "mat":  # of the official file itself, only the first images count
        assert many.found == len(found) - 1
    else:
        assert many.state == "damaged"
        assert "remove what does not belong there" in many.detail


@pytest.mark.parametrize(("name", "split"), ON_DISK, ids=str)
def test_contents_that_changed_since_they_were_fetched_are_told(name, split, tmp_path):
    path = files_of(made(name, split, tmp_path))[0]
    relative = str(path.relative_to(tmp_path))
    (tmp_path / OWN).mkdir()
    for wrong in ({"size": path.stat().st_size, "sha256": "0" * 64}, {"size": 1, "sha256": "0" * 64}, {}, None, 3):
        (tmp_path / OWN / f"{name}.json").write_text(json.dumps({"name": name, "files": {relative: wrong}}))
        found = status(DATASETS[name], tmp_path, deep=True)
        assert found.state == "damaged"
        assert f"igeood data get --force {name}" in found.detail
        assert relative in found.detail or f"{name}.json: damaged" in found.detail


@pytest.mark.parametrize(("name", "split"), [each for each in ON_DISK if DATASETS[each[0]].classes], ids=str)
def test_labels_that_are_no_classes_are_told(name, split, tmp_path):
    path = made(name, split, tmp_path)[-1]
    if DATASETS[name].kind == "mat":
        savemat(path, {"X": pixels(N).transpose(2, 3, 1, 0), "y": np.arange(N, dtype=np.uint8)[:, None]})
    else:
        content = np.fromfile(path, np.uint8).reshape(N, -1)
        content[5, : content.shape[1] - 3072] = 255
        content.tofile(path)
    with pytest.raises(IgeoodError) as error:
        load(name, root=tmp_path, split=split)
    clear(error, path)
    assert "record" in str(error.value)


SCRIPT = """
import sys
from igeood.datasets import load
for name in sys.argv[1:]:
    print(name, load(name, limit=200).digest())
"""


def test_made_sets_are_the_same_in_every_process():
    names = [name for name, _ in MADE]
    found = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT, *names], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True,
            text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(found) == 1
    assert found.pop().split() == [word for name in names for word in (name, load(name, limit=200).digest())]


@pytest.mark.parametrize(
    "name", ["", " ", "CIFAR-10", "cifar10", "zzz", "folder:", "folder", "idx:", "demo:", "x:y", "a\nb"]
)
def test_a_name_that_is_none_is_told(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(IgeoodError) as error:
        load(name, root=tmp_path)
    clear(error)


def test_where_the_data_are_without_a_home(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "IGEOOD_DATA"):
        monkeypatch.delenv(name, raising=False)
    assert data_root().is_absolute()
    with pytest.raises(IgeoodError) as error:
        data_root("~no-such-user/data")
    clear(error, "root")
