"""The command line: parses, calls, prints. Results go to stdout, messages to stderr; torch is imported when needed."""

import errno
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from igeood.cli.bench import bench as bench_command
from igeood.cli.calibrate import calibrate as calibrate_command
from igeood.cli.completion import completion as completion_command
from igeood.cli.data import data as data_command
from igeood.cli.demo import demo as demo_command
from igeood.cli.fit import fit as fit_command
from igeood.cli.paper import paper as paper_command
from igeood.cli.report import report as report_command
from igeood.cli.score import score as score_command
from igeood.cli.train import train as train_command
from igeood.cli.tune import tune as tune_command
from igeood.errors import IgeoodError, IgeoodWarning, InputError
from igeood.version import __version__

_RESUMABLE = ("bench", "data", "demo", "train")  # commands that go on where they were, given again


class _Mistyped(click.ClickException):
    """A command line that cannot be understood, in one line."""

    exit_code = 2

    def __init__(self, error: click.UsageError) -> None:
        command = error.ctx.command_path if error.ctx else "igeood"
        super().__init__(f"{' '.join(error.format_message().split()).rstrip('.')}; see `{command} --help`")

    def show(self, file: Any = None) -> None:  # noqa: ARG002 (click's signature)
        """Say it."""
        click.echo(f"igeood: {self.message}", err=True)


class _Group(click.Group):
    """A group whose commands end with one clear line, and exit code 2, where the user must mend something."""

    def make_context(self, info_name: str | None, args: list[str], *others: Any, **kwargs: Any) -> click.Context:
        """Read the options before the command's name, and keep the whole line for those who note it."""
        line = ["igeood", *args]
        try:
            made = super().make_context(info_name, args, *others, **kwargs)
            made.meta["igeood.line"] = line
            return made  # noqa: TRY300
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            raise _Mistyped(error) from None

    def invoke(self, ctx: click.Context) -> object:
        """Run the command."""
        try:
            with _messages(), _memory():
                return super().invoke(ctx)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            raise _Mistyped(error) from None
        except IgeoodError as error:
            click.echo(f"igeood: {error}", err=True)
        except KeyboardInterrupt:
            goes_on = "; given again, it goes on where it was" if ctx.invoked_subcommand in _RESUMABLE else ""
            click.echo(f"igeood: stopped{goes_on}", err=True)
            sys.exit(130)
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of our output has gone: click ends quietly
                raise
            click.echo(f"igeood: {_told(error, kept=ctx.invoked_subcommand in _RESUMABLE)}", err=True)
        sys.exit(2)


@contextmanager
def _memory() -> Iterator[None]:
    """Memory that runs out is something to mend; torch has no exception of its own for it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)):
            raise
        raise InputError("memory: ran out; give fewer samples or classes, or use a larger machine") from None


@contextmanager
def _messages() -> Iterator[None]:
    """The library's messages and warnings, each once, as a line on stderr."""
    said: set[str] = set()

    def say(text: str) -> None:
        if text not in said:
            said.add(text)
            click.echo(f"igeood: {text}", err=True)

    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: say(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("igeood")
    logger.addHandler(handler)

    def show(message: Any, *_: Any, **__: Any) -> None:
        say(" ".join(str(message).split()))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", IgeoodWarning)
            warnings.showwarning = show
            yield
    finally:
        logger.removeHandler(handler)


def _told(error: OSError, *, kept: bool) -> str:
    """A system's error in one line, with a cure where there is an obvious one."""
    cures = {
        errno.ENOSPC: f"; make room and give the same command again{': what was finished is kept' if kept else ''}",
        errno.EACCES: "; name a place that you may write to",
        errno.EROFS: "; name a place that you may write to",
    }
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}{cures.get(error.errno or 0, '')}"


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="igeood")
def main() -> None:
    """Tell which inputs a trained classifier was not made for."""


main.add_command(demo_command)
main.add_command(report_command)
main.add_command(bench_command)
main.add_command(calibrate_command)
main.add_command(completion_command)
main.add_command(data_command)
main.add_command(fit_command)
main.add_command(paper_command)
main.add_command(score_command)
main.add_command(train_command)
main.add_command(tune_command)
