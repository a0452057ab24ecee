import sys

import numpy as np
import pytest
from PIL import Image

from igeood.bench.datasets import load
from igeood.bench.datasets.images import Arrays, Files, ImageSet, Noise
from igeood.errors import InputError, MissingExtraError

VALUES = np.random.default_rng(0).integers(0, 256, (10, 3, 32, 32), dtype=np.uint8)


@pytest.fixture
def ten():
    return ImageSet("ten", "Ten", Arrays(VALUES), np.arange(10), np.arange(10) % 3, 3)


def prepared(path):
    """The preparation, written out again."""
    image = Image.open(path).convert("RGB")
    size = [max(32, round(32 / min(image.size) * s)) for s in image.size]
    image = image.resize(size, Image.Resampling.BILINEAR)
    left, top = ((s - 32) // 2 for s in image.size)
    return np.asarray(image.crop((left, top, left + 32, top + 32))).transpose(2, 0, 1)


def test_batches_subsets_and_limits_are_those_of_the_arrays(ten):
    for size in (1, 3, 10, 99):
        batches = list(ten.batches(size))
        assert {len(batch) for batch in batches[:-1]} <= {size}
        np.testing.assert_array_equal(np.concatenate(batches), VALUES)
    np.testing.assert_array_equal(ten.images(), VALUES)
    for key in (slice(2, 9, 3), [4, 4, 0], np.array([-1, 1]), np.arange(10) % 2 == 0, []):
        rows = np.arange(10)[key]
        np.testing.assert_array_equal(ten[key].images(), VALUES[rows])
        np.testing.assert_array_equal(ten[key].labels, (np.arange(10) % 3)[rows])
    np.testing.assert_array_equal(ten[2:8][1:3].images(), VALUES[3:5])
    assert ten.limited(4).rows.tolist() == [0, 3, 6, 9]
    assert ten.limited(10) is ten.limited(None) is ten
    with pytest.raises(InputError, match="limit"):
        ten.limited(0)


def test_digest_changes_with_rows_order_labels_and_content_only(ten):
    changed = VALUES.copy()
    changed[9, 2, 31, 31] ^= 1
    others = [ten[:5], ten[::-1], ImageSet("ten", "Ten", Arrays(VALUES), np.arange(10))]
    others.append(ImageSet("ten", "Ten", Arrays(changed), np.arange(10), np.arange(10) % 3, 3))
    assert len({ten.digest, *(images.digest for images in others)}) == 5
    copy = ImageSet("other", "Other", Arrays(VALUES.copy()), np.arange(10), np.arange(10) % 3, 3)
    assert copy.digest == ten.digest == ten[:].digest
    assert len(copy[:6].contents() & ten[4:].contents()) == 2
    assert ten.digest.startswith("03464557")
    assert load("gaussian", limit=7).digest.startswith("f53b2d7c")  # as in 0.1


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "LA", "1", "CMYK"])
@pytest.mark.parametrize("size", [(32, 32), (64, 64), (7, 50), (300, 201), (1, 1)])
def test_preparation_is_the_stated_one_for_every_mode(tmp_path, mode, size):
    pixels = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    path = tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
    Image.fromarray(pixels).convert(mode).save(path)
    np.testing.assert_array_equal(Files((path,)).resized(np.array([0]), 32), prepared(path)[None])


def test_sixteen_bits_transparent_palettes_and_stripes(tmp_path):
    Image.fromarray(np.full((40, 40), 65535, np.uint16)).save(tmp_path / "a.png")
    palette = Image.fromarray(np.zeros((40, 40), np.uint8)).convert("P")
    palette.save(tmp_path / "b.png", transparency=bytes([0, 100]))  # of which Pillow warns
    white, black = load(f"folder:{tmp_path}").images()
    assert (white.min(), black.max()) == (255, 0)
    stripes = Arrays(np.tile(np.array([0, 255], np.uint8), (1, 64, 32))).read(np.array([0]))
    assert np.ptp(stripes[..., 2:-2].astype(int)) < 20  # grey: nearest neighbour would give stripes, or all black


def test_noise_does_not_depend_on_how_much_is_asked_for():
    whole = Noise(np.arange(2500)).read(np.arange(990, 1010))
    np.testing.assert_array_equal(Noise(np.arange(10_000)).read(np.array([1003, 991]))[::-1], whole[[1, 13]])
    rng = np.random.default_rng([0, 1]).normal(0.5, 1, (1000, 3, 32, 32)).clip(0, 1)
    np.testing.assert_array_equal(whole[10:], (255 * rng[:10]).round().astype(np.uint8))
    assert 0.25 < (whole == 0).mean() < 0.36  # P(z < −½) = 0.31


def test_images_that_cannot_be_read_are_named_and_so_is_what_to_install(tmp_path, make, monkeypatch):
    make.images(tmp_path, ["a.png", "b.png", "c.png"])
    whole = (tmp_path / "c.png").read_bytes()
    (tmp_path / "c.png").write_bytes(whole[: len(whole) // 2])
    batches = load(f"folder:{tmp_path}").batches(2)
    assert len(next(batches)) == 2  # batches before are not lost
    with pytest.raises(InputError, match=r"c\.png: does not decode .*fetch the set again"):
        next(batches)
    Image.new("1", (1, 3_000_000)).save(tmp_path / "long.png")
    for message, most in (("narrow", Image.MAX_IMAGE_PIXELS), ("bomb", 1_000_000)):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
        with pytest.raises(InputError, match=rf"long\.png: does not decode .*{message}"):
            load(f"folder:{tmp_path}")[3:].images()
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtraError, match=r"PIL is needed; pip install 'igeood\[data\]'"):
        load(f"folder:{tmp_path}").images()
    assert load("gaussian", limit=2).images().shape == (2, 3, 32, 32)
