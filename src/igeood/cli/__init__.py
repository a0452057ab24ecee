"""The command line: parses, calls, prints. Results go to stdout, messages to stderr; torch is imported when needed."""

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from igeood.errors import Finding, IgeoodError, IgeoodWarning
from igeood.version import __version__

_ON_GUARDS = ("calibrate", "check", "export", "fit", "merge", "monitor", "score", "serve", "tune")
COMMANDS = {  # imported when they are asked for
    **{name: f"igeood.cli.{name}" for name in _ON_GUARDS},
    **dict.fromkeys(("bench", "data", "demo", "paper", "report", "train"), "igeood.bench.commands"),
}


def spelling(command: click.Command | None) -> Callable[[str], str]:
    """How a command writes an argument of Python: `tpr=0.9` as `--tpr 0.9`, where it has such an option."""
    options = {one.name: one.opts[0] for one in (command.params if command else ()) if isinstance(one, click.Option)}

    def spell(text: str) -> str:
        name, _, value = text.partition("=")
        name = f"{name}_column" if value and f"{name}_column" in options else name
        if name not in options:
            return text
        return options[name] if value in ("", "True") else f"{options[name]} {value.strip(chr(39))}"

    return spell


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
                warnings.showwarning = lambda message, *_, **__: self._say(words, message)
                sys.exit(super().main(words, *others, **options))
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "igeood"
            _echo(f"{error.format_message().rstrip('.')}; see `{command} --help`")
        except IgeoodError as error:
            self._say(words, error)
        except OSError as error:
            _echo(f"{error.filename or 'system'}: {error.strerror or error}")
        except click.Abort:
            _echo("stopped")
            sys.exit(130)
        sys.exit(2)

    def _say(self, words: list[str], message: Warning | str | Exception) -> None:
        """Print an error or a warning as the command of these words writes it."""
        content = message.args[0] if isinstance(message, IgeoodWarning) else message
        if isinstance(content, (IgeoodError, Finding)):
            command = self.get_command(click.Context(self), words[0])
            if isinstance(command, click.Group):
                command = command.commands.get(words[1])
            content = content.text(spelling(command))
        _echo(str(content))


def _echo(text: str) -> None:
    click.echo(f"igeood: {' '.join(text.split())}", err=True)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="igeood")
def main() -> None:
    """Detect inputs that a trained classifier was not made for.

    Start with `igeood demo`; or, for your own classifier: `igeood fit`, `igeood calibrate`, then `igeood score`.
    """
