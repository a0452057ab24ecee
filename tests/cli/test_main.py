"""The command line as a whole: help without torch, one line for each error, exit codes, messages."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import igeood
from igeood.cli import COMMANDS
from igeood.terminal import progress_bars

HELP = """
import sys, igeood.cli as c
for words in [[], ['data', 'list'], ['data', 'get'], *([name] for name in c.COMMANDS)]:
    try: c.main([*words, '--help'])
    except SystemExit as error: assert error.code == 0, words
sys.exit(bool({'torch', 'pyarrow', 'igeood.bench.datasets', 'igeood.files'} & set(sys.modules)))
"""


def test_help_needs_neither_torch_nor_the_laboratory(good):
    ended = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert all(f"\n  {name} " in ended.stdout for name in COMMANDS)
    assert igeood.__version__ in good("--version")


@pytest.mark.parametrize("arguments", [["fot"], ["--fot"], ["fit", "--fot"], ["data", "fot"], ["score"]])
def test_a_mistyped_line_is_one_line_that_says_where_to_look(run, arguments):
    result = run(*arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert re.match(r"igeood: .*(fot|GUARD).*`igeood( \w+)? --help`$", result.stderr)


@pytest.mark.parametrize(
    ("error", "code", "fact"),
    [
        (igeood.errors.InputError("two\nlines", argument="tpr", cure="{tpr=0.9}"), 2, "--tpr: two lines; --tpr 0.9"),
        (OSError(28, "No space left on device"), 2, "No space"),
        (KeyboardInterrupt(), 130, "stopped"),
        (BrokenPipeError(32, "Broken pipe"), 1, ""),
    ],
)
def test_an_error_is_one_line_with_an_exit_code_and_leaves_nothing(run, files, monkeypatch, error, code, fact):
    before = sorted(files.iterdir())
    monkeypatch.setattr("igeood.guard.Guard.save", Mock(side_effect=error))
    result = run("calibrate", "fitted.safetensors", "held_out.npz")
    assert (result.exit_code, result.stdout) == (code, "")
    lines = result.stderr.strip().splitlines()
    assert len(lines) == bool(fact)
    assert not fact or (lines[0].startswith("igeood: ") and fact in lines[0])
    assert sorted(files.iterdir()) == before


def test_a_warning_is_one_line_once_and_the_result_stands(run, files, monkeypatch):
    def save(*_):
        for _ in range(2):
            warnings.warn("two\nlines", igeood.errors.IgeoodWarning, stacklevel=1)

    monkeypatch.setattr("igeood.guard.Guard.save", save)
    result = run("calibrate", "fitted.safetensors", "held_out.npz", "--json")
    assert (result.stderr.count("igeood: "), json.loads(result.stdout)["samples"]) == (1, 400)


MESSAGES = {  # a line, and what it has to name: an option, or a file
    "fit bare.npz": "label",
    "fit empty.npz": "no training row|rows?",
    "fit one.npz": "one.npz",
    "fit train.npz --probabilities": "--probabilities",
    "fit shares.npz": "--probabilities",
    "fit train.npz --access grey-box": "--model",
    "fit train.npz --access white-box --method energy": "--access|--method",
    "fit train.npz --access black-box --layers early": "--layers",
    "fit train.npz --size 16": "--size",
    "tune fitted.safetensors --train train.npz --id test.npz --ood test.npz": "--ood",
    "calibrate fitted.safetensors few.npz": "--tpr",
    "score m.safetensors test.npz": "--model",
    "score m.safetensors x --model other:make": "--model",
    "score guard.safetensors test.npz --model nets:make": "--model",
    "score m.safetensors a b --model nets:make": "b",
    "score guard.safetensors test.npz one.npz": "one.npz",
    "calibrate fitted.safetensors narrow.npz": "narrow.npz",
    "score guard.safetensors test.npz --workers 2": "--out",
    "score guard.safetensors test.npz --out o/ --address h:1": "--address",
}


def test_messages_of_the_library_are_spelt_as_on_the_command_line(run, files, known, images, monkeypatch):
    """Nobody is told to give an argument that only Python has."""
    np.savez("bare.npz", logits=known.train.logits)
    np.savez("empty.npz", logits=np.empty((0, 10)), labels=np.empty(0, int))
    np.savez("shares.npz", logits=known.train.logits.softmax(1), labels=known.train.labels)
    np.savez("one.npz", logits=np.zeros((3, 1)))
    np.savez("few.npz", logits=known.train.logits[:9])
    np.savez("narrow.npz", logits=known.train.logits[:, :9])
    monkeypatch.syspath_prepend(images)
    Path("other.py").write_text("from nets import make as old\n\ndef make():\n    return old().half()\n")
    seen = ["--out", "m.safetensors", "--model", "nets:make", "--size", "8", "--method", "msp"]
    assert run("fit", f"folder:{images / 'train'}", *seen).exit_code == 0
    for line, fact in MESSAGES.items():
        result = run(*line.split(), *(["--out", "new.safetensors", "--force"] if line.startswith("fit") else []))
        said = next((text for text in result.stderr.splitlines() if text.startswith("igeood: ")), line)
        assert result.exit_code == (0 if "shares" in line else 2), said
        assert re.search(rf"(?<![\w-])({fact})(?!\w)", said), said
        assert not re.search(r"\w=[\w']|[a-z]_box|loader|\[None|[{}]", said.replace("numpy.savez", "")), said


def test_progress_off_a_terminal_is_a_few_lines_and_on_one_bars(monkeypatch, capsys):
    def lines(steps, total):
        with progress_bars() as report:
            for done in range(1, steps + 1):
                report("part", done, total)
        return capsys.readouterr().err.splitlines()

    assert lines(100, 100) == [f"part: {n} of 100" for n in (25, 50, 75, 100)]
    assert lines(100, None) == [f"part: {2**i}" for i in range(7)]
    assert lines(1, 1) == []  # done before anybody could ask
    monkeypatch.setattr("igeood.terminal.time.monotonic", iter(range(0, 10**6, 40)).__next__)
    assert len(lines(100, 100)) > 45  # every minute, however slow
    monkeypatch.undo()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress_bars() as report:
        for n in range(12):
            report(f"part {n}", 2, 2)
    assert "part 11" in capsys.readouterr().err
