"""Images as the inputs of a guarded model."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from igeood.bench.datasets import DATASETS, load
from igeood.bench.networks import Task, normalised
from igeood.errors import InputError
from igeood.guard import Guard
from igeood.model.step import check_channels


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
    """An image set as batches of inputs, with the labels if it is for training; it can be read again."""

    def __init__(self, name: str, guard: Guard, *, root: str | None, batch: int, training: bool) -> None:
        if guard.preparation is None:
            raise InputError("guard: was made in Python, and does not say how images become inputs; use igeood fit")
        size, *self.scale = (guard.preparation[key] for key in ("size", "mean", "std"))
        self.images = load(name, root=root, split="train" if training else "test", side=size, labelled=training)
        self.batch, self.rows = batch, len(self.images)

    def __iter__(self) -> Iterator[Any]:
        labels = self.images.labels
        return (x if labels is None else (x, labels[rows]) for x, rows in self.blocks())

    def blocks(self, *, ids: bool = False) -> Iterator[tuple[Tensor, Any]]:
        """Batches (n, 3, size, size) with the files' names, or the images' numbers."""
        paths = getattr(self.images.source, "paths", None) if ids else None
        for start, pixels in zip(range(0, self.rows, self.batch), self.images.batches(self.batch), strict=True):
            rows = self.images.rows[start : start + len(pixels)]  # a whole set: its rows are those of the source
            yield normalised(pixels, *self.scale).contiguous(), rows if paths is None else [str(paths[i]) for i in rows]
