"""What the commands on guards share: where models and samples come from, and which files may be replaced."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from igeood.cli import spelling
from igeood.errors import IgeoodError, InputError, plain
from igeood.terminal import FILE, Decorator, Progress, force_option, json_option, show

if TYPE_CHECKING:
    from torch import nn

    from igeood.guard import Guard
    from igeood.images import ImageFolder
    from igeood.summary import Needs, Summary
    from igeood.tables import LogitsFile

Options = dict[str, Any]
SHOWN = 20  # files that failed
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def size_of(_: click.Context, __: click.Parameter, text: str) -> int:
    """Bytes from text such as 512MB or 1.5GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([kmgt]?)(i?)b?", text.strip().lower())
    if match is None or not float(match[1]):
        raise click.BadParameter(f"expected a size such as 512MB, got {text!r}")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _UNITS[unit])


out_option: Decorator = click.option("--out", type=FILE, help="Write the guard here, and leave GUARD as it is.")
tpr_option: Decorator = click.option("--tpr", default=0.95, show_default=True, help="Share of ID samples to keep.")
memory_option: Decorator = click.option(
    "--memory",
    "budget",
    default="256MiB",
    show_default=True,
    callback=size_of,
    help="Memory for the rows that are kept, such as 512MB; of more rows, a sample of each class is kept.",
)
_ENGINE = (
    click.option("--workers", type=click.IntRange(1, 4096), help="Number of processes; by default this one."),
    click.option("--engine", type=click.Choice(["ray"]), help="Run on Ray; on this machine without --address."),
    click.option("--address", metavar="HOST:PORT", help="A Ray cluster, whose machines see the same paths."),
)
_MODEL = (
    force_option,
    json_option,
    click.option("--model", metavar="MODULE:NAME", help="A torch model, or what makes it; the module's code runs."),
    click.option("--weights", type=click.Path(), help="The model's weights: .safetensors, or a state dict in .pt."),
)
_SAMPLES = (
    click.option(
        "--logits-column",
        default="logits",
        show_default=True,
        help="Column of the logits; a pattern such as `logit_*` takes one for each.",
    ),
    click.option("--label-column", help="Column of the true classes, if not `label` or `labels`."),
    click.option("--id-column", help="Column that identifies samples across files; by default `id`, if its ids can."),
    *_MODEL,
    click.option("--batch", default=100, show_default=True, type=click.IntRange(min=1), help="Images at a time."),
)


def options_of(*decorators: Decorator) -> Decorator:
    """Several options as one decorator."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return add


model_options = options_of(*_MODEL)  # --force, --json, and the options that name a model
guard_options = options_of(*_SAMPLES)  # these, and how samples are read
engine_options = options_of(*_ENGINE)  # where many files are done


def load_model(options: Options) -> "nn.Module | None":
    """The model that `--model MODULE:NAME` is, or makes, with its weights."""
    if options["model"] is None:
        if options["weights"] is not None:
            raise InputError("they need their model", argument="weights", cure="give {model} too")
        return None
    from igeood.model.factory import load_weights, make_model

    model = make_model(options["model"])
    return model if options["weights"] is None else load_weights(model, options["weights"])


def load_guard(path: str, options: Options) -> "Guard":
    """The guard in a file, with its model if it has one."""
    from igeood.guard import load

    return load(path, load_model(options))


def sum_of(names: Sequence[str], report: Progress, needs: "Needs | None" = None) -> "Summary":
    """The sum of summaries in files, folders or patterns of them; each is read, added and forgotten."""
    from igeood.summary import Summary

    paths = [path for name in names for path in _summary_files(name)]
    files = [os.path.realpath(path) for path in paths]
    total = None
    for done, path in enumerate(paths, 1):
        if files.count(os.path.realpath(path)) > 1:
            raise InputError("is named twice", place=path, cure="name each summary once")
        part = Summary.load(path, needs)
        try:
            total = part if total is None else total.__iadd__(part)
        except InputError as error:
            raise error.within(path) from None
        report("summaries", done, len(paths))
    return total  # type: ignore[return-value]


def _summary_files(name: str) -> list[str]:
    """The files that a name stands for: itself; those of a folder, all that its manifests have; or of a pattern."""
    from igeood.work.units import MANIFEST, read_manifest

    path = Path(name)
    if path.is_file():
        return [name]
    paths = {*path.rglob("*.safetensors")} if path.is_dir() else {*map(Path, glob(name, recursive=True))}  # noqa: PTH207
    for manifest in path.rglob(MANIFEST) if path.is_dir() else ():  # a missing summary is an error, not a smaller sum
        units = {manifest.parent / unit for unit in read_manifest(manifest.parent)[1]}
        paths = {file for file in paths if manifest.parent not in file.parents} | units
    if not paths:
        raise InputError("no summary there", place=name, cure="give files that `igeood fit --summary` wrote")
    return sorted(map(str, paths))


def health(guard: "Guard", as_json: bool) -> Options:
    """The guard's findings, for the result; warnings are on stderr already."""
    spell = spelling(click.get_current_context().command)
    if as_json:
        return {"health": [{**vars(finding), "cure": plain(finding.cure, spell)} for finding in guard.health]}
    return {"note": [f"{finding.text(spell)}." for finding in guard.health if finding.level == "info"] or None}


def open_samples(
    names: Sequence[str], guard: "Guard", options: Options, *, training: bool = False
) -> "LogitsFile | ImageFolder":
    """Samples for a guard: images if it has a model, else logits files with the features that it reads."""
    if guard.source.model is not None:
        from igeood.images import ImageFolder

        if len(names) > 1:
            problem = "a guard with a model takes one set of images"
            raise InputError(problem, place=names[1], cure="put them into one folder")
        return ImageFolder(names[0], guard, batch=options["batch"], training=training)
    from igeood.work.scoring import open_logits

    return open_logits(guard, names, column_names(options), labelled=training)


def column_names(options: Options) -> dict[str, str | None]:
    """The names of columns, as `read_logits` takes them."""
    return {"logits": options["logits_column"], "label": options["label_column"], "identity": options["id_column"]}


def is_folder(path: str | None) -> bool:
    """Whether a folder is named: it is one, or its name ends with /."""
    return path is not None and (path.endswith(("/", os.sep)) or Path(path).is_dir())


def show_units(as_json: bool, record: Options, failed: dict[str, IgeoodError]) -> None:
    """Print what was done with many files; those that failed are an error."""
    spell = spelling(click.get_current_context().command)
    reasons = {name: error.text(spell) for name, error in failed.items()}
    show(as_json, {**record, "failed": reasons if as_json else len(failed) or None})
    for name, reason in list(reasons.items())[:SHOWN]:
        click.echo(f"igeood: {name}: {reason}", err=True)
    if failed:
        cure = "fix them and give the command again, which goes on with them"
        raise InputError(f"{len(failed)} of {record['files']} files failed", cure=cure)


@dataclass(frozen=True)
class Watched:
    """Samples whose reading is reported; they can be read again."""

    source: "LogitsFile | ImageFolder"
    what: str
    report: Progress

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes, where the samples have them."""
        return getattr(self.source, "classes", None)

    def __iter__(self) -> Iterator[Any]:
        done = 0
        for item in self.source:
            yield item
            done += len(item[0]) if isinstance(item, tuple) else len(item)
            self.report(self.what, done, self.source.rows)


def check_out(
    out: str | None, force: bool, *inputs: str, replaced: str = "", guard: bool = True, what: str = "out"
) -> str:
    """The file to write, `out` or else `replaced`, locked until the command ends; one that is there needs `force`.

    A `guard` replaces guards only. Errors name the option `what`.
    """
    from igeood.files import only_one

    target = Path(os.path.realpath(out or replaced))
    if target in (Path(os.path.realpath(path)) for name in inputs for path in (name, *glob(name, recursive=True))):  # noqa: PTH207
        raise InputError(f"{out} is what the command reads", argument=what, cure="name another file")
    if out is not None and target.exists() and not force:
        raise InputError(f"{out} is there already", argument=what, cure="name another file, or give {force}")
    if guard and out is not None:
        from igeood.guard.file import check_replaceable

        check_replaceable(out)
    click.get_current_context().with_resource(only_one(target.with_name(f".{target.name}.lock"), what))
    return out or replaced
