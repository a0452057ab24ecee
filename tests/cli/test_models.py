"""The commands on guards with a model: images in, verdicts out."""

import csv
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import igeood
from igeood.bench import datasets
from igeood.images import class_labels, image_files

PREPARED = ["--size", "16", "--mean", "0.5,0.4,0.3", "--std", "0.2"]


@pytest.fixture
def nets(images, tmp_path, monkeypatch):
    """The folder of images as one of the current folder's, with the module of the models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    for path in images.iterdir():
        (tmp_path / path.name).symlink_to(path)
    import nets  # noqa: PLC0415 (of that folder)

    return nets


@pytest.mark.parametrize("access", ["black-box", "grey-box", "white-box"])
def test_a_model_the_whole_way(good, nets, access):
    torch.save(nets.make().state_dict(), "w.pt")
    model = ["--model", "nets:make", "--weights", "w.pt", "--batch", "30"]
    options = ["--out", "g.safetensors", "--access", access, *model, *PREPARED]
    about = json.loads(good("fit", "folder:train", *options, "--json"))
    assert (about["classes"], about["samples"]) == (3, 75)
    sets = ["--train", "folder:train", "--id", "folder:held"]
    if access == "white-box":
        tuned = json.loads(good("tune", "g.safetensors", *sets, "--ood", "fgsm", *model, "--json"))
        assert (tuned["temperature"], tuned["id"]) == (None, tuned["ood"])
    good("tune", "g.safetensors", *sets, "--ood", "folder:foreign", *model)
    good("calibrate", "g.safetensors", "folder:held", "--tpr", "0.9", "--model", "nets:net")
    rows = list(csv.DictReader(good("score", "g.safetensors", "folder:foreign", *model).splitlines()))
    assert rows[0]["id"].endswith("foreign/ant/00.png")

    pixels = datasets.load("folder:foreign", side=16).images() / 255.0
    x = torch.tensor((pixels - np.array([0.5, 0.4, 0.3]).reshape(3, 1, 1)) / 0.2, dtype=torch.float32)
    guard = igeood.load("g.safetensors", nets.net)
    assert (guard.access, guard.inputs.std) == (access.replace("-", " "), [0.2, 0.2, 0.2])
    expected = guard.predict(list(x.split(30)))
    np.testing.assert_allclose([float(row["score"]) for row in rows], expected.score, rtol=1e-4, atol=1e-5)
    assert [int(row["label"]) for row in rows] == expected.label.tolist()


@pytest.mark.usefixtures("nets")
def test_a_broken_image_is_refused_by_its_name_and_folders_name_the_classes(run, good):
    model = ["--model", "nets:make", "--batch", "30"]
    good("fit", "folder:train", "--out", "g.safetensors", *model, *PREPARED)
    good("tune", "g.safetensors", "--train", "folder:train", "--id", "folder:held", "--ood", "folder:foreign", *model)
    good("calibrate", "g.safetensors", "folder:held", "--tpr", "0.9", *model)
    shutil.copytree("foreign", "some")
    expected = list(csv.DictReader(good("score", "g.safetensors", "folder:some", *model).splitlines()))
    assert {row["class"] for row in expected} <= {"ant", "bee", "cat"}
    assert all(row["class"] == ("ant", "bee", "cat")[int(row["label"])] for row in expected)
    Path("some/ant/03.png").write_bytes(b"no picture")
    result = run("score", "g.safetensors", "folder:some", *model)
    assert "1 of 75 rows could not be read and are refused; first: " in result.stderr
    rows = list(csv.DictReader(result.stdout.splitlines()))
    assert "some/ant/03.png: does not decode" in rows[3]["reason"]
    assert [rows[3][name] for name in ("score", "is_ood", "label", "class")] == ["inf", "true", "-1", ""]
    assert rows[:3] + rows[4:] == expected[:3] + expected[4:]
    assert run("score", "g.safetensors", "folder:some", *model, "--on-error", "raise").exit_code == 2


FIT = ("fit", "folder:train", "--out", "new.safetensors", "--size", "16", "--model")
FAILURES = [
    ((*FIT, "nets:mak"), "'mak'; give MODULE:NAME, such as nets:make_model for nets.py"),
    ((*FIT, "nets:fails"), "model: nets:fails failed: ValueError: first line second"),
    ((*FIT, "nets:dict"), "model: nets:dict is dict"),
    ((*FIT, "nets:make", "--std", "0.1,0.2"), "std: expected one number, or three"),
    (("fit", "folder:train", "--out", "new.safetensors", "--model", "nets:make"), "size: how many pixels"),
    (("fit", "folder:train", "--out", "new.safetensors", "--weights", "w.pt"), "weights: need their model"),
    (("score", "g.safetensors", "folder:held"), "needs its model: give --model"),
    (("score", "g.safetensors", "folder:held", "--model", "nets:make"), "guard: "),
]


@pytest.mark.parametrize(("arguments", "message"), FAILURES, ids=lambda value: str(value)[-50:])
def test_what_is_wrong_with_a_model_or_its_images_is_one_line(run, nets, arguments, message):
    if "g.safetensors" in arguments:
        pixels = datasets.load("folder:train", side=16).images().astype(np.float32) / 255
        labels = class_labels(Path("train"), image_files(Path("train")))[1]
        igeood.black_box(nets.net).fit(pixels, labels).save("g.safetensors")
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert sum(line.startswith("igeood: ") for line in result.stderr.splitlines()) == 1
    assert not Path("new.safetensors").exists()


def test_an_exception_of_the_model_passes_with_its_cause(run, nets, monkeypatch):
    def forward(*_):
        raise ZeroDivisionError("of the user's own")

    monkeypatch.setattr(nets.net, "forward", forward)
    error = run(*FIT, "nets:net").exception
    assert "of the user's own" in (str(error), str(error.__cause__))
