"""`igeood paper`: the paper's tables and figures."""

import click


@click.command()
@click.argument("name")
@click.option(
    "--results", type=click.Path(file_okay=False), help="Folder of `igeood bench`; without it, only the paper's."
)
@click.option(
    "--out", default="igeood-figures", show_default=True, type=click.Path(file_okay=False), help="Figures go there."
)
@click.option("--validation", help="Set that black and grey box were tuned on, if the results have several.")
@click.option("--network", "networks", multiple=True, help="Weights, to measure the network's time. Repeatable.")
def paper(name: str, results: str | None, out: str, validation: str | None, networks: tuple[str, ...]) -> None:
    """Print a table of the paper, or draw a figure.

    NAME is one of the names below, or `all`.

    Ours beside the paper's, which are in parentheses. Names: toy, black-box, grey-box, white-box, white-box-fgsm, kl,
    hyperparameters, validation-choice, seeds, accuracy, adversarial, timing, others, histograms, curves, gaussianity,
    layers.
    """
    from igeood.benchmark import Results, load_network
    from igeood.paper.catalog import NAMES, make

    kept = None if results is None else Results.existing(results)
    loaded = [load_network(spec) for spec in networks]
    for each in NAMES if name == "all" else [name]:
        click.echo(make(each, kept, out=out, validation=validation, networks=loaded))
