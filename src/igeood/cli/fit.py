"""`igeood fit`: a guard from training samples."""

from typing import TYPE_CHECKING, Any

import click

from igeood.cli._guards import Sources, Watched, check_new, force_option, source_options
from igeood.cli._shared import json_option, tell
from igeood.cli.progress import progress_bars
from igeood.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from igeood.guard import Guard

# Written out, so that --help and completion need not import torch.
LAYERED = ("mahalanobis", "igeood", "igeood+")
METHODS = ("msp", "odin", "energy", "kl-sum", "kl-min", "igeood-logits", "igeood-logits-min", *LAYERED)


def _numbers(_: click.Context, param: click.Parameter, value: str | None) -> tuple[float, ...] | None:
    """Numbers with commas between them: one, or one for each channel."""
    try:
        found = None if value is None else tuple(float(part) for part in value.split(","))
    except ValueError:
        found = ()
    if found is not None and len(found) not in (1, 3):
        raise InputError(f"{param.name}: expected one number, or three with commas between them; got {value!r}")
    return found


@click.command()
@click.argument("train", type=click.Path())
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="The guard's .safetensors file.")
@click.option(
    "--method", type=click.Choice(METHODS), help="By default igeood-logits, and igeood where layers are read."
)
@click.option(
    "--access",
    type=click.Choice(["black-box", "grey-box", "white-box"]),
    help="What of the model is used; by default what the method needs, and with a model its layers.",
)
@click.option("--temperature", type=float, help="Of the softmax; each method has its own default.")
@click.option("--probabilities", is_flag=True, help="The data are probabilities, not logits.")
@click.option("--layers", help="Layers to read, with commas between them; by default those found.")
@click.option("--mean", callback=_numbers, help="Of the images' normalisation: one number, or one for each channel.")
@click.option("--std", callback=_numbers, help="What the images are divided by after the mean: one, or one each.")
@click.option("--size", type=click.IntRange(1, 4096), help="Pixels of each side that the model takes.")
@force_option
@source_options
@json_option
def fit(
    train: str, out: str, method: str | None, access: str | None, temperature: float | None, probabilities: bool,
    layers: str | None, mean: tuple[float, ...] | None, std: tuple[float, ...] | None, size: int | None, force: bool,
    sources: Sources, as_json: bool,
) -> None:  # fmt: skip
    """Learn a guard from TRAIN, and write it to a file.

    TRAIN is a logits file with labels (Parquet or npz). With --model it is images: folder:PATH with a sub-folder for
    each class, or a data set that `igeood data list` names. The N × C logits are held in memory.

    `igeood calibrate` comes next.
    """
    from igeood.perturbation import check_channels

    check_new(out, force, train)
    model = sources.network()
    names = layers.split(",") if layers else None
    guard = _make(model, method, access, temperature, probabilities, names)
    source: Any
    if model is None:
        if mean or std or size:
            raise InputError("mean, std, size: tell how images are prepared; logits files have none")
        source = sources.file(train, names if guard.access == "white box" else (), training=True)
        if guard.detector.needs_labels:
            source.need_labels()
        if guard.access == "white box" and not source.layers:
            raise InputError(
                f"{train}: no column 'feature.<layer>', one for each layer that a white box reads; it has "
                f"{', '.join(source.names)}; write features too, or choose --access black-box"
            )
    else:
        guard.preparation = _preparation(train, mean, std, size)
        for name in ("mean", "std"):  # which its input steps need; they are checked here too
            given = guard.preparation[name]
            checked = check_channels(given * 3 if len(given) == 1 else given, name, positive=name == "std")
            setattr(guard.inputs, name, checked)
        source = sources.images(train, guard.preparation, training=True)
    with progress_bars() as report:
        guard.fit(Watched(source, "fit", report))
    guard.save(out)
    _tell(guard, source.rows, out, as_json)


def _tell(guard: "Guard", samples: int, out: str, as_json: bool) -> None:
    from igeood.detectors import method_name

    method, classes, layers = method_name(guard.detector), guard.detector.n_classes_, guard.layers
    text, right = f"{out}: {method}, {classes} classes, from {samples:,} samples", None
    train = guard._train
    if train is not None and train.labels is not None:
        right = float((train.logits.argmax(dim=1) == train.labels).double().mean())
        text += f", {100 * right:.1f}% of them classified as labelled"
    if right is not None and right < 0.5:
        doubt = "are the classes in its order, and its inputs normalised as in training?"
        click.echo(f"igeood: the classifier disagrees with most labels; {doubt}", err=True)
    text += f", layers {', '.join(layers)}" if layers else ""
    record = {"method": method, "classes": classes, "samples": samples, "layers": layers, "out": out}
    tell(as_json, {**record, "accuracy": right}, text)


def _make(
    model: "nn.Module | None", method: str | None, access: str | None, temperature: float | None, probabilities: bool,
    layers: list[str] | None,
) -> "Guard":  # fmt: skip
    """The guard that the options describe."""
    from igeood.access import black_box, grey_box, white_box

    if access is None:
        needs = method in LAYERED if method else model is not None or layers is not None
        access = "white-box" if needs else "black-box"
    if access == "white-box":
        if probabilities:
            raise InputError("probabilities: a white box reads logits; leave it out, or choose --access black-box")
        return white_box(model, layers=layers or "auto", method=method, temperature=temperature)
    if layers is not None:
        raise InputError(f"layers: a {access.replace('-', ' ')} reads none; leave them out, or --access white-box")
    method = method or "igeood-logits"
    if access == "black-box":
        return black_box(model, method=method, temperature=temperature, probabilities=probabilities)
    if model is None:
        raise InputError("access: a grey box needs the model's gradients; name it: --model module:factory")
    return grey_box(model, method=method, temperature=temperature, probabilities=probabilities)


def _preparation(
    train: str, mean: tuple[float, ...] | None, std: tuple[float, ...] | None, size: int | None
) -> dict[str, Any]:
    """How images become inputs: as told, else as the data set's own numbers are."""
    from igeood import datasets

    known = datasets.DATASETS.get(train)
    if (mean is None) != (std is None):
        raise InputError("mean, std: belong together; give both, or neither")
    if size is None and known is None:
        raise InputError("size: how many pixels does the model take? Give --size, such as 224")
    if mean is None and known is not None and known.mean is not None:
        mean, std = known.mean, known.std
        click.echo(f"images normalised as usual for {train}: mean {mean}, std {std}", err=True)
    return {"size": size or 32, "mean": list(mean or (0.0,)), "std": list(std or (1.0,))}
