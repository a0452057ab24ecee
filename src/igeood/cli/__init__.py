"""The command line: parses, calls, prints. Results go to stdout, messages to stderr; torch is imported when needed."""

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

import click

from igeood.errors import IgeoodError, IgeoodWarning
from igeood.version import __version__

COMMANDS = ("bench", "calibrate", "data", "demo", "fit", "paper", "report", "score", "train", "tune")


class _Group(click.Group):
    """A group whose commands end with one line, and exit code 2, where the user has to fix something."""

    def main(self, args: Sequence[str] | None = None, *others: Any, **options: Any) -> NoReturn:
        """Run a command and exit."""
        words = list(sys.argv[1:] if args is None else args)
        options |= {"standalone_mode": False, "obj": ["igeood", *words]}  # the whole line, for those who note it
        code = 2
        try:
            with _messages():
                sys.exit(super().main(words, *others, **options))
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(code)
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "igeood"
            text = f"{error.format_message().rstrip('.')}; see `{command} --help`"
        except click.Abort:
            code, text = 130, "stopped"
        except IgeoodError as error:
            text = str(error)
        except OSError as error:
            text = f"{error.filename or 'system'}: {error.strerror or error}"
        click.echo(f"igeood: {' '.join(text.split())}", err=True)
        sys.exit(code)


@contextmanager
def _messages() -> Iterator[None]:
    """The library's messages and warnings, each once, as a line on stderr."""
    shown: set[str] = set()

    def show(text: str) -> None:
        if text not in shown:
            shown.add(text)
            click.echo(f"igeood: {' '.join(text.split())}", err=True)

    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: show(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("igeood")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", IgeoodWarning)
            warnings.showwarning = lambda message, *_, **__: show(str(message))
            yield
    finally:
        logger.removeHandler(handler)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="igeood")
def main() -> None:
    """Find the inputs that a trained classifier was not made for."""


for _name in COMMANDS:  # each in the module of its name
    main.add_command(getattr(import_module(f"igeood.cli.{_name}"), _name))
