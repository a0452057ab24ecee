"""`igeood fit`: a guard from training samples."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from igeood.cli._shared import Watched, budget_option, check_out, guard_options, health, load_model, open_samples
from igeood.errors import InputError
from igeood.terminal import FILE, method_option, progress_bars, show

if TYPE_CHECKING:
    from torch import nn

    from igeood.guard import Guard

ACCESS = click.Choice(["black-box", "grey-box", "white-box"])
BUILD = ("method", "temperature", "probabilities", "layers")


@click.command()
@click.argument("train", metavar="TRAIN...", nargs=-1, required=True, type=click.Path())
@click.option("--out", required=True, type=FILE, help="The guard's .safetensors file.")
@click.option("--method", metavar="METHOD", help="Such as energy; a wrong name lists them all.")
@click.option("--access", type=ACCESS, help="What is used of the model; by default what the method needs.")
@click.option("--temperature", type=float, help="Of the softmax; each method has its own default.")
@click.option("--probabilities", is_flag=True, default=None, help="The data are probabilities, not logits.")
@click.option("--layers", metavar="A,B,…", type=lambda text: text.split(","), help="By default those found.")
@click.option("--mean", help="Of the images' normalisation: one number, or one for each channel.")
@click.option("--std", help="What the images are divided by after the mean: one, or one each.")
@click.option("--size", type=click.IntRange(1, 4096), help="Pixels of each side that the model takes.")
@click.option("--classes", type=FILE, help="Names of the classes, one a line; by default the sub-folders'.")
@method_option
@budget_option
@guard_options
def fit(
    train: tuple[str, ...], out: str, access: str | None, mean: str | None, std: str | None, size: int | None,
    budget: int, classes: str | None, force: bool, as_json: bool, options: dict[str, Any], **given: Any,
) -> None:  # fmt: skip
    """Learn a guard from TRAIN, and write it to a file.

    TRAIN is a logits file with labels (Parquet, npz, CSV or JSON lines), several of them, a folder, a pattern such as
    "parts/*.parquet", or - for standard input. With --model it is images: folder:PATH with a sub-folder for each
    class, or a data set that `igeood data list` names. It is read once; above --budget, a sample of the rows is kept.

    `igeood calibrate` comes next.
    """
    from igeood.detectors import method_name

    check_out(out, force, *train)
    model = load_model(given)
    guard = _build(model, access, {name: given[name] for name in BUILD if given[name] is not None})
    guard = guard.with_options(**options) if options else guard
    if model is not None:
        from igeood.bench.inputs import prepare

        prepare(guard, train[0], size, mean=mean, std=std)
        click.echo(f"images: {guard.preparation}", err=True)
    elif mean or std or size:
        raise InputError("mean, std, size: say how images are prepared, logits files have none; leave them out")
    names = None if classes is None else _lines(classes)
    source = open_samples(train, guard, given, training=True)
    with progress_bars() as report:
        guard.fit(Watched(source, "fit", report), classes=names, budget=budget << 20).save(out)
    method, n_classes = method_name(guard.detector), guard.detector.n_classes_
    record = {"out": out, "method": method, "classes": n_classes, "samples": source.rows, "layers": guard.layers}
    show(as_json, {**record, "accuracy": _accuracy(guard), **health(guard, as_json)})


def _lines(path: str) -> list[str]:
    """The lines of a text file; empty ones at its end do not count."""
    try:
        return Path(path).read_text(encoding="utf-8-sig").rstrip().splitlines()
    except UnicodeDecodeError:
        raise InputError(f"classes: {path} is no UTF-8 text; write one name a line") from None


def _build(model: "nn.Module | None", access: str | None, options: dict[str, Any]) -> "Guard":
    """The guard that the options describe."""
    from inspect import signature

    from igeood import guard
    from igeood.detectors import METHODS

    if access is None:
        method = METHODS.get(options.get("method", ""))
        needs_layers = method.needs_layers if method else model is not None or "layers" in options
        access = "white-box" if needs_layers else "black-box"
    make = getattr(guard, access.replace("-", "_"))
    for name in options.keys() - signature(make).parameters:
        raise InputError(f"{name}: a {access} guard has no such option; leave it out, or choose another --access")
    return make(model, **options)  # type: ignore[no-any-return]


def _accuracy(guard: "Guard") -> float | None:
    """Share of the training rows that are kept whose label is the classifier's answer; None without labels."""
    summary: Any = guard.summary
    sample = next(iter(summary.samples.values()), None)
    if sample is None or len(summary.counts) == 1:
        return None
    outputs, weights = sample.outputs()
    return float(weights[outputs.logits.argmax(dim=1) == outputs.labels].sum() / weights.sum())
