"""`igeood merge`: a guard from what several parts of the training data add up to."""

from typing import Any

import click

from igeood.cli import _shared
from igeood.cli._shared import load_model
from igeood.cli.fit import about, build_options, check_targets, name_classes, write
from igeood.terminal import FILE, progress_bars, show


@click.command()
@click.argument("summaries", metavar="SUMMARY...", nargs=-1, required=True, type=click.Path())
@click.option("--out", type=FILE, help="The guard's .safetensors file.")
@click.option("--summary", type=FILE, help="Write the sum of the summaries here.")
@build_options
@_shared.model_options
def merge(
    summaries: tuple[str, ...], out: str | None, summary: str | None, force: bool, as_json: bool, **given: Any
) -> None:
    """Add up SUMMARY files that `igeood fit --summary` wrote, and make a guard of them.

    A folder stands for its .safetensors files, and a pattern such as "parts/*.safetensors" for those that it names.
    They are read one after another. The method may be any that needs no more than they hold.
    """
    from igeood.scale.fitting import build

    check_targets(out, summary, force, summaries)
    model = load_model(given)
    with progress_bars() as report:
        total = _shared.sum_of(summaries, report)
    name_classes(total, given)
    if summary is not None:
        total.save(summary)
    if out is None:
        show(as_json, {"summary": summary, **about(total)})
        return
    if not (given["access"] or given["method"]) and total.rows and total.widths:
        given["access"] = "white-box"
    guard = build(model, given)
    preparation = total.about.get("preparation")
    if preparation is not None:
        guard.preparation = preparation
        for name in ("mean", "std"):
            setattr(guard.inputs, name, preparation[name] * (3 // len(preparation[name])))
    write(guard, total, out, as_json)
