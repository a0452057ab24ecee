"""Progress of long work, on stderr: bars on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

Progress = Callable[[str, int, int], None]  # what, done, of how many


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """A bar for each thing that is reported on; not on a terminal, a line at each quarter of it."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield show


def _lines() -> Progress:
    said: dict[str, int] = {}

    def show(what: str, done: int, total: int) -> None:
        quarter = 4 * done // total if total else 4
        if said.get(what, 0) < quarter:
            said[what] = quarter
            click.echo(f"{what}: {done:,} of {total:,}", err=True)

    return show
