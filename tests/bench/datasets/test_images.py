import builtins
import warnings

import numpy as np
import pytest
from PIL import Image

from igeood.bench.datasets import load
from igeood.bench.datasets.images import Arrays, Files, ImageSet, Noise
from igeood.errors import InputError, MissingExtraError


def made(n=10):
    values = np.random.default_rng(0).integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)
    return ImageSet("made", "Made", Arrays(values), np.arange(n), np.arange(n) % 3, 3), values


def plain(path):
    """The preparation, written out again."""
    image = Image.open(path).convert("RGB")
    scale = 32 / min(image.size)
    image = image.resize([max(32, round(scale * s)) for s in image.size], Image.Resampling.BILINEAR)
    left, top = ((s - 32) // 2 for s in image.size)
    return np.asarray(image.crop((left, top, left + 32, top + 32))).transpose(2, 0, 1)


@pytest.mark.parametrize("size", [1, 3, 10, 99])
def test_batches_together_are_the_images(size):
    images, values = made()
    batches = list(images.batches(size))
    assert [len(b) for b in batches[:-1]] == [size] * (len(batches) - 1)
    np.testing.assert_array_equal(np.concatenate(batches), values)
    np.testing.assert_array_equal(images.images(), values)


def test_subsets_compose_like_the_arrays():
    images, values = made()
    for key in (slice(2, 9, 3), [4, 4, 0], np.array([-1, 1]), np.arange(10) % 2 == 0, []):
        rows = np.arange(10)[key if not isinstance(key, list) else np.array(key, dtype=int)]
        np.testing.assert_array_equal(images[key].images(), values[rows])
        np.testing.assert_array_equal(images[key].labels, (np.arange(10) % 3)[rows])
        assert len(images[key]) == len(rows)
    np.testing.assert_array_equal(images[2:8][1:3].images(), values[3:5])
    with pytest.raises(InputError, match="float64"):
        images[np.array([0.5])]


def test_limit_is_evenly_spaced_and_keeps_first_and_last():
    images, _ = made()
    assert images.limited(4).rows.tolist() == [0, 3, 6, 9]
    assert images.limited(10) is images
    assert images.limited(None) is images
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(InputError, match="limit"):
            images.limited(wrong)
    with pytest.raises(InputError, match="size"):
        images.batches(0)


def test_digest_changes_with_rows_order_labels_and_content():
    images, values = made()
    other = ImageSet("made", "Made", Arrays(values.copy()), np.arange(10), np.arange(10) % 3, 3)
    unlabelled = ImageSet("made", "Made", Arrays(values), np.arange(10))
    changed = values.copy()
    changed[9, 2, 31, 31] ^= 1
    digests = [images[:5].digest(), images[::-1].digest(), unlabelled.digest(), images.digest()]
    digests.append(ImageSet("made", "Made", Arrays(changed), np.arange(10), np.arange(10) % 3, 3).digest())
    assert len(set(digests)) == 5
    assert other.digest() == images.digest() == images[:].digest()
    assert len(images.digest()) == 64


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "LA", "1", "CMYK"])
@pytest.mark.parametrize("size", [(32, 32), (64, 64), (7, 50), (50, 7), (300, 201), (1, 1)])
def test_preparation_is_the_stated_one_for_every_mode(tmp_path, mode, size):
    pixels = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    path = tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
    Image.fromarray(pixels).convert(mode).save(path)
    found = Files((path,)).read(np.array([0]))
    assert found.shape == (1, 3, 32, 32)
    np.testing.assert_array_equal(found[0], plain(path))


def test_a_palette_with_transparency_gives_no_warning(tmp_path):
    path = tmp_path / "image.png"
    image = Image.fromarray(np.zeros((40, 40), np.uint8)).convert("P")
    image.save(path, transparency=bytes([0, 100]))
    assert Files((path,)).read(np.array([0])).shape == (1, 3, 32, 32)


def test_grey_arrays_are_resized_and_repeated():
    values = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)
    images = Arrays(values).read(np.array([2, 0]))
    expected = np.asarray(Image.fromarray(values[2]).convert("RGB").resize((32, 32), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(images[0], expected.transpose(2, 0, 1))
    np.testing.assert_array_equal(images[:, 0], images[:, 2])


def test_noise_does_not_depend_on_how_much_is_asked_for():
    whole = Noise(2500).read(np.arange(990, 1010))
    np.testing.assert_array_equal(Noise(10_000).read(np.array([1003, 991]))[::-1], whole[[1, 13]])
    rng = np.random.default_rng([0, 1]).normal(0.5, 1, (1000, 3, 32, 32)).clip(0, 1)
    np.testing.assert_array_equal(whole[10:], (255 * rng[:10]).round().astype(np.uint8))
    assert 0.25 < (whole == 0).mean() < 0.36  # P(z < −½) = 0.31
    assert load("gaussian")[:5].digest() == load("gaussian")[np.arange(5)].digest()


def test_an_image_that_does_not_decode_is_named_and_the_batches_before_are_not_lost(tmp_path, pictures):
    pictures(tmp_path, ["a.png", "b.png", "c.png"])
    whole = (tmp_path / "c.png").read_bytes()
    (tmp_path / "c.png").write_bytes(whole[: len(whole) // 2])
    batches = load(f"folder:{tmp_path}").batches(2)
    assert len(next(batches)) == 2
    with pytest.raises(InputError, match=r"c\.png: does not decode .*fetch the set again"):
        next(batches)
    (tmp_path / "c.png").write_bytes(b"")
    with pytest.raises(InputError, match=r"c\.png"):
        load(f"folder:{tmp_path}").images()
    images = load(f"folder:{tmp_path}")
    (tmp_path / "c.png").unlink()
    with pytest.raises(InputError, match=r"c\.png: cannot be read"):
        images.digest()


def test_bombs_are_errors(tmp_path, monkeypatch):
    Image.new("1", (12_000, 8_000)).save(tmp_path / "wide.png")  # 96 million pixels: Pillow only warns
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(InputError, match=r"wide\.png"):
            load(f"folder:{tmp_path}").images()
    Image.new("1", (1, 3_000_000)).save(tmp_path / "narrow.png")
    (tmp_path / "wide.png").unlink()
    with pytest.raises(InputError, match=r"narrow\.png: .*narrow"):
        load(f"folder:{tmp_path}").images()
    monkeypatch.setattr("igeood.bench.datasets.images.MAX_PIXELS", 100)
    with pytest.raises(InputError, match=r"narrow\.png: 1 x 3000000"):
        load(f"folder:{tmp_path}").images()


def test_without_pillow_the_error_says_what_to_install(tmp_path, pictures, monkeypatch):
    pictures(tmp_path, ["a.png"])
    real = builtins.__import__

    def without(name, *args):
        if name == "PIL":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    images = load(f"folder:{tmp_path}")
    with pytest.raises(MissingExtraError, match=r"pip install 'igeood\[data\]'"):
        images.images()
    assert load("gaussian", limit=2).images().shape == (2, 3, 32, 32)
