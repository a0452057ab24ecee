"""The page on the command line is true: its commands run in order, and print what it shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "command-line.md"
BLOCKS = re.findall(r"```sh\n(.*?)```\n(?:\n```\n(.*?)```)?", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def run(commands, folder):
    """What these commands print, messages too, as a shell runs them."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, arguments in (("python", ""), ("igeood", " -m igeood.cli")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n')
        (tools / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    shell = ["/bin/sh", "-ec", f"exec 2>&1\n{commands}"]
    done = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def plain(text):
    """Sorted lines, with numbers in their first digits: the last ones differ between machines."""
    return sorted(re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.3g}", text).splitlines())


@pytest.mark.skipif(not Path("/bin/sh").exists(), reason="needs a shell")
def test_the_commands_of_the_page_print_what_it_shows(tmp_path):
    assert BLOCKS
    for commands, shown in BLOCKS:
        assert plain(run(commands, tmp_path)) == plain(shown)
