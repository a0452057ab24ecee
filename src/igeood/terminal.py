"""What the commands share: options, results on stdout, progress on stderr."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

Decorator = Callable[[Callable[..., None]], Callable[..., None]]
Progress = Callable[[str, int, int | None], None]  # what, done, of how many if known
PATIENCE = 60  # seconds without a line, where there are no bars

FILE, FOLDER = click.Path(dir_okay=False), click.Path(file_okay=False)
force_option: Decorator = click.option("--force", is_flag=True, help="Replace existing files.")
json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
root_option: Decorator = click.option("--root", type=FOLDER, help="Folder of the data; default: $IGEOOD_DATA.")
SEED = click.IntRange(0, 2**32 - 1)
seed_option: Decorator = click.option("--seed", default=0, type=SEED, help="Seed for everything random.")


def named(read: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, tuple[str, ...]], dict[str, Any]]:
    """A callback that makes values by name from texts, which are NAME=VALUE."""

    def split(_: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> dict[str, Any]:
        parts = [text.partition("=") for text in texts]
        if not all(name and value for name, _, value in parts) or len({name for name, *_ in parts}) < len(parts):
            raise click.BadParameter(f"expected {param.metavar}, each name once; got {', '.join(texts)}")
        return {name: read(value) for name, _, value in parts}

    return split


def _value(text: str) -> Any:
    """Numbers and `none` as such, other values as text."""
    try:
        return json.loads(text.lower().replace("none", "null"))
    except ValueError:
        return text


method_option: Decorator = click.option(
    "--option",
    "options",
    metavar="NAME=VALUE",
    multiple=True,
    callback=named(_value),
    help="Option of the method, NAME=VALUE, such as temperature=2. Repeatable.",
)


def show(as_json: bool, record: dict[str, Any]) -> None:
    """Print the result: JSON, or a line for each entry that is not None."""
    lines = (f"{name}: {_words(value)}" for name, value in record.items() if value is not None)
    click.echo(json.dumps(record) if as_json else "\n".join(lines))


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(part)}" for name, part in value.items() if part is not None)
    if isinstance(value, (list, tuple)):
        words = list(map(_words, value))
        return (" " if words and words[0].endswith(".") else ", ").join(words) or "none"  # sentences, or names
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns: the first to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]


@contextmanager
def progress_bars(*, lines: bool = True) -> Iterator[Progress]:
    """A bar for each thing under way; not on a terminal, `lines`: one at each quarter of it, and every minute."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield _lines() if lines else lambda *_: None
        return
    from rich import progress
    from rich.console import Console

    columns = (*progress.Progress.get_default_columns(), progress.MofNCompleteColumn())
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, progress.TaskID] = {}

        def report(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=None)
            bars.update(tasks[what], completed=done, total=total, visible=done != total)

        yield report


def _lines() -> Progress:
    shown: dict[str, int] = {}
    last = time.monotonic()

    def report(what: str, done: int, total: int | None) -> None:
        nonlocal last
        part = 4 * done // total if total else done.bit_length()  # of an unknown number, each doubling
        before = shown.setdefault(what, part if done == total else 0)  # finished at its first report: not shown
        if before < part or time.monotonic() - last > PATIENCE:
            shown[what], last = part, time.monotonic()
            click.echo(f"{what}: {done:,} of {total:,}" if total else f"{what}: {done:,}", err=True)

    return report
