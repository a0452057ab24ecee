"""`igeood data`: list, get and verify the data sets. Results go to stdout, progress and messages to stderr."""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from igeood.cli import progress
from igeood.cli._shared import json_option, root_option

if TYPE_CHECKING:
    from igeood.datasets.catalog import Dataset
    from igeood.datasets.store import Status


@click.group()
def data() -> None:
    """List, fetch and check the data sets."""


@data.command("list")
@root_option
@json_option
def list_(root: str | None, as_json: bool) -> None:
    """Show the known data sets, and which of them are there."""
    from igeood.datasets.catalog import DATASETS, data_root
    from igeood.datasets.store import status

    folder = data_root(root)
    rows = [(dataset, status(dataset, folder)) for dataset in DATASETS.values()]
    if as_json:
        click.echo(json.dumps({"root": str(folder), "sets": [_described(*row) for row in rows]}, indent=1))
        return
    click.echo(f"Data sets in {folder}", err=True)
    columns, lines = ["name", "title", "images", "download", "licence", "from", "here"], [_row(*row) for row in rows]
    if progress.on_terminal(sys.stdout):  # eighty columns have no room for seven
        columns = ["name", "what", "images", "download", "here"]
        lines = [[r[0], f"{r[1]}\nlicence: {r[4]}\n{r[5]}".rstrip(), r[2], r[3], r[6]] for r in lines]
    _table(columns, lines)


def _described(dataset: "Dataset", status: "Status") -> dict[str, object]:
    downloads = [asdict(download) for download in dataset.downloads]
    counts, about = dict(dataset.counts), {"title": dataset.title, "licence": dataset.licence, "home": dataset.home}
    return {**asdict(status), **about, "counts": counts, "downloads": downloads, "note": dataset.note}


def _row(dataset: "Dataset", status: "Status") -> list[str]:
    images = f"{sum(dataset.counts.values()):,}"
    sizes = [download.size for download in dataset.downloads]
    size = f"{sum(filter(None, sizes)) / 1e6:,.0f} MB" if all(sizes) and sizes else "unknown" if sizes else "none"
    here = f"partial: {status.found:,}" if status.state == "partial" else status.state
    return [dataset.name, dataset.title, images, size, dataset.licence, dataset.home, here]


def _table(columns: list[str], rows: list[list[str]]) -> None:
    """A table on a terminal; tab-separated lines for another program."""
    if not progress.on_terminal(sys.stdout):
        click.echo("\n".join("\t".join(row) for row in [columns, *rows]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table, markup=False)


@data.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--force", is_flag=True, help="Fetch again what is there.")
@root_option
@json_option
def get(names: tuple[str, ...], root: str | None, force: bool, as_json: bool) -> None:
    """Download data sets and unpack them. A download that was cut goes on where it stopped."""
    from igeood.datasets import store
    from igeood.datasets.catalog import data_root
    from igeood.datasets.loading import find

    folder, done = data_root(root), []
    for dataset in [find(name) for name in names]:
        with progress.progress_bars() as show:
            fetched = store.get(dataset, folder, force=force, progress=_megabytes(show))
        there = "is made when it is used: nothing to download" if dataset.kind == "noise" else f"is there, in {folder}"
        click.echo(f"{dataset.name}: {'fetched' if fetched else there}", err=True)
        done.append({"name": dataset.name, "fetched": fetched, "root": str(folder)})
    if as_json:
        click.echo(json.dumps(done, indent=1))


def _megabytes(show: progress.Progress) -> progress.Progress:
    """What is reported in bytes, shown in megabytes, rounded up."""

    def report(file: str, done: int, total: int | None) -> None:
        show(f"{file}, MB", -(-done // 10**6), total and -(-total // 10**6))

    return report


@data.command()
@click.argument("names", nargs=-1, metavar="[NAME...]")
@click.option("--decode", is_flag=True, help="Also decode every image.")
@root_option
@json_option
def verify(names: tuple[str, ...], root: str | None, decode: bool, as_json: bool) -> None:
    """Check data sets: counts, record sizes, and the files' contents where `get` noted them.

    The exit code is 2 if anything is damaged, or a set that was named is missing.
    """
    from igeood.datasets.catalog import DATASETS, data_root
    from igeood.datasets.loading import find
    from igeood.datasets.store import status

    chosen = [find(name) for name in names] or list(DATASETS.values())
    found = [status(dataset, data_root(root), deep=True, decode=decode) for dataset in chosen]
    if as_json:
        click.echo(json.dumps([asdict(each) for each in found], indent=1))
    else:
        rows = [[s.name, s.state, f"{s.found:,} of {s.expected:,}", s.detail] for s in found]
        _table(["name", "state", "images", "detail"], rows)
    if any(s.state == "damaged" or (s.state == "missing" and names) for s in found):
        sys.exit(2)
