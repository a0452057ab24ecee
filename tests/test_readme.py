"""What the README shows is true: its Python and its commands run as they stand."""

import re
import shlex
from pathlib import Path

import click
import pyarrow.parquet as pq
from click.testing import CliRunner

import igeood
from igeood.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_python_blocks_run_in_order(reader_names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        exec(block, reader_names)  # noqa: S102 (our own README)
    assert igeood.load("guard.safetensors", reader_names["model"]).calibration.tpr == 0.95
    assert igeood.load("logits-guard.safetensors").calibration.tpr == 0.95


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
    on_files = ("fit", "calibrate", "score", "tune")
    ran = [words for words in command_lines() if "--model" not in words and words[0] in on_files]
    assert [words[0] for words in ran] == ["fit", "tune", "calibrate", "score"]
    for words in ran:
        found = CliRunner().invoke(main, words)
        assert found.exit_code == 0, found.output
    assert len(pq.read_table("verdicts.parquet")) == len(classifier.test)


def test_every_command_can_be_parsed():
    lines = list(command_lines())
    assert {words[0] for words in lines} >= {"fit", "calibrate", "score", "tune", "data", "train", "bench", "report"}
    for name, *words in lines:
        group = main.get_command(None, name)
        command, rest = (group.commands[words[0]], words[1:]) if isinstance(group, click.Group) else (group, words)
        command.make_context(name, rest)


def test_every_method_is_in_the_table():
    for name in igeood.METHODS:
        assert f"`{name}`" in README
