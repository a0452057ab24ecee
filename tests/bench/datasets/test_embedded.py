"""The embedded sets: what is in them, and that they are apart."""

import itertools
from string import ascii_uppercase

import numpy as np
from sklearn.datasets import load_digits

from igeood.bench.datasets import EMBEDDED, load
from igeood.bench.datasets.embedded import FONTS, LOOKALIKES


def test_the_known_digits_are_all_there_once_and_have_their_labels():
    digits = load_digits()
    train, test = load("demo:digits", split="train"), load("demo:digits")
    assert (len(train), len(test), train.classes) == (720, 723, 8)
    shown = np.concatenate([s.source.values for s in (train, test)])
    labels = np.concatenate([train.labels, test.labels])
    grey = (digits.images * 255 / 16).round().astype(np.uint8)
    wanted = sorted((g.tobytes(), int(d)) for g, d in zip(grey, digits.target, strict=True) if d < 8)
    assert sorted((g.tobytes(), int(d)) for g, d in zip(shown, labels, strict=True)) == wanted
    assert min(np.bincount(train.labels)) > 15


def test_no_two_sets_share_an_image_and_they_are_the_same_every_time():
    contents = [load(name).contents() for name in EMBEDDED] + [load("demo:digits", split="train").contents()]
    for one, other in itertools.combinations(contents, 2):
        assert not one & other
    assert load("demo:digits").digest.startswith("aa537075")


def test_letters_are_every_letter_in_every_font_but_those_that_look_like_digits():
    images = load("demo:letters")
    letters = [letter for letter in ascii_uppercase if letter not in LOOKALIKES]
    assert len(images) == len(letters) * len(FONTS)
    assert (images.source.values > 0).any(axis=(1, 2)).all()  # no font lacks a letter
