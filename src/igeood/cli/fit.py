"""`igeood fit`: a guard from training samples."""

from typing import TYPE_CHECKING, Any

import click

from igeood.cli._guards import Sources, Watched, check_out, force_option, source_options
from igeood.cli._shared import FILE, json_option, show
from igeood.cli.progress import progress_bars
from igeood.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from igeood.guard import Guard

ACCESS = click.Choice(["black-box", "grey-box", "white-box"])


@click.command()
@click.argument("train", type=click.Path())
@click.option("--out", required=True, type=FILE, help="The guard's .safetensors file.")
@click.option("--method", metavar="METHOD", help="Such as energy; a wrong name lists them all.")
@click.option("--access", type=ACCESS, help="What is used of the model; by default what the method needs.")
@click.option("--temperature", type=float, help="Of the softmax; each method has its own default.")
@click.option("--probabilities", is_flag=True, default=None, help="The data are probabilities, not logits.")
@click.option("--layers", help="Layers to read, with commas between them; by default those found.")
@click.option("--mean", help="Of the images' normalisation: one number, or one for each channel.")
@click.option("--std", help="What the images are divided by after the mean: one, or one each.")
@click.option("--size", type=click.IntRange(1, 4096), help="Pixels of each side that the model takes.")
@click.option("--budget", default=256, show_default=True, type=click.IntRange(1, 2**20), help="MiB of rows to keep.")
@force_option
@source_options
@json_option
def fit(
    train: str, out: str, access: str | None, layers: str | None, mean: str | None, std: str | None, size: int | None,
    budget: int, force: bool, sources: Sources, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Learn a guard from TRAIN, and write it to a file.

    TRAIN is a logits file with labels (Parquet or npz), or a folder of them. With --model it is images: folder:PATH
    with a sub-folder for each class, or a data set that `igeood data list` names. It is read once; above --budget, a
    sample of the rows is kept.

    `igeood calibrate` comes next.
    """
    check_out(out, force, train)
    model = sources.network()
    options["layers"] = layers.split(",") if layers else None
    guard = _build(model, access, {name: value for name, value in options.items() if value is not None})
    if model is not None:
        _prepare(guard, train, size, {"mean": mean, "std": std})
    elif mean or std or size:
        raise InputError("mean, std, size: say how images are prepared, logits files have none; leave them out")
    source = sources.open(train, guard, training=True)
    with progress_bars() as report:
        guard.fit(Watched(source, "fit", report), budget=budget << 20)
    guard.save(out)
    _show(guard, source.rows, out, as_json)


def _build(model: "nn.Module | None", access: str | None, options: dict[str, Any]) -> "Guard":
    """The guard that the options describe."""
    from inspect import signature

    from igeood import guard
    from igeood.detectors import METHODS

    method = options.get("method")
    if method is not None and method not in METHODS:
        raise InputError.unknown("method", method, METHODS)
    if access is None:
        needs_layers = METHODS[method].needs_layers if method else model is not None or "layers" in options
        access = "white-box" if needs_layers else "black-box"
    make = getattr(guard, access.replace("-", "_"))
    for name in options:
        if name not in signature(make).parameters:
            raise InputError(f"{name}: a {access} guard has no such option; leave it out, or choose another --access")
    built: Guard = make(model, **options)
    return built


def _prepare(guard: "Guard", train: str, size: int | None, given: dict[str, str | None]) -> None:
    """Set how images become inputs: as given, else as is usual for the data set."""
    from igeood.bench.datasets import DATASETS
    from igeood.model.step import check_channels

    known = DATASETS.get(train)
    if size is None and known is None:
        raise InputError("size: how many pixels does the model take? Give --size, such as 224")
    guard.preparation = {"size": size or 32}
    for name, neutral in (("mean", "0"), ("std", "1")):
        usual = ",".join(map(str, getattr(known, name, None) or [neutral]))
        try:
            values = [float(part) for part in (given[name] or usual).split(",")]
        except ValueError:
            values = []
        if len(values) not in (1, 3):
            raise InputError(f"{name}: expected one number, or three with commas between them; got {given[name]!r}")
        guard.preparation[name] = values
        setattr(guard.inputs, name, check_channels(values * (3 // len(values)), name, positive=name == "std"))
    click.echo(f"images: {guard.preparation}", err=True)


def _show(guard: "Guard", rows: int, out: str, as_json: bool) -> None:
    from igeood.detectors import method_name

    accuracy = None
    if guard.summary is not None and "logits" in guard.summary.samples:
        outputs, weights = guard.summary.samples["logits"].outputs()
        if outputs.labels is not None:
            accuracy = float(weights[outputs.logits.argmax(dim=1) == outputs.labels].sum() / weights.sum())
            if accuracy < 0.5:
                click.echo("igeood: the classifier disagrees with most labels; are the classes in order?", err=True)
    method, classes = method_name(guard.detector), guard.detector.n_classes_
    record = {"out": out, "method": method, "classes": classes, "samples": rows, "layers": guard.layers}
    show(as_json, {**record, "accuracy": accuracy})
