"""The commands on guards with a model: images in, verdicts out."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import igeood
from igeood.images import class_labels, image_files, read_image

PREPARED = ["--size", "16", "--mean", "0.5,0.4,0.3", "--std", "0.2"]


def pixels_of(name):
    """Images (N, 3, 16, 16) of a folder, in [0, 1]."""
    return np.stack([read_image(path, 16) for path in image_files(Path(name))]).astype(np.float32) / 255


@pytest.mark.parametrize("access", ["black-box", "grey-box", "white-box"])
def test_a_model_the_whole_way(good, nets, access):
    torch.save(nets.make().state_dict(), "w.pt")
    model = ["--model", "nets:make", "--weights", "w.pt", "--batch", "30"]
    options = ["--out", "g.safetensors", "--access", access, *model, *PREPARED]
    about = json.loads(good("fit", "folder:train", *options, "--json"))
    assert (about["classes"], about["samples"]) == (3, 75)
    good("tune", "g.safetensors", "--train", "train", "--id", "held", "--ood", "foreign", *model)
    good("calibrate", "g.safetensors", "folder:held", "--tpr", "0.9", "--model", "nets:net")
    rows = list(csv.DictReader(good("score", "g.safetensors", "folder:foreign", *model).splitlines()))
    assert rows[0]["id"].endswith("foreign/ant/00.png")

    x = (torch.from_numpy(pixels_of("foreign")) - torch.tensor([0.5, 0.4, 0.3])[:, None, None]) / 0.2
    guard = igeood.load("g.safetensors", nets.net)
    assert (guard.access, guard.source.std) == (access.replace("-", " "), [0.2, 0.2, 0.2])
    expected = guard.predict(list(x.split(30)))
    np.testing.assert_allclose([float(row["score"]) for row in rows], expected.score, rtol=1e-4, atol=1e-5)
    assert [int(row["label"]) for row in rows] == expected.label.tolist()


@pytest.mark.usefixtures("nets")
def test_a_broken_image_is_refused_by_its_name_and_folders_name_the_classes(run, good):
    model = ["--model", "nets:make", "--batch", "30"]
    good("fit", "folder:train", "--out", "g.safetensors", *model, *PREPARED)
    good("calibrate", "g.safetensors", "folder:held", "--tpr", "0.9", *model)
    shutil.copytree("foreign", "some")
    expected = list(csv.DictReader(good("score", "g.safetensors", "folder:some", *model).splitlines()))
    assert all(row["class"] == ("ant", "bee", "cat")[int(row["label"])] for row in expected)
    Path("some/ant/03.png").write_bytes(b"no picture")
    result = run("score", "g.safetensors", "folder:some", *model)
    assert "1 of 75" in result.stderr
    rows = list(csv.DictReader(result.stdout.splitlines()))
    assert "some/ant/03.png" in rows[3]["reason"]
    assert [rows[3][name] for name in ("score", "is_ood", "label", "class")] == ["inf", "true", "-1", ""]
    assert rows[:3] + rows[4:] == expected[:3] + expected[4:]
    assert run("score", "g.safetensors", "folder:some", *model, "--on-error", "raise").exit_code == 2


FIT = "fit folder:train --out new.safetensors"
FAILURES = {  # a line, and what its error has to name
    f"{FIT} --size 16 --model nets:mak": "--model",
    f"{FIT} --size 16 --model nets:fails": "first line second",
    f"{FIT} --size 16 --model nets:dict": "--model",
    f"{FIT} --size 16 --model nets:make --std 0.1,0.2": "--std",
    f"{FIT} --size 16 --model nets:make --workers 2": "--workers",
    f"{FIT} --model nets:make": "--size",
    f"{FIT} --weights w.pt": "--model",
    "score g.safetensors folder:held": "--model",
    "score g.safetensors folder:held --model nets:make": "guard",
    "score g.safetensors folder:held --model nets:make --out folder/": "--out",
}


def test_what_is_wrong_with_a_model_or_its_images_is_one_line(run, nets):
    labels = class_labels(Path("train"), image_files(Path("train")))[1]
    igeood.black_box(nets.net).fit(torch.from_numpy(pixels_of("train")), labels).save("g.safetensors")
    for line, fact in FAILURES.items():
        result = run(*line.split())
        said = [text for text in result.stderr.splitlines() if text.startswith("igeood: ")]
        assert (result.exit_code, len(said), Path("new.safetensors").exists()) == (2, 1, False), result.output
        assert fact in said[0]


def test_an_exception_of_the_model_passes_with_its_cause(run, nets, monkeypatch):
    def forward(*_):
        raise ZeroDivisionError("of the user's own")

    monkeypatch.setattr(nets.net, "forward", forward)
    error = run(*FIT.split(), "--size", "16", "--model", "nets:net").exception
    assert "of the user's own" in (str(error), str(error.__cause__))
