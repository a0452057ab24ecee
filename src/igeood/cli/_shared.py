"""What the commands on guards share: where models and samples come from, and which files may be replaced."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from igeood.errors import InputError
from igeood.terminal import FILE, Decorator, Progress, force_option, json_option, root_option

if TYPE_CHECKING:
    from torch import nn

    from igeood.bench.inputs import Images
    from igeood.guard import Guard
    from igeood.tables import LogitsFile

out_option: Decorator = click.option("--out", type=FILE, help="Write the guard here, and leave GUARD as it is.")
tpr_option: Decorator = click.option("--tpr", default=0.95, show_default=True, help="Share of ID samples to keep.")
_OPTIONS = (
    force_option,
    click.option("--logits-column", default="logits", show_default=True, help="Column of the logits."),
    click.option("--label-column", help="Column of the true classes, if not `label` or `labels`."),
    click.option("--id-column", help="Column that identifies samples across files; by default `id` only names rows."),
    click.option("--model", metavar="MODULE:NAME", help="A torch model, or what makes it; the module's code runs."),
    click.option("--weights", type=click.Path(), help="The model's weights: .safetensors, or a state dict in .pt."),
    click.option("--batch", default=100, show_default=True, type=click.IntRange(min=1), help="Images at a time."),
    root_option,
    json_option,
)


def guard_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--force`, `--json`, and the options of `Sources`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True)
class Sources:
    """Options that say how samples are read: columns of files, or a model and how it is fed."""

    logits_column: str
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
        if self.model is None or self.weights is None:
            return _model(self.model) if self.model else None
        from igeood.bench.networks import load_weights

        return load_weights(_model(self.model), self.weights)

    def guard(self, path: str) -> "Guard":
        """The guard in a file, with its model if it has one."""
        from igeood.guard import load

        return load(path, self.network())

    def open(self, name: str, guard: "Guard", *, training: bool = False) -> "LogitsFile | Images":
        """Samples for a guard: images if it has a model, else a logits file with the features that it reads."""
        if guard.inputs.model is not None:
            from igeood.bench.inputs import Images

            return Images(name, guard, root=self.root, batch=self.batch, training=training)
        from igeood.tables import read_logits

        layers = guard.layers or (None if guard.access == "white box" else ())
        columns = {"logits": self.logits_column, "label": self.label_column, "identity": self.id_column}
        return read_logits(name, layers=layers, labelled=training, **columns)


def _model(spec: str) -> "nn.Module":
    """The model `module:name`, or what the function of this name returns. The current folder is searched too."""
    from torch import nn

    module, _, name = spec.partition(":")
    if not (module and name) or module.endswith(".py"):
        raise InputError(f"model: expected MODULE:NAME, such as nets:make_model for nets.py; got {spec!r}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        model = getattr(importlib.import_module(module), name)
        model = model if isinstance(model, nn.Module) else model()
    except (Exception, SystemExit) as error:  # of the user's own code
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"model: {spec} failed: {reason}; fix its name, or that module") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"model: {spec} is {type(model).__name__}; expected a torch.nn.Module, or what makes one")
    return model


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


def check_out(out: str | None, force: bool, *inputs: str, replaced: str = "") -> str:
    """The file to write, `out` or else `replaced`, locked until the command ends.

    Raises where it would take the place of a file that is there, or of what it is made from.
    """
    from igeood.files import only_one

    target = Path(os.path.realpath(out or replaced))
    if out is not None and target.exists():
        is_input = any(Path(name).exists() and target.samefile(name) for name in inputs)
        if is_input or not force:
            raise InputError(f"out: {out} is there already; name another file{'' if is_input else ', or give --force'}")
    if not target.parent.is_dir():
        raise InputError(f"out: {target.parent} is no folder; make it first")
    click.get_current_context().with_resource(only_one(target.with_name(f".{target.name}.lock"), "out"))
    return out or replaced
