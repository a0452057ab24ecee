"""What the README shows is true: its Python and its commands run as they stand, its tables are those of the code."""

import re
import shlex
from pathlib import Path

import click
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import igeood
from igeood.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_blocks_run_in_order(reader_names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
            exec(block, reader_names)  # noqa: S102 (our own README)
        reader_names["guard"].save("own.safetensors")
        for file in ("own.safetensors", "guard.safetensors"):
            assert igeood.load(file, reader_names["model"]).calibration.tpr == 0.95
        assert igeood.load("logits-guard.safetensors").calibration.tpr == 0.95
    finally:
        igeood.METHODS.pop("nearest-mean", None)  # registered there


def command_lines():
    """Calls of `igeood` in the README's shell blocks, as lists of words."""
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.partition(" > ")[0], comments=True)
            if words[:1] == ["igeood"]:
                yield words[1:]


def test_commands_on_files_run_in_order(classifier, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    igeood.write_logits("train.parquet", classifier.train, classifier.labels)
    for name, logits in (("held-out", classifier.held_out), ("new", classifier.test), ("foreign", classifier.ood)):
        igeood.write_logits(f"{name}.parquet", logits)
    for words in command_lines():
        if "--model" not in words and words[0] in ("fit", "calibrate", "score", "tune"):
            result = CliRunner().invoke(main, words)
            assert result.exit_code == 0, result.output
    assert len(pq.read_table("verdicts.parquet")) == len(classifier.test)


@pytest.mark.parametrize("words", list(command_lines()), ids=" ".join)
def test_every_command_can_be_parsed(words):
    name, *rest = words
    command = main.get_command(None, name)
    if isinstance(command, click.Group):
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(name, rest)


def row(name):
    """A method's row of the table, but for the words on its score."""
    needs = igeood.METHODS[name].needs
    layers = {"none": "logits", "last": "last layer", "last two": "last two layers", "all": "all layers"}
    words = [layers.get(needs.layers, needs.layers), *["head"] * needs.head, *["labels"] * needs.labels, *needs.returns]
    return f"| `{name}` | {igeood.METHODS[name].title} | {', '.join(words)} |"


def test_the_table_of_methods_is_the_registry():
    table = re.findall(r"^(\| `[\w+-]+` \|[^|]*\|[^|]*\|)[^|]+\|$", README, re.MULTILINE)
    assert sorted(table) == sorted(map(row, igeood.METHODS))


def test_the_tree_names_every_part_of_the_source():
    lines = re.search(r"```\nsrc/igeood/\n(.*?)```", README, re.DOTALL)[1].splitlines()
    shown = {part for line in lines for part in re.split(" {2,}", line.strip())[0].split(", ")}
    folder = ROOT / "src" / "igeood"
    packages = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    modules = {path.name for path in folder.glob("*.py")} - {"__init__.py", "errors.py", "version.py", "terminal.py"}
    assert shown == packages | modules
