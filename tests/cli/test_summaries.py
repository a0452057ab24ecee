"""`igeood fit --summary`, `merge` and `tune --summary`: parts of the training data on machines of their own."""

import json
import shutil

import pytest
import torch

import igeood
from igeood.cli._shared import size_of
from igeood.model.factory import make_model


@pytest.fixture
def parts(files, known):
    """Training rows in parts of unequal size, one without some classes, one without a row."""
    few = (known.train.labels < 3).nonzero()[:, 0]
    rest = (known.train.labels >= 3).nonzero()[:, 0]
    for i, rows in enumerate((few, rest[:11], rest[:0], rest[11:])):
        ids = [f"train-{3 * row}" for row in rows.tolist()]
        igeood.write_logits(files / "parts" / f"{i}.parquet", known.train[rows], ids=ids)
    return files


@pytest.mark.parametrize("options", [[], ["--method", "mahalanobis"]])
def test_a_merged_guard_is_that_of_all_rows(good, parts, known, options):
    for i in range(4):
        good("fit", f"parts/{i}.parquet", "--summary", f"sums/{i}.safetensors", *options)
    whole = json.loads(good("fit", "parts", "--out", "whole.safetensors", *options, "--json"))
    merged = json.loads(good("merge", "sums/*.safetensors", "--out", "g.safetensors", *options, "--json"))
    assert merged == {**whole, "out": "g.safetensors"}
    expected = igeood.load("whole.safetensors").score(known.test)
    torch.testing.assert_close(igeood.load("g.safetensors").score(known.test), expected, rtol=1e-9, atol=1e-9)


def test_a_folder_is_its_summaries_and_all_that_its_manifests_name(good, bad, parts):
    for i in (0, 1):
        good("fit", f"parts/{i}.parquet", "--summary", f"sums/deep/{i}.safetensors")
    good("fit", "parts/2.parquet", "parts/3.parquet", "--summary", "sums/machine/")
    assert json.loads(good("merge", "sums", "--summary", "t", "--json"))["samples"] == 400
    next((parts / "sums" / "machine").glob("3*")).unlink()  # a missing summary is an error, not a smaller sum
    assert "sums/machine/3" in bad("merge", "sums", "--summary", "v")
    (parts / "sums" / "machine" / "_manifest.json").write_text("{}")
    assert "_manifest.json" in bad("merge", "sums", "--summary", "v")


def test_files_are_summarised_one_by_one_and_their_summaries_removed(good, files):
    shutil.copy("train.parquet", files / "in.parquet")
    good("fit", "in.parquet", "--out", "g.safetensors", "--workers", 1)
    good("fit", "in.parquet", "--out", "h.safetensors")
    assert (files / "g.safetensors").read_bytes() == (files / "h.safetensors").read_bytes()
    assert not (files / "g.safetensors.parts").exists()


def test_a_guard_is_tuned_from_a_summary_as_from_the_rows(good, files):
    good("fit", "train.parquet", "--summary", "s.safetensors", "--out", "g.safetensors")
    sets = ["--id", "held_out.parquet", "--ood", "ood.parquet", "--json"]
    by_rows = json.loads(good("tune", "g.safetensors", "--train", "train.parquet", *sets, "--out", "a"))
    by_sums = json.loads(good("tune", "g.safetensors", "--summary", "s.safetensors", *sets, "--out", "b"))
    assert by_sums == {**by_rows, "out": "b"}
    assert (files / "a").read_bytes() == (files / "b").read_bytes()


def test_tuning_holds_no_more_than_its_memory(good, files, known):
    sets = ["--train", "train.parquet", "--id", "held_out.npz", "--ood", "ood.parquet", "--json", "--share", 1]
    all_rows = json.loads(good("tune", "fitted.safetensors", *sets, "--out", "a"))
    few = json.loads(good("tune", "fitted.safetensors", *sets, "--out", "b", "--memory", "18kB"))
    row = 10 * known.ood.logits.element_size()
    for part in ("id", "ood"):
        assert all_rows[part] == 400
        assert 9000 / row / 3 < few[part] <= 9000 / row
    assert "sampled" in [finding["code"] for finding in few["health"]]
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


WRONG = {  # a line, and what its error has to name
    "fit train.parquet": "--out",
    "merge s": "--out",
    "merge none/* --out g": "none/*",
    "merge guard.safetensors --out g": "guard.safetensors",
    "merge s narrow --out g": "narrow",
    "merge s energy --out g": "energy",
    "merge s --method mahalanobis --out g": "mahalanobis",
    "merge s --out s --force": "--out",
    "merge s --probabilities --out g": "probabilities",
    "merge s --classes names --out g": "--classes",
    "merge s ./s --out g": "./s",
    "merge . --out g": "--out",
    "merge [st]* --summary total": "--summary",
    "merge s --summary train.npz/": "--summary",
    "fit train.parquet --out guard.safetensors/": "--out",
    "merge torn --out g": "torn",
    "tune guard.safetensors --id held_out.npz --ood ood.npz": "--train",
    "fit train.parquet --out g --memory lots": "--memory",
    "fit train.parquet --out g --memory 10": "--memory",
}


def test_what_does_not_add_up(good, bad, files, known):
    good("fit", "train.parquet", "--summary", "s")
    good("fit", "train.parquet", "--summary", "energy", "--method", "energy")
    igeood.write_logits("narrow.npz", known.train.logits[:, :4], known.train.labels % 4)
    good("fit", "narrow.npz", "--summary", "narrow")
    (files / "torn").write_bytes((files / "s").read_bytes()[:-9])
    (files / "names").write_text("one\ntwo")
    for line, fact in WRONG.items():
        assert fact.lower() in bad(*line.split()).lower(), line
        assert not (files / "g").exists()


def test_sizes_of_memory():
    sizes = {"20kB": 20_000, "0.02 mb": 20_000, "20000": 20_000, "20KiB": 20_480, "1.5g": 1_500_000_000}
    assert {text: size_of(None, None, text) for text in sizes} == sizes
