"""What several commands have: options, and how results are printed."""

import json
from collections.abc import Callable
from typing import Any

import click

Decorator = Callable[[Callable[..., None]], Callable[..., None]]

json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
root_option: Decorator = click.option(
    "--root", type=click.Path(file_okay=False), help="Where the data are; $IGEOOD_DATA, or the user's cache folder."
)


def seed_option(what: str) -> Decorator:
    """`--seed`, with what it seeds."""
    return click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**32 - 1), help=what)


def show(as_json: bool, record: Any, text: str) -> None:
    """Print the result: JSON, or words."""
    click.echo(json.dumps(record) if as_json else text)
