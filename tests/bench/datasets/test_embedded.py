"""The embedded sets: what is in them, and that they are apart."""

import itertools

import numpy as np
from sklearn.datasets import load_digits

from igeood.bench.datasets import EMBEDDED, load


def test_the_known_digits_are_all_there_once_and_have_their_labels():
    digits = load_digits()
    train, test = load("demo:digits", split="train"), load("demo:digits")
    shown = np.concatenate([train.source.values, test.source.values])
    labels = np.concatenate([train.labels, test.labels])
    grey = (digits.images * 255 / 16).round().astype(np.uint8)
    wanted = sorted((g.tobytes(), int(d)) for g, d in zip(grey, digits.target, strict=True) if d < 8)
    assert sorted((g.tobytes(), int(d)) for g, d in zip(shown, labels, strict=True)) == wanted


def test_no_two_sets_share_an_image_and_they_are_the_same_every_time():
    contents = [load(name).contents() for name in EMBEDDED] + [load("demo:digits", split="train").contents()]
    assert not any(one & other for one, other in itertools.combinations(contents, 2))
    assert load("demo:digits").digest.startswith("aa537075")
