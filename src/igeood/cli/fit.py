"""`igeood fit`: a guard from training samples."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from igeood.cli import _shared
from igeood.cli._shared import Watched, check_out, health, load_model, open_samples
from igeood.errors import InputError
from igeood.terminal import FILE, Decorator, method_option, progress_bars, show

if TYPE_CHECKING:
    from igeood.guard import Guard
    from igeood.summary import Summary

ACCESS = click.Choice(["black-box", "grey-box", "white-box"])
_SUMMARY = "Write what training rows add up to here; `igeood merge` adds several. A folder gets one for each file."
_OPTIONS: tuple[Decorator, ...] = (
    click.option("--method", metavar="METHOD", help="Such as energy; a wrong name lists them all."),
    click.option("--access", type=ACCESS, help="What is used of the model; by default what the method needs."),
    click.option("--temperature", type=float, help="Of the softmax; each method has its own default."),
    click.option("--probabilities", is_flag=True, default=None, help="The data are probabilities, not logits."),
    click.option("--layers", metavar="A,B,…", type=lambda text: text.split(","), help="By default those found."),
    click.option("--classes", type=FILE, help="Names of the classes, one a line; by default the sub-folders'."),
    method_option,
)


def build_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say which guard to make."""
    return _shared.model_options(command, _OPTIONS)


@click.command()
@click.argument("train", metavar="TRAIN...", nargs=-1, required=True, type=click.Path())
@click.option("--out", type=FILE, help="The guard's .safetensors file.")
@click.option("--summary", type=click.Path(), help=_SUMMARY)
@click.option("--mean", help="Of the images' normalisation: one number, or one for each channel.")
@click.option("--std", help="What the images are divided by after the mean: one, or one each.")
@click.option("--size", type=click.IntRange(1, 4096), help="Pixels of each side that the model takes.")
@build_options
@_shared.memory_option
@_shared.engine_options
@_shared.guard_options
def fit(
    train: tuple[str, ...], out: str | None, summary: str | None, mean: str | None, std: str | None, size: int | None,
    budget: int, workers: int | None, engine: str | None, address: str | None, force: bool, as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """Learn a guard from TRAIN, and write it to a file.

    TRAIN is a logits file with labels (Parquet, npz, CSV or JSON lines), several of them, a folder, a pattern such as
    "parts/*.parquet", or - for standard input. With --model it is images: folder:PATH with a sub-folder for each
    class. It is read once; above --memory, a sample of the rows is kept.

    With --summary in place of --out, what one part of the training data adds up to is written: each machine sums up
    its own part, and `igeood merge` makes a guard of them all.

    With --workers or --engine, or a folder as --summary, each file of TRAIN is summed up on its own. The same command
    goes on after a stop; the summaries are in the folder of --summary, or else in OUT.parts until the guard is there.

    `igeood calibrate` comes next.
    """
    from igeood.scale.fitting import build

    where = {"engine": engine, "workers": workers, "address": address}
    check_targets(out, summary, force, train)
    folder = str(summary) if _shared.is_folder(summary) else f"{out or summary}.parts"
    model = load_model(given)
    guard = build(model, given)
    if model is not None:
        from igeood.images import prepare

        prepare(guard, size, mean, std)
        click.echo(f"images: {guard.preparation}", err=True)
    elif mean or std or size:
        raise InputError("mean, std, size: say how images are prepared, logits files have none; leave them out")
    if folder == summary or any(where.values()):
        return _fit_each(guard, train, out, summary, folder, budget, force, as_json, where, given)
    source = open_samples(train, guard, given, training=True)
    with progress_bars() as report:
        total = sum_up(guard, Watched(source, "fit", report), given, budget)
        if summary is not None:
            total.save(summary)
        if out is None:
            show(as_json, {"summary": summary, **about(total)})
        else:
            write(guard, total, out, as_json)
    return None


def _fit_each(
    guard: "Guard", train: tuple[str, ...], out: str | None, summary: str | None, folder: str, budget: int, force: bool,
    as_json: bool, where: dict[str, Any], given: dict[str, Any],
) -> None:  # fmt: skip
    """Sum up each file in a folder, add the summaries in the order of the files, and fit the guard."""
    from igeood.scale.engines import choose
    from igeood.scale.fitting import BUILD, summarise_file
    from igeood.scale.units import do_units, find_units, remove_units

    if guard.inputs.model is not None:
        raise InputError("model: images are summed up in one process; leave --workers and --engine out, name one file")
    if given["classes"] is not None and out is None:
        raise InputError("classes: summaries of files have no names; give --classes to `igeood merge`")
    units, columns = find_units(train, folder, ".safetensors", ()), _shared.column_names(given)
    options = {name: given[name] for name in ("access", *BUILD, "options")}
    recipe = {"kind": "fit", **options, "columns": columns, "memory": budget}
    with progress_bars() as report:
        call = (summarise_file, options, columns, budget)
        outcomes = do_units(units, folder, recipe, choose(**where), call, report, force=force)
        failed = {units[unit]: end for unit, end in outcomes.items() if isinstance(end, str)}
        if failed or (out is None and folder == summary):
            done = {"files": len(units), "done": len(outcomes) - len(failed), "skipped": len(units) - len(outcomes)}
            return _shared.show_units(as_json, {"summary": folder, **done}, failed)
        total = _shared.sum_of([str(Path(folder, unit)) for unit in units], report)
    name_classes(total, given)
    if summary is not None and folder != summary:
        total.save(summary)
    if out is None:
        show(as_json, {"summary": summary, **about(total)})
    else:
        write(guard, total, out, as_json)
    if folder != summary:
        remove_units(folder, units)
    return None


def check_targets(out: str | None, summary: str | None, force: bool, sources: Sequence[str]) -> None:
    """Raise unless a guard's file, a summary's or a folder for summaries is named, and may be written."""
    if out is None and summary is None:
        raise click.UsageError("give --out for a guard, or --summary for a part of it")
    if out is not None and out.endswith("/"):
        raise InputError(f"out: {out} is no file's name; leave / out")
    for path, is_guard in ((out, True), (summary, False)):
        if path is not None and (is_guard or not _shared.is_folder(path)):
            check_out(path, force, *sources, guard=is_guard)


def sum_up(guard: "Guard", source: Watched, given: dict[str, Any], budget: int) -> "Summary":
    """The summary of training samples, with the names of the classes and what images are prepared by."""
    from igeood.guard import summarise

    total = summarise(guard, source, budget=budget)
    name_classes(total, given)
    total.about |= {} if guard.preparation is None else {"preparation": guard.preparation}
    return total


def name_classes(total: "Summary", given: dict[str, Any]) -> None:
    """Note the names in the file that --classes names."""
    from igeood.guard.names import checked_names

    if given["classes"] is not None:
        names = _lines(given["classes"])
        total.about["classes"] = list(checked_names(names, total.n_classes) if total.rows else names)


def about(total: "Summary") -> dict[str, Any]:
    """What a summary has, for the result."""
    kept = {kind: len(sample) for kind, sample in total.samples.items()}
    shape = {"classes": total.n_classes, "layers": list(total.widths)} if total.rows else {}
    return {"samples": total.rows, **shape, "kept": kept or None}


def write(guard: "Guard", total: "Summary", out: str, as_json: bool) -> None:
    """Fit a guard, write it, and show what it is."""
    from igeood.detectors import method_name

    guard.fit(total).save(out)
    method, n_classes = method_name(guard.detector), guard.detector.n_classes_
    record = {"out": out, "method": method, "classes": n_classes, "samples": total.rows, "layers": guard.layers}
    show(as_json, {**record, "accuracy": _accuracy(guard), **health(guard, as_json)})


def _lines(path: str) -> list[str]:
    """The lines of a text file; empty ones at its end do not count."""
    try:
        return Path(path).read_text(encoding="utf-8-sig").rstrip().splitlines()
    except UnicodeDecodeError:
        raise InputError(f"classes: {path} is no UTF-8 text; write one name a line") from None


def _accuracy(guard: "Guard") -> float | None:
    """Share of the training rows that are kept whose label is the classifier's answer; None without labels."""
    summary: Any = guard.summary
    sample = next(iter(summary.samples.values()), None)
    if sample is None or len(summary.counts) == 1:
        return None
    right = total = 0.0
    for outputs, weights in sample.batches():
        right += float(weights[outputs.logits.argmax(dim=1) == outputs.labels].sum())
        total += float(weights.sum())
    return right / total
