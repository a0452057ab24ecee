"""`igeood report`, as a user runs it."""

import json

import pytest
from click.testing import CliRunner

from igeood.cli import main


def run(*arguments):
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def test_a_page_and_its_verdicts(full, tmp_path):
    result = run(full.folder, "--out", tmp_path / "page.html", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["bytes"] == (tmp_path / "page.html").stat().st_size
    assert list(said["verdicts"]) == ["resnet-10-16, CIFAR-10"]
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{empty}/none"], "no results.jsonl in"),
        (["{empty}"], "nothing was measured"),
        (["{full}", "--validation", "isun"], "validation: no results tuned on 'isun'"),
        (["{full}", "--guard", "{empty}/results.jsonl"], "no guard file"),
    ],
)
def test_what_the_user_must_fix(full, maker, arguments, message):
    (maker.folder / "results.jsonl").touch()
    result = run(*(text.format(full=full.folder, empty=maker.folder) for text in arguments))
    assert result.exit_code == 2
    assert message in result.stderr
    assert not list(maker.folder.rglob("*.html"))
