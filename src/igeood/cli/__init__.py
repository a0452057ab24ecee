"""The command line: parses, calls, prints. Results go to stdout, messages to stderr; torch is imported when needed."""

import errno
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import click

from igeood.errors import IgeoodError, IgeoodWarning
from igeood.version import __version__

COMMANDS = ("bench", "calibrate", "completion", "data", "demo", "fit", "paper", "report", "score", "train", "tune")
_RESUMABLE = ("bench", "data", "demo", "train")  # commands that go on where they were, given again


class _Group(click.Group):
    """A group whose commands end with one clear line, and exit code 2, where the user must mend something."""

    def make_context(self, info_name: str | None, args: list[str], *others: Any, **kwargs: Any) -> click.Context:
        """Read the options before the command's name, and keep the whole line for those who note it."""
        line = ["igeood", *args]
        with _one_line():
            made = super().make_context(info_name, args, *others, **kwargs)
        made.meta["igeood.line"] = line
        return made

    def invoke(self, ctx: click.Context) -> object:
        """Run the command."""
        with _one_line(ctx), _messages():
            return super().invoke(ctx)


@contextmanager
def _one_line(ctx: click.Context | None = None) -> Iterator[None]:
    """What the user must mend, in one line, with exit code 2; after Ctrl-C 130."""
    code = 2
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "igeood"
        text = f"{' '.join(error.format_message().split()).rstrip('.')}; see `{command} --help`"
    except IgeoodError as error:
        text = str(error)
    except KeyboardInterrupt:
        code, text = 130, f"stopped{'; given again, it goes on where it was' if _resumable(ctx) else ''}"
    except (MemoryError, OSError, RuntimeError) as error:
        text = _told(error, kept=_resumable(ctx))
        if not text:
            raise
    else:
        return
    click.echo(f"igeood: {text}".replace("\n", "\\n"), err=True)  # a file's name may have any character
    sys.exit(code)


def _resumable(ctx: click.Context | None) -> bool:
    return ctx is not None and ctx.invoked_subcommand in _RESUMABLE


def _told(error: MemoryError | OSError | RuntimeError, *, kept: bool) -> str:
    """A system's error in one line, with a cure where there is an obvious one; empty where it is not the user's."""
    if not isinstance(error, OSError):  # torch has no exception of its own for memory that runs out
        out = isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
        return "memory: ran out; give fewer samples or classes, or use a larger machine" if out else ""
    if error.errno == errno.EPIPE:  # the reader of our output has gone: click ends quietly
        return ""
    cures = {
        errno.ENOSPC: f"; make room and give the same command again{': what was finished is kept' if kept else ''}",
        errno.EACCES: "; mend its permissions, or name a place that you may write to",
        errno.EROFS: "; name a place that you may write to",
        errno.ENAMETOOLONG: "; give a shorter one",
        errno.EEXIST: "; name another place",
        errno.ENOENT: "; check the path",
        errno.ENOTDIR: "; name another place",
    }
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}{cures.get(error.errno or 0, '')}"


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
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", IgeoodWarning)
            warnings.showwarning = lambda message, *_, **__: say(" ".join(str(message).split()))
            yield
    finally:
        logger.removeHandler(handler)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="igeood")
def main() -> None:
    """Tell which inputs a trained classifier was not made for."""


for _name in COMMANDS:  # each in the module of its name
    main.add_command(getattr(import_module(f"igeood.cli.{_name}"), _name))
