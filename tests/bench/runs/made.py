"""A small world to benchmark in: CIFAR-10's layout with few images, two folders of pictures, a network."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from igeood.benchmark import Plan, load_network, run
from igeood.networks import build


def pictures(n, seed, tint):
    """Images (n, 3, 32, 32) whose class is where a bright square is."""
    draw = np.random.default_rng(seed)
    images = draw.integers(0, 80, size=(n, 3, 32, 32), dtype=np.uint8)
    labels = np.arange(n) % 10
    for i, label in enumerate(labels):
        row, column = divmod(int(label), 4)
        images[i, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += np.uint8(120)
    images[:, tint] //= 2
    return images, labels


def make_world(folder: Path) -> Path:
    """Write the data root with everything in it, and give its path."""
    batches = folder / "cifar-10-batches-bin"
    batches.mkdir(parents=True)
    for name, n, seed in (("data_batch_1", 200, 0), ("test_batch", 160, 1)):
        images, labels = pictures(n, seed, 0)
        np.concatenate([labels[:, None].astype(np.uint8), images.reshape(n, -1)], axis=1).tofile(
            batches / f"{name}.bin"
        )
    for name, seed in (("red", 2), ("blue", 3)):
        (folder / name).mkdir()
        for i, image in enumerate(pictures(60, seed, seed - 1)[0]):
            Image.fromarray(image.transpose(1, 2, 0)).save(folder / name / f"{i:03d}.png")
    torch.manual_seed(0)
    about = {"network": "resnet-10-16", "trained_on": "cifar-10", "classes": "10"}
    save_file(build("resnet-10-16").state_dict(), folder / "net.safetensors", about)
    return folder


def make_plan(world: Path, **changes) -> Plan:
    ood = (f"folder:{world / 'red'}", "gaussian")
    options = {"ood": ood, "validation": (f"folder:{world / 'blue'}",), "limit": 20, "images": 80, "splits": 1}
    return Plan(**{**options, **changes})


if __name__ == "__main__":  # what the tests start and kill
    root, out, changes = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    changes = {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}
    run([load_network(str(root / "net.safetensors"))], make_plan(root, **changes), out, root=root)
