"""`igeood data`: list and get the data sets."""

import json
from collections.abc import Sequence

import click

from igeood.cli import progress
from igeood.cli._shared import json_option, root_option


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

    folder = data_root(root)
    rows = []
    for dataset in DATASETS.values():
        here = status(dataset, folder)
        state = f"{here.state}, {here.found:,} of {here.expected:,}"
        rows.append([dataset.name, dataset.title, state, dataset.licence, dataset.home, here.detail])
    columns = ["name", "title", "here", "licence", "from", "detail"]
    if as_json:
        sets = [dict(zip(columns, row, strict=True)) for row in rows]
        click.echo(json.dumps({"root": str(folder), "sets": sets}, indent=1))
        return
    click.echo(f"Data sets in {folder}", err=True)
    _print_table([columns, *rows])


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(map(str.ljust, row, widths)).rstrip())


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

    folder, done = data_root(root), []
    with progress.progress_bars() as report:
        for dataset in [find(name) for name in names]:
            fetched = fetch(dataset, folder, force=force, progress=report)
            done.append({"name": dataset.name, "fetched": fetched, "root": str(folder)})
            click.echo(f"{dataset.name}: {'fetched' if fetched else 'is there'}", err=True)
    if as_json:
        click.echo(json.dumps(done, indent=1))
