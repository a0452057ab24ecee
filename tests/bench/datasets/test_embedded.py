"""The embedded sets: what is in them, and that they are apart."""

import itertools

from igeood.bench.datasets import EMBEDDED, load


def test_no_two_sets_share_an_image_and_they_are_the_same_every_time():
    contents = [load(name).contents() for name in EMBEDDED] + [load("demo:digits", split="train").contents()]
    assert not any(one & other for one, other in itertools.combinations(contents, 2))
    assert load("demo:digits").digest.startswith("aa537075")
