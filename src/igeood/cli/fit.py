"""`igeood fit`: a guard from training samples."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from igeood.cli import _shared
from igeood.cli._shared import Options, Watched, check_out, health, load_model, open_samples
from igeood.errors import IgeoodError, InputError
from igeood.terminal import FILE, method_option, progress_bars, show

if TYPE_CHECKING:
    from igeood.guard import Guard
    from igeood.summary import Summary

ACCESS = click.Choice(["black-box", "grey-box", "white-box"])
build_options = _shared.options_of(  # which guard to make
    click.option("--method", metavar="METHOD", help="Such as energy; a wrong name lists them all."),
    click.option("--access", type=ACCESS, help="What is used of the model; by default what the method needs."),
    click.option("--temperature", type=float, help="Softmax temperature; each method has its own default."),
    click.option("--probabilities", is_flag=True, default=None, help="The data are probabilities, not logits."),
    click.option("--layers", metavar="A,B,…", type=lambda text: text.split(","), help="Layers to read."),
    click.option("--classes", type=FILE, help="Names of the classes, one a line; by default the sub-folders'."),
    method_option,
)


@click.command()
@click.argument("train", metavar="TRAIN...", nargs=-1, required=True, type=click.Path())
@click.option("--out", type=FILE, help="The guard's .safetensors file.")
@click.option("--summary", type=click.Path(), help="Write the training summary here; a folder gets one for each file.")
@click.option("--mean", help="Mean of the images' normalisation: one number, or one for each channel.")
@click.option("--std", help="Standard deviation of the images' normalisation: one number, or one for each channel.")
@click.option("--size", type=click.IntRange(1, 4096), help="Pixels of each side that the model takes.")
@build_options
@_shared.memory_option
@_shared.engine_options
@_shared.guard_options
def fit(train: tuple[str, ...], out: str | None, summary: str | None, as_json: bool, **options: Any) -> None:
    """Learn a guard from TRAIN, and write it to a file.

    TRAIN is a logits file with labels (Parquet, npz, CSV or JSON lines), several of them, a folder, or a pattern such
    as "parts/*.parquet". With --model it is a folder of images with a sub-folder for each class. It is read once; above
    --memory, a sample of the rows is kept.

    With --summary in place of --out, the summary of one part of the training data is written: each machine sums up
    its own part, and `igeood merge` makes a guard of them all.

    With --workers or --engine, or a folder as --summary, each file of TRAIN is summed up on its own. The same command
    goes on after a stop; the summaries are in the folder of --summary, or else in OUT.parts until the guard is there.

    `igeood calibrate` comes next.
    """
    from igeood.guard import summarise
    from igeood.work.fitting import build

    check_targets(out, summary, options["force"], train)
    model = load_model(options)
    guard = build(model, options)
    preparation = {name: options[name] for name in ("size", "mean", "std")}
    if model is not None:
        from igeood.images import prepare

        prepare(guard, **preparation)
        click.echo(f"images: {guard.preparation}", err=True)
    elif any(preparation.values()):
        problem = "--mean, --std and --size say how images are prepared, logits files have none"
        raise InputError(problem, cure="leave them out")
    if _shared.is_folder(summary) or any(options[name] for name in ("engine", "workers", "address")):
        _fit_each(guard, train, out, summary, as_json, options)
        return
    source = open_samples(train, guard, options, training=True)
    with progress_bars() as report:
        total = summarise(guard, Watched(source, "fit", report), budget=options["budget"])
        name_classes(total, options)
        total.about |= {} if guard.preparation is None else {"preparation": guard.preparation}
        write(guard, total, out, summary, as_json)


def _fit_each(
    guard: "Guard", train: tuple[str, ...], out: str | None, summary: str | None, as_json: bool, options: Options
) -> None:
    """Sum up each file in a folder, add the summaries in the order of the files, and fit the guard."""
    from igeood.work.engines import choose
    from igeood.work.fitting import BUILD, summarise_file
    from igeood.work.units import do_units, find_units, remove_units

    if guard.source.model is not None:
        cure = "leave {workers} and {engine} out, and name one file"
        raise InputError("images are summed up in one process", argument="model", cure=cure)
    if options["classes"] is not None and out is None:
        problem = "summaries of files have no names"
        raise InputError(problem, argument="classes", cure="give --classes to `igeood merge`")
    keeps_parts = _shared.is_folder(summary)
    folder = str(summary) if keeps_parts else f"{out or summary}.parts"
    units = find_units(train, folder, ".safetensors", ())
    columns = _shared.column_names(options)
    chosen = {name: options[name] for name in ("access", *BUILD, "options")}
    recipe = {"kind": "fit", **chosen, "columns": columns, "memory": options["budget"]}
    work = partial(summarise_file, chosen, columns, options["budget"])
    engine = choose(options["engine"], options["workers"], options["address"])
    with progress_bars() as report:
        outcomes = do_units(units, folder, recipe, engine, work, report, options["force"])
        failed = {units[unit]: end for unit, end in outcomes.items() if isinstance(end, IgeoodError)}
        if failed or (out is None and keeps_parts):
            done = {"files": len(units), "done": len(outcomes) - len(failed), "skipped": len(units) - len(outcomes)}
            _shared.show_units(as_json, {"summary": folder, **done}, failed)
            return
        total = _shared.sum_of([str(Path(folder, unit)) for unit in units], report, guard.detector.needs)
    name_classes(total, options)
    write(guard, total, out, None if keeps_parts else summary, as_json)
    if not keeps_parts:
        remove_units(folder, units)


def check_targets(out: str | None, summary: str | None, force: bool, sources: Sequence[str]) -> None:
    """Raise unless a guard's file, a summary's or a folder for summaries is named, and may be written."""
    if out is None and summary is None:
        raise click.UsageError("give --out for a guard, or --summary for a part of it")
    if out is not None and out.endswith("/"):
        raise InputError(f"{out} is no file's name", argument="out", cure="leave / out")
    if out is not None:
        check_out(out, force, *sources)
    if summary is not None and not _shared.is_folder(summary):
        check_out(summary, force, *sources, guard=False, what="summary")


def name_classes(total: "Summary", options: Options) -> None:
    """Note the names in the file that --classes names."""
    from igeood.guard.names import checked_names

    path = options["classes"]
    if path is None:
        return
    try:
        names = Path(path).read_text(encoding="utf-8-sig").rstrip().splitlines()
    except UnicodeDecodeError:
        raise InputError(f"{path} is no UTF-8 text", argument="classes", cure="write one name a line") from None
    total.about["classes"] = list(checked_names(names, total.n_classes) if total.rows else names)


def write(guard: "Guard", total: "Summary", out: str | None, summary: str | None, as_json: bool) -> None:
    """Write the summary and fit and write the guard, those that are wanted, and show what they are."""
    from igeood.detectors import method_name

    if summary is not None:
        total.save(summary)
    if out is None:
        shape = {"classes": total.n_classes, "layers": list(total.widths)} if total.rows else {}
        kept = {name: len(sample) for name, sample in total.samples.items()}
        show(as_json, {"summary": summary, "samples": total.rows, **shape, "kept": kept or None})
        return
    guard.fit(total).save(out)
    record = {
        "out": out,
        "method": method_name(guard.detector),
        "classes": guard.detector.n_classes_,
        "samples": total.rows,
        "layers": guard.layers,
        "accuracy": _accuracy(total),
    }
    show(as_json, {**record, **health(guard, as_json)})


def _accuracy(summary: "Summary") -> float | None:
    """Share of the training rows that are kept whose label is the classifier's answer; None without labels."""
    sample = next(iter(summary.samples.values()), None)
    if sample is None or len(summary.counts) == 1:
        return None
    right = 0.0
    total = 0.0
    for outputs, weights in sample.batches():
        right += float(weights[outputs.logits.argmax(dim=1) == outputs.labels].sum())
        total += float(weights.sum())
    return right / total
