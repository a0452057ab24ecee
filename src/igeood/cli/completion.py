"""`igeood completion`: command names and options, completed by the shell."""

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

_SHELLS = {
    "bash": (BashComplete, 'add to ~/.bashrc:  eval "$(igeood completion bash)"'),
    "zsh": (ZshComplete, 'add to ~/.zshrc:  eval "$(igeood completion zsh)"'),
    "fish": (FishComplete, "once:  igeood completion fish > ~/.config/fish/completions/igeood.fish"),
}


@click.command()
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that lets a shell complete igeood's commands, options and methods."""
    kind, place = _SHELLS[shell]
    click.echo(f"# To install, {place}")
    click.echo(kind(ctx.find_root().command, {}, "igeood", "_IGEOOD_COMPLETE").source())
