"""`igeood merge`: a guard from the summaries of several parts of the training data."""

from collections.abc import Sequence
from fnmatch import fnmatch
from os.path import realpath
from pathlib import Path
from typing import Any

import click

from igeood.cli import _shared
from igeood.cli.fit import build_options, check_targets, read_names, write
from igeood.errors import InputError
from igeood.terminal import FILE, progress_bars


@click.command()
@click.argument("summaries", metavar="SUMMARY...", nargs=-1, required=True, type=click.Path())
@click.option("--out", type=FILE, help="Write the guard here (.safetensors).")
@click.option("--summary", type=FILE, help="Write the sum of the summaries here.")
@build_options
@_shared.result_options
def merge(summaries: tuple[str, ...], out: str | None, summary: str | None, **options: Any) -> None:
    """Add training summaries and make a guard from their sum.

    SUMMARY is a file that `igeood fit --summary` wrote, a folder of such .safetensors files, or a pattern such as
    "parts/*.safetensors". Summaries are read one at a time. --method takes any that needs no more than they hold.
    """
    from igeood.guard.names import checked_names
    from igeood.images import use_preparation
    from igeood.work.fitting import build

    _check_elsewhere({"out": out, "summary": summary}, summaries)
    check_targets(out, summary, options["force"], summaries)
    model = _shared.load_model(options)
    needs = build(model, options).detector.needs if options["method"] else None
    with progress_bars() as report:
        total = _shared.sum_of(summaries, report, needs)
    if not (options["access"] or options["method"]) and total.rows and total.widths:
        options["access"] = "white-box"
    guard = build(model, options)
    if "preparation" in total.about:
        use_preparation(guard, total.about["preparation"])
    names = read_names(options["classes"])
    if names is not None:
        total.about["classes"] = list(checked_names(names, total.n_classes) if total.rows else names)
    write(guard, total, out, summary, options)


def _check_elsewhere(targets: dict[str, str | None], sources: Sequence[str]) -> None:
    """Raise if a file would be written where summaries are read: the next merge would add it."""
    for option, target in targets.items():
        for source in sources if target else ():
            is_inside = Path(source).is_dir() and Path(source).resolve() in Path(str(target)).resolve().parents
            if is_inside or fnmatch(realpath(str(target)), realpath(source)) or str(target).endswith("/"):
                problem = f"{target} is a folder, or among the files that are read"
                raise InputError(problem, argument=option, cure="name a file elsewhere")
