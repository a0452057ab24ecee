"""What the commands on guards share: where samples and models come from, and what may be written over."""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from igeood.cli._shared import FILE, Decorator, root_option
from igeood.cli.progress import Progress
from igeood.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from igeood.bench.datasets import ImageSet
    from igeood.guard import Guard
    from igeood.tables import LogitsFile

force_option: Decorator = click.option("--force", is_flag=True, help="Write over a file that is there.")
out_option: Decorator = click.option("--out", type=FILE, help="Write the guard here, and leave GUARD as it is.")


@dataclass(frozen=True)
class Sources:
    """Options that say how samples are read: columns of files, or a model and how it is fed."""

    logits_column: str | None
    label_column: str | None
    id_column: str | None
    model: str | None
    weights: str | None
    batch: int
    root: str | None

    def network(self) -> "nn.Module | None":
        """The model that was named, with its weights."""
        if self.model is None and self.weights is not None:
            raise InputError("weights: need their model; give --model MODULE:NAME too")
        if self.model is None:
            return None
        from igeood.cli._models import find_model

        return find_model(self.model, self.weights)

    def guard(self, path: str) -> "Guard":
        """The guard in a file, with its model if it has one."""
        from igeood.guard import load

        return load(path, self.network())

    def open(self, name: str, guard: "Guard", *, training: bool = False) -> "LogitsFile | Images":
        """Samples for a guard: images if it has a model, else a logits file with the features that it reads."""
        if guard.inputs.model is not None:
            return self._images(name, guard.preparation, training)
        from igeood.tables import read_logits

        layers = guard.layers or (None if guard.access == "white box" else ())
        columns = {"logits": self.logits_column, "label": self.label_column, "identity": self.id_column}
        return read_logits(name, layers=layers, labelled=training, **columns)

    def _images(self, name: str, preparation: dict[str, Any] | None, training: bool) -> "Images":
        from igeood.bench import datasets

        if preparation is None:
            raise InputError("guard: was made in Python, and does not say how images become inputs; use igeood fit")
        split = "train" if training else "test"
        images = datasets.load(name, root=self.root, split=split, side=preparation["size"], labelled=training)
        return Images(images, len(images), preparation["mean"], preparation["std"], self.batch)


_OPTIONS = (
    click.option("--logits-column", help="Column of the logits, if it is not `logits`."),
    click.option("--label-column", help="Column of the true classes, if not `label` or `labels`."),
    click.option("--id-column", help="Column that identifies samples across files; by default `id` only names rows."),
    click.option("--model", metavar="MODULE:NAME", help="A torch model, or what makes it; the module's code runs."),
    click.option("--weights", type=click.Path(), help="The model's weights: .safetensors, or a state dict in .pt."),
    click.option("--batch", default=100, show_default=True, type=click.IntRange(min=1), help="Images at a time."),
    root_option,
)  # fmt: skip


def source_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `Sources` to a command, which gets them as one argument, `sources`."""

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        chosen = {field.name: given.pop(field.name) for field in fields(Sources)}
        command(sources=Sources(**chosen), **given)

    decorated: Callable[..., None] = wrapped
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated


@dataclass(frozen=True)
class Images:
    """Images as batches of inputs, scaled and normalised; with their labels where they have any."""

    set: "ImageSet"
    rows: int
    mean: Sequence[float]
    std: Sequence[float]
    batch: int

    def __iter__(self) -> Iterator[Any]:
        labels = self.set.labels
        for x, rows in self.blocks():
            yield x if labels is None else (x, labels[rows])

    def blocks(self, *, ids: bool = False) -> Iterator[tuple[Any, Any]]:
        """Batches (n, 3, size, size) with the files' names, or the images' numbers."""
        from igeood.bench.networks import normalised

        paths = getattr(self.set.source, "paths", None) if ids else None
        for start, images in zip(range(0, self.rows, self.batch), self.set.batches(self.batch), strict=True):
            rows = self.set.rows[start : start + len(images)]  # a whole set: its rows are those of the source
            x = normalised(images, self.mean, self.std).contiguous()
            yield x, rows if paths is None else [str(paths[row]) for row in rows]


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


def check_out(out: str | None, force: bool, *inputs: str, replaced: str | None = None) -> str:
    """The file to write, `out` or else `replaced`, locked until the command ends.

    Raises where it would take the place of a file that is there, or of what it is made from.
    """
    from igeood.files import only_one

    target = Path(os.path.realpath(out or replaced or ""))
    if out is not None:
        is_input = any(Path(name).exists() and target.exists() and target.samefile(name) for name in inputs)
        if is_input or (target.exists() and not force):
            raise InputError(f"out: {out} is there already; name another file{'' if is_input else ', or give --force'}")
    if not target.parent.is_dir():
        raise InputError(f"out: {target.parent} is no folder; make it first")
    click.get_current_context().with_resource(only_one(target.with_name(f".{target.name}.lock"), "out"))
    return out or replaced or ""
