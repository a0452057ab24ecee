import dataclasses
import json

import click
import pytest
from click.testing import CliRunner

from igeood.bench.datasets import DATASETS, Download
from igeood.cli.data import data
from igeood.errors import InputError


@pytest.fixture
def run(tmp_path):
    def invoke(*arguments):
        return CliRunner().invoke(data, [*arguments, "--root", str(tmp_path / "data")])

    return invoke


def test_list_shows_every_set_and_what_is_there(root, run):
    result = run("list")
    assert result.exit_code == 0
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert [line[0] for line in lines[1:]] == list(DATASETS)
    here = {line[0]: line[-1] for line in lines}
    assert (here["gaussian"], here["isun"], here["svhn"]) == ("ok", "partial: 2", "ok")
    assert "170 MB" in result.stdout
    assert str(root) in result.stderr


def test_list_on_a_terminal_is_a_table(run, monkeypatch):
    monkeypatch.setattr("igeood.cli.progress.on_terminal", lambda _: True)
    result = run("list")
    assert result.exit_code == 0
    assert "cifar-10" in result.stdout
    assert "\t" not in result.stdout


def test_list_as_json(run):
    sets = json.loads(run("list", "--json").stdout)["sets"]
    assert [each["name"] for each in sets] == list(DATASETS)
    assert sets[0]["downloads"][0]["checksum"].startswith("md5:")
    assert sets[0]["state"] == "missing"


@pytest.mark.parametrize("terminal", [True, False])
def test_get_fetches_and_reports_on_stderr(run, web, zipped, tmp_path, pictures, monkeypatch, terminal):
    pictures(tmp_path / "made", ["1.png"])
    content = zipped(tmp_path / "iSUN.zip", {"iSUN/1.png": (tmp_path / "made/1.png").read_bytes()}).read_bytes()
    dataset = dataclasses.replace(
        DATASETS["isun"], counts={"test": 1}, downloads=(Download(web.add("iSUN.zip", content)),)
    )
    monkeypatch.setitem(DATASETS, "isun", dataset)
    monkeypatch.setattr("igeood.cli.progress.on_terminal", lambda _: terminal)
    result = run("get", "isun")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "isun: fetched" in result.stderr
    assert "iSUN.zip" in result.stderr
    again = run("get", "isun", "gaussian", "--json")
    assert [each["fetched"] for each in json.loads(again.stdout)] == [False, False]
    assert "isun: is there" in again.stderr
    assert "gaussian: is made when it is used" in again.stderr
    assert run("verify", "isun").exit_code == 0


def test_get_with_an_unknown_name_fetches_nothing(run):
    error = run("get", "gaussian", "isnu").exception
    assert isinstance(error, InputError)
    assert "did you mean isun" in str(error)


def test_verify_exits_with_2_for_damage_or_a_named_missing_set(root, run):
    assert run("verify").exit_code == 0
    (root / "cifar-100-binary/test.bin").write_bytes(b"short")
    result = run("verify", "--json", "--decode")
    assert result.exit_code == 2
    states = {each["name"]: each["state"] for each in json.loads(result.stdout)}
    assert (states["cifar-100"], states["cifar-10"], states["gaussian"]) == ("damaged", "partial", "ok")
    (root / "cifar-100-binary/test.bin").unlink()
    (root / "cifar-100-binary/train.bin").unlink()
    assert run("verify").exit_code == 0
    result = run("verify", "cifar-100")
    assert result.exit_code == 2
    assert "cifar-100\tmissing\t0 of 60,000" in result.stdout


def test_the_group_is_a_click_group():
    assert isinstance(data, click.Group)
    assert set(data.commands) == {"list", "get", "verify"}
