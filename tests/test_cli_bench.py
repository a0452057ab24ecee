"""The commands of the benchmark, as a user runs them."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.torch import save_file

from igeood.cli import main
from igeood.networks import build


def run(*arguments, root=None):
    """The command in this process: its result, with standard output and error apart."""
    return CliRunner(env={"IGEOOD_DATA": str(root)} if root else None).invoke(main, [str(a) for a in arguments])


def assert_told(found, *parts):
    """The user is told in one line what to mend."""
    assert found.exit_code == 2, found.output
    lines = [line for line in found.stderr.splitlines() if line.startswith("igeood: ")]
    assert len(lines) == 1, found.stderr
    assert "Traceback" not in found.output
    assert all(part in lines[0] for part in parts), lines[0]


@pytest.fixture
def quick(world):
    """Arguments of a short benchmark."""
    some = ["--setting", "black-box", "--method", "energy", "--method", "igeood-logits", "--images", "40"]
    return ["bench", "--network", world / "net.safetensors", "--ood", f"folder:{world / 'red'}", *some]


def test_bench_then_paper(quick, world, tmp_path):
    found = run(*quick, "--out", tmp_path / "r", "--json", root=world)
    assert found.exit_code == 0, found.output
    cells = [json.loads(line) for line in found.stdout.splitlines()]
    assert [c["method"] for c in cells] == ["energy", "igeood-logits"]
    assert "no --validation" in found.stderr
    again = run(*quick, "--out", tmp_path / "r", root=world)
    assert "resnet-10-16 black-box energy folder:" in again.stdout
    assert f"TNR {100 * cells[0]['tnr']:.1f}" in again.stdout
    assert len((tmp_path / "r" / "results.jsonl").read_text().splitlines()) == 2
    noted = [json.loads(line)["command"] for line in (tmp_path / "r" / "commands.jsonl").read_text().splitlines()]
    given = ["igeood", *map(str, quick), "--out", str(tmp_path / "r")]
    assert noted == [[*given, "--json"], given]
    table = run("paper", "black-box", "--results", tmp_path / "r", "--out", tmp_path / "f")
    assert "| resnet-10-16, CIFAR-10 |" in table.stdout


def test_bench_finds_the_sets_that_are_there(world, tmp_path):
    network = world / "net.safetensors"
    found = run(
        "bench",
        "--network",
        network,
        "--setting",
        "black-box",
        "--method",
        "msp",
        "--images",
        40,
        "--out",
        tmp_path,
        root=world,
    )
    assert found.exit_code == 0, found.output
    assert "OOD sets: gaussian\n" in found.stderr


def test_train_and_its_errors(tmp_path):
    batches = tmp_path / "cifar-10-batches-bin"
    batches.mkdir()
    draw = np.random.default_rng(0)
    for name in ("data_batch_1", "test_batch"):
        records = draw.integers(0, 256, size=(40, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(40) % 10
        records.tofile(batches / f"{name}.bin")
    out = tmp_path / "net.safetensors"
    arguments = ["train", "resnet-10-16", "--epochs", 1, "--batch", 20, "--out", out]
    found = run(*arguments, "--json", root=tmp_path)
    assert found.exit_code == 0, found.output
    assert set(json.loads(found.stdout)) == {"network", "data", "out", "accuracy", "accuracy_fisher_rao"}
    assert "epoch 1 of 1: loss" in found.stderr
    assert_told(run(*arguments, root=tmp_path), str(out), "is there already")
    assert_told(
        run("train", "resnet34", "--out", tmp_path / "x.safetensors", root=tmp_path), "did you mean 'resnet-34'"
    )
    arguments[-1] = tmp_path / "y.safetensors"
    (batches / "data_batch_1.bin").write_bytes(b"x" * 5000)
    assert_told(run(*arguments, root=tmp_path), "data_batch_1.bin", "truncated; fetch the set again")
    assert_told(run(*arguments, root=tmp_path / "none"), "none/cifar-10-batches-bin", "igeood data get cifar-10")


def test_what_the_user_must_mend(quick, world, tmp_path):
    out = ["--out", tmp_path / "r"]
    assert_told(
        run(*quick, "--ood", "tiny-imagenet", *out, root=world), "tiny-imagenet", "igeood data get tiny-imagenet"
    )
    assert_told(run(*quick, "--ood", "tinyimagenet", *out, root=world), "did you mean tiny-imagenet")
    assert_told(run(*quick, "--method", "magic", *out, root=world), "no 'magic'")
    assert_told(run(*quick, "--setting", "blackbox", *out, root=world), "did you mean 'black-box'")
    assert_told(
        run("train", "resnet-10-16", "--data", "chars74k", "--out", tmp_path / "c.safetensors"), "no training images"
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    assert_told(run(*quick, "--ood", f"folder:{empty}", *out, root=world), str(empty), "no image files")
    (empty / "broken.png").write_bytes(b"this is no picture")
    assert_told(run(*quick, "--ood", f"folder:{empty}", *out, root=world), "broken.png", "remove it")
    (tmp_path / "w.safetensors").write_bytes(b"nothing")
    assert_told(run("bench", "--network", tmp_path / "w.safetensors", *out, root=world), "w.safetensors", "is damaged")
    save_file(build("resnet-10-16").state_dict(), tmp_path / "w.safetensors")
    other = f"resnet-34:{tmp_path / 'w.safetensors'}"
    assert_told(run("bench", "--network", other, "--in-distribution", "cifar-10", *out, root=world), "of another shape")
    assert_told(run("paper", "black-box", "--results", tmp_path / "none"), "none", "igeood bench")
    assert_told(run("paper", "table-9"), "no 'table-9'")


def test_finished_cells_stay_when_a_later_one_fails(quick, world, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "broken.png").write_bytes(b"this is no picture")
    assert_told(run(*quick, "--ood", f"folder:{broken}", "--out", tmp_path / "r", root=world), "broken.png")
    kept = [json.loads(line) for line in (tmp_path / "r" / "results.jsonl").read_text().splitlines()]
    assert [c["method"] for c in kept] == ["energy"]


def test_a_full_disk_is_told(quick, world, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert_told(
        run(*quick, "--out", tmp_path / "r", root=world), ".safetensors: No space left", "what was finished is kept"
    )


def test_a_place_that_cannot_be_written(quick, world, tmp_path):
    (tmp_path / "file").write_text("in the way")
    found = run(*quick, "--out", tmp_path / "file" / "r", root=world)
    assert_told(found, "file")


def test_a_reader_that_leaves_gets_no_traceback():
    code = "import sys; sys.argv = ['igeood', 'paper', 'others']; from igeood.cli import main; main()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        told = process.stderr.read().decode()
        process.wait()
    assert "Traceback" not in told
    assert process.returncode != 0
