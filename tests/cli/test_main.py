"""The command line as a whole: help without torch, one line for each error, exit codes, messages."""

import json
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet as pq
import pytest

import igeood
from igeood.cli import COMMANDS, SPELLING
from igeood.terminal import progress_bars


def test_help_needs_neither_torch_nor_the_laboratory(good):
    code = (
        "import sys, igeood.cli as c\n"
        "for words in [[], ['data', 'list'], ['data', 'get'], *([name] for name in c.COMMANDS)]:\n"
        "    try: c.main([*words, '--help'])\n"
        "    except SystemExit as error: assert error.code == 0, words\n"
        "sys.exit(bool({'torch', 'pyarrow', 'igeood.bench.datasets', 'igeood.files'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert all(f"\n  {name} " in ended.stdout for name in COMMANDS)
    assert good("--version") == f"igeood, version {igeood.__version__}\n"


@pytest.mark.parametrize("arguments", [["fot"], ["--fot"], ["fit", "--fot"], ["data", "fot"], ["score"]])
def test_a_mistyped_line_is_one_line_that_says_where_to_look(run, arguments):
    result = run(*arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert re.match(r"igeood: .*(fot|GUARD).*; see `igeood( \w+)? --help`$", result.stderr)


def test_errors_are_one_line_and_a_warning_is_one_once(run, files, monkeypatch):
    before = sorted(files.iterdir())
    for error, line in (
        (igeood.errors.InputError("two\nlines: bad"), "two lines: bad"),
        (OSError(28, "No space left on device"), "system: No space left on device"),
    ):
        monkeypatch.setattr("igeood.guard.Guard.save", Mock(side_effect=error))
        result = run("calibrate", "fitted.safetensors", "held_out.npz")
        assert (result.exit_code, result.stdout, result.stderr.strip()) == (2, "", f"igeood: {line}")
        assert sorted(files.iterdir()) == before

    def save(*_):
        for _ in range(2):
            warnings.warn("two\nlines", igeood.errors.IgeoodWarning, stacklevel=1)

    monkeypatch.setattr("igeood.guard.Guard.save", save)
    result = run("calibrate", "fitted.safetensors", "held_out.npz", "--json")
    assert result.stderr == "igeood: two lines\n"
    assert json.loads(result.stdout)["samples"] == 400


def test_messages_of_the_library_are_spelt_as_on_the_command_line(run, files, known, images, monkeypatch):
    """Nobody is told to give an argument that only Python has."""
    source = "".join(path.read_text() for path in Path(igeood.__file__).parent.rglob("*.py") if "cli" not in path.parts)
    assert [phrase for phrase in SPELLING if phrase not in source] == []
    np.savez("bare.npz", logits=known.train.logits)
    np.savez("empty.npz", logits=np.empty((0, 10)), labels=np.empty(0, int))
    np.savez("shares.npz", logits=known.train.logits.softmax(1), labels=known.train.labels)
    np.savez("one.npz", logits=np.zeros((3, 1)))
    np.savez("few.npz", logits=known.train.logits[:9])
    monkeypatch.syspath_prepend(images)
    Path("other.py").write_text("from nets import make as old\n\ndef make():\n    return old().half()\n")
    seen = ["--out", "m.safetensors", "--model", "nets:make", "--size", "8", "--method", "msp"]
    assert run("fit", f"folder:{images / 'train'}", *seen).exit_code == 0
    new = ["--out", "new.safetensors", "--force"]
    for line, message in {
        "fit bare.npz": "labels: .*; add a column `label`, or name another one with --label-column",
        "fit empty.npz": "data: no training row; give at least one",
        "fit one.npz": "one.npz: logits: ",
        "fit train.npz --probabilities": "probabilities: row 0 .* of logits, leave --probabilities out",
        "fit shares.npz": "logits: every row .* say so with --probabilities",
        "fit train.npz --access grey-box": "model: .*; give --model MODULE:NAME",
        "fit train.npz --access white-box --method energy": "method: .*; use --access black-box; here are",
        "fit train.npz --access black-box --method knn": "method: .*; use --access white-box; here are",
        "tune fitted.safetensors --train train.npz --id test.npz": "ood: .* give some, or --ood fgsm for",
        "tune fitted.safetensors --train train.npz --id test.npz --ood fgsm": "ood: .* has no model",
        "calibrate fitted.safetensors few.npz": "id_data: 9 samples cannot promise --tpr 0.95; at least",
        "score m.safetensors test.npz": "model: the guard .* needs its model: give --model MODULE:NAME",
        "score m.safetensors x --model other:make": "model: .*; give that one with --model and --weights",
        "score guard.safetensors test.npz --model nets:make": "model: .*; leave it out",
        "score m.safetensors a b --model nets:make": "b: a guard with a model takes one set of images",
    }.items():
        words = [*line.split(), *(new if line.startswith("fit") else [])]
        lines = run(*words).stderr.splitlines()
        (said,) = [text for text in lines if text.startswith("igeood: ")][:1]
        assert re.search(message, said), said
        assert not re.search(r"\w\(|\w=[\w']|[a-z]_box|strict|loader|\[None", said), said


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """1,000,000 × 10 logits in one row group, and a guard."""
    folder, labels = tmp_path_factory.mktemp("big"), np.arange(1_000_000) % 10
    logits = np.random.default_rng(0).normal(size=(1_000_000, 10)).astype(np.float32)
    logits[np.arange(1_000_000), labels] += 4
    igeood.write_logits(folder / "big.parquet", logits, labels)
    guard = igeood.black_box().fit(logits[:5000], labels[:5000]).calibrate(logits[5000:8000])
    guard.save(folder / "guard.safetensors")
    return folder, guard, logits


MEASURED = """
import re, sys
from pathlib import Path
import pyarrow.csv, pyarrow.parquet
import igeood, igeood.cli, igeood.tables
def megabytes(what):
    return int(re.search(what + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
igeood.black_box().fit([[4.0, 0], [0, 5.0]] * 9, [0, 1] * 9).score([[1.0, 0.0]])
start = megabytes("VmRSS")
try:
    igeood.cli.main()
finally:
    assert megabytes("VmHWM") - start < 500, megabytes("VmHWM") - start
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_million_rows_are_scored_in_bounded_memory(big, tmp_path):
    folder, guard, logits = big
    words = ["score", folder / "guard.safetensors", folder / "big.parquet", "--out", tmp_path / "o.parquet"]
    ended = subprocess.run([sys.executable, "-c", MEASURED, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    table, verdict = pq.read_table(tmp_path / "o.parquet"), guard.predict(logits)
    assert "score: 1,000,000 of 1,000,000\n" in ended.stderr
    assert f"{verdict.is_ood.sum():,} of 1,000,000 refused\n" in ended.stderr
    for name, values in {"score": verdict.score, "p_value": verdict.p_value, "id": np.arange(len(logits))}.items():
        np.testing.assert_allclose(table[name].to_numpy(), values, rtol=1e-12)


@pytest.mark.parametrize("line", ["score {guard} {big} --out o.parquet", "fit {big} --out new.safetensors"])
def test_ctrl_c_leaves_nothing_behind(big, tmp_path, line):
    words = line.format(guard=big[0] / "guard.safetensors", big=big[0] / "big.parquet").split()
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # in the background it is off
    command = [sys.executable, "-c", f"{listen}from igeood.cli import main; main()", *words]
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as process:
        assert re.match(r"(score|fit): [\d,]+ of 1,000,000\n", process.stderr.readline())
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert (process.returncode, rest.splitlines()[-1], "Traceback" in rest) == (130, "igeood: stopped", False)
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_is_quiet(big):
    line = f"{sys.executable} -m igeood.cli score {big[0]}/guard.safetensors {big[0]}/big.parquet | head -1"
    shell = [shutil.which("bash"), "-c", f"{line}; exit ${{PIPESTATUS[0]}}"]
    ended = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.count("\n")) == (1, 1)
    assert [text for text in ended.stderr.splitlines() if not text.startswith("score: ")] == []


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
