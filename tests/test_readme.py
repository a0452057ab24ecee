"""What the README shows is true: its Python and its commands run as they stand, its tables are those of the code."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

import igeood
from igeood.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def text_of(*parts):
    return ROOT.joinpath(*parts).read_text(encoding="utf-8")


def test_its_code_prints_what_it_says(reader_names, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [(code, shown)] = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL)
    exec(code, reader_names)  # noqa: S102 (our own README)
    number = re.compile(r"-?\d+\.\d+")
    printed = capsys.readouterr().out
    assert number.sub("#", printed).split() == number.sub("#", shown).split(), printed
    figures, expected = ([float(n) for n in number.findall(text)] for text in (printed, shown))
    assert figures == pytest.approx(expected, rel=0.3, abs=0.1)  # networks differ from machine to machine


def test_the_calls_of_its_table_work(reader_names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = re.findall(r"`((?:igeood|guard)\.[^`]+\))`", README)
    assert calls
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
    for words in command_lines():
        if words[0] == "serve":
            continue
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output
    assert sorted(path.name for path in Path("scores").glob("*.parquet")) == ["a.parquet"]
    assert Path("guard.onnx").exists()


def test_its_comparison_is_that_of_the_page():
    first = text_of("docs", "comparison.md").partition("## Where the product loses")[0]
    page = dict(re.findall(r"^\| `([\w+-]+)` \| (.+? \| .+? \| .+? \| .+?) \|", first, re.M))
    plain = README.replace("*", "").replace(" (all layers)", "")
    shown = re.findall(r"^\| `([\w+-]+)` \| (.+?) \| (.+?) \| (.+?) \| ([\d.]+) \|$", plain, re.M)
    assert shown
    for name, *figures in shown:
        assert " | ".join(figures) == page[name]


def test_the_tree_names_every_part_of_the_source():
    tree = re.search(r"```\nsrc/igeood/\n(.*?)```", text_of("CONTRIBUTING.md"), re.DOTALL)[1]
    folder = ROOT / "src" / "igeood"
    parts = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    parts |= {path.name for path in folder.glob("*.py")} - {"__init__.py", "version.py", "terminal.py"}
    assert {part for part in parts if not re.search(rf"^  {re.escape(part)} ", tree, re.M)} == set()
