"""The laboratory's commands. What they run is imported when they run, so that `igeood --help` needs no torch."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from igeood.terminal import (
    FILE,
    FOLDER,
    force_option,
    json_option,
    method_option,
    progress_bars,
    root_option,
    seed_option,
    show,
)

if TYPE_CHECKING:
    from igeood.bench.demo import Demo
    from igeood.bench.networks import Progress
    from igeood.bench.report import Report
    from igeood.bench.runs import Results
    from igeood.checking.result import Example

_COUNT = click.IntRange(min=1)
_SEARCH = "Search for temperatures; bayes is the paper's: 5 × 500 trials."
_IMAGES = click.IntRange(min=40)


@click.group()
def data() -> None:
    """List and fetch the data sets."""


@data.command("list")
@root_option
@json_option
def list_(root: str | None, as_json: bool) -> None:
    """Show the known data sets, and which of them are there."""
    from igeood.bench.datasets import DATASETS, data_root
    from igeood.bench.datasets.store import status

    click.echo(f"Data sets in {data_root(root)}", err=True)
    for dataset in DATASETS.values():
        here = status(dataset, data_root(root))
        about = {"title": dataset.title, "licence": dataset.licence, "from": dataset.home, "note": dataset.note}
        text = f"{here.name:<21} {here.state:<8} {here.found:>7} of {here.expected:<7} {dataset.title}"
        click.echo(json.dumps({**asdict(here), **about}) if as_json else text)


@data.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@force_option
@root_option
@json_option
def get(names: tuple[str, ...], root: str | None, force: bool, as_json: bool) -> None:
    """Download data sets and unpack them. A download that was cut goes on where it stopped."""
    from igeood.bench.datasets import data_root, loading, store

    with progress_bars() as report:
        for dataset in [loading.find(name) for name in names]:
            fetched = store.get(dataset, data_root(root), force=force, progress=report)
            show(as_json, {"name": dataset.name, "fetched": fetched})


@click.command()
@click.argument("network")
@click.option("--data", default="cifar-10", show_default=True, help="A set of `igeood data list`, or idx:FOLDER.")
@click.option("--out", required=True, type=FILE, help="The .safetensors file to write.")
@click.option("--head", default="linear", show_default=True, help="linear, or deconf-c for the method of that name.")
@root_option
@click.option("--epochs", default=300, show_default=True, type=click.IntRange(1, 10**5), help="Passes over the images.")
@click.option("--batch", default=64, show_default=True, type=click.IntRange(min=2), help="Images a step.")
@click.option("--rate", default=0.1, show_default=True, help="Learning rate, cut tenfold at 50% and 75%.")
@click.option("--augment/--no-augment", default=True, show_default=True, help="Shift and mirror; off for digits.")
@seed_option
@click.option("--limit", type=_COUNT, help="Use this many images of each split only.")
@json_option
def train(
    network: str, data: str, out: str, head: str, root: str | None, limit: int | None, as_json: bool, **recipe: Any
) -> None:
    """Train NETWORK by the paper's recipe: SGD, Nesterov momentum 0.9, weight decay 1e-4.

    Networks: densenet-bc-100, resnet-34 (days on a CPU), resnet-10-16 (a minute an epoch).

    A run that was stopped goes on from its checkpoint when the same command is given again.
    """
    from igeood.bench import networks

    networks.build(network, head=head)
    how = networks.Recipe(**recipe)
    task = networks.learning_task(data, root=root, limit=limit)
    click.echo(f"{len(task.images):,} training images, {len(task.test_images):,} test images", err=True)
    with progress_bars() as report:

        def progress(now: "Progress") -> None:
            report(f"{network}, steps", now.epoch * now.steps + now.step, how.epochs * now.steps)
            if now.step == now.steps:
                click.echo(f"epoch {now.epoch + 1}: loss {now.loss:.3f}, {now.accuracy:.1%} right", err=True)

        accuracy = networks.train(network, task, out, how, head=head, progress=progress)
    show(as_json, {"network": network, "head": head, "data": data, "out": out, "accuracy": accuracy})


@click.command()
@click.option("--network", "networks", multiple=True, required=True, help="PATH, NAME:PATH, or MODULE:NAME.")
@click.option("--weights", type=click.Path(), help="Of a network of your own, MODULE:NAME.")
@click.option("--in-distribution", help="What the networks were trained on, where their files don't say it.")
@click.option("--mean", help="Of the inputs, where the files don't say it: one, or three.")
@click.option("--std", help="What the inputs are divided by after the mean: one, or three.")
@click.option("--size", default=32, show_default=True, type=click.IntRange(1, 4096), help="Pixels of each side.")
@click.option("--resize", default="smooth", type=click.Choice(["smooth", "nearest"]), help="How OOD files are resized.")
@click.option("--ood", multiple=True, help="OOD set to measure on; by default all that are there.")
@click.option("--validation", multiple=True, help="OOD set to tune on, or none; by default isun, if it is there.")
@click.option("--setting", "settings", multiple=True, help="By default the paper's four.")
@click.option("--method", "methods", multiple=True, help="By default all of the setting.")
@click.option("--limit", default=300, show_default=True, type=_IMAGES, help="Images of each kind, with an input step.")
@click.option("--images", type=_IMAGES, help="Images of each test set at most; up to half of them are to tune on.")
@click.option("--train", type=_COUNT, help="Training images at most, evenly spaced.")
@click.option("--splits", default=5, show_default=True, type=click.IntRange(1, 1000), help="Of the white box.")
@click.option("--attacked", default="train", type=click.Choice(["train", "test"]), help="Images to make FGSM ones of.")
@click.option("--search", default="sweep", show_default=True, type=click.Choice(["sweep", "bayes"]), help=_SEARCH)
@method_option
@seed_option
@click.option("--out", default="igeood-results", show_default=True, type=FOLDER, help="Folder of the results.")
@root_option
@json_option
def bench(
    networks: tuple[str, ...],
    weights: str | None,
    in_distribution: str | None,
    mean: str | None,
    std: str | None,
    size: int,
    resize: str,
    out: str,
    root: str | None,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Measure methods × data sets on trained networks.

    A network is a file of weights that says what it is, as `igeood train` writes it; NAME:PATH, with NAME such as
    densenet-bc-100; or any model of yours, MODULE:NAME with --weights and --in-distribution.

    --network, --ood, --validation, --setting and --method may be given several times. Sets are those of `igeood data
    list`, folder:PATH, idx:PATH or demo:NAME. Settings are black-box, grey-box, white-box (tuned on samples of the OOD
    set, split at random), white-box-fgsm (on adversarial ones), white-box-step and white-box-fgsm-step (with the
    paper's input steps), white-box-validation (on --validation, as black and grey box are), and untuned: every method
    as it is. With an input step, as in the grey box, the network runs anew for each method: hence --limit.
    --resize nearest makes aliased copies of image files, as the literature has them; tiny-imagenet-nearest names one.

    What was measured before is not measured again. Outputs of the networks are kept in the results' folder --out.
    `igeood paper` makes tables and figures of it.
    """
    from igeood.bench.datasets import DATASETS, data_root
    from igeood.bench.datasets.loading import nearest_name
    from igeood.bench.datasets.store import begun
    from igeood.bench.runs import Plan, load_network, run
    from igeood.images import channels

    how: Any = {"in_distribution": in_distribution, "weights": weights, "size": size}
    how |= {name: tuple(channels(text, name)) for name, text in (("mean", mean), ("std", std)) if text}
    loaded = [load_network(spec, **how) for spec in networks]
    here = tuple(name for name, dataset in DATASETS.items() if begun(dataset, data_root(root)))
    usual = {"ood": here, "validation": tuple({"isun"} & {*here})}
    given = {**usual, **{name: value for name, value in chosen.items() if value not in ((), None)}}
    if resize == "nearest":
        given |= {part: tuple(map(nearest_name, given[part])) for part in ("ood", "validation")}
    plan = Plan(**given)
    click.echo(f"sets: {', '.join(plan.ood)}; tuned on: {', '.join(plan.validation) or 'none'}", err=True)
    with progress_bars() as report:

        def done(number: int, total: int, record: dict[str, Any]) -> None:
            report("cells", number, total)
            click.echo(json.dumps(record, sort_keys=True) if as_json else _line(record))

        results = run(loaded, plan, out, root=root, notify=report, done=done)
    results.note(click.get_current_context().obj)
    click.echo(f"{len(results.cells.records)} results in {out}; `igeood report {out}`", err=True)


def _line(record: dict[str, Any]) -> str:
    place = " ".join(str(record[name]) for name in ("network", "setting", "method", "ood", "seed"))
    return f"{place}: " + "  ".join(f"{name.upper()} {100 * record[name]:.1f}" for name in ("tnr", "auroc", "aupr"))


@click.command()
@click.argument("name")
@click.option("--results", type=FOLDER, help="Folder of `igeood bench`; without it, only the paper's.")
@click.option("--out", default="igeood-figures", show_default=True, type=FOLDER, help="Folder of the figures.")
@click.option("--validation", help="Set that black and grey box were tuned on, if the results have several.")
@click.option("--network", "networks", multiple=True, help="Weights, to measure the network's time. Repeatable.")
def paper(name: str, results: str | None, out: str, validation: str | None, networks: tuple[str, ...]) -> None:
    """Print a table of the paper, or draw a figure: ours beside the paper's, which are in parentheses.

    NAME is one of toy, black-box, grey-box, white-box, white-box-fgsm, equation-12, centroids, kl, hyperparameters,
    validation-choice, seeds, accuracy, adversarial, timing, others, histograms, curves, gaussianity, layers,
    layer-reduction, input-steps; or all.
    """
    from igeood.bench.paper.catalog import LEGEND, NAMES, make
    from igeood.bench.runs import Results, load_network

    measured = None if results is None else Results.existing(results)
    loaded = [load_network(spec) for spec in networks]
    if name == "all":
        click.echo(LEGEND)
    for each in NAMES if name == "all" else [name]:
        click.echo(make(each, measured, out=out, validation=validation, networks=loaded))


@click.command()
@click.argument("results", type=FOLDER)
@click.option("--out", type=FILE, help="The file to write; by default RESULTS/methods.html.")
@click.option("--validation", help="Set that was tuned on, if the results have several.")
@json_option
def report(results: str, out: str | None, validation: str | None, as_json: bool) -> None:
    """Compare methods on one HTML page of RESULTS, a folder of `igeood bench` or `igeood demo`.

    It needs no other file and no network: mail it, print it, or open it on a phone. The report of a guard is that of
    `igeood check`.
    """
    from igeood.bench.runs import Results

    target = Path(results) / "methods.html" if out is None else Path(out)
    page = _write_page(target, Results.existing(results), validation)
    show(as_json, {"out": str(target), "bytes": target.stat().st_size, "methods": page.methods})


def _write_page(path: Path, results: "Results", validation: str | None = None) -> "Report":
    from igeood.bench.report import make
    from igeood.files import write_whole

    page = make(results, made_on=date.today(), validation=validation)
    write_whole(path, page.html.encode())
    return page


@click.command()
@click.option("--out", default="igeood-demo", show_default=True, type=FOLDER, help="Folder for all output.")
@seed_option
@json_option
def demo(out: str, seed: int, as_json: bool) -> None:
    """See it work: train a small classifier, guard it, compare methods, write a report.

    Needs no download. The classifier learns the digits 0 to 7, and then meets 8 and 9, letters, photographs and noise.
    What is in --out already is not done again.
    """
    from igeood.bench.demo import run

    with progress_bars() as report:
        result = run(out, seed=seed, notify=report)
    result.results.note(click.get_current_context().obj)
    pages = {"report": str(Path(out) / "report.html"), "comparison": str(Path(out) / "methods.html")}
    result.check.report(pages["report"])
    _write_page(Path(pages["comparison"]), result.results)
    if as_json:
        show(True, {**result.check.to_dict(), "methods": result.methods, "out": out, **pages})
        return
    click.echo("\n".join([*_story(result), f"Report: {pages['report']}", f"Methods: {pages['comparison']}"]))


def _story(result: "Demo") -> Iterator[str]:
    """What the demonstration shows, in lines."""
    from igeood.checking.result import percent
    from igeood.detectors import METHODS

    check = result.check
    yield f"A network has learnt the handwritten digits 0 to 7; it is right on {check.accuracy:.1%} of new ones."
    yield "Whatever else it is shown, it answers with one of these digits. The guard around it"
    yield f"  keeps   {percent(check.kept.kept):>5} of the digits that it was made for, and"
    yield from (f"  refuses {percent(one.refused):>5} of {one.name}" for one in check.ood)
    yield f"Its promise: {check.promise}."
    for one in check.ood:
        refused = [example for example in (*one.least, *one.most) if example.is_ood]
        yield from (_refused(one.name, example) for example in refused[:1])  # the least surprising
    yield "Four methods as they are, by the share of foreign images refused while 95% of digits are kept:"
    yield "  " + ", ".join(f"{METHODS[name].title} {share:.1%}" for name, share in result.methods.items())


def _refused(name: str, one: "Example") -> str:
    sure = f"{one.confidence:.1%} confidence, and refused (p-value {one.p_value:.2g})"
    return f"  {name}: one was taken for a {one.answer} with {sure}: {one.reason}"
