"""Calls of every command of the command line, and what may come of one that is wrong.

The commands are those of click's own tree: each gets a call that works, and then one with each of its parameters
spoilt, by what the parameter takes.
"""

import json
import os
import re
import shutil
import signal
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import messages
from click.testing import CliRunner, Result

from igeood.cli import main

Words = tuple[str, ...]
PATIENCE = 300  # seconds for a call, which takes one: it hangs


def walk(group: click.Group = main, path: Words = ()) -> Iterator[tuple[Words, click.Command]]:
    """Every command that there is, with the words that call it."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from walk(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(walk())

# What a parameter of this name takes in the folder that `make_files` makes; of one command, or of any.
GOOD: dict[str, str] = {
    "train": "train.npz",
    "fit.out": "new.safetensors",
    "guard": "guard.safetensors",
    "tune.guard": "fitted.safetensors",
    "calibrate.guard": "fitted.safetensors",
    "id_data": "held_out.npz",
    "ood": "ood.npz",
    "data": "test.npz",
    "results": "results",
    "networks": "net.safetensors",
    "network": "resnet-10-16",
    "train.out": "new.safetensors",
    "name": "accuracy",
    "names": "gaussian",
    "shell": "bash",
}
# Options that make a call short.
SHORT: dict[str, dict[str, str]] = {
    "bench": {"ood": "folder:red", "settings": "black-box", "methods": "msp", "images": "40", "train": "100"},
    "train": {"data": "cifar-10", "epochs": "1", "batch": "20", "limit": "20"},
    "data verify": {"names": "gaussian"},
}
# Where a command writes that is not told by --out.
OWN = {"report": "results/report.html", "tune": "fitted.safetensors", "calibrate": "fitted.safetensors"}


@dataclass(frozen=True)
class Called:
    """What a call did: its result, and the files that it made, changed or removed."""

    result: Result
    changed: set[str]

    @property
    def code(self) -> int:
        return self.result.exit_code

    @property
    def line(self) -> str:
        """The last line on stderr, where an error is told."""
        return (self.result.stderr.splitlines() or [""])[-1]


def good(words: Words, **changes: str | None) -> list[str]:
    """The arguments of a call that works, with other values for some parameters; None leaves one out."""
    command, key = COMMANDS[words], " ".join(words)
    values: dict[str, str | None] = dict(SHORT.get(key, {}))
    for param in command.params:
        if param.required:
            values[param.name] = GOOD.get(f"{key}.{param.name}", GOOD.get(param.name, guess(param)))
    if "as_json" in (param.name for param in command.params):
        values["as_json"] = ""
    values |= changes
    options, rest = [], []
    for param in command.params:
        value = values.get(param.name)
        if value is None:
            continue
        if isinstance(param, click.Argument):
            rest.append(value)
        else:
            options += [param.opts[0]] if param.is_flag else [f"{param.opts[0]}={value}"]
    return [*words, *options, "--", *rest]


def guess(param: click.Parameter) -> str:
    """Something that a parameter nobody has told us of may take."""
    if isinstance(param.type, click.Choice):
        return str(param.type.choices[0])
    numbers = (click.types.IntParamType, click.types.FloatParamType)
    return "1" if isinstance(param.type, numbers) else "train.npz" if isinstance(param.type, click.Path) else "name"


def contents(folder: Path) -> dict[str, tuple[int, ...]]:
    """Every file and folder below a folder, with what tells whether it was written to."""
    found = ((path, path.lstat()) for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {str(p.relative_to(folder)): (s.st_mode, s.st_ino, s.st_mtime_ns * p.is_file(), s.st_size) for p, s in found}


@contextmanager
def patience(seconds: int = PATIENCE) -> Iterator[None]:
    """An error if it takes longer."""

    def late(*_: object) -> None:
        raise TimeoutError(f"no answer after {seconds} s")  # an OSError: it is told, and seen in the line

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def call(arguments: list[str], folder: Path) -> Called:
    """Run a command in this process, from the current folder, and see what became of the files in it."""
    before = contents(folder)
    with patience():
        result = CliRunner(env={"IGEOOD_DATA": str(folder), "COLUMNS": "80"}).invoke(main, arguments)
    after = contents(folder)
    return Called(result, {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)})


def no_traceback(called: Called) -> None:
    """Whatever came of it, it was told in words, in time."""
    error = called.result.exception
    trace = "".join(traceback.format_exception(error)) if error else ""
    assert error is None or isinstance(error, SystemExit), trace
    assert "Traceback" not in called.result.output
    assert "no answer after" not in called.result.output


def refused(called: Called, *named: str, code: int = 2) -> str:
    """The call failed, with one clear line on stderr, no result, and no file touched; gives that line."""
    no_traceback(called)
    assert called.code == code, called.result.output
    assert called.changed == set(), called.line
    assert called.line.startswith("igeood: "), called.result.stderr
    assert sum(line.startswith("igeood: ") for line in called.result.stderr.splitlines()) == 1, called.result.stderr
    text = called.line.removeprefix("igeood: ")
    assert len(text) <= messages.LONGEST + 3 * max(map(len, named), default=0), text
    assert not named or any(name and name in text for name in named), f"names none of {named}: {text}"
    assert cured(text), f"offers no cure: {text}"
    return text


# what else says what to do, besides what any message may
CURE = re.compile(
    r"[;:] (mend|see|fetch) |; is .*\?$|\bsuch as\b|\bexpected (one|a finite) number\b|\b(known|embedded) are\b"
)


def cured(text: str) -> bool:
    """Whether a line says what to do."""
    return bool(CURE.search(text) or messages.cure(text))


def strict_json(text: str) -> list[Any]:
    """JSON, one value or one a line, in which every number is one, and every character is of any terminal."""
    assert text.isascii(), text

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON: {text}")

    try:
        return [json.loads(text, parse_constant=refuse)]
    except json.JSONDecodeError:
        return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def may_write(words: Words, arguments: list[str]) -> str:
    """The file or folder that a call may write; empty if there is none."""
    given = [word.removeprefix("--out=") for word in arguments if word.startswith("--out=")]
    default = next((param.default for param in COMMANDS[words].params if param.name == "out"), "")
    return (given[-1] or ".") if given else OWN.get(" ".join(words), default if isinstance(default, str) else "")


def went_well(called: Called, words: Words, arguments: list[str]) -> None:
    """The call ended well: what it printed can be read, and it has written only where it should."""
    no_traceback(called)
    if "--json" in arguments:
        strict_json(called.result.stdout)
    place = Path(may_write(words, arguments) or "nowhere")
    near = {str(place), *(str(parent) for parent in place.parents)}
    stray = {name for name in called.changed if name not in near and place not in Path(name).parents}
    assert not stray, f"wrote {stray}, not only {place}"


class Place:
    """A folder to call commands in, that is as it was made each time it is entered."""

    def __init__(self, pristine: Path, folder: Path) -> None:
        self.pristine, self.folder = pristine, folder
        self.before: dict[str, tuple[int, ...]] | None = None

    def tidy(self) -> Path:
        """The folder, made anew if anything in it has changed."""
        if self.before is None or contents(self.folder) != self.before:
            shutil.rmtree(self.folder, ignore_errors=True)
            shutil.copytree(self.pristine, self.folder)
            self.before = contents(self.folder)
        return self.folder


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that everybody may look into."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        try:
            yield Path(name)
        finally:
            for path in [Path(name), *Path(name).rglob("*")]:
                if not path.is_symlink():
                    path.chmod(0o755)


@contextmanager
def as_nobody() -> Iterator[None]:
    """As a user for whom permissions count; root may do anything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
