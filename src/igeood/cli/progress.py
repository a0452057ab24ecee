"""Progress of long work, on stderr: bars on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

Progress = Callable[[str, int, int | None], None]  # what, done, of how many if that is known
BARS = 6  # finished ones that stay on the screen
PATIENCE = 60  # seconds without a line, where there are no bars


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """A bar for each thing that is reported on; not on a terminal, a line at each quarter of it, and every minute."""
    with _bars() if sys.stderr is not None and sys.stderr.isatty() else _lines() as report:
        yield report


@contextmanager
def _bars() -> Iterator[Progress]:
    from rich import progress
    from rich.console import Console

    columns = (*progress.Progress.get_default_columns(), progress.MofNCompleteColumn())
    with progress.Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, progress.TaskID] = {}

        def show(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what)
            bars.update(tasks[what], completed=done, total=total)
            if done == total and len(tasks) > BARS:
                bars.remove_task(tasks.pop(what))

        yield show


@contextmanager
def _lines() -> Iterator[Progress]:
    shown: dict[str, int] = {}
    last = time.monotonic()

    def show(what: str, done: int, total: int | None) -> None:
        nonlocal last
        part = 4 * done // total if total else done.bit_length()  # of an unknown number, each doubling
        before = shown.setdefault(what, part if done == total else 0)  # finished at its first report: not shown
        if before < part or time.monotonic() - last > PATIENCE:
            shown[what], last = part, time.monotonic()
            click.echo(f"{what}: {done:,} of {total:,}" if total else f"{what}: {done:,}", err=True)

    yield show
