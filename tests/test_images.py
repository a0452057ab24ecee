"""Folders of images as inputs: the stated preparation, classes from sub-folders, bad files by name."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from igeood.errors import MissingExtraError
from igeood.images import ImageFolder, channels, class_labels, image_files, normalised, prepare, read_image, resized

GUARD = SimpleNamespace(preparation={"size": 16, "mean": [0.5], "std": [0.25]}, source=SimpleNamespace(model=None))


def draw(path, size=(40, 36), mode="RGB", seed=1):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


@pytest.fixture
def classes(tmp_path):
    """Two classes of two images each, one of them deeper down."""
    for i, name in enumerate(("b/2.png", "a/deep/0.png", "a/1.png", "b/3.JPG", ".hidden/4.png")):
        draw(tmp_path / name, seed=i)
    (tmp_path / "a" / "notes.txt").write_text("no image")
    return tmp_path


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "LA", "1", "CMYK"])
@pytest.mark.parametrize("size", [(32, 32), (7, 50), (300, 201), (1, 1)])
def test_preparation_is_the_stated_one_for_every_mode(tmp_path, mode, size):
    path = draw(tmp_path / ("image.tif" if mode == "CMYK" else "image.png"), size, mode)
    image = Image.open(path).convert("RGB")
    image = image.resize([max(32, round(32 / min(size) * side)) for side in size], Image.Resampling.BILINEAR)
    left, top = ((side - 32) // 2 for side in image.size)
    expected = np.asarray(image.crop((left, top, left + 32, top + 32))).transpose(2, 0, 1)
    np.testing.assert_array_equal(read_image(path, 32), expected)


def test_sixteen_bits_transparent_palettes_and_stripes(tmp_path):
    Image.fromarray(np.full((40, 40), 65535, np.uint16)).save(tmp_path / "a.png")
    palette = Image.fromarray(np.zeros((40, 40), np.uint8)).convert("P")
    palette.save(tmp_path / "b.png", transparency=bytes([0, 100]))  # of which Pillow warns
    assert (read_image(tmp_path / "a.png", 32).min(), read_image(tmp_path / "b.png", 32).max()) == (255, 0)
    stripes = Image.fromarray(np.tile(np.array([0, 255], np.uint8), (64, 32)))
    assert np.ptp(resized(stripes, 32)[..., 2:-2].astype(int)) < 20  # grey: nearest neighbour would give stripes
    assert set(np.unique(resized(stripes, 32, nearest=True))) <= {0, 255}


def test_batches_of_a_folder_have_labels_names_and_normalised_pixels(classes):
    folder = ImageFolder(f"folder:{classes}", GUARD, batch=3, training=True)
    assert (folder.classes, folder.rows) == (("a", "b"), 4)
    batches = list(folder)
    assert [batch.labels.tolist() for batch in batches] == [[0, 0, 1], [1]]
    paths = [classes / name for name in ("a/1.png", "a/deep/0.png", "b/2.png", "b/3.JPG")]
    pixels = np.stack([read_image(path, 16) for path in paths])
    torch.testing.assert_close(torch.cat([batch.x for batch in batches]), normalised(pixels, [0.5], [0.25]))
    test = ImageFolder(str(classes), GUARD, batch=3, training=False)
    assert [name for _, names in test.blocks(ids=True) for name in names] == [str(path) for path in paths]
    assert [row for _, rows in test.blocks() for row in rows] == [0, 1, 2, 3]
    white = np.full((1, 3, 2, 2), 255, dtype=np.uint8)
    assert normalised(white, (0.5, 0.5, 0.0), (0.5, 0.25, 1.0))[0, :, 0, 0].tolist() == [1.0, 2.0, 1.0]


def test_files_that_do_not_decode_are_named_or_refused(classes, refused, monkeypatch):
    bad = classes / "b" / "2.png"
    bad.write_bytes(bad.read_bytes()[:500])
    folder = ImageFolder(str(classes), GUARD, batch=4, training=False)
    with refused(None, str(bad)):
        list(folder)
    folder.on_error = "refuse"
    ((batch, _),) = folder.blocks()
    assert (list(batch.reasons), "2.png" in batch.reasons[2]) == ([2], True)
    long = classes / "long.png"
    Image.new("1", (1, 3_000_000)).save(long)
    for most in (Image.MAX_IMAGE_PIXELS, 1_000_000):  # too long, and a decompression bomb
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
        with refused(None, str(long)):
            read_image(long, 32)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtraError, match=r"igeood\[data\]"):
        read_image(long, 32)


def test_folders_that_have_no_classes_or_images(classes, refused):
    for folder in (classes / "none", classes / ".hidden" / "x"):
        with refused(None, str(folder)):
            image_files(folder)
    for place, make in (
        ("a", classes / "a" / "deeper" / "5.png"),  # too few classes
        ("5.png", classes / "5.png"),  # beside the classes
        ("empty", classes / "empty" / "notes"),
    ):
        draw(make) if make.suffix else make.mkdir(parents=True)
        folder = classes / "a" / "deeper" if place == "a" else classes
        with refused(None, str(folder if place == "a" else classes / place)):
            class_labels(folder, image_files(folder))
        if make.suffix:
            make.unlink()


def test_how_images_become_inputs_is_kept_with_the_guard(refused):
    guard = SimpleNamespace(source=SimpleNamespace(), preparation=None)
    prepare(guard, 8, "0.5", "0.1,0.2,0.3")
    assert guard.preparation == {"size": 8, "mean": [0.5], "std": [0.1, 0.2, 0.3]}
    assert guard.source.std == [0.1, 0.2, 0.3]
    with refused("size"):
        prepare(guard, None, None, None)
    with refused("mean"):
        channels("1,2", "mean")
    with refused("guard"):
        ImageFolder(".", SimpleNamespace(preparation=None), batch=1, training=False)


def test_a_network_of_one_channel_gets_grey_images(tmp_path):
    draw(tmp_path / "one.png")
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3))
    grey = SimpleNamespace(preparation=GUARD.preparation, source=SimpleNamespace(model=model))
    (batch,), (colour,) = (ImageFolder(str(tmp_path), guard, batch=4, training=False) for guard in (grey, GUARD))
    weights = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
    torch.testing.assert_close(batch.x, (colour.x * weights).sum(dim=1, keepdim=True), atol=0.02, rtol=0)
