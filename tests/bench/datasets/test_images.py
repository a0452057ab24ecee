import itertools

import numpy as np

from igeood.bench.datasets import EMBEDDED, load
from igeood.bench.datasets.images import Arrays, ImageSet

VALUES = np.random.default_rng(0).integers(0, 256, (10, 3, 32, 32), dtype=np.uint8)
TEN = ImageSet("ten", "Ten", Arrays(VALUES), np.arange(10), np.arange(10) % 3, 3)


def test_batches_subsets_and_limits_are_those_of_the_arrays():
    for size in (1, 3, 99):
        np.testing.assert_array_equal(np.concatenate(list(TEN.batches(size))), VALUES)
    for key in (slice(2, 9, 3), [4, 4, 0], np.array([-1, 1]), np.arange(10) % 2 == 0, []):
        rows = np.arange(10)[key]
        np.testing.assert_array_equal(TEN[key].images(), VALUES[rows])
        np.testing.assert_array_equal(TEN[key].labels, (np.arange(10) % 3)[rows])
    np.testing.assert_array_equal(TEN[2:8][1:3].images(), VALUES[3:5])
    assert TEN.limited(4).rows.tolist() == [0, 3, 6, 9]
    assert TEN.limited(10) is TEN.limited(None) is TEN


def test_digest_changes_with_rows_order_labels_and_content_only():
    changed = VALUES.copy()
    changed[9, 2, 31, 31] ^= 1
    others = [TEN[:5], TEN[::-1], ImageSet("ten", "Ten", Arrays(VALUES), np.arange(10))]
    others.append(ImageSet("ten", "Ten", Arrays(changed), np.arange(10), np.arange(10) % 3, 3))
    assert len({TEN.digest, *(images.digest for images in others)}) == 5
    copy = ImageSet("other", "Other", Arrays(VALUES.copy()), np.arange(10), np.arange(10) % 3, 3)
    assert copy.digest == TEN.digest == TEN[:].digest
    assert len(copy[:6].contents() & TEN[4:].contents()) == 2
    assert TEN.digest.startswith("03464557")
    assert load("gaussian", limit=7).digest.startswith("f53b2d7c")  # as in 0.1
    assert load("demo:digits").digest.startswith("aa537075")


def test_no_two_embedded_sets_share_an_image():
    contents = [load(name).contents() for name in EMBEDDED] + [load("demo:digits", split="train").contents()]
    assert not any(one & other for one, other in itertools.combinations(contents, 2))
