"""`igeood score` where rows cannot be read, and the names of classes."""

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import igeood

BAD = [*range(10), 17, 30, 31]


def test_bad_rows_are_refused_and_counted(run, good, bad, files, monkeypatch):
    monkeypatch.setattr("igeood.tables.BLOCK_VALUES", 100)  # nothing tells how wide the rows of the first block are
    table = pq.read_table("test.parquet", columns=["id", "logits"])
    logits = table["logits"].to_pylist()
    logits[:10] = [None] * 10
    logits[17], logits[30][2], logits[31] = [1.0], float("nan"), None
    pq.write_table(pa.table({"id": table["id"], "logits": logits}), "bad.parquet", row_group_size=100)
    expected = list(csv.DictReader(good("score", "guard.safetensors", "test.parquet").splitlines()))
    result = run("score", "guard.safetensors", "bad.parquet")
    assert (result.exit_code, "13 of 400" in result.stderr, "test-0" in result.stderr) == (0, True, True)
    rows = list(csv.DictReader(result.stdout.splitlines()))
    assert [i for i, row in enumerate(rows) if row["label"] != expected[i]["label"]] == BAD
    good_rows = [[float(each[i]["score"]) for i in range(400) if i not in BAD] for each in (rows, expected)]
    np.testing.assert_allclose(*good_rows, rtol=1e-9)
    assert all(rows[i]["reason"] and not expected[i]["reason"] for i in BAD)
    assert [rows[30][name] for name in ("score", "is_ood", "label")] == ["inf", "true", "-1"]
    about = json.loads(good("score", "guard.safetensors", "bad.parquet", "--out", "o.jsonl", "--json"))
    assert (about["unread"], about["rows"]) == (13, 400)
    assert json.loads(Path("o.jsonl").read_text().splitlines()[31])["score"] is None  # JSON has no infinity
    scored = list(csv.DictReader(good("score", "fitted.safetensors", "bad.parquet").splitlines()))
    assert (scored[17]["score"], bool(scored[17]["reason"])) == ("inf", True)
    assert "row 0" in bad("score", "guard.safetensors", "bad.parquet", "--on-error", "raise", "--out", "new.csv")
    assert not Path("new.csv").exists()


def test_a_file_of_one_row_is_an_error_unless_refuse_is_asked_for(good, bad, files):
    np.savez("one.npz", logits=np.full((1, 10), np.nan))
    assert "--on-error refuse" in bad("score", "guard.safetensors", "one.npz")
    assert good("score", "guard.safetensors", "one.npz", "--on-error", "refuse")


def test_a_file_names_the_classes(good, files):
    Path("names.txt").write_text("".join(f"number {i}\n" for i in range(10)))
    good("fit", "train.npz", "--out", "g.safetensors", "--classes", "names.txt")
    good("calibrate", "g.safetensors", "held_out.npz")
    rows = list(csv.DictReader(good("score", "g.safetensors", "test.npz").splitlines()))
    assert [row["class"] for row in rows] == [f"number {row['label']}" for row in rows]
    assert igeood.load("g.safetensors").classes == tuple(f"number {i}" for i in range(10))


@pytest.mark.parametrize("content", [b"a\nb\n", b"\xff"])
def test_names_that_do_not_fit(bad, files, content):
    Path("names.txt").write_bytes(content)
    assert "--classes: " in bad("fit", "train.npz", "--out", "new.safetensors", "--classes", "names.txt")
    assert not Path("new.safetensors").exists()
