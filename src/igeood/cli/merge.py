"""`igeood merge`: a guard from the summaries of several parts of the training data."""

from collections.abc import Sequence
from fnmatch import fnmatch
from os.path import realpath
from pathlib import Path
from typing import Any

import click

from igeood.cli import _shared
from igeood.cli._shared import load_model
from igeood.cli.fit import build_options, check_targets, name_classes, write
from igeood.errors import InputError
from igeood.terminal import FILE, progress_bars


@click.command()
@click.argument("summaries", metavar="SUMMARY...", nargs=-1, required=True, type=click.Path())
@click.option("--out", type=FILE, help="The guard's .safetensors file.")
@click.option("--summary", type=FILE, help="Write the sum of the summaries here.")
@build_options
@_shared.model_options
def merge(
    summaries: tuple[str, ...], out: str | None, summary: str | None, force: bool, as_json: bool, **options: Any
) -> None:
    """Add up SUMMARY files that `igeood fit --summary` wrote, and make a guard of them.

    A folder stands for the .safetensors files below it, a pattern such as "parts/*.safetensors" for those it names.
    They are read one after another. The method may be any that needs no more than they hold.
    """
    from igeood.images import use_preparation
    from igeood.work.fitting import build

    _check_elsewhere([path for path in (out, summary) if path], summaries)
    check_targets(out, summary, force, summaries)
    model = load_model(options)
    with progress_bars() as report:
        total = _shared.sum_of(summaries, report)
    name_classes(total, options)
    if not (options["access"] or options["method"]) and total.rows and total.widths:
        options["access"] = "white-box"
    guard = build(model, options)
    if "preparation" in total.about:
        use_preparation(guard, total.about["preparation"])
    write(guard, total, out, summary, as_json)


def _check_elsewhere(targets: Sequence[str], sources: Sequence[str]) -> None:
    """Raise if a file would be written into a folder that is read: the next merge would add it."""
    folders = [Path(name).resolve() for name in sources if Path(name).is_dir()]
    for target in targets:
        is_inside = any(folder in Path(target).resolve().parents for folder in folders)
        is_named = any(fnmatch(realpath(target), realpath(name)) for name in sources if set("*?[") & set(name))
        if target.endswith("/") or is_inside or is_named:
            problem = f"{target} is a folder, or among the files that are read"
            raise InputError(problem, argument="out", cure="name one elsewhere")
