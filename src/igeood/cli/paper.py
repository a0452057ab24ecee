"""`igeood paper`: the paper's tables and figures."""

import click

from igeood.cli._shared import FOLDER


@click.command()
@click.argument("name")
@click.option("--results", type=FOLDER, help="Folder of `igeood bench`; without it, only the paper's.")
@click.option("--out", default="igeood-figures", show_default=True, type=FOLDER, help="Folder of the figures.")
@click.option("--validation", help="Set that black and grey box were tuned on, if the results have several.")
@click.option("--network", "networks", multiple=True, help="Weights, to measure the network's time. Repeatable.")
def paper(name: str, results: str | None, out: str, validation: str | None, networks: tuple[str, ...]) -> None:
    """Print a table of the paper, or draw a figure: ours beside the paper's, which are in parentheses.

    NAME is one of toy, black-box, grey-box, white-box, white-box-fgsm, kl, hyperparameters, validation-choice, seeds,
    accuracy, adversarial, timing, others, histograms, curves, gaussianity, layers; or all.
    """
    from igeood.bench.paper.catalog import NAMES, make
    from igeood.bench.runs import Results, load_network

    measured = None if results is None else Results.existing(results)
    loaded = [load_network(spec) for spec in networks]
    for each in NAMES if name == "all" else [name]:
        click.echo(make(each, measured, out=out, validation=validation, networks=loaded))
