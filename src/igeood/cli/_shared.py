"""What several commands have: options, and how results are printed."""

import json
from collections.abc import Callable
from typing import Any

import click

Decorator = Callable[[Callable[..., None]], Callable[..., None]]

FILE, FOLDER = click.Path(dir_okay=False), click.Path(file_okay=False)

json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
root_option: Decorator = click.option("--root", type=FOLDER, help="Where the data are, if not in $IGEOOD_DATA.")


def seed_option(what: str) -> Decorator:
    """`--seed`, with what it seeds."""
    return click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**32 - 1), help=what)


def show(as_json: bool, record: dict[str, Any]) -> None:
    """Print the result: JSON, or a line for each entry that there is."""
    lines = (f"{name}: {_words(value)}" for name, value in record.items() if value is not None)
    click.echo(json.dumps(record) if as_json else "\n".join(lines))


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(part)}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        words = list(map(_words, value))
        return (" " if words and words[0].endswith(".") else ", ").join(words) or "none"  # sentences, or names
    return f"{value:.6g}" if isinstance(value, float) else str(value)
