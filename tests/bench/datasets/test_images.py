import numpy as np
import pytest

from igeood.bench.datasets import load
from igeood.bench.datasets.images import Arrays, ImageSet, Noise
from igeood.errors import InputError

VALUES = np.random.default_rng(0).integers(0, 256, (10, 3, 32, 32), dtype=np.uint8)


@pytest.fixture
def ten():
    return ImageSet("ten", "Ten", Arrays(VALUES), np.arange(10), np.arange(10) % 3, 3)


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


def test_noise_does_not_depend_on_how_much_is_asked_for():
    whole = Noise(np.arange(2500)).read(np.arange(990, 1010))
    np.testing.assert_array_equal(Noise(np.arange(10_000)).read(np.array([1003, 991]))[::-1], whole[[1, 13]])
    rng = np.random.default_rng([0, 1]).normal(0.5, 1, (1000, 3, 32, 32)).clip(0, 1)
    np.testing.assert_array_equal(whole[10:], (255 * rng[:10]).round().astype(np.uint8))
    assert 0.25 < (whole == 0).mean() < 0.36  # P(z < −½) = 0.31
