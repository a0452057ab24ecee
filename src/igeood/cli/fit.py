"""`igeood fit`: a guard from training samples."""

from typing import TYPE_CHECKING, Any

import click

from igeood.cli._guards import Sources, Watched, check_out, force_option, source_options
from igeood.cli._shared import json_option, show
from igeood.cli.progress import progress_bars
from igeood.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from igeood.guard import Guard
    from igeood.summary import Summary

Channels = tuple[float, ...]


def _numbers(_: click.Context, param: click.Parameter, value: str | None) -> Channels | None:
    """Numbers with commas between them: one, or one for each channel."""
    try:
        numbers = None if value is None else tuple(float(part) for part in value.split(","))
    except ValueError:
        numbers = ()
    if numbers is not None and len(numbers) not in (1, 3):
        raise InputError(f"{param.name}: expected one number, or three with commas between them; got {value!r}")
    return numbers


@click.command()
@click.argument("train", type=click.Path())
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="The guard's .safetensors file.")
@click.option("--method", metavar="METHOD", help="Such as energy; a wrong name lists them all.")
@click.option(
    "--access", type=click.Choice(["black-box", "grey-box", "white-box"]),
    help="What of the model is used; by default what the method needs, and with a model its layers.",
)  # fmt: skip
@click.option("--temperature", type=float, help="Of the softmax; each method has its own default.")
@click.option("--probabilities", is_flag=True, help="The data are probabilities, not logits.")
@click.option("--layers", help="Layers to read, with commas between them; by default those found.")
@click.option("--mean", callback=_numbers, help="Of the images' normalisation: one number, or one for each channel.")
@click.option("--std", callback=_numbers, help="What the images are divided by after the mean: one, or one each.")
@click.option("--size", type=click.IntRange(1, 4096), help="Pixels of each side that the model takes.")
@click.option(
    "--budget", default=256, show_default=True, type=click.IntRange(1, 2**20), help="MiB of training rows to keep."
)
@force_option
@source_options
@json_option
def fit(
    train: str, out: str, method: str | None, access: str | None, temperature: float | None, probabilities: bool,
    layers: str | None, mean: Channels | None, std: Channels | None, size: int | None, budget: int, force: bool,
    sources: Sources, as_json: bool,
) -> None:  # fmt: skip
    """Learn a guard from TRAIN, and write it to a file.

    TRAIN is a logits file with labels (Parquet or npz), or a folder of them. With --model it is images: folder:PATH
    with a sub-folder for each class, or a data set that `igeood data list` names. It is read once; memory is bounded
    by --budget.

    `igeood calibrate` comes next.
    """
    check_out(out, force, train)
    model = sources.network()
    names = layers.split(",") if layers else None
    guard = _build(model, method, access, temperature, probabilities, names)
    if model is not None:
        _prepare(guard, train, mean, std, size)
    elif mean or std or size:
        raise InputError("mean, std, size: say how images are prepared; logits files have none; leave them out")
    source = sources.open(train, guard, training=True)
    with progress_bars() as report:
        guard.fit(Watched(source, "fit", report), budget=budget << 20)
    guard.save(out)
    _show(guard, source.rows, out, as_json)


def _build(
    model: "nn.Module | None", method: str | None, access: str | None, temperature: float | None, probabilities: bool,
    layers: list[str] | None,
) -> "Guard":  # fmt: skip
    """The guard that the options describe."""
    from igeood.detectors import METHODS
    from igeood.guard import black_box, grey_box, white_box

    if method is not None and method not in METHODS:
        raise InputError.unknown("method", method, METHODS)
    if access is None:
        needs_layers = METHODS[method].needs_layers if method else model is not None or layers is not None
        access = "white-box" if needs_layers else "black-box"
    if access == "white-box":
        if probabilities:
            raise InputError("probabilities: a white box reads logits; leave it out, or choose --access black-box")
        return white_box(model, layers=layers or "auto", method=method, temperature=temperature)
    if layers is not None:
        raise InputError(f"layers: a {access.replace('-', ' ')} reads none; leave them out, or --access white-box")
    options: dict[str, Any] = {"temperature": temperature, "probabilities": probabilities}
    options |= {} if method is None else {"method": method}
    if access == "black-box":
        return black_box(model, **options)
    if model is None:
        raise InputError("access: a grey box needs the model's gradients; name it with --model MODULE:NAME")
    return grey_box(model, **options)


def _prepare(guard: "Guard", train: str, mean: Channels | None, std: Channels | None, size: int | None) -> None:
    """Set how images become inputs: as given, else as is usual for the data set."""
    from igeood.bench.datasets import DATASETS
    from igeood.model.step import check_channels

    known = DATASETS.get(train)
    if (mean is None) != (std is None):
        raise InputError("mean, std: belong together; give both, or neither")
    if size is None and known is None:
        raise InputError("size: how many pixels does the model take? Give --size, such as 224")
    if mean is None and known is not None and known.mean is not None:
        mean, std = known.mean, known.std
        click.echo(f"images normalised as usual for {train}: mean {mean}, std {std}", err=True)
    guard.preparation = {"size": size or 32, "mean": list(mean or (0.0,)), "std": list(std or (1.0,))}
    for name in ("mean", "std"):  # for input steps; checked here too
        values = guard.preparation[name]
        channels = check_channels(values * 3 if len(values) == 1 else values, name, positive=name == "std")
        setattr(guard.inputs, name, channels)


def _show(guard: "Guard", samples: int, out: str, as_json: bool) -> None:
    from igeood.detectors import method_name

    method, classes, layers = method_name(guard.detector), guard.detector.n_classes_, guard.layers
    accuracy = None if guard.summary is None else _accuracy(guard.summary)
    text = f"{out}: {method}, {classes} classes, from {samples:,} samples"
    text += f", {100 * accuracy:.1f}% of them classified as labelled" if accuracy is not None else ""
    text += f", layers {', '.join(layers)}" if layers else ""
    if accuracy is not None and accuracy < 0.5:
        doubt = "are the classes in its order, and its inputs normalised as in training?"
        click.echo(f"igeood: the classifier disagrees with most labels; {doubt}", err=True)
    record = {"method": method, "classes": classes, "samples": samples, "layers": layers, "out": out}
    show(as_json, {**record, "accuracy": accuracy}, text)


def _accuracy(summary: "Summary") -> float | None:
    """Share of the training rows that the classifier labels as given, by the rows that were kept."""
    correct = total = 0.0
    for outputs, weights in summary.samples["logits"].batches() if "logits" in summary.samples else ():
        if outputs.labels is not None:
            correct += float(weights[outputs.logits.argmax(dim=1) == outputs.labels].sum())
            total += float(weights.sum())
    return correct / total if total else None
