"""The command line: parses, calls, prints. Results go to stdout, messages to stderr; torch is imported when needed."""

import re
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from igeood.errors import IgeoodError, IgeoodWarning
from igeood.version import __version__

_ON_GUARDS = ("calibrate", "export", "fit", "merge", "monitor", "score", "serve", "tune")
COMMANDS = {  # imported when they are asked for
    **{name: f"igeood.cli.{name}" for name in _ON_GUARDS},
    **dict.fromkeys(("bench", "data", "demo", "paper", "report", "train"), "igeood.bench.commands"),
}
# What messages of the library say to users of Python, and what they say here. Arguments that are options of the command
# need no line: `tpr=0.9` becomes `--tpr 0.9`, and `distinct=True` becomes `--distinct`.
SPELLING = {
    "give (x, y), or fit(logits, labels)": "add a column `label`, or name another one with --label-column",
    ", or a new loader if this one was read already": "",
    "needs its model: load(path, model), or --model": "needs its model: give --model MODULE:NAME",
    "load that model, or pass strict=False": "give that one with --model and --weights",
    "black_box; a wrapped one may need on='features'": "--access black-box",
    "white_box; a wrapped one, on='logits'": "--access white-box",
    "use black_box, or epsilon=0": "use --access black-box",
    "or use black_box": "or use --access black-box",
    "give the classifier": "give --model MODULE:NAME",
    "of logits, leave probabilities=False": "of logits, leave --probabilities out",
    "extract them with statistic='moments'": "write the means of each channel, then the deviations",
    "calibrate with guarantee='tolerance', or": "run `igeood calibrate` with --guarantee tolerance and score again, or",
    "or leave it to bank='auto'": "or leave --option bank out",
    "raise max_passes or tolerance": "the guard works, its centroids are less exact",
    "give some, such as a batch of the held-out loader": "give --example input.npz",
    "call calibrate with held-out samples first": "run `igeood calibrate` with held-out samples first",
    "give what predict takes": "give inputs of the model; an .npz file has an array for each keyword, or one",
    ", or arrays with '|h'": ", or columns 'feature.|h'",
}
_ARGUMENT = re.compile(r"(?<![\w/])(\w+)=(True|'[\w-]+'|\d[\d.]*\b)(?![\w/])")


def in_shell_words(text: str, command: click.Command | None) -> str:
    """A message of the library in the words of the command line."""
    for python, shell in SPELLING.items():
        text = text.replace(python, shell)
    options = {one.name: one.opts[0] for one in getattr(command, "params", ()) if isinstance(one, click.Option)}

    def spelt(found: re.Match[str]) -> str:
        name, value = found.groups()
        return f"{options[name]} {value}".replace(" True", "").replace("'", "") if name in options else found[0]

    return _ARGUMENT.sub(spelt, text)


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
        """Print a message of the library, as the command of these words would say it."""
        _echo(in_shell_words(str(message), self.get_command(click.Context(self), words[0])))


def _echo(text: str) -> None:
    click.echo(f"igeood: {' '.join(text.split())}", err=True)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="igeood")
def main() -> None:
    """Find the inputs that a trained classifier was not made for."""
