"""Images as the inputs of a guarded model."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from igeood.bench.datasets import DATASETS, ImageSet, load
from igeood.bench.networks import Task, normalised
from igeood.errors import InputError
from igeood.guard import Guard
from igeood.model.batches import Batch
from igeood.model.step import check_channels
from igeood.outputs import Refused


def prepare(guard: Guard, train: str, size: int | None, **given: str | None) -> None:
    """Set how images become inputs: size, mean and std as given, else as is usual for the data set."""
    known = DATASETS.get(train)
    if size is None and known is None:
        raise InputError("size: how many pixels does the model take? Give --size, such as 224")
    guard.preparation = {"size": size or 32}
    for name, neutral in (("mean", [0.0]), ("std", [1.0])):
        text, usual = given[name], getattr(known, name, None) or neutral
        values = list(usual) if text is None else channels(text, name)
        guard.preparation[name] = values
        setattr(guard.inputs, name, values * (3 // len(values)))


def channels(text: str, name: str) -> list[float]:
    """One number, or three, from text with commas between them."""
    values: Any = check_channels(text.split(","), name, positive=name == "std")
    if len(values) not in (1, 3):
        raise InputError(f"{name}: expected one number, or three with commas between them; got {text!r}")
    return list(values)


def learning_task(name: str, *, root: str | None = None, limit: int | None = None) -> Task:
    """A labelled set, to train a classifier on; normalised as is usual for it, or else by its own moments."""
    learn, test = (load(name, root=root, split=split, limit=limit) for split in ("train", "test"))
    if learn.labels is None or test.labels is None or learn.classes is None:
        raise InputError(f"data: {name} has no labels to learn; name a set of labelled images")
    usual = (getattr(DATASETS.get(name), key, None) or () for key in ("mean", "std"))
    return Task(name, learn.classes, learn.images(), learn.labels, test.images(), test.labels, *usual)


class Images:
    """An image set as batches of inputs, with the labels if it is for training; it can be read again.

    With `on_error = "refuse"`, files that do not decode are noted in their batch's `refused`, and black there.
    """

    on_error = "raise"

    def __init__(self, name: str, guard: Guard, *, root: str | None, batch: int, training: bool) -> None:
        if guard.preparation is None:
            raise InputError(
                "guard: was made in Python, and has no size of images; use igeood fit, or predict in Python"
            )
        size, *self.scale = (guard.preparation[key] for key in ("size", "mean", "std"))
        self.images = load(name, root=root, split="train" if training else "test", side=size, labelled=training)
        self.batch, self.rows = batch, len(self.images)

    def __iter__(self) -> Iterator[Any]:
        labels = self.images.labels
        return (b.x if labels is None else (b.x, labels[rows]) for b, rows in self.blocks())

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the sub-folders that are classes."""
        return self.images.names

    def blocks(self, *, ids: bool = False) -> Iterator[tuple[Batch, Any]]:
        """Batches of inputs (n, 3, size, size) with the files' names, or the images' numbers."""
        paths = getattr(self.images.source, "paths", None) if ids else None
        for start in range(0, self.rows, self.batch):
            refused: Refused = {}
            part = self.images[start : start + self.batch]  # of a whole set: its rows are those of the source
            x = normalised(self._pixels(part, refused), *self.scale).contiguous()
            yield Batch({"": x}, refused=refused), part.rows if paths is None else [str(paths[i]) for i in part.rows]

    def _pixels(self, part: ImageSet, refused: Refused) -> Any:
        try:
            return part.images()
        except InputError:
            if self.on_error == "raise":
                raise
        pixels = np.zeros((len(part), 3, part.side, part.side), np.uint8)
        for row in range(len(part)):
            try:
                pixels[row] = part[[row]].images()[0]
            except InputError as error:  # noqa: PERF203
                refused[row] = str(error)
        return pixels
