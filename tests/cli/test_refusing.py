"""`igeood score` where rows cannot be read, and the names of classes."""

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import igeood


def test_bad_rows_are_refused_and_counted(run, good, files, known):
    table = pq.read_table("test.parquet", columns=["id", "logits"])
    logits = table["logits"].to_pylist()
    logits[17], logits[30][2], logits[31] = [1.0], float("nan"), None
    pq.write_table(pa.table({"id": table["id"], "logits": logits}), "bad.parquet", row_group_size=100)
    expected = good("score", "guard.safetensors", "test.parquet").splitlines()
    result = run("score", "guard.safetensors", "bad.parquet")
    assert (result.exit_code, result.stderr.splitlines()[0]) == (
        0, "3 of 400 rows could not be read and are refused; first: row test-17: logits: 1 values, expected 10",
    )  # fmt: skip
    for i in range(4):
        Path("bad").mkdir(exist_ok=True)
        pq.write_table(pq.read_table("bad.parquet").slice(25 * i, 25 if i < 3 else 400), f"bad/{i}.parquet")
    assert good("score", "guard.safetensors", "bad") == result.stdout
    lines = result.stdout.splitlines()
    bad = [17, 30, 31]
    assert [line for line, wanted in zip(lines, expected, strict=True) if line != wanted] == [lines[1 + i] for i in bad]
    rows = list(csv.DictReader(lines))
    assert [rows[30][name] for name in ("score", "is_ood", "label")] == ["inf", "true", "-1"]
    assert rows[30]["reason"].startswith("logits: NaN")
    about = json.loads(good("score", "guard.safetensors", "bad.parquet", "--out", "o.jsonl", "--json"))
    assert (about["unread"], about["rows"]) == (3, 400)
    assert json.loads(Path("o.jsonl").read_text().splitlines()[31])["score"] is None  # JSON has no infinity
    scored = list(csv.DictReader(good("score", "fitted.safetensors", "bad.parquet").splitlines()))
    assert (scored[17]["score"], scored[17]["reason"]) == ("inf", "logits: 1 values, expected 10")
    raised = run("score", "guard.safetensors", "bad.parquet", "--on-error", "raise", "--out", "new.csv")
    assert (raised.exit_code, "row 17" in raised.stderr) == (2, True)
    assert not Path("new.csv").exists()


def test_a_file_of_one_row_is_an_error_unless_refuse_is_asked_for(run, files):
    np.savez("one.npz", logits=np.full((1, 10), np.nan))
    assert run("score", "guard.safetensors", "one.npz").exit_code == 2
    asked = run("score", "guard.safetensors", "one.npz", "--on-error", "refuse")
    assert (asked.exit_code, "1 of 1 rows could not be read" in asked.stderr) == (0, True)


def test_a_file_names_the_classes(run, good, files):
    Path("names.txt").write_text("".join(f"number {i}\n" for i in range(10)))
    good("fit", "train.npz", "--out", "g.safetensors", "--classes", "names.txt")
    good("calibrate", "g.safetensors", "held_out.npz")
    rows = list(csv.DictReader(good("score", "g.safetensors", "test.npz").splitlines()))
    assert [row["class"] for row in rows] == [f"number {row['label']}" for row in rows]
    assert igeood.load("g.safetensors").classes == tuple(f"number {i}" for i in range(10))
    for content, message in ((b"a\nb\n", "2 names for 10 classes"), (b"\xff", "names.txt is no UTF-8 text")):
        Path("names.txt").write_bytes(content)
        result = run("fit", "train.npz", "--out", "new.safetensors", "--classes", "names.txt")
        assert (result.exit_code, message in result.stderr, Path("new.safetensors").exists()) == (2, True, False)
