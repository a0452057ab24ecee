"""The demonstration, run once as a user runs it."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import igeood
from igeood import datasets, demo
from igeood.benchmark import Results, load_network
from igeood.benchmark.cells import halves
from igeood.datasets import load
from igeood.metrics import evaluate
from igeood.storage import read


def run(*arguments):
    command = [sys.executable, "-m", "igeood.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "out"
    found = run("demo", "--out", str(folder))
    assert found.returncode == 0, found.stderr
    return folder, found


def test_it_ends_with_the_table_and_the_reports_path(made):
    folder, found = made
    assert found.stdout.rstrip().endswith(str(folder / "report.html"))
    for name in ("Baseline (MSP)", "ODIN", "Energy", "Mahalanobis", "IGEOOD+", "black box", "grey box", "white box"):
        assert name in found.stdout
    for name in ("Digits 8, 9", "Photographs", "average", "at least 95%", "taken for a", "guard.safetensors"):
        assert name in found.stdout
    assert max(map(len, found.stdout.splitlines()[:-2])) <= 80
    assert "training: 42 of 168" in found.stderr
    assert "Traceback" not in found.stderr


def test_the_report_is_there_and_tells_the_same_verdict(made):
    folder, found = made
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert len(page.encode()) < 2_000_000
    told = json.loads(run("report", str(folder), "--out", str(folder / "again.html"), "--json").stdout)
    [verdict] = told["verdicts"].values()
    assert verdict[0] in " ".join(found.stdout.split())
    assert "on average over calibration sets of" in page
    assert f"igeood demo --out {folder}" in page


def test_every_method_is_measured_on_images_that_nothing_was_tuned_on(made):
    cells = Results(made[0]).cells.records
    assert len(cells) == 4 * (4 + 3 + 3)
    assert {c["validation"] for c in cells} == {demo.VALIDATION}
    assert demo.VALIDATION not in {c["ood"] for c in cells}
    assert {c["id_images"] for c in cells if c["setting"] != "grey-box"} == {622}


def test_the_table_is_what_the_scores_say(made):
    for cell in Results(made[0]).cells.records:
        record, tensors = read(made[0] / "scores" / cell["scores"], "scores")
        assert cell["tnr"] == evaluate(tensors["id"], tensors["ood"]).tnr_at_tpr
        for side in ("id", "ood"):
            order = tensors[side].sort(descending=True).values
            torch.testing.assert_close(tensors[side][tensors[f"{side}_most_rows"]], order[:8])
            torch.testing.assert_close(tensors[side][tensors[f"{side}_least_rows"]], order.flip(0)[:8])
            if cell["setting"] == "white-box-validation":
                assert len(record["columns"]) == tensors[f"{side}_parts"].shape[1]
                torch.testing.assert_close(
                    tensors[f"{side}_parts"].double().sum(dim=1), tensors[side], rtol=1e-4, atol=1e-3
                )


def test_the_kept_images_are_those_of_the_rows(made):
    cell = next(c for c in Results(made[0]).cells.records if c["ood"] == "demo:letters" and c["method"] == "igeood+")
    _, tensors = read(made[0] / "scores" / cell["scores"], "scores")
    letters, known = load("demo:letters").images(), load("demo:digits")
    assert (letters[tensors["ood_most_rows"].numpy()] == tensors["ood_most"].numpy()).all()
    unseen = known[halves(len(known), 0)[1]].images()
    assert (unseen[tensors["id_least_rows"].numpy()] == tensors["id_least"].numpy()).all()


def test_the_guard_keeps_what_it_says_and_loads(made):
    folder = made[0]
    network = load_network(str(folder / "weights.safetensors"))
    guard = igeood.load(folder / "guard.safetensors", network.model)
    known = datasets.load("demo:digits")
    unseen = known[demo.parted(len(known), 0)[1]]
    kept = 1 - np.mean(np.concatenate([guard.predict(b[0]).is_ood for b in network.batches(unseen, 32)]))
    assert f"{100 * (1 - kept):5.1f}% of 622 refused" in made[1].stdout
    assert kept > 0.89  # of 622, with 440 to calibrate on: four deviations below 95%


def test_given_again_it_does_nothing_twice_and_another_seed_wants_another_folder(made):
    folder, first = made
    weights = (folder / "weights.safetensors").stat().st_mtime_ns
    again = run("demo", "--out", str(folder), "--json")
    assert again.returncode == 0
    assert (folder / "weights.safetensors").stat().st_mtime_ns == weights
    told = json.loads(again.stdout)
    assert told["report"] == str(folder / "report.html")
    assert told["verdict"][0] in " ".join(first.stdout.split())
    assert "training" not in again.stderr
    other = run("demo", "--out", str(folder), "--seed", "3")
    assert other.returncode == 2
    told = f"igeood: out: {folder / 'weights.safetensors'} is of another demonstration, or seed; name another folder"
    assert other.stderr.splitlines()[-1] == told


def test_an_unwritable_folder(tmp_path):
    (tmp_path / "file").touch()
    found = run("demo", "--out", str(tmp_path / "file" / "demo"))
    assert found.returncode == 2
    assert found.stderr.count("\n") == 1
