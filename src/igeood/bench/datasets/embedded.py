"""Small sets that need no download, made of what scikit-learn and matplotlib bring along: for the demonstration.

Digits are scikit-learn's; letters are drawn with matplotlib's fonts in the digits' form, 8 x 8 counts of ink;
photographs are patches of scikit-learn's two, in colour.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from string import ascii_uppercase

import numpy as np
from numpy.typing import NDArray

from igeood.bench.datasets.images import SIDE, Arrays, Images, ImageSet, Labels
from igeood.errors import InputError, import_extra

KNOWN = 8  # digits 0…7 are what a classifier learns; 8 and 9 are left out
TRAIN = 720  # of the known digits, half; the others are its test images
INK = 16  # the darkest count of the digits
LOOKALIKES = frozenset("IOSZ")  # as a digit's 1, 0, 5, 2 they would be in-distribution
_STYLES = ("", "-Bold", "-Oblique", "-BoldOblique")
FONTS = (
    *(f"DejaVu{family}{style}" for family in ("Sans", "SansMono") for style in _STYLES),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *("cmb10", "cmr10", "cmss10", "cmti10", "cmtt10"),
)


@dataclass(frozen=True)
class Embedded:
    """A set's title for tables, and how it is made for a split."""

    title: str
    make: Callable[[str], tuple[Images, Labels | None]]


def load_embedded(name: str, split: str) -> ImageSet:
    """One of `EMBEDDED`; only the digits have a split `"train"`."""
    splits = ("train", "test") if name == "demo:digits" else ("test",)
    for argument, value, known in (("name", name, EMBEDDED), ("split", split, splits)):
        if value not in known:
            raise InputError.unknown(argument, value, known)
    images, labels = EMBEDDED[name].make(split)
    classes = None if labels is None else KNOWN
    return ImageSet(name, EMBEDDED[name].title, Arrays(images), np.arange(len(images)), labels, classes)


def _digits(part: str) -> tuple[Images, Labels | None]:
    """Digits 0…7 in an order that is random but always the same, so that both splits have all writers; or 8 and 9."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 (slow to import)

    digits = load_digits()
    rows = np.random.default_rng(0).permutation(np.flatnonzero(digits.target < KNOWN))
    rows = {"train": rows[:TRAIN], "test": rows[TRAIN:]}.get(part, np.flatnonzero(digits.target >= KNOWN))
    rows.sort()
    return _grey(digits.images[rows]), digits.target[rows].astype(np.int64)


@lru_cache(maxsize=2)
def _letters(alphabet: str) -> Images:
    chosen = [letter for letter in alphabet if letter not in LOOKALIKES]
    return _grey(np.stack([_glyph(letter, font) for letter in chosen for font in FONTS]))


def _glyph(letter: str, font: str) -> NDArray[np.float64]:
    """A letter as the digits were made: a bitmap of 32 x 32 that it fills, then counts in blocks of 4 x 4."""
    modules = ("Image", "ImageDraw", "ImageFont", "ImageOps")
    image, drawing, fonts, ops = (import_extra(f"PIL.{name}", "data") for name in modules)
    file = Path(import_extra("matplotlib", "report").get_data_path()) / "fonts" / "ttf" / f"{font}.ttf"
    canvas = image.new("L", (160, 160))
    drawing.Draw(canvas).text((40, 20), letter, fill=255, font=fonts.truetype(str(file), 96))
    cut = ops.contain(canvas.crop(canvas.getbbox()), (SIDE, SIDE), image.Resampling.BILINEAR)
    bitmap = image.new("L", (SIDE, SIDE))
    bitmap.paste(cut, ((SIDE - cut.width) // 2, (SIDE - cut.height) // 2))
    ink = np.asarray(bitmap) > 127
    return np.asarray(ink.reshape(8, 4, 8, 4).sum(axis=(1, 3)), np.float64)


def _patches() -> Images:
    """Squares of 32 x 32 pixels that cover scikit-learn's two photographs, (520, 3, 32, 32)."""
    from sklearn.datasets import load_sample_images  # noqa: PLC0415 (slow to import)

    import_extra("PIL.Image", "data")  # which scikit-learn reads them with
    patches = []
    for photograph in load_sample_images().images:  # (427, 640, 3)
        rows, columns = (side // SIDE for side in photograph.shape[:2])
        whole = photograph[: rows * SIDE, : columns * SIDE].reshape(rows, SIDE, columns, SIDE, 3)
        patches.append(whole.transpose(0, 2, 4, 1, 3).reshape(-1, 3, SIDE, SIDE))
    return np.concatenate(patches)


def _grey(counts: NDArray[np.float64]) -> Images:
    """Counts of ink as bytes: white on black."""
    return (counts * (255 / INK)).round().astype(np.uint8)


EMBEDDED: Mapping[str, Embedded] = {
    "demo:digits": Embedded("Digits 0–7", _digits),
    "demo:left-out": Embedded("Digits 8, 9", lambda _: (_digits("others")[0], None)),
    "demo:letters": Embedded("Capital letters", lambda _: (_letters(ascii_uppercase), None)),
    "demo:photographs": Embedded("Photographs", lambda _: (_patches(), None)),
}
