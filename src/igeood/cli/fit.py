"""`igeood fit`: a guard from training samples."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from igeood.cli import _shared
from igeood.cli._shared import Options, check_out, health, is_folder, load_model, open_samples
from igeood.errors import InputError
from igeood.terminal import FILE, method_option, progress_bars, show

if TYPE_CHECKING:
    from igeood.guard import Guard
    from igeood.summary import Summary

ACCESS = click.Choice(["black-box", "grey-box", "white-box"])
_CLASSES = """Text file of class names, one per line, in the order of the logits; default: sub-folders' names, or those
of --logits-column "p_*", or the sorted labels if they are names."""
_ACCESS = """What the guard reads: logits; logits and gradients; or logits and layers. Default: white-box if the method
reads layers and --model or --layers is given, or if it needs them; else black-box."""
build_options = _shared.options_of(  # which guard to make
    click.option("--method", metavar="NAME", help="Method; default: evidence. A wrong name lists all methods."),
    click.option("--access", type=ACCESS, help=_ACCESS),
    click.option("--temperature", type=float, help="Softmax temperature; the default depends on the method."),
    click.option("--probabilities", is_flag=True, default=None, help="The classifier gives probabilities, not logits."),
    click.option("--layers", metavar="A,B,…", type=lambda text: text.split(","), help="Names of the layers to read."),
    click.option("--classes", type=FILE, help=_CLASSES),
    method_option,
)


@click.command()
@click.argument("train", metavar="TRAIN...", nargs=-1, required=True, type=click.Path())
@click.option("--out", type=FILE, help="Write the guard here (.safetensors).")
@click.option("--summary", type=click.Path(), help="Write the training summary here; a folder gets one for each file.")
@click.option("--mean", help="Mean of the images' normalisation: one number, or three with commas.")
@click.option("--std", help="Standard deviation of the images' normalisation: one number, or three with commas.")
@click.option("--size", type=click.IntRange(1, 4096), help="Height and width of the model's images, in pixels.")
@build_options
@_shared.memory_option
@_shared.engine_options
@_shared.guard_options
def fit(train: tuple[str, ...], out: str | None, summary: str | None, **options: Any) -> None:
    """Fit a guard on TRAIN and write it to a file.

    TRAIN is a logits file with labels (Parquet, npz or CSV), several files, a folder, or a pattern such as
    "parts/*.parquet". Labels are class numbers, which count the columns of logits from 0, or names of classes. With
    --model, TRAIN is a folder of images, with a sub-folder for each class.

    With --summary instead of --out, only the training summary is written. Each machine can summarise its own part of
    the training data; `igeood merge` makes a guard from all summaries.

    With --workers or --engine, or a folder as --summary, each file of TRAIN is summarised separately. After an
    interruption, the same command continues. The summaries are kept in the folder of --summary; without it, in
    OUT.parts until the guard is written.

    The next step is `igeood calibrate`.
    """
    from igeood.guard import summarise
    from igeood.images import prepare
    from igeood.work.fitting import build

    check_targets(out, summary, options["force"], train)
    guard = build(load_model(options), options)
    preparation = {name: options[name] for name in ("size", "mean", "std")}
    if guard.source.model is not None:
        prepare(guard, **preparation)
        click.echo(f"images: {guard.preparation}", err=True)
    for name in preparation if guard.source.model is None else ():
        if preparation[name] is not None:
            raise InputError("is for images; logits files have none", argument=name, cure="leave it out")
    if is_folder(summary) or any(options[name] for name in ("engine", "workers", "address")):
        _fit_each(guard, train, out, summary, options)
        return
    with progress_bars() as report:
        samples = open_samples(train, guard, options, report, "fit", training=True)
        total = summarise(guard, samples, classes=read_names(options["classes"]), budget=options["budget"])
    total.about |= {} if guard.preparation is None else {"preparation": guard.preparation}
    write(guard, total, out, summary, options)


def _fit_each(guard: "Guard", train: tuple[str, ...], out: str | None, summary: str | None, options: Options) -> None:
    """Summarise each file in a folder, add the summaries in the order of the files, and fit the guard."""
    from igeood.work.fitting import BUILD, summarise_file
    from igeood.work.scoring import open_logits
    from igeood.work.units import find_units, remove_units

    if guard.source.model is not None:
        cure = "leave {workers} and {engine} out, and name one file"
        raise InputError("images are summarised in one process", argument="model", cure=cure)
    keeps_parts = is_folder(summary)
    folder = str(summary) if keeps_parts else f"{out or summary}.parts"
    units = find_units(train, folder, ".safetensors", ())
    names = read_names(options["classes"])
    columns: Options = _shared.column_names(options)
    file = open_logits(guard, train, columns, labelled=True).settled(names)  # alike for all files
    columns |= {"logits": None, "columns": file.columns, "classes": file.classes}
    chosen = {**{name: options[name] for name in ("access", *BUILD, "options")}, "classes": names}
    recipe = {"kind": "fit", **chosen, "columns": columns, "memory": options["budget"]}
    work = partial(summarise_file, chosen, columns, options["budget"])
    _, failed, counts = _shared.do_files(units, folder, recipe, work, options)
    if failed or (out is None and keeps_parts):
        _shared.show_files(options["as_json"], {"summary": folder, **counts}, failed)
        return
    with progress_bars() as report:
        total = _shared.sum_of([str(Path(folder, unit)) for unit in units], report, guard.detector.needs)
    write(guard, total, out, None if keeps_parts else summary, options)
    if not keeps_parts:
        remove_units(folder, units)


def check_targets(out: str | None, summary: str | None, force: bool, sources: Sequence[str]) -> None:
    """Raise unless a guard's file, a summary's or a folder for summaries is named, and may be written."""
    if out is None and summary is None:
        raise click.UsageError("give --out to write a guard, or --summary to write a summary")
    if out is not None and out.endswith("/"):
        raise InputError(f"{out} is not a file name", argument="out", cure="leave / out")
    if out is not None:
        check_out(out, force, *sources)
    if summary is not None and not is_folder(summary):
        check_out(summary, force, *sources, guard=False, what="summary")


def read_names(path: str | None) -> list[str] | None:
    """The class names in a text file."""
    try:
        return None if path is None else Path(path).read_text(encoding="utf-8-sig").rstrip().splitlines()
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text", argument="classes", cure="write one name per line") from None


def write(guard: "Guard", total: "Summary", out: str | None, summary: str | None, options: Options) -> None:
    """Write the summary and fit and write the guard, those that are wanted, and show the result."""
    from igeood.detectors import method_name

    as_json = options["as_json"]
    if summary is not None:
        total.save(summary)
    if out is None:
        shape = {"classes": total.n_classes, "layers": list(total.widths)} if total.rows else {}
        kept = {name: len(sample) for name, sample in total.samples.items()}
        show(as_json, {"summary": summary, "samples": total.rows, **shape, "kept": kept or None})
        return
    guard.fit(total).save(out)
    record = {"out": out, "method": method_name(guard.detector), "classes": guard.detector.n_classes_}
    record |= {"samples": total.rows, "layers": guard.layers, "accuracy": _accuracy(total)}
    show(as_json, {**record, **health(guard, as_json)})


def _accuracy(summary: "Summary") -> float | None:
    """Share of the kept training rows whose label is the classifier's answer; None without labels."""
    sample = next(iter(summary.samples.values()), None)
    if sample is None or len(summary.counts) == 1:
        return None
    outputs, weights = sample.outputs()
    return float(weights[outputs.logits.argmax(dim=1) == outputs.labels].sum() / weights.sum())
