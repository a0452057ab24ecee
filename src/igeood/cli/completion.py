"""`igeood completion`: command names and options, completed by the shell."""

import click

_PLACES = {
    "bash": 'add to ~/.bashrc:  eval "$(igeood completion bash)"',
    "zsh": 'add to ~/.zshrc:  eval "$(igeood completion zsh)"',
    "fish": "once:  igeood completion fish > ~/.config/fish/completions/igeood.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(list(_PLACES)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that lets a shell complete igeood's commands, options and methods."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 (click has all three)
    click.echo(f"# To install, {_PLACES[shell]}")
    click.echo(kind(ctx.find_root().command, {}, "igeood", "_IGEOOD_COMPLETE").source())
