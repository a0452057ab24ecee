"""`igeood train`: the reference classifiers."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from igeood.cli._shared import json_option, root_option, seed_option, tell
from igeood.cli.progress import progress_bars

if TYPE_CHECKING:
    from igeood.networks import Recipe, Task


@click.command()
@click.argument("network")
@click.option(
    "--data", default="cifar-10", show_default=True, help="Data set, as `igeood data list` names it; or idx:FOLDER."
)
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="The .safetensors file to write.")
@root_option
@click.option("--epochs", default=300, show_default=True, type=click.IntRange(1, 10**5), help="Passes over the images.")
@click.option("--batch", default=64, show_default=True, type=click.IntRange(min=2), help="Images a step.")
@click.option(
    "--rate", default=0.1, show_default=True, type=click.FloatRange(0, 100, min_open=True),
    help="Learning rate, cut tenfold at 50% and 75%.",
)  # fmt: skip
@click.option("--augment/--no-augment", default=True, show_default=True, help="Shift and mirror; off for digits.")
@seed_option("Of everything random.")
@click.option("--limit", type=click.IntRange(min=1), help="Use this many images of each split only.")
@json_option
def train(
    network: str, data: str, out: str, root: str | None, epochs: int, batch: int, rate: float, augment: bool,
    seed: int, limit: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Train NETWORK by the paper's recipe: SGD, Nesterov momentum 0.9, weight decay 1e-4.

    Networks: densenet-bc-100, resnet-34 (days on a CPU), resnet-10-16 (a minute an epoch).

    A run that was stopped goes on from its checkpoint when the same command is given again.
    """
    from igeood.networks import Recipe, build

    build(network)
    if Path(out).suffix and Path(out).with_suffix(".training").exists():
        click.echo(f"going on from {Path(out).with_suffix('.training')}", err=True)
    recipe = Recipe(epochs=epochs, batch=batch, rate=rate, augment=augment, seed=seed)
    found = _run(network, _task(data, root, limit), out, recipe)
    about = {"network": network, "data": data, "out": out, "accuracy": found[0], "accuracy_fisher_rao": found[1]}
    right = f"{100 * found[0]:.2f}% right by softmax, {100 * found[1]:.2f}% by Fisher–Rao"
    tell(as_json, about, f"{network} on {data}: {right}\nweights: {out}")


def _task(data: str, root: str | None, limit: int | None) -> "Task":
    from igeood import datasets
    from igeood.errors import InputError
    from igeood.networks import Task

    known = datasets.DATASETS.get(data)
    if known is not None and "train" not in known.counts:
        raise InputError(f"data: {data} has no training images; there are cifar-10, cifar-100, svhn and idx:FOLDER")
    learn, judge = (datasets.load(data, root=root, split=split, limit=limit) for split in ("train", "test"))
    if learn.labels is None or judge.labels is None:
        raise InputError(f"data: {data} has no labels to learn; name a set of labelled images")
    for split, images in (("training", learn), ("test", judge)):
        click.echo(f"{len(images):,} {split} images" + (f" ({images.note})" if images.note else ""), err=True)
    classes = learn.classes or int(learn.labels.max()) + 1
    mean, std = (known.mean or (), known.std or ()) if known else ((), ())
    return Task(data, classes, learn.images(), learn.labels, judge.images(), judge.labels, mean, std)


def _run(network: str, task: "Task", out: str, recipe: "Recipe") -> tuple[float, float]:
    from igeood.networks import train as run
    from igeood.networks.training import Progress as Now

    with progress_bars() as report:

        def show(now: Now) -> None:
            report(f"{network}, steps", now.epoch * now.steps + now.step, recipe.epochs * now.steps)
            if now.step == now.steps:
                told = f"loss {now.loss:.3f}, {100 * now.accuracy:.1f}% right"
                click.echo(f"epoch {now.epoch + 1} of {recipe.epochs}: {told}", err=True)

        found = run(network, task, out, recipe, progress=show)
    return found.softmax, found.fisher_rao
