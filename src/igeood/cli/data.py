"""`igeood data`: list, get and verify the data sets. Results go to stdout, progress and messages to stderr."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import IO, TYPE_CHECKING

import click

if TYPE_CHECKING:
    from igeood.datasets.catalog import Dataset
    from igeood.datasets.download import Progress
    from igeood.datasets.store import Status

_root = click.option(
    "--root",
    type=click.Path(file_okay=False),
    help="Folder of the data sets; otherwise $IGEOOD_DATA, or the user's cache folder.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def data() -> None:
    """List, fetch and check the data sets."""


@data.command("list")
@_root
@_json
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
    if _terminal(sys.stdout):  # eighty columns have no room for seven
        columns = ["name", "what", "images", "download", "here"]
        wide = [_row(*row) for row in rows]
        lines = [[r[0], f"{r[1]}\nlicence: {r[4]}\n{r[5]}".rstrip(), r[2], r[3], r[6]] for r in wide]
    else:
        columns = ["name", "title", "images", "download", "licence", "from", "here"]
        lines = [_row(*row) for row in rows]
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


def _terminal(stream: IO[str]) -> bool:
    return stream.isatty()


def _table(columns: list[str], rows: list[list[str]]) -> None:
    """A table on a terminal; tab-separated lines for another program."""
    if not _terminal(sys.stdout):
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
@_root
@_json
def get(names: tuple[str, ...], root: str | None, force: bool, as_json: bool) -> None:
    """Download data sets and unpack them. A download that was cut goes on where it stopped."""
    from igeood.datasets import store
    from igeood.datasets.catalog import data_root
    from igeood.datasets.loading import find

    folder, done = data_root(root), []
    for dataset in [find(name) for name in names]:
        with _progress() as progress:
            fetched = store.get(dataset, folder, force=force, progress=progress)
        there = "is made when it is used: nothing to download" if dataset.kind == "noise" else f"is there, in {folder}"
        click.echo(f"{dataset.name}: {'fetched' if fetched else there}", err=True)
        done.append({"name": dataset.name, "fetched": fetched, "root": str(folder)})
    if as_json:
        click.echo(json.dumps(done, indent=1))


@contextmanager
def _progress() -> Iterator["Progress"]:
    """A bar on a terminal; otherwise a line for each tenth."""
    if not _terminal(sys.stderr):
        yield _lines()
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True)) as progress:
        tasks: dict[str, bars.TaskID] = {}

        def report(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = progress.add_task(file, total=total)
            progress.update(tasks[file], completed=done, total=total)

        yield report


def _lines() -> "Progress":
    said: dict[str, int] = {}

    def report(file: str, done: int, total: int | None) -> None:
        tenth = 10 * done // total if total else done // 10**8
        if said.get(file) != tenth:
            said[file] = tenth
            of = f" of {total / 1e6:,.1f}" if total else ""
            click.echo(f"{file}: {done / 1e6:,.1f}{of} MB", err=True)

    return report


@data.command()
@click.argument("names", nargs=-1, metavar="[NAME...]")
@click.option("--decode", is_flag=True, help="Also decode every image.")
@_root
@_json
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
