"""`igeood fit --summary`, `merge` and `tune --summary`: parts of the training data on machines of their own."""

import json

import numpy as np
import pytest
import torch

import igeood
from igeood.model.factory import make_model


@pytest.fixture
def parts(files, known):
    """Training rows in parts of unequal size, one without some classes, one without a row."""
    folder = files / "parts"
    few = known.train[known.train.labels < 3]
    rest = known.train[known.train.labels >= 3]
    for i, part in enumerate((few, rest[:11], rest[:0], rest[11:])):
        igeood.write_logits(folder / f"{i}.parquet", part)
    return [folder / f"{i}.parquet" for i in range(4)]


def summed(good, parts, *options):
    for path in parts:
        good("fit", path, "--summary", path.with_suffix(".safetensors"), *options)


@pytest.mark.parametrize("options", [[], ["--method", "fisher-rao-product"], ["--method", "mahalanobis"]])
def test_a_merged_guard_is_that_of_all_rows(good, run, parts, known, options):
    summed(good, parts, *options)
    whole = json.loads(good("fit", "train.parquet", "--out", "whole.safetensors", *options, "--json"))
    merged = json.loads(good("merge", "parts/*.safetensors", "--out", "g.safetensors", *options, "--json"))
    assert merged == {**whole, "out": "g.safetensors"}
    expected = igeood.load("whole.safetensors").score(known.test)
    torch.testing.assert_close(igeood.load("g.safetensors").score(known.test), expected, rtol=1e-9, atol=1e-9)
    parts[0].with_suffix(".safetensors").rename(parts[0].with_name("deep.safetensors"))
    deep = parts[0].parent / "deep"
    deep.mkdir()
    parts[0].with_name("deep.safetensors").rename(deep / "0.safetensors")
    assert json.loads(good("merge", "parts", "--summary", "t", "--json"))["samples"] == 400
    good("fit", "parts/0.parquet", "parts/1.parquet", "--summary", "above/machine/", *options)
    kept = json.loads(good("merge", "above", "--summary", "u", "--json"))["samples"]
    assert kept == int((known.train.labels < 3).sum()) + 11
    next((parts[0].parent.parent / "above" / "machine").glob("0*")).unlink()
    assert "there is no summary file" in run("merge", "above", "--summary", "v").stderr
    (parts[0].parent.parent / "above" / "machine" / "_manifest.json").write_text("{}")
    assert "_manifest.json" in run("merge", "above", "--summary", "v").stderr


def test_a_guard_is_tuned_from_a_summary_as_from_the_rows(good, files):
    good("fit", "train.parquet", "--summary", "s.safetensors", "--out", "g.safetensors")
    sets = ["--id", "held_out.parquet", "--ood", "ood.parquet", "--json"]
    by_rows = json.loads(good("tune", "g.safetensors", "--train", "train.parquet", *sets, "--out", "a"))
    by_sums = json.loads(good("tune", "g.safetensors", "--summary", "s.safetensors", *sets, "--out", "b"))
    assert by_sums == {**by_rows, "out": "b"}
    assert (files / "a").read_bytes() == (files / "b").read_bytes()


def test_tuning_holds_no_more_than_its_memory(good, run, files, known, caplog):
    sets = ["--train", "train.parquet", "--id", "held_out.npz", "--ood", "ood.parquet", "--json", "--share", 1]
    all_rows = json.loads(good("tune", "fitted.safetensors", *sets, "--out", "a"))
    few = json.loads(good("tune", "fitted.safetensors", *sets, "--out", "b", "--memory", "18kB"))
    row = 10 * known.ood.logits.element_size()
    for kind in ("id", "ood"):
        assert all_rows[kind] == 400
        assert 9000 / row / 3 < few[kind] <= 9000 / row
    assert "tune: the budget holds" in caplog.text
    calibrated = json.loads(good("calibrate", "b", "held_out.npz", "--json"))
    assert calibrated["samples"] == 400 - few["id"]  # the very rows that were drawn


def test_a_summary_of_images_keeps_how_they_were_prepared(good, images, monkeypatch):
    monkeypatch.chdir(images)
    monkeypatch.syspath_prepend(str(images))
    model = ["--model", "nets:make"]
    prepared = ["--size", "24", "--mean", "0.2", "--std", "0.5,0.6,0.7"]
    good("fit", "folder:train", *model, *prepared, "--out", "whole", "--summary", "s")
    good("merge", "s", *model, "--out", "g")
    loaded = igeood.load("g", make_model("nets:make"))
    assert loaded.preparation == {"size": 24, "mean": [0.2], "std": [0.5, 0.6, 0.7]}
    assert loaded.classes == ("ant", "bee", "cat")
    assert good("score", "g", "folder:held", *model) == good("score", "whole", "folder:held", *model)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fit", "train.parquet"], "give --out for a guard, or --summary for a part of it"),
        (["merge", "s"], "give --out for a guard, or --summary for a part of it"),
        (["merge", "none/*", "--out", "g"], "none/*: no summary there; give files that `igeood fit --summary` wrote"),
        (["merge", "guard.safetensors", "--out", "g"], "guard.safetensors holds a guard, not a summary"),
        (["merge", "s", "narrow", "--out", "g"], "narrow: outputs: a batch has widths [('logits', 4)]"),
        (["merge", "s", "energy", "--out", "g"], "energy: summary: "),
        (["merge", "s", "--method", "mahalanobis", "--out", "g"], "MahalanobisLayers needs sums 'full'"),
        (["merge", "s", "--out", "s", "--force"], "out: s is what the command reads"),
        (["merge", "s", "--probabilities", "--out", "g"], "summary: probabilities differ"),
        (["merge", "s", "--classes", "names", "--out", "g"], "classes: 2 names for 10 classes"),
        (["merge", "s", "./s", "--out", "g"], "s: is named twice; name each summary once"),
        (["merge", ".", "--out", "g"], "out: g is a folder, or among the files that are read"),
        (["merge", "[st]*", "--summary", "total"], "out: total is a folder, or among the files that are read"),
        (["merge", "s", "--summary", "train.npz/"], "out: train.npz/ is a folder"),
        (["fit", "train.parquet", "--out", "guard.safetensors/"], "out: guard.safetensors/ is no file's name"),
        (["merge", "torn", "--out", "g"], "torn is damaged, or no summary file"),
        (["tune", "guard.safetensors", "--id", "held_out.npz"], "give --train, or --summary in its place"),
        (["fit", "train.parquet", "--out", "g", "--memory", "lots"], "expected a size such as 512MB, got 'lots'"),
        (["fit", "train.parquet", "--out", "g", "--memory", "10"], "10 bytes cannot hold one training row of each"),
    ],
)
def test_what_does_not_add_up(good, run, files, known, words, message):
    good("fit", "train.parquet", "--summary", "s")
    good("fit", "train.parquet", "--summary", "energy", "--method", "energy")
    igeood.write_logits("narrow.npz", known.train.logits[:, :4], known.train.labels % 4)
    good("fit", "narrow.npz", "--summary", "narrow")
    (files / "torn").write_bytes((files / "s").read_bytes()[:-9])
    (files / "names").write_text("one\ntwo")
    result = run(*words)
    assert result.exit_code == 2
    assert message in result.stderr.splitlines()[-1]
    assert not (files / "g").exists()


def test_sizes_of_memory(good, files):
    kept = {}
    for text in ("20kB", "20KiB", "0.02 mb", "20000"):
        kept[text] = json.loads(good("fit", "train.npz", "--summary", "s", "--memory", text, "--force", "--json"))[
            "kept"
        ]
    assert kept["20kB"] == kept["0.02 mb"] == kept["20000"]
    assert 0 < kept["20kB"]["logits"] < kept["20KiB"]["logits"] < 400
    assert np.isclose(kept["20kB"]["logits"] / kept["20KiB"]["logits"], 20000 / 20480, rtol=0.1)
