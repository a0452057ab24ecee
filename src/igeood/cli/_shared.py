"""What the commands on guards share: where models and samples come from, and which files may be replaced."""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from igeood.cli import spelling
from igeood.errors import IgeoodError, InputError, plain
from igeood.terminal import FILE, Decorator, Progress, force_option, json_option, progress_bars, show

if TYPE_CHECKING:
    from torch import Tensor, nn

    from igeood.guard import Guard
    from igeood.images import ImageFolder
    from igeood.logits_files import LogitsFile
    from igeood.summary import Needs, Summary
    from igeood.work.engines import Work

Options = dict[str, Any]
SHOWN = 20  # files that failed
_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_PREFIXES |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_BYTES = {f"{prefix}{b}": size for prefix, size in _PREFIXES.items() for b in ("", "b")}


def quantity(
    units: Mapping[str, float], example: str, least: float, most: float = math.inf
) -> Callable[[click.Context, click.Parameter, str], float]:
    """A callback that reads a number with one of these units, such as the example, from `least` to `most`."""

    def read(_: click.Context, __: click.Parameter, text: str) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?) *([a-z]*)", text.strip().lower())
        unit = None if match is None else units.get(match[2])
        value = math.nan if match is None or unit is None else type(unit)(float(match[1]) * unit)
        if not least <= value <= most:
            raise click.BadParameter(f"expected a text such as {example}, got {text!r}")
        return value

    return read


_LOGITS = """Column of logits; a pattern such as "p_*" takes one column for each class. Default: those that the guard
was fitted on, else `logits`, else all that begin with `logit`."""
_ID = "Column whose texts identify samples across files; default: that of `fit`, else `id`."
_MEMORY = "Memory for the training rows that are kept, such as 512MB; of more rows, a sample of each class is kept."
out_option: Decorator = click.option("--out", type=FILE, help="Write the new guard here instead of replacing GUARD.")
tpr_option: Decorator = click.option("--tpr", default=0.95, help="Share of in-distribution samples to keep.")
size_of = quantity(_BYTES, "512MB", least=1)
memory_option: Decorator = click.option("--memory", "budget", default="256MiB", callback=size_of, help=_MEMORY)
_ENGINE = (
    click.option("--workers", type=click.IntRange(1, 4096), help="Files to do at a time, each in its own process."),
    click.option("--engine", type=click.Choice(["ray"]), help="Run on Ray; without --address, on this machine."),
    click.option("--address", metavar="HOST:PORT", help="Ray cluster; its machines must see the same paths."),
)
_MODEL = (
    click.option("--model", metavar="MODULE:NAME", help="PyTorch model, or a function that returns it; its code runs."),
    click.option("--weights", type=click.Path(), help="The model's weights: .safetensors, or a state dict in .pt."),
)
_SAMPLES = (
    click.option("--logits-column", metavar="NAME", help=_LOGITS),
    click.option("--label-column", metavar="NAME", help="Column of true classes; default: `label` or `labels`."),
    click.option("--id-column", metavar="NAME", help=_ID),
    click.option("--batch", default=100, type=click.IntRange(min=1), help="Images in a batch."),
)


def options_of(*decorators: Decorator) -> Decorator:
    """Several options as one decorator."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return add


model_options = options_of(*_MODEL)
result_options = options_of(*_MODEL, force_option, json_option)
guard_options = options_of(*_SAMPLES, *_MODEL, force_option, json_option)
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
    seen = set()
    total: Any = None
    for done, path in enumerate(paths, 1):
        if os.path.realpath(path) in seen:
            raise InputError("is named twice", place=path, cure="name each summary once")
        seen.add(os.path.realpath(path))
        part = Summary.load(path, needs)
        try:
            total = part if total is None else total.__iadd__(part)
        except InputError as error:
            raise error.within(path) from None
        report("summaries", done, len(paths))
    return cast("Summary", total)


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
    names: Sequence[str], guard: "Guard", options: Options, report: Progress, what: str, *, training: bool = False
) -> "LogitsFile | ImageFolder":
    """Samples for a guard: images if it has a model, else logits files with the features that it reads.

    Reading them is reported as `what`.
    """
    if guard.source.model is not None:
        from igeood.images import ImageFolder

        if len(names) > 1:
            problem = "a guard with a model takes one set of images"
            raise InputError(problem, place=names[1], cure="put them into one folder")
        samples: Any = ImageFolder(names[0], guard, batch=options["batch"], training=training)
    else:
        from igeood.work.scoring import open_logits

        samples = open_logits(guard, names, column_names(options), labelled=training)
    samples.report = partial(report, what)
    return cast("LogitsFile | ImageFolder", samples)


def read_arrays(name: str, argument: str, *inputs: str) -> tuple[dict[str, "Tensor"], "Tensor | None"]:
    """What an .npz file has for a model: an array for each input, or these inputs, and the labels if there are some."""
    import numpy as np
    import torch

    try:
        with Path(name).open("rb") as content:
            file = np.load(content, allow_pickle=False)
            keys = {*inputs, "label", "labels"} if inputs else {*file.files}
            named = {key: file[key] for key in file.files if key in keys}
            arrays = {key: torch.from_numpy(a.astype(a.dtype.newbyteorder("="))) for key, a in named.items()}
    except Exception as error:  # of zip files and arrays, there are many
        cure = "write one with numpy.savez, an array of numbers for each input"
        raise InputError(f"{name} is no .npz file of numbers ({error})", argument=argument, cure=cure) from error
    labels = [arrays.pop(key) for key in ("label", "labels") if key in arrays]
    return arrays, labels[-1] if labels else None


def column_names(options: Options) -> dict[str, str | None]:
    """The names of columns, as `read_logits` takes them."""
    return {"logits": options["logits_column"], "label": options["label_column"], "identity": options["id_column"]}


def is_folder(path: str | None) -> bool:
    """Whether a path names a folder: it is one, or ends with /."""
    return path is not None and (path.endswith(("/", os.sep)) or Path(path).is_dir())


def do_files(
    units: dict[str, str], folder: str, recipe: Options, work: "Work", options: Options
) -> tuple[Options, Options, Options]:
    """Do the units of work; return the results and the errors by input file, and the counts of files."""
    from igeood.work.engines import choose
    from igeood.work.units import do_units

    engine = choose(options["engine"], options["workers"], options["address"])
    with progress_bars() as report:
        outcomes = do_units(units, folder, recipe, partial(engine, work), report, force=options["force"])
    failed = {units[unit]: outcome for unit, outcome in outcomes.items() if isinstance(outcome, IgeoodError)}
    done = {units[unit]: outcome for unit, outcome in outcomes.items() if units[unit] not in failed}
    return done, failed, {"files": len(units), "done": len(done), "skipped": len(units) - len(outcomes)}


def show_files(as_json: bool, record: Options, failed: dict[str, IgeoodError]) -> None:
    """Print what was done with many files; those that failed are an error."""
    spell = spelling(click.get_current_context().command)
    reasons = {name: error.text(spell) for name, error in failed.items()}
    show(as_json, {**record, "failed": reasons if as_json else len(failed) or None})
    for name, reason in list(reasons.items())[:SHOWN]:
        click.echo(f"igeood: {name}: {reason}", err=True)
    if failed:
        cure = "fix them and repeat the command, which continues with them"
        raise InputError(f"{len(failed)} of {record['files']} files failed", cure=cure)


def check_out(
    out: str | None, force: bool, *inputs: str, replaced: str = "", guard: bool = True, what: str = "out"
) -> str:
    """The file to write, `out` or else `replaced`, locked until the command ends; an existing one needs `force`.

    A `guard` replaces guards only. Errors name the option `what`.
    """
    from igeood.files import only_one

    target = Path(os.path.realpath(out or replaced))
    read = (path for name in inputs for path in (name, *glob(name, recursive=True)))  # noqa: PTH207
    if target in (Path(os.path.realpath(path)) for path in read):
        raise InputError(f"{out} is what the command reads", argument=what, cure="name another file")
    if out is not None and target.exists() and not force:
        raise InputError(f"{out} exists", argument=what, cure="name another file, or give {force}")
    if guard and out is not None:
        from igeood.guard.file import check_replaceable

        check_replaceable(out)
    click.get_current_context().with_resource(only_one(target.with_name(f".{target.name}.lock"), what))
    return out or replaced
