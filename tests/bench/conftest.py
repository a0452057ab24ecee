"""A small world to benchmark in: CIFAR-10's layout with few images, two folders of pictures, a network."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from igeood.bench.networks import build
from igeood.bench.runs import Plan, load_network, run


def pictures(n, seed, tint):
    """Images (n, 3, 32, 32) whose class is where a bright square is."""
    images = np.random.default_rng(seed).integers(0, 80, size=(n, 3, 32, 32), dtype=np.uint8)
    labels = np.arange(n) % 10
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 4)
        image[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += np.uint8(120)
    images[:, tint] //= 2
    return images, labels


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A data root with few images, and a network's weights."""
    folder = tmp_path_factory.mktemp("world")
    batches = folder / "cifar-10-batches-bin"
    batches.mkdir(parents=True)
    for name, n, seed in (("data_batch_1", 200, 0), ("test_batch", 160, 1)):
        images, labels = pictures(n, seed, 0)
        records = np.concatenate([labels[:, None].astype(np.uint8), images.reshape(n, -1)], axis=1)
        records.tofile(batches / f"{name}.bin")
    for name, seed in (("red", 2), ("blue", 3)):
        (folder / name).mkdir()
        for i, image in enumerate(pictures(60, seed, seed - 1)[0]):
            Image.fromarray(image.transpose(1, 2, 0)).save(folder / name / f"{i:03d}.png")
    torch.manual_seed(0)
    about = {"network": "resnet-10-16", "trained_on": "cifar-10", "classes": "10"}
    save_file(build("resnet-10-16").state_dict(), folder / "net.safetensors", about)
    return folder


@pytest.fixture(scope="session")
def network(world):
    return load_network(str(world / "net.safetensors"))


@pytest.fixture(scope="session")
def plan(world):
    """Makes a plan for that world."""

    def make(**changes):
        ood = (f"folder:{world / 'red'}", "gaussian")
        options = {"ood": ood, "validation": (f"folder:{world / 'blue'}",), "limit": 25, "images": 80, "splits": 1}
        return Plan(**{**options, **changes})

    return make


def few_strengths():
    """A context in which regressions choose between two strengths: what is tested is who tunes on what."""
    return patch("igeood.detectors.weighted.Weighted.strengths", (0.01, 1.0))


@pytest.fixture(scope="module", autouse=True)
def _few_strengths():
    with few_strengths():
        yield


@pytest.fixture(scope="session")
def whole(world, network, plan, tmp_path_factory):
    """Results of an unbroken run of everything in that world."""
    with few_strengths():
        return run([network], plan(), tmp_path_factory.mktemp("whole"), root=world)
