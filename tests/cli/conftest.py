"""A folder with what the commands take: logits files, guards, images, a model's module, a small benchmark."""

import shutil
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import igeood
from igeood.cli import main

NETS = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))

def fails():
    raise ValueError("first line\\nsecond")

class Pair(nn.Linear):
    def forward(self, left, right):
        return super().forward(torch.cat([left, right], dim=1))

net, dict = make(), dict
pair = Pair(6, 3).eval()
"""


@pytest.fixture(scope="session")
def run():
    """Runs a command in this process; returns click's result."""

    def invoke(*arguments, root=None):
        environment = {"IGEOOD_DATA": None if root is None else str(root)}
        return CliRunner(env=environment).invoke(main, [str(one) for one in arguments], prog_name="igeood")

    return invoke


@pytest.fixture(scope="session")
def good(run):
    """Runs a command that has to end well; returns its stdout."""

    def invoke(*arguments, **options):
        result = run(*arguments, **options)
        assert result.exit_code == 0, result.output
        return result.stdout

    return invoke


@pytest.fixture(scope="session")
def bad(run):
    """Runs a command that has to fail, with nothing on stdout; returns the line that says why, the last."""

    def invoke(*arguments, **options):
        result = run(*arguments, **options)
        assert (result.exit_code, result.stdout, "Traceback" in result.stderr) == (2, "", False), result.output
        line = result.stderr.splitlines()[-1]
        assert line.startswith("igeood: ")
        return line

    return invoke


@pytest.fixture(scope="session")
def made(known, tmp_path_factory):
    """Logits files, and guards with and without a threshold."""
    folder = tmp_path_factory.mktemp("made")
    for name in ("train", "held_out", "test", "ood"):
        outputs = getattr(known, name)
        igeood.write_logits(folder / f"{name}.parquet", outputs, ids=[f"{name}-{3 * i}" for i in range(400)])
        igeood.write_logits(folder / f"{name}.npz", outputs)
    guard = igeood.black_box().fit(known.train.logits, known.train.labels)
    guard.summary.save(folder / "train.summary")
    guard.save(folder / "fitted.safetensors")
    guard.calibrate(known.held_out.logits).save(folder / "guard.safetensors")
    guard.predict(known.test.logits.numpy()).to_pandas().to_csv(folder / "verdicts.csv", index=False)
    return folder


@pytest.fixture
def files(made, tmp_path, monkeypatch):
    """A copy of them as the current folder."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_images(folder, n, draw, tint):
    folder.mkdir(parents=True)
    for i in range(n):
        pixels = draw.integers(0, 100, (26, 20, 3)) + np.asarray(tint)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i:02}.png")


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """Folders of images of three classes, and the module of a model."""
    folder, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for part in ("train", "held", "foreign"):
        for c, name in enumerate(("ant", "bee", "cat")):
            tint = 150 * draw.random() if part == "foreign" else 60 * np.eye(3)[c]
            write_images(folder / part / name, 25, draw, tint)
    (folder / "nets.py").write_text(NETS)
    return folder


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


@pytest.fixture(scope="session")
def laboratory(good, tmp_path_factory):
    """A data root with few images, a network that was trained on them for an epoch, and results of a benchmark."""
    folder, draw = tmp_path_factory.mktemp("laboratory"), np.random.default_rng(0)
    (folder / "cifar-10-batches-bin").mkdir()
    for name in ("data_batch_1", "test_batch"):
        records = draw.integers(0, 256, size=(100, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(100) % 10
        records.tofile(folder / "cifar-10-batches-bin" / f"{name}.bin")
    write_images(folder / "red", 45, draw, (150, 0, 0))
    network, ood = folder / "net.safetensors", f"folder:{folder / 'red'}"
    good("train", "resnet-10-16", "--epochs", 1, "--batch", 50, "--out", network, root=folder)
    quick = ["--setting", "black-box", "--method", "energy", "--images", 40, "--out", folder / "results"]
    good("bench", "--network", network, "--ood", ood, *quick, root=folder)
    return folder
