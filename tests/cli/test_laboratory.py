"""The commands of the laboratory, as a user runs them."""

import json

from igeood.bench.datasets import DATASETS


def test_bench_then_paper_then_report_and_bench_on_the_sets_that_are_there(run, good, laboratory, tmp_path):
    out = tmp_path / "r"
    sets = ["--ood", f"folder:{laboratory / 'red'}", "--setting", "black-box", "--images", 40]
    line = ["bench", "--network", laboratory / "net.safetensors", *sets, "--method", "energy", "--out", out]
    (cell,) = map(json.loads, good(*line, "--json", root=laboratory).splitlines())
    assert (cell["method"], cell["setting"]) == ("energy", "black-box")
    again = run(*line, "--method", "msp", root=laboratory)
    assert [text.split()[2] for text in again.stdout.splitlines()] == ["energy", "msp"]
    assert f"TNR {100 * cell['tnr']:.1f}" in again.stdout
    noted = [json.loads(text)["command"] for text in (out / "commands.jsonl").read_text().splitlines()]
    assert noted == [["igeood", *map(str, line), *rest] for rest in (["--json"], ["--method", "msp"])]

    assert "resnet-10-16" in good("paper", "black-box", "--results", out, "--out", tmp_path / "f")
    assert json.loads(good("report", out, "--json"))["bytes"] == (out / "methods.html").stat().st_size

    some = ["--setting", "black-box", "--method", "msp", "--images", 40, "--out", tmp_path / "s"]
    result = run("bench", "--network", laboratory / "net.safetensors", *some, root=laboratory)
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    assert "gaussian" in line  # what it was trained on is left out


def test_data(good, laboratory):
    listed = good("data", "list", root=laboratory)
    assert [line.split()[0] for line in listed.splitlines()] == list(DATASETS)
    records = [json.loads(line) for line in good("data", "list", "--root", laboratory, "--json").splitlines()]
    states = {record["name"]: record["state"] for record in records if record["state"] != "missing"}
    assert states == {"cifar-10": "partial", "gaussian": "ok"}
    record = json.loads(good("data", "get", "gaussian", "--json", root=laboratory))
    assert record == {"name": "gaussian", "fetched": False}
