"""The command line: parses, calls, prints. Results go to stdout, messages to stderr; torch is imported when needed."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from igeood.errors import IgeoodError, IgeoodWarning
from igeood.version import __version__

COMMANDS = {  # imported when they are asked for
    **{name: f"igeood.cli.{name}" for name in ("calibrate", "fit", "score", "tune")},
    **dict.fromkeys(("bench", "data", "demo", "paper", "report", "train"), "igeood.bench.commands"),
}


class _Group(click.Group):
    """A group whose commands end with one line, and exit code 2, where the user has to fix something."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names of the commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command of this name, from its module."""
        return getattr(import_module(COMMANDS[cmd_name]), cmd_name) if cmd_name in COMMANDS else None

    def main(self, args: Sequence[str] | None = None, *others: Any, **options: Any) -> NoReturn:
        """Run a command and exit."""
        words = list(sys.argv[1:] if args is None else args)
        options |= {"standalone_mode": False, "obj": ["igeood", *words]}  # the whole line, for those who note it
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("default", IgeoodWarning)
                warnings.showwarning = lambda message, *_, **__: _echo(str(message))
                sys.exit(super().main(words, *others, **options))
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "igeood"
            _echo(f"{error.format_message().rstrip('.')}; see `{command} --help`")
        except IgeoodError as error:
            _echo(str(error))
        except OSError as error:
            _echo(f"{error.filename or 'system'}: {error.strerror or error}")
        except click.Abort:
            _echo("stopped")
            sys.exit(130)
        sys.exit(2)


def _echo(text: str) -> None:
    click.echo(f"igeood: {' '.join(text.split())}", err=True)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="igeood")
def main() -> None:
    """Find the inputs that a trained classifier was not made for."""
