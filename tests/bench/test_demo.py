"""The demonstration, run once as a user runs it."""

import json
from unittest.mock import patch

import numpy as np
import pytest
from click.testing import CliRunner

import igeood
from igeood.bench import datasets, demo
from igeood.bench.runs import Results, load_network
from igeood.checking.result import percent
from igeood.cli import main


def run(*arguments):
    with patch.multiple(demo, IMAGES=120, EPOCHS=3):
        return CliRunner().invoke(main, ["demo", *map(str, arguments)])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder, and what the command printed, with fewer images and epochs than a user gets."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    result = run("--out", folder, "--json")
    assert result.exit_code == 0, result.stderr
    return folder, json.loads(result.stdout)


def test_its_figures_are_those_of_the_files_on_digits_that_the_guard_has_not_seen(made):
    folder, told = made
    network = load_network(str(folder / "weights.safetensors"))
    guard = igeood.load(folder / "guard.safetensors", network.model)
    assert told["promise"] == guard.promise
    known = datasets.load("demo:digits")
    held_out, unseen = demo.parted(len(known), 0)
    assert not {*held_out.tolist()} & {*unseen.tolist()}
    rows = {row["name"]: row for row in told["rows"] if row["what"] in ("held out", "ood")}
    assert rows["all"]["kept"] > 0.85  # at least 95% are kept on average, and 362 digits rarely differ by 10 points
    assert (rows["all"]["n"], told["left_out"]) == (len(unseen), 0)
    for title, images in {demo.OOD[name]: datasets.load(name, limit=120) for name in demo.OOD}.items():
        verdict = guard.predict(list(network.batches(images, 32)))
        share = float(np.mean(np.asarray(verdict.is_ood)))
        assert rows[title]["refused"] == pytest.approx(share, abs=1 / len(images))  # a score may be at the threshold
    cells = Results(folder).cells.records
    assert {(c["method"], c["ood"]) for c in cells} == {(m, ood) for m in demo.METHODS for ood in demo.OOD}
    assert list(told["methods"]) == list(demo.METHODS)


@pytest.mark.parametrize("name", ["report.html", "methods.html"])
def test_its_pages_need_no_network_and_fit_a_phone_and_a_screen(made, open_page, name):
    for width in (390, 1280):
        page = open_page((made[0] / name).as_uri(), width)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.scrollHeight") <= 5000  # before anything is unfolded


@pytest.mark.slow
def test_given_again_it_trains_no_more_and_another_seed_wants_another_folder(made):
    folder, told = made
    again = run("--out", folder)
    assert "training" not in again.stderr
    shares = [percent(row["refused"]) for row in told["rows"] if row["what"] == "ood"]
    for text in (*shares, *demo.OOD.values(), told["promise"], told["report"]):
        assert text in again.stdout
    assert run("--out", folder, "--seed", "3").exit_code == 2
