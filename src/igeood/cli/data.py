"""`igeood data`: list and get the data sets."""

import json

import click

from igeood.cli._shared import json_option, root_option, show
from igeood.cli.progress import progress_bars


@click.group()
def data() -> None:
    """List and fetch the data sets."""


@data.command("list")
@root_option
@json_option
def list_(root: str | None, as_json: bool) -> None:
    """Show the known data sets, and which of them are there."""
    from dataclasses import asdict

    from igeood.bench.datasets import DATASETS, data_root
    from igeood.bench.datasets.store import status

    click.echo(f"Data sets in {data_root(root)}", err=True)
    for dataset in DATASETS.values():
        here = status(dataset, data_root(root))
        record = {**asdict(here), "title": dataset.title, "licence": dataset.licence, "from": dataset.home}
        text = f"{here.name:<14} {here.state:<8} {here.found:>7} of {here.expected:<7} {dataset.title}"
        click.echo(json.dumps(record) if as_json else text)


@data.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--force", is_flag=True, help="Fetch again what is there.")
@root_option
@json_option
def get(names: tuple[str, ...], root: str | None, force: bool, as_json: bool) -> None:
    """Download data sets and unpack them. A download that was cut goes on where it stopped."""
    from igeood.bench.datasets import data_root
    from igeood.bench.datasets.loading import find
    from igeood.bench.datasets.store import get as fetch

    with progress_bars() as report:
        for dataset in [find(name) for name in names]:
            fetched = fetch(dataset, data_root(root), force=force, progress=report)
            show(as_json, {"name": dataset.name, "fetched": fetched})
