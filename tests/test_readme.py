"""What the README shows is true: its Python and its commands run as they stand, its tables are those of the code."""

import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import igeood
from igeood.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def text_of(*parts):
    return ROOT.joinpath(*parts).read_text(encoding="utf-8")


def test_it_is_short_and_code_comes_early():
    lines = README.splitlines()
    assert len(lines) <= 120
    assert lines.index("```python") < 25


def test_its_code_prints_what_it_says(reader_names, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [(code, shown)] = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL)
    exec(code, reader_names)  # noqa: S102 (our own README)
    number = re.compile(r"-?\d+\.\d+")
    printed = capsys.readouterr().out
    assert number.sub("#", printed).split() == number.sub("#", shown).split(), printed
    assert [float(n) for n in number.findall(printed)] == pytest.approx(
        [float(n) for n in number.findall(shown)], rel=0.2
    )


def test_the_calls_of_its_table_work(reader_names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = re.findall(r"`((?:igeood|guard)\.[^`]+\))`", README)
    assert len(calls) >= 8
    names = {"igeood": igeood, "path": "guard.safetensors", "shard": reader_names["train_loader"], **reader_names}
    names["loader"] = reader_names["held_out_loader"]
    names["guard"] = igeood.white_box(names["model"], method="probe").fit(names["train_loader"])
    for call in calls:
        names["guard"].calibrate(names["held_out_loader"])  # `tune` undoes it
        exec(call, names)  # noqa: S102 (our own README)


def command_lines():
    """Calls of `igeood` in the README's shell blocks, as lists of words."""
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.partition(" > ")[0], comments=True)
            if words[:1] == ["igeood"]:
                yield words[1:]


def test_commands_run_in_order(classifier, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    guard = igeood.black_box().fit(classifier.train, classifier.labels).calibrate(classifier.held_out)
    guard.save("guard.safetensors")
    Path("logits").mkdir()
    igeood.write_logits("logits/a.parquet", classifier.test)
    names = [words[0] for words in command_lines()]
    assert names == ["serve", "score", "monitor", "export"]
    for words in list(command_lines())[1:]:
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output
    assert sorted(path.name for path in Path("scores").glob("*.parquet")) == ["a.parquet"]
    assert Path("guard.onnx").exists()


@pytest.mark.parametrize("words", list(command_lines()), ids=" ".join)
def test_every_command_can_be_parsed(words):
    name, *rest = words
    command = main.get_command(None, name)
    if isinstance(command, click.Group):
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(name, rest)


def test_its_comparison_is_that_of_the_page():
    first = text_of("docs", "comparison.md").partition("## Where the product loses")[0]
    page = dict(re.findall(r"^\| `([\w+-]+)` \| (.+? \| .+? \| .+? \| .+?) \|", first, re.M))
    plain = README.replace("*", "").replace(" (all layers)", "")
    shown = re.findall(r"^\| `([\w+-]+)` \| (.+?) \| (.+?) \| (.+?) \| ([\d.]+) \|$", plain, re.M)
    assert [row[0] for row in shown] == ["fisher-rao-product", "mahalanobis", "mahalanobis++", "knn", "vim", "energy"]
    for name, *figures in shown:
        assert " | ".join(figures) == page[name]


def test_the_tree_names_every_part_of_the_source():
    tree = re.search(r"```\nsrc/igeood/\n(.*?)```", text_of("CONTRIBUTING.md"), re.DOTALL)[1]
    folder = ROOT / "src" / "igeood"
    parts = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    parts |= {path.name for path in folder.glob("*.py")} - {"__init__.py", "version.py", "terminal.py"}
    assert {part for part in parts if not re.search(rf"^  {re.escape(part)} ", tree, re.M)} == set()
