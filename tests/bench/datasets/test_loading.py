import gzip

import numpy as np
import pytest
from PIL import Image

from igeood.bench.datasets import DATASETS, EMBEDDED, load
from igeood.errors import InputError

PAPER = {"cifar-10": 10_000, "cifar-100": 10_000, "svhn": 10_000, "tiny-imagenet": 10_000, "lsun": 10_000}
PAPER |= {"isun": 8_925, "textures": 5_640, "chars74k": 7_705, "places365": 36_500, "gaussian": 10_000}


def test_the_table_has_the_papers_sets_and_counts():
    assert {name: DATASETS[name].counts["test"] for name in PAPER} == PAPER


@pytest.fixture
def digits(tmp_path, make):
    """The four files of an MNIST-like set."""
    for stem, n in (("train", 7), ("t10k", 4)):
        draw = np.random.default_rng(n)
        (tmp_path / f"{stem}-images-idx3-ubyte").write_bytes(make.idx(draw.integers(0, 256, (n, 28, 28), np.uint8)))
        (tmp_path / f"{stem}-labels-idx1-ubyte").write_bytes(make.idx(np.arange(n, dtype=np.uint8)))
    return tmp_path


def check(images, again):
    """Bytes in the right shape, classes in their range, and the same every time."""
    pixels = images.images()
    assert (pixels.shape, pixels.dtype) == ((len(images), 3, 32, 32), np.uint8)
    assert np.ptp(pixels) > 128  # of all that a byte holds
    if images.labels is not None:
        assert (images.labels.dtype, images.labels.shape) == (np.int64, (len(images),))
        assert 0 <= images.labels.min() <= images.labels.max() < images.classes
    np.testing.assert_array_equal(again.images(), pixels)
    assert again.digest == images.digest


@pytest.mark.parametrize(("name", "split"), [(name, split) for name in DATASETS for split in DATASETS[name].counts])
def test_every_set_loads_from_its_official_layout(root, name, split):
    images, again = (load(name, root=root, split=split, limit=60) for _ in range(2))
    assert (images.labels is None) == (DATASETS[name].classes is None)
    assert len(images) == (60 if name == "gaussian" or (name, split) == ("cifar-10", "train") else 12)
    check(images, again)
    assert load(name, root=root, split=split, limit=2, side=48).images().shape == (2, 3, 48, 48)


@pytest.mark.parametrize("name", [*EMBEDDED, "idx", "folder"])
def test_every_other_set_loads(digits, make, name):
    make.images(digits / "deep/er", ["c.PNG"])
    make.images(digits, ["b.JPG", "a.bmp"])
    name = name if name in EMBEDDED else f"{name}:{digits}"
    check(load(name, limit=60), load(name, limit=60))


@pytest.mark.parametrize("name", [name for name in DATASETS if name != "gaussian"])
def test_damaged_files_and_missing_sets_are_named(root, name, tmp_path):
    place = root / DATASETS[name].layouts["test"][0][0]
    path = place if place.is_file() else sorted(place.rglob("*.png"))[-1]
    for content in (b"", b"<!doctype html>" + b" " * 5000, path.read_bytes()[: path.stat().st_size // 2 + 1]):
        path.write_bytes(content)
        with pytest.raises(InputError, match=path.name):
            load(name, root=root).images()
    with pytest.raises(InputError, match=str(tmp_path)):
        load(name, root=tmp_path)


def test_the_literatures_copies_are_found_at_any_depth_of_their_folder_and_hidden_files_left_out(tmp_path, make):
    """As people have them: archives unpack to `Imagenet/test`, `LSUN_resize/LSUN_resize` or the folder alone."""
    places = {"tiny-imagenet-crop": "Imagenet/test", "lsun": "LSUN_resize/LSUN_resize", "isun": "iSUN"}
    for name, place in places.items():
        make.images(tmp_path / place, ["0.png"], size=(32, 32))
        (tmp_path / place / "._0.png").write_bytes(b"not an image")
        pixels = np.asarray(Image.open(tmp_path / place / "0.png")).transpose(2, 0, 1)
        np.testing.assert_array_equal(load(name, root=tmp_path).images(), pixels[None])


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_folders_have_splits_and_labels(digits, suffix):
    for path in list(digits.iterdir()) if suffix else ():
        path.write_bytes(gzip.compress(path.read_bytes()))
        path.rename(f"{path}{suffix}")
    train, test = (load(f"idx:{digits}", split=split) for split in ("train", "test"))
    assert (len(train), train.classes, test.labels.tolist()) == (7, 7, [0, 1, 2, 3])
    alone = load(f"idx:{digits}/t10k-images-idx3-ubyte{suffix}")
    assert alone.labels is None
    np.testing.assert_array_equal(alone.images(), test.images())


def test_images_by_the_nearest_pixel(tmp_path, refused):
    (tmp_path / "sets").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "sets" / "one.png")
    name = f"folder:{tmp_path / 'sets'}"
    smooth, nearest = load(name), load(f"{name}-nearest")
    np.testing.assert_array_equal(nearest.images()[0], pixels[1::2, 1::2].transpose(2, 0, 1))
    assert smooth.digest != nearest.digest
    assert smooth.contents() == nearest.contents()  # what was tuned on is still recognised
    with refused("name"):
        load("gaussian-nearest")
