"""The page on the command line is true: its commands run in order, and say what it shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "command-line.md"
BLOCK = re.compile(r"```sh\n(.*?)```\n(?:\n```\n(.*?)```)?", re.DOTALL)
BLOCKS = BLOCK.findall(PAGE.read_text(encoding="utf-8"))


def run(commands, folder):
    """What these commands print, messages and all, as a shell runs them."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, arguments in (("python", ""), ("igeood", " -m igeood.cli")):
        script = tools / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n')
        script.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    found = subprocess.run(
        ["/bin/sh", "-ec", f"exec 2>&1\n{commands}"],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout
    return found.stdout


def plain(text):
    """Numbers in their first digits: the last ones differ between machines."""
    return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.3g}", text)


@pytest.mark.skipif(not Path("/bin/sh").exists(), reason="needs a shell")
def test_the_pages_commands_say_what_it_shows(tmp_path):
    assert len(BLOCKS) >= 7
    for commands, shown in BLOCKS:
        said = run(commands, tmp_path)
        assert sorted(plain(said).splitlines()) == sorted(plain(shown).splitlines())
