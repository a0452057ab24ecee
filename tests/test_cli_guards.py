"""`igeood fit`, `tune`, `calibrate` and `score`, as a user runs them: what they do, and how they fail."""

import csv
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner
from PIL import Image

import igeood
from igeood.cli import main
from igeood.cli.fit import LAYERED, METHODS
from igeood.cli.score import _judge

IGEOOD = [sys.executable, "-m", "igeood.cli"]
ENOSPC = OSError(28, "No space left on device")


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def told(result):
    """What a command said, once it has ended well."""
    assert result.exit_code == 0, result.stderr
    return result.stdout


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def made(known, tmp_path_factory):
    """Logits files, good and bad, and a guard in each state."""
    folder = tmp_path_factory.mktemp("made")
    for name in ("train", "held_out", "test", "ood"):
        igeood.write_logits(folder / f"{name}.parquet", getattr(known, name), ids=[f"{name}-{i}" for i in range(400)])
        igeood.write_logits(folder / f"{name}.npz", getattr(known, name))
    logits = known.test.logits.numpy()
    nan = logits.copy()
    nan[321, 4] = np.nan
    np.savez(folder / "nan.npz", logits=nan, labels=known.test.labels)
    igeood.write_logits(folder / "narrow.parquet", logits[:, :7], known.test.labels % 7)
    igeood.write_logits(folder / "bare.parquet", logits)
    igeood.write_logits(folder / "flat.parquet", logits, known.test.labels)
    igeood.write_logits(folder / "half.npz", known.train.logits[:200], known.train.labels[:200])
    table = pq.read_table(folder / "bare.parquet").append_column("id", pa.array([[1]] * 400))
    pq.write_table(table, folder / "list-ids.parquet")
    pq.write_table(pa.table({"logits": [[1.0, 2.0], [1.0]], "label": [0, 1]}), folder / "ragged.parquet")
    (folder / "empty.parquet").write_bytes(b"")
    (folder / "cut.parquet").write_bytes((folder / "test.parquet").read_bytes()[:5000])
    (folder / "pickle.npz").write_bytes(pickle.dumps({"logits": logits}))
    np.savez(folder / "objects.npz", logits=np.array([{"a": 1}, None]))
    (folder / "folder").mkdir()
    guard = igeood.black_box().fit(known.train.logits, known.train.labels)
    guard.save(folder / "fitted.safetensors")
    guard.calibrate(known.held_out.logits).save(folder / "guard.safetensors")
    return folder


@pytest.fixture
def files(made, tmp_path, monkeypatch):
    """A copy of them as the current folder."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("suffix", ["parquet", "npz"])
@pytest.mark.parametrize("options", [[], ["--method", "energy"], ["--method", "igeood"], ["--layers", "block.late"]])
def test_the_whole_way_is_the_librarys(files, known, suffix, options):
    about = json.loads(told(run("fit", f"train.{suffix}", "--out", "g.safetensors", *options, "--json")))
    layered = "igeood" in options or "--layers" in options
    layers = ["block.late"] if "--layers" in options else ["early", "block.late"] if layered else []
    method = "igeood" if layered else "energy" if "energy" in options else "igeood-logits"
    right = float((known.train.logits.argmax(dim=1) == known.train.labels).double().mean())
    expected = {"method": method, "classes": 10, "samples": 400, "layers": layers, "out": "g.safetensors"}
    assert about == {**expected, "accuracy": right}
    sets = ["--train", f"train.{suffix}", "--id", f"held_out.{suffix}", "--ood", f"ood.{suffix}"]
    tuned = json.loads(told(run("tune", "g.safetensors", *sets, "--json")))
    calibrated = run("calibrate", "g.safetensors", f"held_out.{suffix}", "--json")
    assert "igeood: calibrate: left out " in calibrated.stderr

    make = igeood.white_box if layered else igeood.black_box
    guard = make(method=method, **({"layers": layers} if layered else {})).fit(known.train)
    guard.tune(known.held_out, known.ood).calibrate(known.held_out)
    assert tuned["temperature"] == guard.tuning.temperature.best.temperature
    assert (tuned["epsilon"], tuned["id"], tuned["ood"]) == (0.0, guard.tuning.n_id, 400)
    assert (tuned["tnr"], tuned["tnr_before"]) == (guard.tuning.after, guard.tuning.before)
    n = len(guard.calibration.scores)
    expected = {"threshold": guard.threshold, "promise": guard.promise, "n": n, "out": "g.safetensors"}
    assert json.loads(told(calibrated)) == expected

    verdict = guard.predict(known.test)
    result = run("score", "g.safetensors", f"test.{suffix}")
    rows = list(csv.DictReader(told(result).splitlines()))
    assert [row["id"] for row in rows] == [f"test-{i}" if suffix == "parquet" else str(i) for i in range(400)]
    assert [float(row["score"]) for row in rows] == verdict.score.tolist()
    assert [float(row["p_value"]) for row in rows] == verdict.p_value.tolist()
    assert [row["is_ood"] == "true" for row in rows] == verdict.is_ood.tolist()
    assert [int(row["label"]) for row in rows] == verdict.label.tolist()
    assert result.stderr == f"{int(verdict.is_ood.sum())} of 400 refused\n"


def test_every_output_format_has_the_same_rows(files):
    lines = told(run("score", "guard.safetensors", "test.parquet", "--json")).splitlines()
    rows = [json.loads(line) for line in lines]
    assert list(rows[0]) == ["id", "score", "p_value", "is_ood", "label"]
    for name in ("o.parquet", "o.pq", "o.csv", "o.jsonl"):
        summary = json.loads(told(run("score", "guard.safetensors", "test.parquet", "--out", name, "--json")))
        assert summary == {"rows": 400, "refused": sum(row["is_ood"] for row in rows), "out": name}
    for name in ("o.parquet", "o.pq"):
        assert pq.read_table(name).to_pylist() == rows
    assert pyarrow.csv.read_csv("o.csv").to_pylist() == rows
    assert Path("o.jsonl").read_text().splitlines() == lines


def test_a_guard_without_threshold_gives_scores_only(files):
    result = run("score", "fitted.safetensors", "test.npz")
    assert told(result).splitlines()[0] == "id,score,label"
    assert "not calibrated: scores only; `igeood calibrate`" in result.stderr
    assert result.stderr.endswith("400 scored\n")


def test_columns_of_other_names(files):
    table = pq.read_table("train.parquet").rename_columns(
        {"logits": "z", "label": "y", "id": "key", "feature.early": "a", "feature.block.late": "b"}
    )
    pq.write_table(table, "other.parquet")
    columns = ["--logits-column", "z", "--label-column", "y", "--id-column", "key"]
    assert run("fit", "other.parquet", "--out", "g.safetensors", *columns).exit_code == 0
    assert Path("g.safetensors").read_bytes() == Path("fitted.safetensors").read_bytes()
    assert "\ntrain-0," in told(run("score", "g.safetensors", "other.parquet", *columns)).replace('"', "")


def test_only_fit_reads_labels(files, known):
    """Those of OOD samples may be no classes of ours."""
    np.savez("odd.npz", logits=known.ood.logits, labels=np.full(400, -1))
    assert (
        run("tune", "fitted.safetensors", "--train", "train.npz", "--id", "test.npz", "--ood", "odd.npz").exit_code == 0
    )
    assert run("calibrate", "fitted.safetensors", "odd.npz").exit_code == 0
    assert run("score", "fitted.safetensors", "odd.npz", "--out", "o.csv").exit_code == 0
    assert "labels: -1 at position 0 is outside 0…9" in run("fit", "odd.npz", "--out", "g.safetensors").stderr


def test_no_rows_give_no_rows(files):
    np.savez("none.npz", logits=np.empty((0, 10)))
    result = run("score", "guard.safetensors", "none.npz")
    assert told(result) == "id,score,p_value,is_ood,label\n"
    assert result.stderr == "0 of 0 refused\n"


def test_what_is_there_is_not_written_over(files):
    before = Path("guard.safetensors").read_bytes()
    result = run("fit", "train.npz", "--out", "guard.safetensors")
    assert (result.exit_code, "there already; name another file, or give --force" in result.stderr) == (2, True)
    assert Path("guard.safetensors").read_bytes() == before
    assert run("fit", "train.npz", "--out", "guard.safetensors", "--force").exit_code == 0
    assert Path("guard.safetensors").read_bytes() == Path("fitted.safetensors").read_bytes()
    result = run("score", "fitted.safetensors", "test.parquet", "--out", "test.parquet", "--force")
    assert (result.exit_code, "is what this is made from" in result.stderr) == (2, True)
    calibrate = ("calibrate", "fitted.safetensors", "held_out.npz", "--out")
    tune = ("tune", "fitted.safetensors", "--train", "train.npz", "--id", "held_out.npz", "--ood", "ood.npz", "--out")
    for start, made_from in ((calibrate, ["held_out.npz"]), (tune, ["train.npz", "held_out.npz", "ood.npz"])):
        for name in made_from:
            result = run(*start, name, "--force")
            assert (result.exit_code, "is what this is made from" in result.stderr) == (2, True)
        result = run(*start, "guard.safetensors")
        assert (result.exit_code, "there already" in result.stderr) == (2, True)
        assert run(*start, "again.safetensors", "--force").exit_code == 0
        assert run(*start, "again.safetensors", "--force").exit_code == 0
    assert run(*calibrate, "other.safetensors").exit_code == 0
    assert igeood.load("fitted.safetensors").calibration is None
    assert igeood.load("other.safetensors").calibration is not None


def test_calibrating_on_what_was_fitted_on_is_told(files):
    result = run("calibrate", "fitted.safetensors", "train.npz")
    assert result.exit_code == 0
    assert "igeood: id_data: 400 of 400 samples are training samples" in result.stderr


def test_widths_are_compared_before_anything_is_judged(files, monkeypatch):
    zeros = pa.array(np.zeros(2_000_000, np.float32))  # a few hundred bytes of file
    pq.write_table(pa.table({"logits": pa.FixedSizeListArray.from_arrays(zeros, len(zeros))}), "wide.parquet")
    np.savez_compressed("wide.npz", logits=zeros.to_numpy()[None])
    monkeypatch.setattr("igeood.logits_files.LogitsFile.blocks", lambda *_, **__: pytest.fail("was read"))
    for start in (SCORE, CALIBRATE, TUNE):
        for name in ("wide.parquet", "wide.npz"):
            result = run(*start, name)
            assert result.exit_code == 2
            told = "2000000 columns, but the guard was fitted on 10 classes; give logits of the same classifier"
            assert result.stderr == f"igeood: {name}: {told}\n"


def test_memory_that_runs_out(files, monkeypatch):
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes")):
        monkeypatch.setattr("igeood.guard.Guard.fit", lambda *_, error=error: (_ for _ in ()).throw(error))
        result = run("fit", "train.npz", "--out", "g.safetensors")
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert result.stderr.startswith("igeood: memory: ran out; ")
    monkeypatch.setattr("igeood.guard.Guard.fit", lambda *_: (_ for _ in ()).throw(RuntimeError("a bug")))
    assert isinstance(run("fit", "train.npz", "--out", "g.safetensors").exception, RuntimeError)


def test_verdicts_from_an_accelerator():
    """Such tensors do not become arrays by themselves; nor does one that wants gradients, which stands for them."""
    import torch  # noqa: PLC0415

    there = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError):
        np.asarray(there)
    verdict = igeood.Verdict(*[there] * 4)
    guard = SimpleNamespace(calibration=True, predict=lambda _: verdict)
    assert all(isinstance(value, np.ndarray) for value in _judge(guard, None).values())


def test_warnings_are_lines(files, known):
    igeood.write_logits("p.npz", known.train.logits.softmax(1), known.train.labels)
    result = run("fit", "p.npz", "--out", "g.safetensors")
    assert result.stderr.startswith("igeood: logits: every row is ≥ 0 and sums to 1: are these probabilities?")
    assert (result.exit_code, result.stderr.count("\n"), "Warning" in result.stderr) == (0, 1, False)
    assert run("fit", "p.npz", "--out", "h.safetensors", "--probabilities").stderr == ""
    assert run("calibrate", "h.safetensors", "p.npz").exit_code == 0


def test_two_classes_are_no_probabilities(files, known):
    igeood.write_logits("two.npz", known.train.logits[:, :2], known.train.labels % 2)
    assert "two classes: FR₀ is constant" in run("fit", "two.npz", "--out", "g.safetensors").stderr
    igeood.write_logits("two-held-out.npz", known.held_out.logits[:, :2])
    assert run("calibrate", "g.safetensors", "two-held-out.npz").stderr == ""


FIT, SCORE = ("fit", "--out", "new.safetensors"), ("score", "guard.safetensors", "--out", "new.parquet")
CALIBRATE = ("calibrate", "fitted.safetensors")
TUNE = ("tune", "fitted.safetensors", "--id", "held_out.npz", "--ood", "ood.npz", "--train")
BAD_DATA = {
    "none.parquet": "none.parquet: there is no such file",
    "folder": "folder: is a folder; give a Parquet or npz file",
    "empty.parquet": "empty.parquet: is empty",
    "cut.parquet": "cut.parquet: is damaged, or no Parquet file",
    "pickle.npz": "pickle.npz: is neither Parquet nor npz",
    "objects.npz": "objects.npz: logits: holds Python objects, which are never read",
    "nan.npz": "nan.npz: logits: row 321 has NaN",
    "folder:folder": "images need a model to run through; name it: --model",
}
FAILURES = [
    *(((*start, data), message) for start in (FIT, SCORE, CALIBRATE, TUNE) for data, message in BAD_DATA.items()),
    *(((*start, "narrow.parquet"), "7 columns, but the guard was fitted on 10") for start in (SCORE, CALIBRATE)),
    *(((*s, "test.npz", "--logits-column", "z"), "no column 'z' with the logits; it has") for s in (FIT, SCORE)),
    ((*FIT, "ragged.parquet"), "logits: row 1 has 1 values, the first row 2"),
    ((*FIT, "bare.parquet"), "no column 'label' with the true classes; it has logits; name another with --label"),
    ((*FIT, "bare.parquet", "--method", "igeood"), "no column 'label'"),
    (
        (*FIT, "flat.parquet", "--method", "igeood"),
        "flat.parquet: no column 'feature.<layer>', one for each layer that a white box reads; it has logits, label",
    ),
    ((*SCORE, "list-ids.parquet"), "id: list<element: int64> does not name rows; name another --id-column"),
    ((*TUNE, "test.npz"), "train: 400 of 400 samples are not those that the guard was fitted on; give the same file"),
    ((*TUNE, "half.npz"), "train: lacks 200 of 400 samples that the guard was fitted on"),
    ((*FIT, "train.npz", "--layers", "deep"), "no column 'feature.deep' with the features of layer 'deep'"),
    ((*FIT, "train.npz", "--access", "grey-box"), "a grey box needs the model's gradients"),
    ((*FIT, "train.npz", "--access", "black-box", "--layers", "a"), "a black box reads none"),
    ((*FIT, "train.npz", "--method", "igeood", "--probabilities"), "a white box reads logits"),
    ((*FIT, "train.npz", "--temperature", "-1"), "temperature: must be a positive finite number"),
    ((*FIT, "train.npz", "--size", "32"), "logits files have none"),
    ((*FIT, "train.npz", "--weights", "w.pt"), "weights: whose? Name the model too"),
    ((*FIT, "train.npz", "--model", "nets"), "expected MODULE:NAME"),
    (("fit", "train.npz", "--out", "none/g.safetensors"), "out: none is no folder"),
    (("score", "none.safetensors", "test.npz"), "there is no guard file none.safetensors"),
    (("score", "train.npz", "test.npz"), "is damaged, or no guard file"),
    (("score", "guard.safetensors", "test.npz", "--out", "o.txt"), "ends in none of .parquet, .pq, .csv, .jsonl"),
    (("score", "guard.safetensors", "test.npz", "--out", "none/o.csv"), "out: none is no folder"),
    (("score", "guard.safetensors", "test.npz", "--out", "/proc/o.csv"), "/proc"),  # nobody may write there
    ((*CALIBRATE, "held_out.npz", "--tpr", "1.5"), "tpr: "),
    ((*CALIBRATE, "held_out.npz", "--out", "none/g.safetensors"), "none is no folder"),
    (("tune", "fitted.safetensors", "--id", "held_out.npz", "--ood", "fgsm", "--train", "train.npz"), "has no model"),
]


@pytest.mark.parametrize(("arguments", "message"), FAILURES, ids=lambda value: str(value)[:60])
def test_what_the_user_must_mend_is_one_line(files, arguments, message):
    before = {path.name: path.stat().st_mtime_ns for path in files.iterdir()}
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("igeood: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert {path.name: path.stat().st_mtime_ns for path in files.iterdir()} == before


@pytest.mark.parametrize("out", ["o.parquet", "o.csv", "o.jsonl"])
def test_a_full_disk(files, monkeypatch, out):
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(ENOSPC))
    before = names(files)
    for arguments in (
        ("score", "guard.safetensors", "test.npz", "--out", out),
        ("fit", "train.npz", "--out", "new.safetensors"),
        ("calibrate", "guard.safetensors", "held_out.npz"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert re.fullmatch(r"(.* refused\n)?igeood: .*No space left on device; make room .*\n", result.stderr)
        assert names(files) == before


def test_a_disk_that_is_really_full(files):
    disk = files / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        [shutil.which("mount"), "-t", "tmpfs", "-o", "size=4k", "none", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting is not permitted")
    try:
        for out in ("o.parquet", "o.csv", "o.jsonl"):
            result = run("score", "guard.safetensors", "test.parquet", "--out", disk / out)
            assert result.exit_code == 2
            assert "No space left on device; make room" in result.stderr.splitlines()[-1]
            assert names(disk) == []
    finally:
        subprocess.run([shutil.which("umount"), disk], check=True)


def test_a_system_that_refuses(files, monkeypatch):
    """As it would be for another user than root."""
    denied = PermissionError(13, "Permission denied")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(denied))
        result = run("score", "guard.safetensors", "test.npz", "--out", "o.csv")
    assert (
        result.stderr
        == "igeood: o.csv: Permission denied; mend its permissions, or name a place that you may write to\n"
    )
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(denied))
        result = run("score", "guard.safetensors", "test.npz")
    assert result.exit_code == 2
    assert result.stderr == "igeood: test.npz: cannot be read (Permission denied); mend its permissions, or its disk\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_that_may_not_be_written_to(files):
    (files / "folder").chmod(0o500)
    result = run("score", "guard.safetensors", "test.npz", "--out", "folder/o.csv")
    assert result.exit_code == 2
    assert "name a place that you may write to" in result.stderr


MEASURED = """
import re, sys
from pathlib import Path
import pyarrow.csv
import igeood, igeood.cli, igeood.logits_files
def megabytes(what):
    return int(re.search(what + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
igeood.load(sys.argv[2])
start = megabytes("VmRSS")
try:
    igeood.cli.main()
finally:
    print("memory", start, megabytes("VmHWM"), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """2,000,000 × 10 logits in one row group, and a guard."""
    folder = tmp_path_factory.mktemp("big")
    n = 2_000_000
    logits = np.random.default_rng(0).normal(size=(n, 10)).astype(np.float32)
    logits[np.arange(n), np.arange(n) % 10] += 4
    column = pa.FixedSizeListArray.from_arrays(pa.array(logits.reshape(-1)), 10)
    table = pa.table({"logits": column, "class": np.arange(n) % 10})
    pq.write_table(table, folder / "big.parquet", row_group_size=n, compression="none")
    guard = igeood.black_box().fit(logits[:5000], np.arange(5000) % 10).calibrate(logits[5000:8000])
    guard.save(folder / "guard.safetensors")
    return folder, guard, logits


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_million_rows_in_bounded_memory(big, tmp_path, capsys):
    folder, guard, logits = big
    arguments = ["score", folder / "guard.safetensors", folder / "big.parquet", "--out", tmp_path / "o.parquet"]
    found = subprocess.run([sys.executable, "-c", MEASURED, *arguments], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    start, peak = map(int, re.search(r"memory (\d+) (\d+)", found.stderr).groups())
    with capsys.disabled():
        sys.stdout.write(f" [{start} MB at the start, {peak} MB at most] ")
    assert peak - start < 500
    assert "score: 524,285 of 2,000,000\n" in found.stderr
    assert "score: 2,000,000 of 2,000,000\n" in found.stderr
    table, verdict = pq.read_table(tmp_path / "o.parquet"), guard.predict(logits)
    assert f"{verdict.is_ood.sum():,} of 2,000,000 refused\n" in found.stderr
    assert np.array_equal(table["score"].to_numpy(), verdict.score)
    assert np.array_equal(table["p_value"].to_numpy(), verdict.p_value)
    assert np.array_equal(table["id"].to_numpy(), np.arange(len(logits)))


LONG = {
    "score to Parquet": "score {guard} {big} --out o.parquet",
    "score to CSV": "score {guard} {big} --out o.csv",
    "score to stdout": "score {guard} {big}",
    "fit": "fit {big} --method msp --out new.safetensors",
    "calibrate": "calibrate {guard} {big}",
    "tune": "tune {guard} --train {big} --label-column class --id {big} --ood {big}",
}


@pytest.mark.parametrize("what", LONG)
def test_ctrl_c_leaves_nothing_behind(big, tmp_path, what):
    folder = big[0]
    before = (folder / "guard.safetensors").read_bytes()
    line = LONG[what].format(guard=folder / "guard.safetensors", big=folder / "big.parquet")
    with subprocess.Popen(
        [*IGEOOD, *line.split()], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert re.match(r"(score|fit|calibrate): [\d,]+ of 2,000,000\n", process.stderr.readline())
        unlocked = [name for name in names(tmp_path) if not name.endswith(".lock")]
        assert len(unlocked) == (what in ("score to Parquet", "score to CSV"))  # the temporary file
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130
    assert rest.splitlines()[-1] == "igeood: stopped"
    assert "Traceback" not in rest
    assert names(tmp_path) == []
    assert (folder / "guard.safetensors").read_bytes() == before


@pytest.mark.parametrize("options", ["", "--json"])
def test_a_closed_pipe_is_quiet(big, options):
    folder = big[0]
    line = f"{' '.join(IGEOOD)} score {folder}/guard.safetensors {folder}/big.parquet {options} | head -1"
    found = subprocess.run(
        [shutil.which("bash"), "-c", f"{line}; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True, check=False
    )
    assert found.stdout.count("\n") == 1
    assert found.returncode == 1
    assert [text for text in found.stderr.splitlines() if not text.startswith("score: ")] == []


NETS = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))

def rigid():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 3))

class Forgetful(nn.Linear):
    def forward(self, x):
        return {}["logits"]

def forgetful():
    return Forgetful(3, 3)

def leaves():
    raise SystemExit("usage")

def fails():
    raise ValueError("first line\\nsecond")

net = make()
number = 3
"""


@pytest.fixture
def images(tmp_path, monkeypatch):
    """Folders of images of three classes, and the module of a model, as the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    rng = np.random.default_rng(0)
    for part in ("train", "held", "foreign"):
        for c, name in enumerate(("ant", "bee", "cat")):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for i in range(25):
                pixels = rng.integers(0, 100, (26, 20, 3)) + (
                    150 * rng.random() if part == "foreign" else 60 * np.eye(3)[c]
                )
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i:02}.png")
    Path("nets.py").write_text(NETS)
    return tmp_path


@pytest.mark.parametrize("access", ["black-box", "grey-box", "white-box"])
def test_a_model_the_whole_way(images, access):
    import torch  # noqa: PLC0415

    sys.path.insert(0, str(images))
    import nets  # noqa: PLC0415

    torch.save(nets.make().state_dict(), "w.pt")
    model = ["--model", "nets:make", "--weights", "w.pt", "--batch", "30"]
    prepared = ["--size", "16", "--mean", "0.5,0.4,0.3", "--std", "0.2"]
    about = json.loads(
        told(run("fit", "folder:train", "--out", "g.safetensors", "--access", access, *model, *prepared, "--json"))
    )
    assert (about["classes"], about["samples"]) == (3, 75)
    sets = ["--train", "folder:train", "--id", "folder:held", "--ood", "folder:foreign"]
    assert run("tune", "g.safetensors", *sets, *model).exit_code == 0
    assert run("calibrate", "g.safetensors", "folder:held", "--tpr", "0.9", "--model", "nets:net").exit_code == 0
    rows = list(csv.DictReader(told(run("score", "g.safetensors", "folder:foreign", *model)).splitlines()))
    assert rows[0]["id"] == str(images / "foreign/ant/00.png")

    pixels = igeood.datasets.load("folder:foreign", side=16).images() / 255.0
    x = torch.tensor((pixels - np.array([0.5, 0.4, 0.3]).reshape(3, 1, 1)) / 0.2, dtype=torch.float32)
    guard = igeood.load("g.safetensors", nets.net)
    assert guard.access == access.replace("-", " ")
    assert guard.inputs.std == [0.2, 0.2, 0.2]
    expected = guard.predict(list(x.split(30)))
    np.testing.assert_allclose([float(row["score"]) for row in rows], expected.score, rtol=1e-4, atol=1e-5)
    assert [int(row["label"]) for row in rows] == expected.label.tolist()


def test_tuning_a_models_guard_on_its_own_attacks(images):
    options = ["--model", "nets:make", "--json"]
    told(run("fit", "folder:train", "--out", "g.safetensors", "--size", "16", *options))
    sets = ["--train", "folder:train", "--id", "folder:held", "--ood", "fgsm"]
    found = json.loads(told(run("tune", "g.safetensors", *sets, *options)))
    assert found["temperature"] is None
    assert found["id"] == found["ood"]


MODEL = ("fit", "folder:train", "--out", "new.safetensors", "--size", "16", "--model")
MODEL_FAILURES = [
    ((*MODEL, "nets:mak"), "nets:mak: the module has no 'mak'; did you mean make?"),
    ((*MODEL, "net:make"), "no module 'net'"),
    ((*MODEL, "nets:number"), "nets:number is int; expected a torch.nn.Module"),
    ((*MODEL, "nets:fails"), "nets:fails failed: ValueError: first line ("),
    ((*MODEL, "broken:make"), "importing broken failed: SyntaxError"),
    ((*MODEL, "nets:make", "--weights", "none.pt"), "weights: there is no file none.pt"),
    ((*MODEL, "nets:make", "--weights", "nets.py"), "weights: nets.py is neither .safetensors"),
    ((*MODEL, "nets:make", "--layers", "9"), "layers: the model has no '9'"),
    ((*MODEL, "nets:make", "--mean", "a"), "mean: expected one number, or three"),
    ((*MODEL, "nets:make", "--std", "0.1,0.2"), "std: expected one number, or three"),
    ((*MODEL, "nets:make", "--mean", "0.5", "--std", "0"), "std: must be"),
    ((*MODEL, "nets:make", "--mean", "0.5"), "mean, std: belong together; give both, or neither"),
    ((*MODEL, "nets:make", "--std", "0.5"), "mean, std: belong together; give both, or neither"),
    ((*MODEL, "nets.py:make"), "leave out .py: nets:make"),
    ((*MODEL, "nets:leaves"), "nets:leaves failed: SystemExit: usage ("),
    ((*MODEL, "script:make"), "importing script failed: SystemExit: 3 ("),
    (
        (*MODEL, "nets:rigid", "--access", "black-box"),
        "model: fails on an input of shape (75, 3, 16, 16): RuntimeError:",
    ),
    ((*MODEL, "nets:rigid"), "; is --size right?"),
    ((*MODEL, "nets:forgetful", "--access", "black-box"), "nets.py, line 16); is --size right?"),
    ((*MODEL, "nets:forgetful", "--access", "black-box"), "(75, 3, 16, 16): KeyError: 'logits' ("),
    (("fit", "train", *MODEL[2:], "nets:make"), "train: is a folder; to read its images, say folder:train"),
    (("fit", "folder:train/ant", *MODEL[2:], "nets:make"), "lies beside the classes"),
    (("fit", "folder:none", *MODEL[2:], "nets:make"), "there is no such folder"),
    (("fit", "folder:empty", *MODEL[2:], "nets:make"), "a sub-folder for each class, at least two; found 0"),
    (("fit", "folder:damaged", *MODEL[2:], "nets:make"), "damaged/b/1.png: does not decode as an image"),
    (("fit", "folder:train", "--out", "new.safetensors", "--model", "nets:make"), "size: how many pixels"),
    (("fit", "gaussian", *MODEL[2:], "nets:make"), "split: gaussian has test, got 'train'"),
    (("score", "made.safetensors", "folder:held"), "needs its model: load(path, model), or --model"),
    (("score", "made.safetensors", "folder:held", "--model", "nets:make"), "made in Python"),
]


@pytest.mark.parametrize(("arguments", "message"), MODEL_FAILURES, ids=lambda value: str(value)[-60:])
def test_what_is_wrong_with_a_model_or_its_images_is_one_line(images, arguments, message):
    Path("broken.py").write_text("def make(:\n")
    Path("script.py").write_text("raise SystemExit(3)\n")
    for name in ("empty", "damaged/a", "damaged/b"):
        Path(name).mkdir(parents=True)
    shutil.copy("train/ant/00.png", "damaged/a/0.png")
    Path("damaged/b/1.png").write_bytes(Path("train/ant/00.png").read_bytes()[:60])
    if "made.safetensors" in arguments:
        sys.path.insert(0, str(images))
        import nets  # noqa: PLC0415

        found = igeood.datasets.load("folder:train", side=16, labelled=True)
        pixels = found.images().astype(np.float32) / 255
        igeood.black_box(nets.net).fit(pixels, found.labels).save("made.safetensors")
    before = names(images)
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert [name for name in names(images) if name != "__pycache__"] == [n for n in before if n != "__pycache__"]


def test_the_methods_are_the_catalogues():
    assert tuple(igeood.METHODS) == METHODS
    assert tuple(name for name, method in igeood.METHODS.items() if method.needs_layers) == LAYERED


@pytest.mark.parametrize(
    ("words", "incomplete", "found"),
    [
        ([], "", {"fit", "tune", "calibrate", "score"}),
        (["fit"], "--met", {"--method"}),
        (["fit", "--method"], "ig", {"igeood", "igeood+", "igeood-logits", "igeood-logits-min"}),
        (["calibrate", "--guarantee"], "", {"marginal", "tolerance"}),
    ],
)
def test_completion(words, incomplete, found):
    shell = BashComplete(main, {}, "igeood", "_IGEOOD_COMPLETE")
    assert found <= {item.value for item in shell.get_completions(words, incomplete)}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell):
    script = told(run("completion", shell))
    assert script.startswith("# To install, ")
    assert f"{shell}_complete" in script
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=script, text=True, capture_output=True, check=False).returncode == 0


def test_warnings_of_others_are_lines_too(files, monkeypatch):
    def warned(*_, **__):
        warnings.warn("two\nlines", UserWarning, stacklevel=1)

    monkeypatch.setattr("igeood.guard.Guard.save", warned)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert run("fit", "train.npz", "--out", "g.safetensors").stderr == "igeood: two lines\n"


def test_fit_tells_how_many_labels_the_classifier_agrees_with(tmp_path):
    logits, classes = np.eye(4).repeat(10, axis=0) * 9, np.arange(4).repeat(10)
    for labels, share in ((classes, 1.0), ((classes + 1) % 4, 0.0)):
        np.savez(tmp_path / "t.npz", logits=logits, labels=labels)
        found = run("fit", tmp_path / "t.npz", "--out", tmp_path / "g.safetensors", "--force", "--json")
        assert found.exit_code == 0, found.output
        assert json.loads(found.stdout)["accuracy"] == share
        assert ("disagrees with most labels" in found.stderr) == (share < 0.5)
