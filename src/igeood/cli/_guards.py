"""What the commands on guards share: where samples and models come from, progress, and how results are told."""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from igeood.cli.progress import Progress, progress_bars
from igeood.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from igeood.datasets import ImageSet
    from igeood.guard import Guard
    from igeood.logits_files import LogitsFile

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
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
                raise InputError("weights: whose? Name the model too: --model module:factory")
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
                raise InputError(f"{name}: {file.n_classes} columns, but the guard was fitted on {classes} classes")
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
        help="A torch model, or a function that makes it. The module is imported, with the current folder on the path: "
        "its code runs.",
    ),
    click.option("--weights", type=click.Path(), help="The model's weights: .safetensors, or a state dict in .pt."),
    click.option("--batch", default=100, show_default=True, type=click.IntRange(min=1), help="Images at a time."),
    click.option("--root", type=click.Path(file_okay=False), help="Where the data are; $IGEOOD_DATA by default."),
)


def source_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `Sources` to a command, which gets them as one argument, `sources`."""

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        kept = {field.name: given.pop(field.name) for field in fields(Sources)}
        command(sources=Sources(**kept), **given)

    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


class Images:
    """Images as batches of inputs, scaled and normalised; with their labels where they have any."""

    def __init__(self, images: "ImageSet", mean: Sequence[float], std: Sequence[float], batch: int) -> None:
        import numpy as np

        self.set, self.batch = images, batch
        self.mean, self.std = (np.array(v, np.float32).reshape(-1, 1, 1) for v in (mean, std))
        self.rows = len(images)

    def __iter__(self) -> Iterator[Any]:
        start = 0
        for x, _ in self.blocks():
            yield x if self.set.labels is None else (x, self.set.labels[start : start + len(x)])
            start += len(x)

    def blocks(self, *, ids: bool = False) -> Iterator[tuple[Any, Any]]:
        """Batches (n, 3, size, size) with the files' names, or the images' numbers."""
        import torch

        start, paths = 0, getattr(self.set.source, "paths", None) if ids else None
        for images in self.set.batches(self.batch):
            rows = self.set.rows[start : start + len(images)]
            x = (images.astype("float32") / 255.0 - self.mean) / self.std
            yield torch.from_numpy(x), rows if paths is None else [str(paths[row]) for row in rows]
            start += len(images)


class Watched:
    """Samples whose reading is reported; they can be read again."""

    def __init__(self, source: "LogitsFile | Images", what: str, report: Progress) -> None:
        self.source, self.what, self.report = source, what, report

    def __iter__(self) -> Iterator[Any]:
        done = 0
        for item in self.source:
            yield item
            done += len(item[0]) if isinstance(item, tuple) else len(item)
            self.report(self.what, done, self.source.rows)


@contextmanager
def progress() -> Iterator[Progress]:
    """Progress of what takes more than one block; less is over at once."""
    with progress_bars() as show:
        begun: set[str] = set()

        def report(what: str, done: int, total: int) -> None:
            if done < total or what in begun:
                begun.add(what)
                show(what, done, total)

        yield report


def load_guard(path: str, sources: Sources) -> "Guard":
    """The guard in a file, with its model if it has one."""
    from igeood.access import load

    return load(path, sources.network())


def check_new(out: str | None, force: bool, *inputs: str) -> None:
    """Raise where a result would take the place of a file that is there, or of what it is made from."""
    if out is None:
        return
    target = Path(out)
    if any(Path(name).exists() and target.exists() and target.samefile(name) for name in inputs):
        raise InputError(f"out: {out} is what this is made from; name another file")
    if target.exists() and not force:
        raise InputError(f"out: {out} is there already; name another file, or give --force")
    if not target.parent.is_dir():
        raise InputError(f"out: {target.parent} is no folder; make it first")


def tell(as_json: bool, record: dict[str, Any], text: str) -> None:
    """The result: one JSON object, or words."""
    click.echo(json.dumps(record) if as_json else text)
