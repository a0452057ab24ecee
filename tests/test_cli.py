"""The command line as a whole, as a user runs it."""

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

import igeood
from igeood.cli import main


def run(*arguments):
    command = [sys.executable, "-m", "igeood.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_does_not_import_torch():
    code = (
        "import sys, igeood.cli as c\n"
        "for name in [None, *c.main.commands]:\n"
        "    c.main([*filter(None, [name]), '--help'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules or 'pyarrow' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    for command in ("demo", "fit", "tune", "calibrate", "score", "bench"):
        assert f"  {command} " in found.stdout


def commands(group=main, path=()):
    """Every command that there is, as the words that call it."""
    for name, command in group.commands.items():
        yield from commands(command, (*path, name)) if isinstance(command, click.Group) else [((*path, name), command)]


COMMANDS = dict(commands())


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_mistyped_command_is_one_line_that_tells_where_to_look(words):
    params = COMMANDS[words].params
    numbers = [p.opts[0] for p in params if isinstance(p.type, click.types.IntParamType)]
    attempts = [[*words, "--no-such-option"], *([*words, option, "x"] for option in numbers)]
    if any(p.required for p in params):
        attempts.append(list(words))
    for arguments in attempts:
        found = CliRunner().invoke(main, arguments, prog_name="igeood")
        assert found.exit_code == 2
        assert found.stdout == ""
        assert found.stderr.startswith("igeood: ")
        assert found.stderr.endswith(f"; see `igeood {' '.join(words)} --help`\n")
        assert found.stderr.count("\n") == 1


def test_an_unknown_command_or_option_before_it():
    for arguments in (["fot"], ["--fot"]):
        found = CliRunner().invoke(main, arguments, prog_name="igeood")
        assert (found.exit_code, found.stderr.count("\n")) == (2, 1)
        assert "fot" in found.stderr


def test_without_a_command_it_helps():
    for arguments in ([], ["data"]):
        assert "Commands:" in CliRunner().invoke(main, arguments).output


def test_version():
    assert run("--version").stdout.strip() == f"igeood, version {igeood.__version__}"


def test_what_the_user_must_mend_is_one_line_and_exit_code_2(tmp_path):
    found = run("fit", "none.parquet", "--out", str(tmp_path / "none" / "guard.safetensors"))
    assert found.returncode == 2
    assert found.stderr.startswith("igeood: out: ")
    assert found.stderr.count("\n") == 1


def test_unknown_names_of_the_package():
    assert "black_box" in dir(igeood)
    assert not hasattr(igeood, "white_noise")
