"""`igeood fit`, `tune`, `calibrate` and `score` on logits files: they do what the library does, and write safely."""

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

import igeood
from igeood.work import engines

GUARDS = [
    ("parquet", [], igeood.black_box),
    ("npz", ["--method", "energy"], lambda: igeood.black_box(method="energy")),
    ("parquet", ["--method", "igeood"], lambda: igeood.white_box(method="igeood")),
    ("npz", ["--layers", "block.late"], lambda: igeood.white_box(layers=["block.late"])),
]


def rows_of(text):
    return list(csv.DictReader(text.splitlines()))


@pytest.mark.parametrize(("suffix", "options", "make"), GUARDS)
def test_the_whole_way_is_the_librarys(run, good, files, known, suffix, options, make):
    about = json.loads(good("fit", f"train.{suffix}", "--out", "g.safetensors", *options, "--json"))
    sets = {name: getattr(known, name) for name in ("train", "held_out", "ood")}
    if suffix == "parquet":  # whose ids identify samples
        ids = {name: [f"{name}-{3 * i}" for i in range(400)] for name in sets}
        sets = {name: igeood.Outputs.of(outputs, ids=ids[name]) for name, outputs in sets.items()}
    guard = make().fit(sets["train"])
    assert (about["classes"], about["samples"], about["layers"]) == (10, 400, guard.layers)
    words = ["--train", f"train.{suffix}", "--id", f"held_out.{suffix}", "--ood", f"ood.{suffix}"]
    tuned = json.loads(good("tune", "g.safetensors", *words, "--json"))
    calibrated = json.loads(good("calibrate", "g.safetensors", f"held_out.{suffix}", "--json"))

    guard.tune(sets["held_out"], sets["ood"]).calibrate(sets["held_out"])
    assert (tuned["epsilon"], tuned["id"], tuned["ood"]) == (0.0, guard.tuning.n_id, 400)
    assert (tuned["tnr"], tuned["tnr_before"]) == (guard.tuning.after, guard.tuning.before)
    assert (calibrated["threshold"], calibrated["promise"]) == (guard.threshold, guard.promise)
    assert calibrated["samples"] == len(guard.calibration.scores) == 400 - guard.tuning.n_id
    assert [finding["code"] for finding in calibrated["health"]] == [finding.code for finding in guard.health]

    verdict = guard.predict(known.test)
    result = run("score", "g.safetensors", f"test.{suffix}")
    rows = rows_of(result.stdout)
    assert [row["id"] for row in rows] == [f"test-{3 * i}" if suffix == "parquet" else str(i) for i in range(400)]
    for name in ("score", "p_value", "is_ood", "label"):
        assert [json.loads(row[name]) for row in rows] == getattr(verdict, name).tolist()
    assert f"{int(verdict.is_ood.sum())} of 400" in result.stderr


def rounded(rows):
    """What is written of samples, without the last digits: blocks of another size round otherwise."""
    return [{**row, "score": f"{float(row['score']):.9g}"} for row in rows]


def test_every_output_format_has_the_same_rows_however_many_blocks(good, files, monkeypatch):
    lines = good("score", "guard.safetensors", "test.parquet", "--json").splitlines()
    rows = [json.loads(line) for line in lines]
    assert list(rows[0]) == ["id", "score", "p_value", "is_ood", "label", "reason"]
    refused = sum(row["is_ood"] for row in rows)
    monkeypatch.setattr("igeood.tables.BLOCK_VALUES", 300)
    for name in ("o.parquet", "o.csv", "o.jsonl"):
        record = json.loads(good("score", "guard.safetensors", "test.parquet", "--out", name, "--json"))
        assert record == {"out": name, "rows": 400, "refused": refused}
    written = pq.read_table("o.parquet").to_pylist()
    assert written == pyarrow.csv.read_csv("o.csv").to_pylist()
    assert written == [json.loads(line) for line in Path("o.jsonl").read_text().splitlines()]
    assert rounded(written) == rounded(rows)


def test_a_file_without_rows_and_a_guard_without_threshold(run, good, files):
    np.savez("none.npz", logits=np.empty((0, 10)))
    assert good("score", "guard.safetensors", "none.npz").split() == ["id,score,p_value,is_ood,label,reason"]
    result = run("score", "fitted.safetensors", "test.npz")
    assert set(rows_of(result.stdout)[0]) == {"id", "score", "reason"}
    assert "igeood calibrate" in result.stderr


def test_columns_of_other_names(good, files):
    names = {"logits": "z", "label": "y", "id": "key"}
    pq.write_table(pq.read_table("train.parquet", columns=list(names)).rename_columns(names), "other.parquet")
    columns = ["--logits-column", "z", "--label-column", "y"]
    good("fit", "other.parquet", "--out", "g.safetensors", *columns, "--id-column", "key")
    assert igeood.load("g.safetensors").columns == {"logits": ["z"], "id": "key"}
    assert rows_of(good("score", "g.safetensors", "other.parquet"))[1]["id"] == "train-3"


def write_named(path, outputs, order, *, prefix="p_"):
    """A CSV file of ten columns with names, in some order, and with names as labels."""
    columns = {f"{prefix}{NAMES[c]}": outputs.logits[:, c].numpy() for c in order}
    labels = [NAMES[label] for label in outputs.labels.tolist()]
    Path(path).parent.mkdir(exist_ok=True)
    pyarrow.csv.write_csv(pyarrow.table({**columns, "label": labels}), path)


NAMES = list("zyxwvutsrq")  # not sorted
ORDER = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]


@pytest.mark.parametrize("way", ["file", "workers", "merge"])
def test_names_and_columns_are_remembered(run, good, files, known, monkeypatch, way):
    """Files whose columns have another order each give what one array with numbers gives."""
    monkeypatch.setattr("igeood.work.engines.in_processes", lambda _, *work: engines.here(*work))
    write_named("parts/1.csv", known.train[:150], range(10))
    write_named("parts/2.csv", known.train[150:], range(10) if way == "merge" else ORDER)
    write_named("held_out.csv", known.held_out, ORDER)
    write_named("test.csv", known.test, ORDER[::-1])
    write_named("other.csv", known.test, range(10), prefix="q_")
    columns = ["--logits-column", "p_*", "--method", "igeood-logits"]
    if way == "merge":
        for part in "12":
            good("fit", f"parts/{part}.csv", "--summary", f"{part}.sum", *columns)
        good("merge", "1.sum", "2.sum", "--method", "igeood-logits", "--out", "g.safetensors")
        good("fit", "held_out.csv", "--summary", "3.sum", *columns)  # of columns in another order
        assert run("merge", "1.sum", "3.sum", "--out", "h.safetensors").exit_code == 2
    else:
        good("fit", "parts", "--out", "g.safetensors", *columns, *(["--workers", 2] if way == "workers" else []))
    good("calibrate", "g.safetensors", "held_out.csv")
    guard = igeood.load("g.safetensors")
    assert (guard.classes, guard.columns) == (tuple(NAMES), {"logits": [f"p_{name}" for name in NAMES], "id": None})
    expected = igeood.black_box(method="igeood-logits").fit(known.train.logits, known.train.labels)
    verdict = expected.calibrate(known.held_out.logits).predict(known.test.logits)
    rows = rows_of(good("score", "g.safetensors", "test.csv"))
    np.testing.assert_allclose([float(row["score"]) for row in rows], verdict.score, rtol=1e-4, atol=1e-6)
    assert [row["class"] for row in rows] == [NAMES[label] for label in verdict.label.tolist()]
    assert np.array_equal(guard.predict(igeood.read_logits("test.csv")).label, verdict.label)
    good("score", "g.safetensors", "test.csv", "test.npz", "--out", "scores/")  # an array has no names
    result = run("score", "g.safetensors", "other.csv")
    assert (result.exit_code, "p_z" in result.stderr, "--logits-column" in result.stderr) == (2, True, True)
    assert good("score", "g.safetensors", "other.csv", "--logits-column", "q_*")
    sets = ["--train", "parts", "--id", "held_out.csv", "--ood", "test.csv"]
    good("tune", "g.safetensors", *sets, "--out", "t.safetensors")
    assert igeood.load("t.safetensors").columns == guard.columns


@pytest.mark.parametrize(("options", "is_known"), [([], False), (["--id-column", "id"], True)])
def test_samples_are_recognised_by_the_ids_of_a_named_column(run, good, files, known, options, is_known):
    for name, shift in (("first", 0), ("again", 1e-3)):
        igeood.write_logits(f"{name}.npz", known.train.logits + shift, known.train.labels, ids=np.arange(400))
    good("fit", "first.npz", "--out", "g.safetensors", *options)
    record = json.loads(good("calibrate", "g.safetensors", "again.npz", "--json"))  # the guard remembers the column
    assert ("trained-on" in [finding["code"] for finding in record["health"]]) == is_known
    assert ((record["promise"] is None), ("warning" in record)) == (is_known, is_known)


def test_fit_and_tune_take_options_of_the_method(run, good, files):
    fit = ["fit", "train.npz", "--method", "igeood-logits", "--out", "g.safetensors"]
    good(*fit, "--option", "centroid_temperature=2", "--option", "temperature=3")
    detector = igeood.load("g.safetensors").detector
    assert (detector.centroid_temperature, detector.temperature) == (2.0, 3.0)
    sets = ("--train", "train.npz", "--id", "test.npz", "--ood", "ood.npz", "--out", "t.safetensors")
    good("tune", "g.safetensors", *sets, "--option", "centroid_temperature=none")
    assert igeood.load("t.safetensors").detector.centroid_temperature is None
    for option, name in {"odd=1": "odd", "temperature=x": "temperature", "odd": "--option", "=3": "--option"}.items():
        result = run("tune", "g.safetensors", *sets, "--force", "--option", option)
        assert (result.exit_code, name in result.stderr) == (2, True), result.stderr


def test_only_fit_reads_labels_and_warns_where_the_classifier_disagrees(run, good, files, known):
    """Labels of OOD samples may be no classes of ours."""
    np.savez("odd.npz", logits=known.ood.logits, labels=np.full(400, -1))
    good("tune", "fitted.safetensors", "--train", "train.npz", "--id", "test.npz", "--ood", "odd.npz")
    good("calibrate", "fitted.safetensors", "odd.npz")
    good("score", "fitted.safetensors", "odd.npz", "--out", "o.csv")
    result = run("fit", "odd.npz", "--out", "g.safetensors")
    assert (result.exit_code, "odd.npz: labels: row 0" in result.stderr) == (2, True)
    logits, classes = np.eye(4).repeat(10, axis=0) * 9, np.arange(4).repeat(10)
    for labels, accuracy in ((classes, 1.0), ((classes + 1) % 4, 0.0)):
        np.savez("t.npz", logits=logits, labels=labels)
        record = json.loads(good("fit", "t.npz", "--out", "g.safetensors", "--force", "--json"))
        assert record["accuracy"] == accuracy
        assert ("labels-disagree" in [finding["code"] for finding in record["health"]]) == (accuracy < 0.5)


def test_existing_files_are_not_overwritten(run, good, files):
    before = {name: Path(name).read_bytes() for name in ("guard.safetensors", "held_out.npz", "train.npz")}
    for words in (["guard.safetensors"], ["held_out.npz", "--force"], ["train.npz", "--force"]):
        result = run("fit", "train.npz", "--out", *words)
        assert (result.exit_code, words[0] in result.stderr) == (2, True)
        assert Path(words[0]).read_bytes() == before[words[0]]
    good("fit", "train.npz", "--out", "guard.safetensors", "--force")
    assert Path("guard.safetensors").read_bytes() == Path("fitted.safetensors").read_bytes()
    good("calibrate", "fitted.safetensors", "held_out.npz", "--out", "new/other.safetensors")  # the folder is made
    guards = [igeood.load(path) for path in ("fitted.safetensors", "new/other.safetensors")]
    assert [guard.calibration is None for guard in guards] == [True, False]


def test_files_are_scored_one_by_one_into_a_folder(run, files, monkeypatch):
    monkeypatch.setattr("igeood.work.engines.in_processes", lambda _, *work: engines.here(*work))
    for is_done in (False, True):
        result = run("score", "guard.safetensors", "test.npz", "ood.npz", "--out", "scores", "--workers", 2)
        assert (result.exit_code, "of 800" in result.stderr) == (0, not is_done)
        assert len(list(Path("scores").glob("*.npz.parquet"))) == 2


def test_ids_of_two_kinds_are_kept_as_text(good, files, known):
    for name, ids in (("1", np.arange(200, 400)), ("2", [f"x{i}" for i in range(200)])):
        igeood.write_logits(files / "mixed" / f"{name}.parquet", known.test.logits[:200], ids=ids)
    good("score", "guard.safetensors", "mixed", "--out", "o.parquet")
    assert pq.read_table("o.parquet")["id"].to_pylist() == [*map(str, range(200, 400)), *(f"x{i}" for i in range(200))]


@pytest.mark.parametrize("name", ["img_{:05}.png", "7a{}f-photo", "{}"])
def test_training_samples_are_recognised_whatever_their_ids_look_like(good, files, known, name):
    """Ids that look like a count are no names to `fit`, which then knows rows: so does `calibrate`, with such ids."""
    ids = [name.format(i) for i in range(400)]
    igeood.write_logits("train.parquet", known.train.logits, known.train.labels, ids=ids)
    mixed = torch.cat([known.train.logits[:300], known.held_out.logits[:60]])
    igeood.write_logits("mixed.parquet", mixed, ids=[*ids[:300], *(name.format(900 + 7 * i) for i in range(60))])
    good("fit", "train.parquet", "--out", "g.safetensors")
    told = json.loads(good("calibrate", "g.safetensors", "mixed.parquet", "--json"))
    assert (told["samples"], told["left_out"]) == (60, [*range(300)])
