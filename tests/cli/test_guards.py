"""`igeood fit`, `tune`, `calibrate` and `score` on logits files: they do what the library does, and write safely."""

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import igeood

GUARDS = [
    ([], igeood.black_box),
    (["--method", "energy"], lambda: igeood.black_box(method="energy")),
    (["--method", "igeood"], lambda: igeood.white_box(method="igeood")),
    (["--layers", "block.late"], lambda: igeood.white_box(layers=["block.late"])),
]


@pytest.mark.parametrize("suffix", ["parquet", "npz"])
@pytest.mark.parametrize(("options", "make"), GUARDS)
def test_the_whole_way_is_the_librarys(run, good, files, known, caplog, suffix, options, make):
    about = json.loads(good("fit", f"train.{suffix}", "--out", "g.safetensors", *options, "--json"))
    by_id = {name: getattr(known, name) for name in ("train", "held_out", "ood")}
    if suffix == "parquet":  # whose ids identify samples
        ids = {name: [f"{name}-{i}" for i in range(400)] for name in by_id}
        by_id = {name: igeood.Outputs.of(outputs, ids=ids[name]) for name, outputs in by_id.items()}
    guard = make().fit(by_id["train"])
    assert (about["classes"], about["samples"], about["layers"]) == (10, 400, guard.layers)
    sets = ["--train", f"train.{suffix}", "--id", f"held_out.{suffix}", "--ood", f"ood.{suffix}"]
    tuned = json.loads(good("tune", "g.safetensors", *sets, "--json"))
    calibrated = run("calibrate", "g.safetensors", f"held_out.{suffix}", "--json")
    assert "calibrate: left out " in caplog.text  # on stderr, where nobody else handles messages

    guard.tune(by_id["held_out"], by_id["ood"]).calibrate(by_id["held_out"])
    assert (tuned["epsilon"], tuned["id"], tuned["ood"]) == (0.0, guard.tuning.n_id, 400)
    assert (tuned["tnr"], tuned["tnr_before"]) == (guard.tuning.after, guard.tuning.before)
    expected = {"out": "g.safetensors", "threshold": guard.threshold, "samples": len(guard.calibration.scores)}
    assert json.loads(calibrated.stdout) == {
        **expected,
        "promise": guard.promise,
        "health": list(map(vars, guard.health)),
    }

    verdict = guard.predict(known.test)
    result = run("score", "g.safetensors", f"test.{suffix}")
    rows = list(csv.DictReader(result.stdout.splitlines()))
    assert [row["id"] for row in rows] == [f"test-{i}" if suffix == "parquet" else str(i) for i in range(400)]
    for name in ("score", "p_value", "is_ood", "label"):
        assert [json.loads(row[name]) for row in rows] == getattr(verdict, name).tolist()
    assert result.stderr == f"{int(verdict.is_ood.sum())} of 400 refused\n"


def test_every_output_format_has_the_same_rows(good, files):
    lines = good("score", "guard.safetensors", "test.parquet", "--json").splitlines()
    rows = [json.loads(line) for line in lines]
    assert list(rows[0]) == ["id", "score", "p_value", "is_ood", "label", "reason"]
    refused = sum(row["is_ood"] for row in rows)
    for name in ("o.parquet", "o.csv", "o.jsonl"):
        record = json.loads(good("score", "guard.safetensors", "test.parquet", "--out", name, "--json"))
        assert record == {"out": name, "rows": 400, "refused": refused}
    assert pq.read_table("o.parquet").to_pylist() == pyarrow.csv.read_csv("o.csv").to_pylist() == rows
    assert Path("o.jsonl").read_text().splitlines() == lines


def test_blocks_share_one_header_and_a_guard_without_threshold_gives_scores_only(run, good, files, monkeypatch):
    np.savez("none.npz", logits=np.empty((0, 10)))
    empty = run("score", "guard.safetensors", "none.npz")
    assert (empty.stdout, empty.stderr) == ("id,score,p_value,is_ood,label,reason\n", "0 of 0 refused\n")
    monkeypatch.setattr("igeood.outputs.BLOCK_VALUES", 300)
    assert good("score", "guard.safetensors", "test.npz").count("id,score,p_value,is_ood,label,reason\n") == 1
    good("score", "guard.safetensors", "test.npz", "--out", "o.parquet")
    assert pq.read_table("o.parquet").num_rows == 400
    scores = run("score", "fitted.safetensors", "test.npz")
    assert scores.stdout.startswith("id,score,reason\n")
    assert "not calibrated: scores only; run `igeood calibrate`" in scores.stderr


def test_columns_of_other_names(good, files):
    names = {"logits": "z", "label": "y", "id": "key"}
    pq.write_table(pq.read_table("train.parquet", columns=list(names)).rename_columns(names), "other.parquet")
    columns = ["--logits-column", "z", "--label-column", "y"]
    good("fit", "other.parquet", "--out", "g.safetensors", *columns)
    assert Path("g.safetensors").read_bytes() == Path("fitted.safetensors").read_bytes()
    named = good("score", "g.safetensors", "other.parquet", *columns, "--id-column", "key")
    assert "\ntrain-0," in named.replace('"', "")


def test_samples_are_known_again_by_the_ids_of_a_named_column(run, files, known):
    noisy = known.train.logits.numpy() + 1e-3
    for name, logits in (("train", known.train.logits), ("again", noisy)):
        igeood.write_logits(f"{name}-ids.npz", logits, known.train.labels, ids=np.arange(400))
    for options, is_known in (([], False), (["--id-column", "id"], True)):
        run("fit", "train-ids.npz", "--out", "g.safetensors", "--force", *options)
        result = run("calibrate", "g.safetensors", "again-ids.npz", *options, "--json")
        assert ("igeood: id_data: 400 of 400 samples are training samples" in result.stderr) == is_known
        record, promise = json.loads(result.stdout), igeood.load("g.safetensors").promise
        assert (record["promise"], record.get("warning")) == ((None, promise) if is_known else (promise, None))


def test_fit_and_tune_take_options_of_the_method_and_the_papers_search(run, good, files, known, monkeypatch):
    monkeypatch.setattr("igeood.guard.tuning.BAYES_TRIALS", 4)
    good("fit", "train.npz", "--out", "g.safetensors", "--option", "solver=sgd", "--option", "centroid_temperature=1")
    loaded = igeood.load("g.safetensors").detector
    expected = igeood.IgeoodLogits(solver="sgd", centroid_temperature=1.0).fit(known.train)
    assert loaded.params() == expected.params()
    np.testing.assert_allclose(loaded.score(known.test), expected.score(known.test), rtol=1e-9)
    sets = ("--train", "train.npz", "--id", "test.npz", "--ood", "ood.npz")
    good("tune", "g.safetensors", *sets, "--search", "bayes", "--option", "solver=weiszfeld", "--out", "t.safetensors")
    tuned = igeood.load("t.safetensors")
    assert (tuned.detector.solver, tuned.detector.centroid_temperature) == ("weiszfeld", 1.0)
    assert len(tuned.tuning.trials) == 20  # of 5 seeds
    assert all(1 <= trial["temperature"] <= 1000 for trial in tuned.tuning.trials)
    shares = known.train.logits.softmax(dim=1)
    guards = [igeood.black_box(probabilities=True), igeood.black_box().with_options(probabilities=True)]
    scores = [guard.fit(shares, known.train.labels).score(shares) for guard in guards]
    assert scores[0].tolist() == scores[1].tolist()
    changed = guards[0].with_options(temperature=5.0)
    assert (changed.calibration, changed.summary, changed.detector.temperature) == (None, None, 5.0)
    for option, message in {"odd=1": "odd: 'igeood-logits' has no such option", "solver=x": "solver: expected"}.items():
        result = run("tune", "g.safetensors", *sets, "--option", option, "--out", "u.safetensors")
        assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
    for option in ("solver", "=3"):
        assert run("fit", "train.npz", "--out", "v.safetensors", "--option", option).exit_code == 2


def test_tune_without_ood_samples(run, good, files, known):
    igeood.write_logits("h.npz", known.train.logits, features={"|h": known.train.logits.tanh()})
    good("fit", "h.npz", "--out", "g.safetensors", "--method", "deconf-c")
    tuned = json.loads(good("tune", "g.safetensors", "--train", "h.npz", "--id", "h.npz", "--share", "1", "--json"))
    mean = -float(known.train.logits.tanh().double().amax(dim=1).mean())
    assert (tuned["mean_score"], tuned["id"], "tnr" in tuned) == (pytest.approx(mean), 400, False)
    result = run("tune", "fitted.safetensors", "--train", "train.npz", "--id", "test.npz")
    assert (result.exit_code, "ood: IgeoodLogits needs OOD samples to tune on" in result.stderr) == (2, True)


def test_only_fit_reads_labels_and_warns_where_the_classifier_disagrees(run, good, files, known):
    """Labels of OOD samples may be no classes of ours."""
    np.savez("odd.npz", logits=known.ood.logits, labels=np.full(400, -1))
    good("tune", "fitted.safetensors", "--train", "train.npz", "--id", "test.npz", "--ood", "odd.npz")
    good("calibrate", "fitted.safetensors", "odd.npz")
    good("score", "fitted.safetensors", "odd.npz", "--out", "o.csv")
    assert "odd.npz: labels: row 0 has a class outside" in run("fit", "odd.npz", "--out", "g.safetensors").stderr
    logits, classes = np.eye(4).repeat(10, axis=0) * 9, np.arange(4).repeat(10)
    for labels, accuracy in ((classes, 1.0), ((classes + 1) % 4, 0.0)):
        np.savez("t.npz", logits=logits, labels=labels)
        result = run("fit", "t.npz", "--out", "g.safetensors", "--force", "--json")
        assert json.loads(result.stdout)["accuracy"] == accuracy
        assert ("the classifier disagrees with 100% of them" in result.stderr) == (accuracy < 0.5)


def test_what_is_there_is_not_written_over(run, good, files):
    before = Path("guard.safetensors").read_bytes()
    fit = ("fit", "train.npz", "--out", "guard.safetensors")
    assert "guard.safetensors is there already; name another file, or give --force" in run(*fit).stderr
    assert Path("guard.safetensors").read_bytes() == before
    forced = run("fit", "train.npz", "--out", "held_out.npz", "--force")
    assert "held_out.npz is there, and is no guard's file" in forced.stderr
    assert "train.npz is what the command reads" in run("fit", "train.npz", "--out", "train.npz", "--force").stderr
    good(*fit, "--force")
    assert Path("guard.safetensors").read_bytes() == Path("fitted.safetensors").read_bytes()
    good("calibrate", "fitted.safetensors", "held_out.npz", "--out", "new/other.safetensors")  # the folder is made
    guards = [igeood.load(path) for path in ("fitted.safetensors", "new/other.safetensors")]
    assert [guard.calibration is None for guard in guards] == [True, False]


def test_options_that_do_not_go_together(run, files):
    for options, message in (
        (["--access", "grey-box"], "model: "),
        (["--access", "black-box", "--layers", "early"], "layers: a black-box guard has no such option"),
        (["--method", "igeood", "--access", "black-box"], "method: 'igeood' is not one for a black box"),
        (["--size", "16"], "mean, std, size: say how images are prepared"),
    ):
        result = run("fit", "train.npz", "--out", "new.safetensors", *options)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert result.stderr.startswith(f"igeood: {message}")
        assert not Path("new.safetensors").exists()


def shards(files, n):
    """The test set in n parts, as Spark leaves them: some are empty, some in folders, and not all files are data."""
    table, ends = pq.read_table("test.parquet"), np.linspace(0, 400, n - 1).astype(int)
    for i, (start, end) in enumerate(zip([0, *ends], [*ends, 400], strict=True)):
        folder = files / "parts" / f"day={i // 20:02}"
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.slice(start, end - start), folder / f"part-{i:05}.snappy.parquet")
        (folder / f".part-{i:05}.snappy.parquet.crc").write_bytes(b"crc")
    (files / "parts" / "_SUCCESS").touch()
    (files / "parts" / "_temporary").mkdir()
    (files / "parts" / "_temporary" / "a.parquet").write_bytes(b"half")


def test_fifty_parts_are_scored_as_the_one_file(good, run, files, monkeypatch):
    shards(files, 50)
    monkeypatch.setattr("igeood.outputs.BLOCK_VALUES", 640)  # blocks of 64 rows: no part ends with one
    parts = sorted(map(str, Path("parts").rglob("part-*.parquet")))
    assert len(parts) == 50
    assert any(pq.read_metadata(part).num_rows == 0 for part in parts)
    expected = good("score", "guard.safetensors", "test.parquet")
    for names in (
        ["parts"],
        ["parts/*/*.parquet"],
        ["parts/day=*"],
        ["parts/*"],
        parts,
        ["parts/day=00", "parts/_SUCCESS", *parts[20:]],
    ):
        assert good("score", "guard.safetensors", *names) == expected
    good("fit", "parts", "--out", "g.safetensors")
    good("fit", "test.parquet", "--out", "h.safetensors")
    assert Path("g.safetensors").read_bytes() == Path("h.safetensors").read_bytes()
    one, many = ("test.parquet", "held_out.parquet"), ("parts/*", "held*.parquet")
    for train, held_out in (one, many):
        ood = ["--ood", "foreign=ood.parquet", "--ood", "parts/day=01/*", "--out", "t.safetensors", "--force"]
        good("tune", "g.safetensors", "--train", train, "--id", held_out, *ood)
        good("calibrate", "t.safetensors", held_out)
    tuned = igeood.load("t.safetensors")
    assert list(tuned.tuning.left_out) == []
    assert tuned.tuning.n_ood > 400


def write_kind(path, columns):
    """A file of the kind that its name says."""
    if path.endswith("npz"):
        np.savez(path, **columns)
    elif path.endswith("jsonl"):
        rows = pa.table({name: list(column) for name, column in columns.items()}).to_pylist()
        Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        pyarrow.csv.write_csv(pa.table(columns), path)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "npz"])
def test_every_kind_of_file_and_of_columns_is_scored_as_parquet(good, files, known, kind):
    """One column for each logit, in any order, or lists; ids are kept."""
    logits = known.test.logits.numpy()
    others = {"id": [f"test-{i}" for i in range(400)], "label": known.test.labels.numpy()}
    write_kind(f"wide.{kind}", {**others, **{f"logit_{i}": logits[:, i] for i in reversed(range(10))}})
    sources = [("wide", "logit_*"), ("wide", "*")]
    if kind != "csv":
        write_kind(f"lists.{kind}", {**others, "logits": logits})
        sources.append(("lists", "logits"))
    expected = list(csv.DictReader(good("score", "guard.safetensors", "test.parquet").splitlines()))
    for name, column in sources:
        scored = good("score", "guard.safetensors", f"{name}.{kind}", "--logits-column", column)
        rows = list(csv.DictReader(scored.splitlines()))
        assert [row["id"] for row in rows] == [row["id"] for row in expected]
        scores = [[float(row["score"]) for row in each] for each in (rows, expected)]
        np.testing.assert_allclose(*scores, rtol=1e-6)  # text has more digits than float32


def test_ids_of_two_kinds_are_kept_as_text(good, files, known):
    for name, ids in (("1", np.arange(200, 400)), ("2", [f"x{i}" for i in range(200)])):
        igeood.write_logits(files / "mixed" / f"{name}.parquet", known.test.logits[:200], ids=ids)
    good("score", "guard.safetensors", "mixed", "--out", "o.parquet")
    assert pq.read_table("o.parquet")["id"].to_pylist() == [*map(str, range(200, 400)), *(f"x{i}" for i in range(200))]
