"""`igeood report`, as a user runs it."""

import json

import pytest
from click.testing import CliRunner

from igeood.cli import main


def run(*arguments):
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def assert_told(found, *parts):
    assert found.exit_code == 2, found.output
    lines = [line for line in found.stderr.splitlines() if line.startswith("igeood: ")]
    assert len(lines) == 1, found.stderr
    assert all(part in lines[0] for part in parts), lines[0]


def test_a_page_and_its_verdict(full, tmp_path):
    out = tmp_path / "page.html"
    found = run(full.folder, "--out", out)
    assert found.exit_code == 0, found.output
    assert "verdicts: resnet-10-16, CIFAR-10 IGEOOD+ (white box, tuned on Gaussian noise) refuses " in found.stdout
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_json(full, tmp_path):
    found = json.loads(run(full.folder, "--out", tmp_path / "page.html", "--json").stdout)
    assert found["bytes"] == (tmp_path / "page.html").stat().st_size
    assert list(found["verdicts"]) == ["resnet-10-16, CIFAR-10"]


def test_what_the_user_must_mend(full, maker, tmp_path):
    assert_told(run(tmp_path / "none"), "no results.jsonl in", "igeood bench")
    (maker.folder / "results.jsonl").touch()
    assert_told(run(maker.folder, "--out", tmp_path / "x.html"), "nothing was measured")
    assert_told(run(full.folder, "--out", tmp_path / "none" / "x.html"), "is no folder; make it first")
    assert_told(run(full.folder, "--validation", "isun"), "validation: no results tuned on 'isun'")
    assert_told(run(full.folder, "--guard", maker.folder / "results.jsonl"), "no guard file")
    assert not list(tmp_path.glob("*.html"))


def test_a_file_that_cannot_be_replaced(full, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    found = run(full.folder, "--out", tmp_path / "x.html")
    if "Permission denied" not in found.stderr:
        pytest.fail(found.output)
    assert found.exit_code == 2
    assert not list(tmp_path.iterdir())
