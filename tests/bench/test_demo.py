"""The demonstration, run once as a user runs it."""

import json
from unittest.mock import patch

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import igeood
from igeood.bench import datasets, demo
from igeood.bench.guarded import Guarded
from igeood.bench.runs import Results, load_network
from igeood.cli import main


def run(*arguments):
    with patch.multiple(demo, IMAGES=120, EPOCHS=3):
        return CliRunner().invoke(main, ["demo", *map(str, arguments)])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder, and what the command printed, with fewer images and epochs than a user gets."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    result = run("--out", folder)
    assert result.exit_code == 0, result.stderr
    return folder, result.stdout


def test_its_figures_are_in_the_story_and_in_the_report(made):
    folder, printed = made
    page = (folder / "report.html").read_text(encoding="utf-8")
    guarded = Guarded.load(folder)
    known, *foreign = guarded.sets
    assert known.refused < 0.15  # at least 95% are kept on average, and 361 digits rarely differ by 10 points
    for share in (1 - known.refused, *(one.refused for one in foreign)):
        assert f"{share:.1%}" in printed
        assert f"{share:.1%}" in page
    cells = Results(folder).cells.records
    assert {(c["method"], c["ood"]) for c in cells} == {(m, ood) for m in demo.METHODS for ood in demo.OOD}


def test_the_guard_and_its_pictures_are_those_of_the_files(made):
    folder = made[0]
    network = load_network(str(folder / "weights.safetensors"))
    guard = igeood.load(folder / "guard.safetensors", network.model)
    guarded = Guarded.load(folder)
    assert (guarded.promise, guarded.threshold) == (guard.promise, guard.threshold)
    known = datasets.load("demo:digits")
    held_out, unseen = demo.parted(len(known), 0)
    assert not {*held_out.tolist()} & {*unseen.tolist()}
    sets = [known[unseen], *(datasets.load(name, limit=120) for name in demo.OOD)]
    for one, images in zip(guarded.sets, sets, strict=True):
        verdict = guard.predict(list(network.batches(images, 32)))
        torch.testing.assert_close(one.scores, torch.as_tensor(verdict.score), rtol=1e-4, atol=1e-4)
        assert one.refused == pytest.approx(float(np.mean(np.asarray(verdict.is_ood))), abs=1 / len(images))
        rows = [picture.row for picture in one.pictures]
        assert (torch.from_numpy(images[rows].images()) == one.images).all()


@pytest.mark.slow
def test_given_again_it_trains_no_more_and_another_seed_wants_another_folder(made):
    folder, printed = made
    again = run("--out", folder)
    assert again.stdout == printed
    assert "training" not in again.stderr
    assert run("--out", folder, "--seed", "3").exit_code == 2
    assert list(json.loads(run("--out", folder, "--json").stdout)["methods"]) == list(demo.METHODS)
