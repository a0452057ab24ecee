"""What the page tells of a guard: how much it keeps and refuses, its scores, and pictures with reasons."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from igeood.bench.figures.drawing import look_of
from igeood.bench.guarded import Guarded, Judged, Picture
from igeood.bench.report.drawing import Drawing, histogram, number, picture
from igeood.bench.runs.averages import Key
from igeood.files import read_record
from igeood.guard.file import load_calibration

Card = dict[str, str]  # of a picture: its set, its source, the text for those who don't see it, and lines beside it


@dataclass(frozen=True, eq=False)
class Guarding:
    """A guard, and the sets that it has judged.

    Attributes
    ----------
    about : str
        Its method, and whose guard it is; empty if its file is not there.
    left_out : int
        Images that were offered to calibrate it but not used, because training or tuning had seen them.
    guarded : Guarded, optional
        What it does with sets of images, if that was tried.
    promise : str, optional
        None if it is not calibrated.
    threshold : float, optional
        None if it is not calibrated.
    """

    about: str = ""
    left_out: int = 0
    guarded: Guarded | None = None
    promise: str | None = None
    threshold: float | None = None

    def sets(self, *, is_known: bool | None = None) -> list[Judged]:
        """The sets judged: all, the known ones or the foreign ones."""
        every = self.guarded.sets if self.guarded else []
        return [one for one in every if is_known in (None, one.is_known)]

    def headline(self) -> str:
        """What the guard does, in a sentence."""
        parts = [
            f"{verb} {_joined(f'{abs(is_known - one.refused):.1%} of {within(one.title)}' for one in sets)}"
            for verb, is_known in (("keeps", True), ("refuses", False))
            if (sets := self.sets(is_known=is_known))
        ]
        return f"The guard {' and '.join(parts)}."

    def histograms(self) -> Iterator[Drawing]:
        """Scores of each foreign set beside those of the known ones, with the guard's threshold."""
        known = [one.scores.numpy() for one in self.sets(is_known=True)]
        for one in self.sets(is_known=False) if known else ():
            yield histogram(one.title, np.concatenate(known), one.scores.numpy(), self.threshold or 0.0)

    def pictures(self) -> Iterator[tuple[str, list[Card]]]:
        """Pictures of what was refused, of what was missed, and of what was refused wrongly, each with a heading."""
        for is_known, is_ood, text in (
            (False, True, "Refused: {} of {} foreign images. Some of them:"),
            (False, False, "Missed: {} of {} foreign images are kept."),
            (True, True, "Refused wrongly: {} of {} known images."),
        ):
            sets = self.sets(is_known=is_known)
            images = [len(one.scores) for one in sets]
            refused = sum(round(n * one.refused) for n, one in zip(images, sets, strict=True))
            count = refused if is_ood else sum(images) - refused
            cards = [card for one in sets for card in _cards(one, is_ood=is_ood)]
            yield text.format(f"{count:,}", f"{sum(images):,}"), cards


def _cards(one: Judged, *, is_ood: bool) -> Iterator[Card]:
    for image, shown in zip(one.images.numpy(), one.pictures, strict=True):
        if shown.is_ood == is_ood:
            yield {"set": one.title, "source": picture(image), **_words(shown)}


def _words(shown: Picture) -> Card:
    sure = ">99.9%" if shown.confidence > 0.9994 else f"{shown.confidence:.1%}"
    lines = {"taken": f"taken for class {shown.label}", "sure": f"{sure} sure · p = {shown.p_value:.2g}"}
    alt = f"image {shown.row}, score {number(shown.score)}, {'refused' if shown.is_ood else 'kept'}"
    return {**lines, "reason": shown.reason if shown.is_ood else "", "alt": alt}


def within(title: str) -> str:
    """A set's title within a sentence.

    >>> within("Digits 8, 9"), within("Gaussian noise")
    ('digits 8 and 9', 'Gaussian noise')
    """
    return title if title.startswith("Gaussian") else f"{title[0].lower()}{title[1:]}".replace(", ", " and ")


def _joined(parts: Iterable[str]) -> str:
    """Parts of a sentence.

    >>> _joined(["1% of A", "2% of B", "3% of C"])
    '1% of A, 2% of B and 3% of C'
    """
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last


def guarding(folder: Path, path: Path | None, keys: list[Key]) -> Guarding | None:
    """What there is to tell of a guard.

    Parameters
    ----------
    folder : path
        Of the results, with what a guard has judged.
    path : path, optional
        The guard's file. What another guard has judged is not told of it.
    keys : list of Key
        The networks of the report.

    Returns
    -------
    Guarding or None
        None if there is no guard.
    """
    guarded = Guarded.load(folder)
    if path is None:
        return Guarding("", 0, guarded, guarded.promise, guarded.threshold) if guarded else None
    record, _ = read_record(path, "guard")
    whose = {key.weights: str(key) for key in keys}.get(record["model"], "a network that is not in this report")
    about = f"{look_of(record['method']).title}, {record['access']}, of {whose} ({path.name})"
    if not record["calibration"]:
        return Guarding(about)
    known = load_calibration(path)
    is_its = guarded is not None and math.isclose(guarded.threshold, known.threshold)
    return Guarding(about, len(known.left_out), guarded if is_its else None, known.promise, known.threshold)
