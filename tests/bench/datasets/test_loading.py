import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from igeood.bench import datasets
from igeood.bench.datasets import DATASETS, load
from igeood.errors import InputError

DATA = Path(os.environ.get("IGEOOD_DATA", ""))


def real(name):
    there = bool(os.environ.get("IGEOOD_DATA")) and (DATA / name).exists()
    return [pytest.mark.data, pytest.mark.skipif(not there, reason="set IGEOOD_DATA to the folder of real data")]


@pytest.mark.parametrize("name", DATASETS)
def test_every_set_loads_from_its_official_layout(root, name):
    for split in DATASETS[name].counts:
        images = load(name, root=root, split=split, limit=5)
        pixels = images.images()
        assert (pixels.shape, pixels.dtype) == ((len(images), 3, 32, 32), np.uint8)
        assert images.name == name
        assert images.title == DATASETS[name].title
        if images.labels is not None:
            assert images.labels.dtype == np.int64
            assert images.labels.shape == (len(images),)
            assert images.classes == DATASETS[name].classes
        assert load(name, root=root, split=split, limit=5).digest() == images.digest()


@pytest.mark.parametrize("name", [name for name in DATASETS if name != "gaussian"])
def test_a_missing_set_says_where_and_what_to_do(tmp_path, name):
    with pytest.raises(InputError, match=rf"{tmp_path}.*{name} .*`igeood data get {name}`.*IGEOOD_DATA") as caught:
        load(name, root=tmp_path)
    assert "\n" not in str(caught.value)


def test_a_half_downloaded_set_is_told_apart(tmp_path):
    (tmp_path / "cifar-10-binary.tar.gz.part").write_bytes(b"x")
    with pytest.raises(InputError, match=r"cifar-10-binary\.tar\.gz\.part: .*half downloaded; run `igeood data get"):
        load("cifar-10", root=tmp_path)


def test_a_part_of_a_set_loads_and_says_so(root):
    for i in (2, 3, 4, 5):
        (root / f"cifar-10-batches-bin/data_batch_{i}.bin").unlink()
    assert load("cifar-10", root=root, split="train").note == "4 of 50,000 images"


def test_other_places_are_found_too(root):
    (root / "places365").mkdir()
    (root / "val_256").rename(root / "places365/val_256")
    (root / "svhn/test_32x32.mat").rename(root / "test_32x32.mat")
    (root / "iSUN/iSUN_patches/a.jpeg").rename(root / "iSUN/a.jpeg")
    assert len(load("places365", root=root)) == 1
    assert len(load("svhn", root=root)) == 12
    assert len(load("isun", root=root)) == 2


def test_masks_and_hidden_files_are_no_images(root):
    (root / "iSUN/iSUN_patches/._a.jpeg").write_bytes(b"not an image")
    assert len(load("isun", root=root).images()) == 2
    assert len(load("chars74k", root=root)) == 2


@pytest.mark.parametrize(
    ("wrong", "meant"), [("cifar10", "cifar-10"), ("SVHN", "svhn"), ("tinyimagenet", "tiny-imagenet")]
)
def test_an_unknown_name_gets_a_suggestion(wrong, meant):
    with pytest.raises(InputError, match=f"did you mean {meant}"):
        load(wrong)


def test_a_name_like_none_gets_the_list():
    with pytest.raises(InputError, match=r"known are cifar-10, .*idx:PATH"):
        load("#")


def test_unknown_splits_are_errors(root):
    with pytest.raises(InputError, match="lsun has test, got 'train'"):
        load("lsun", root=root, split="train")
    with pytest.raises(InputError, match="split"):
        load("gaussian", split="train")


def test_limit_spans_the_classes(tmp_path, pictures):
    for name in "abcd":
        pictures(tmp_path / name, [f"{i}.png" for i in range(5)])
    images = load(f"folder:{tmp_path}", limit=4)
    assert [images.source.paths[row].parent.name for row in images.rows] == list("abcd")
    assert images.labels is images.classes is None


def test_folders_are_recursive_and_in_order_whatever_the_suffix(tmp_path, pictures):
    pictures(tmp_path, ["b.JPG", "a.bmp"])
    pictures(tmp_path / "deep/er", ["c.PNG"])
    (tmp_path / "notes.txt").write_text("no image")
    images = load(f"folder:{tmp_path}")
    assert [path.name for path in images.source.paths] == ["a.bmp", "b.JPG", "c.PNG"]
    assert images.title == tmp_path.name


def test_empty_and_missing_folders_are_errors(tmp_path):
    with pytest.raises(InputError, match=f"{tmp_path}: no image files"):
        load(f"folder:{tmp_path}")
    with pytest.raises(InputError, match="no such folder; give"):
        load(f"folder:{tmp_path}/none")
    (tmp_path / "dtd/images").mkdir(parents=True)
    with pytest.raises(InputError, match="no image files in it; fetch"):
        load("textures", root=tmp_path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_folders_have_splits_and_labels(tmp_path, idx, suffix):
    for stem, n in (("train", 7), ("t10k", 4)):
        for kind, values in (
            ("images-idx3", np.ones((n, 28, 28), np.uint8)),
            ("labels-idx1", np.arange(n, dtype=np.uint8)),
        ):
            content = idx(values)
            path = tmp_path / f"{stem}-{kind}-ubyte{suffix}"
            path.write_bytes(gzip.compress(content) if suffix else content)
    train, test = (load(f"idx:{tmp_path}", split=split) for split in ("train", "test"))
    assert (len(train), len(test), train.classes) == (7, 4, 7)
    assert test.labels.tolist() == [0, 1, 2, 3]
    assert test.images().shape == (4, 3, 32, 32)
    alone = load(f"idx:{tmp_path}/t10k-images-idx3-ubyte{suffix}")
    assert alone.labels is None
    np.testing.assert_array_equal(alone.images(), test.images())
    with pytest.raises(InputError, match="train and test"):
        load(f"idx:{tmp_path}", split="val")


def test_idx_mistakes_are_named(tmp_path, idx):
    with pytest.raises(InputError, match="no such file"):
        load(f"idx:{tmp_path}/none")
    with pytest.raises(InputError, match=r"t10k-labels-idx1-ubyte.*\.gz.*fetch the four"):
        load(f"idx:{tmp_path}")
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.zeros(3, np.uint8)))
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(np.zeros((4, 28, 28), np.uint8)))
    with pytest.raises(InputError, match="3 labels for 4 images"):
        load(f"idx:{tmp_path}")
    (tmp_path / "narrow").write_bytes(idx(np.zeros((1, 1, 3_000_000), np.uint8)))
    with pytest.raises(InputError, match=rf"{tmp_path}/narrow: .*too long and narrow"):
        load(f"idx:{tmp_path}/narrow").images()


def test_the_package_exports_its_contract():
    assert set(datasets.__all__) == {
        "DATASETS", "EMBEDDED", "Dataset", "Download", "ImageSet", "canonical", "data_root", "load",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param("cifar-10", 10_000, marks=real("cifar-10-batches-bin")),
        pytest.param("tiny-imagenet", 2_000, marks=real("tiny-imagenet-200")),
        pytest.param("chars74k", 1_500, marks=real("English")),
    ],
)
def test_real_sets(name, count):
    images = load(name)
    assert len(images) >= count
    pixels = images.limited(300).images()
    assert 60 < pixels.mean() < 200
    assert len(np.unique(pixels.reshape(300, -1), axis=0)) > 290
    if name == "cifar-10":
        assert np.bincount(images.labels).tolist() == [1000] * 10
