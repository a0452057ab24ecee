"""The command line: parses, calls, prints. Results go to stdout, messages to stderr; torch is imported when needed."""

import errno
import sys

import click

from igeood.cli.bench import bench as bench_command
from igeood.cli.data import data as data_command
from igeood.cli.paper import paper as paper_command
from igeood.cli.train import train as train_command
from igeood.errors import IgeoodError
from igeood.version import __version__


class _Group(click.Group):
    """A group whose commands end with one clear line, and exit code 2, where the user must mend something."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except IgeoodError as error:
            click.echo(f"igeood: {error}", err=True)
        except KeyboardInterrupt:
            click.echo("igeood: stopped; bench, train and data get go on where they were, given again", err=True)
            sys.exit(130)
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of our output has gone: click ends quietly
                raise
            click.echo(f"igeood: {_told(error)}", err=True)
        sys.exit(2)


def _told(error: OSError) -> str:
    """A system's error in one line, with a cure where there is an obvious one."""
    cures = {
        errno.ENOSPC: "; make room and give the same command again: what was finished is kept",
        errno.EACCES: "; name a place that you may write to",
        errno.EROFS: "; name a place that you may write to",
    }
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}{cures.get(error.errno or 0, '')}"


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="igeood")
def main() -> None:
    """Tell which inputs a trained classifier was not made for."""


@main.command()
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed of every split and of the classifier.",
)
@click.option("--save", "path", type=click.Path(dir_okay=False), help="Also write the guard to this file.")
def demo(seed: int, path: str | None) -> None:
    """Guard a small digits classifier, and compare the black-box methods on it."""
    from igeood.demo import run

    run(seed=seed, path=path)


main.add_command(bench_command)
main.add_command(data_command)
main.add_command(paper_command)
main.add_command(train_command)
