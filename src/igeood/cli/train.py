"""`igeood train`: the reference classifiers."""

from typing import TYPE_CHECKING, Any

import click

from igeood.cli._shared import FILE, json_option, root_option, seed_option, show
from igeood.cli.progress import progress_bars
from igeood.errors import InputError

if TYPE_CHECKING:
    from igeood.bench.networks import Progress, Task


@click.command()
@click.argument("network")
@click.option("--data", default="cifar-10", show_default=True, help="A set of `igeood data list`, or idx:FOLDER.")
@click.option("--out", required=True, type=FILE, help="The .safetensors file to write.")
@root_option
@click.option("--epochs", default=300, show_default=True, type=click.IntRange(1, 10**5), help="Passes over the images.")
@click.option("--batch", default=64, show_default=True, type=click.IntRange(min=2), help="Images a step.")
@click.option("--rate", default=0.1, show_default=True, help="Learning rate, cut tenfold at 50% and 75%.")
@click.option("--augment/--no-augment", default=True, show_default=True, help="Shift and mirror; off for digits.")
@seed_option("Of everything random.")
@click.option("--limit", type=click.IntRange(min=1), help="Use this many images of each split only.")
@json_option
def train(network: str, data: str, out: str, root: str | None, limit: int | None, as_json: bool, **recipe: Any) -> None:
    """Train NETWORK by the paper's recipe: SGD, Nesterov momentum 0.9, weight decay 1e-4.

    Networks: densenet-bc-100, resnet-34 (days on a CPU), resnet-10-16 (a minute an epoch).

    A run that was stopped goes on from its checkpoint when the same command is given again.
    """
    from igeood.bench.networks import Recipe, build
    from igeood.bench.networks import train as run

    build(network)
    how = Recipe(**recipe)
    with progress_bars() as report:

        def progress(now: "Progress") -> None:
            report(f"{network}, steps", now.epoch * now.steps + now.step, how.epochs * now.steps)
            if now.step == now.steps:
                click.echo(f"epoch {now.epoch + 1}: loss {now.loss:.3f}, {now.accuracy:.1%} right", err=True)

        accuracy = run(network, _task(data, root, limit), out, how, progress=progress)
    show(as_json, {"network": network, "data": data, "out": out, "accuracy": accuracy})


def _task(data: str, root: str | None, limit: int | None) -> "Task":
    from igeood.bench import datasets
    from igeood.bench.networks import Task

    learn, test = (datasets.load(data, root=root, split=split, limit=limit) for split in ("train", "test"))
    if learn.labels is None or test.labels is None:
        raise InputError(f"data: {data} has no labels to learn; name a set of labelled images")
    click.echo(f"{len(learn):,} training images, {len(test):,} test images", err=True)
    known, classes = datasets.DATASETS.get(data), learn.classes or int(learn.labels.max()) + 1
    mean, std = (known.mean or (), known.std or ()) if known else ((), ())
    return Task(data, classes, learn.images(), learn.labels, test.images(), test.labels, mean, std)
