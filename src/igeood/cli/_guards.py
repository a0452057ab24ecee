"""What the commands on guards share: where samples and models come from, and what may be written over."""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from igeood.cli._shared import root_option
from igeood.cli.progress import Progress
from igeood.errors import GuardFileError, InputError
from igeood.files import only_one

if TYPE_CHECKING:
    from torch import nn

    from igeood.datasets import ImageSet
    from igeood.guard import Guard
    from igeood.logits_files import LogitsFile

force_option = click.option("--force", is_flag=True, help="Write over a file that is there.")


def replacing(command: Callable[..., None]) -> Callable[..., None]:
    """`--out` and `--force` of a command that otherwise replaces the guard it was given."""
    return click.option(
        "--out", type=click.Path(dir_okay=False), help="Write the guard here, and leave GUARD as it is."
    )(force_option(command))


@dataclass(frozen=True)
class Sources:
    """Options that tell how samples are read: columns of files, or a model and how it is fed."""

    logits_column: str | None
    label_column: str | None
    id_column: str | None
    model: str | None
    weights: str | None
    batch: int
    root: str | None

    def network(self) -> "nn.Module | None":
        """The model that was named, with its weights."""
        if self.model is None:
            if self.weights is not None:
                raise InputError("weights: whose? Name the model too; give --model module:factory")
            return None
        from igeood.cli._models import find_model
        from igeood.networks import load_weights

        model = find_model(self.model)
        return model if self.weights is None else load_weights(model, self.weights)

    def file(self, path: str, layers: Sequence[str] | None, *, training: bool = False) -> "LogitsFile":
        """A logits file, with the features of these layers, or of all."""
        from igeood.logits_files import read_logits

        if path.startswith(("folder:", "idx:", "demo:")):
            raise InputError(f"{path}: images need a model to run through; name it: --model module:factory")
        columns = {"logits": self.logits_column, "label": self.label_column, "identity": self.id_column}
        return read_logits(path, layers=layers, labelled=training, **columns)

    def images(self, name: str, preparation: dict[str, Any], *, training: bool = False) -> "Images":
        """A set of images as batches for the model."""
        from igeood import datasets

        if name not in datasets.DATASETS and Path(name).is_dir():
            raise InputError(f"{name}: is a folder; to read its images, say folder:{name}")
        split, side = "train" if training else "test", preparation["size"]
        found = datasets.load(name, root=self.root, split=split, side=side, labelled=training)
        if training and found.labels is None:
            raise InputError(f"{name}: has no labels to fit on; name a set of labelled images")
        return Images(found, preparation["mean"], preparation["std"], self.batch)

    def open(self, name: str, guard: "Guard", *, training: bool = False) -> "LogitsFile | Images":
        """Samples for a guard that is there already."""
        if guard.inputs.model is None:
            file, classes = self.file(name, guard.layers, training=training), guard.detector.n_classes_
            if file.rows and file.n_classes != classes:  # told before anything is read
                told = f"{file.n_classes} columns, but the guard was fitted on {classes} classes"
                raise InputError(f"{name}: {told}; give logits of the same classifier")
            return file
        if guard.preparation is None:
            raise InputError(
                "guard: was made in Python, and does not say how images become inputs; make it with igeood fit"
            )
        return self.images(name, guard.preparation, training=training)


_OPTIONS = (
    click.option("--logits-column", help="Column of the logits, if it is not `logits`."),
    click.option("--label-column", help="Column of the true classes, if not `label` (Parquet) or `labels` (npz)."),
    click.option("--id-column", help="Column of names for the rows, if it is not `id`."),
    click.option(
        "--model",
        metavar="MODULE:NAME",
        help="A torch model, or what makes it. The module is imported, also from the current folder: its code runs.",
    ),
    click.option("--weights", type=click.Path(), help="The model's weights: .safetensors, or a state dict in .pt."),
    click.option("--batch", default=100, show_default=True, type=click.IntRange(min=1), help="Images at a time."),
    root_option,
)


def source_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `Sources` to a command, which gets them as one argument, `sources`."""

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        kept = {field.name: given.pop(field.name) for field in fields(Sources)}
        command(sources=Sources(**kept), **given)

    made: Callable[..., None] = wrapped
    for option in reversed(_OPTIONS):
        made = option(made)
    return made


@dataclass(frozen=True)
class Images:
    """Images as batches of inputs, scaled and normalised; with their labels where they have any."""

    set: "ImageSet"
    mean: Sequence[float]
    std: Sequence[float]
    batch: int

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.set)

    def __iter__(self) -> Iterator[Any]:
        labels = self.set.labels
        for x, at in self._batches():
            yield x if labels is None else (x, labels[at])

    def blocks(self, *, ids: bool = False) -> Iterator[tuple[Any, Any]]:
        """Batches (n, 3, size, size) with the files' names, or the images' numbers."""
        paths = getattr(self.set.source, "paths", None) if ids else None
        for x, at in self._batches():
            rows = self.set.rows[at]
            yield x, rows if paths is None else [str(paths[row]) for row in rows]

    def _batches(self) -> Iterator[tuple[Any, slice]]:
        from igeood.networks.training import normalised

        start = 0
        for images in self.set.batches(self.batch):
            x = normalised(images, self.mean, self.std).contiguous()  # as any model may ask for
            yield x, slice(start, start + len(images))
            start += len(images)


@dataclass(frozen=True)
class Watched:
    """Samples whose reading is reported; they can be read again."""

    source: "LogitsFile | Images"
    what: str
    report: Progress

    def __iter__(self) -> Iterator[Any]:
        done = 0
        for item in self.source:
            yield item
            done += len(item[0]) if isinstance(item, tuple) else len(item)
            self.report(self.what, done, self.source.rows)


def load_guard(path: str, sources: Sources, data: str = "") -> "Guard":
    """The guard in a file, with its model if it has one; `data`, the other argument, may have been meant."""
    from igeood import storage
    from igeood.access import load

    try:
        return load(path, sources.network())
    except GuardFileError as error:
        try:
            storage.read(data)
        except GuardFileError:
            raise error from None
        raise InputError(f"guard: {path} is none, but {data} is: give the guard first, then the samples") from None


def check_new(out: str | None, force: bool, *inputs: str, replaced: str | None = None) -> None:
    """Raise where a result would take the place of a file that is there, or of what it is made from.

    Until the command ends no other writes `out`, or `replaced` where there is none: one result would be lost.
    """
    if out is not None:
        target = Path(out)
        if any(Path(name).exists() and target.exists() and target.samefile(name) for name in inputs):
            raise InputError(f"out: {out} is what this is made from; name another file")
        if target.exists() and not force:
            raise InputError(f"out: {out} is there already; name another file, or give --force")
        if not target.parent.is_dir():
            raise InputError(f"out: {target.parent} is no folder; make it first")
    written = Path(os.path.realpath(out or replaced or ""))
    if written.parent.is_dir() and not written.is_dir():
        lock = only_one(written.with_name(f".{written.name}.lock"), "out" if out else "guard")
        try:
            click.get_current_context().with_resource(lock)
        except OSError as error:
            error.filename = out or replaced  # not the lock's
            raise
