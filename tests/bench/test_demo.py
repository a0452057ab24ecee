"""The demonstration, run once as a user runs it."""

import json
from unittest.mock import patch

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import igeood
from igeood.bench import datasets, demo
from igeood.bench.runs import Results, load_network
from igeood.bench.runs.cells import halves
from igeood.cli import main
from igeood.files import read_record


def run(*arguments):
    return CliRunner().invoke(main, ["demo", "--json", *map(str, arguments)])


FEWER = patch.multiple(demo, IMAGES=400, GREY_IMAGES=40, EPOCHS=12)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder, and what the command said, with fewer images than a user gets."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    with FEWER:
        result = run("--out", folder)
    assert result.exit_code == 0, result.stderr
    assert "training: 21 of 84" in result.stderr
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert len(page.encode()) < 2_000_000
    assert json.loads(result.stdout)["verdict"][0] in page
    assert "on average over calibration sets of" in page
    return folder, json.loads(result.stdout)


def test_every_method_is_measured_on_images_that_nothing_was_tuned_on_and_the_most_extreme_are_kept(made):
    cells = Results(made[0]).cells.records
    tuned = [c for c in cells if c["setting"] != "untuned"]
    assert (len(tuned), len(cells)) == (4 * (4 + 3 + 4), 4 * (4 + 3 + 4 + len(demo.UNTUNED)))
    assert {c["validation"] for c in tuned} == {demo.VALIDATION}
    assert demo.VALIDATION not in {c["ood"] for c in cells}
    assert {c["id_images"] for c in tuned if c["setting"] != "grey-box"} == {200}
    best = {c["ood"]: c["auroc"] for c in cells if c["method"] == "igeood+"}
    assert min(best.values()) > 0.8
    assert best["gaussian"] > 0.99
    cell = next(c for c in cells if c["ood"] == "demo:letters" and c["method"] == "igeood+")
    _, tensors = read_record(made[0] / "scores" / cell["scores"], "scores")
    for side in ("id", "ood"):
        order = tensors[side].sort(descending=True).values
        torch.testing.assert_close(tensors[side][tensors[f"{side}_most_rows"]], order[:8])
        torch.testing.assert_close(tensors[side][tensors[f"{side}_least_rows"]], order.flip(0)[:8])
    letters, known = (datasets.load(name, limit=400) for name in ("demo:letters", "demo:digits"))
    assert (letters.images()[tensors["ood_most_rows"].numpy()] == tensors["ood_most"].numpy()).all()
    unseen = known[halves(len(known), 0)[1]].images()
    assert (unseen[tensors["id_least_rows"].numpy()] == tensors["id_least"].numpy()).all()


def test_the_guard_keeps_what_it_promises_and_loads(made):
    folder = made[0]
    network = load_network(str(folder / "weights.safetensors"))
    guard = igeood.load(folder / "guard.safetensors", network.model)
    known = datasets.load("demo:digits")
    unseen = known[demo.parted(len(known), 0)[1]]
    kept = 1 - np.mean(np.concatenate([guard.predict(b[0]).is_ood for b in network.batches(unseen, 32)]))
    assert kept > 0.89  # of 622, with 621 to calibrate on: four deviations below 95%


def test_given_again_it_does_nothing_twice_and_another_seed_wants_another_folder(made):
    folder, said = made
    files = {
        path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors") if path.name != "guard.safetensors"
    }
    with FEWER:
        again = run("--out", folder)
    assert json.loads(again.stdout) == said
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert "training" not in again.stderr
    other = run("--out", folder, "--seed", "3")
    assert (other.exit_code, "is of another demonstration, or seed; name another folder" in other.stderr) == (2, True)
    nowhere = run("--out", folder / "report.html" / "demo")
    assert (nowhere.exit_code, "Traceback" in nowhere.stderr) == (2, False)
