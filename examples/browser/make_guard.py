"""A guard for the browser: trains a small network on the digits 0 to 7, guards it, and writes guard.onnx and samples/.

python examples/browser/make_guard.py [FOLDER]
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

import igeood


def main(folder: Path) -> None:
    """Train, guard, export, and write some pictures to judge."""
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    known = (labels < 8).nonzero()[:, 0]
    train, held_out, test = known[torch.randperm(len(known))].split([800, 350, len(known) - 1150])
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32),
        nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(64, 8),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(8):
        for rows in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()

    guard = igeood.white_box(model).fit((images[train], labels[train])).calibrate(images[held_out])
    guard.export(folder / "guard.onnx", example=images[test[:8]])
    foreign = (labels >= 8).nonzero()[:, 0]
    wrongly, rightly = (100 * guard.predict(images[rows]).is_ood.float().mean() for rows in (test, foreign))
    print(f"guard.onnx: {wrongly:.1f}% of the digits 0…7 are refused, {rightly:.1f}% of 8 and 9")

    some = [*test, *foreign]  # of each digit the last
    pictures = {f"digit-{int(labels[i])}.png": images[i] for i in sorted(some, key=lambda i: int(labels[i]))}
    pictures |= {"noise.png": torch.rand(1, 8, 8), "stripes.png": (torch.arange(64).reshape(1, 8, 8) % 2).float()}
    (folder / "samples").mkdir(exist_ok=True)
    for name, picture in pictures.items():
        Image.fromarray((255 * picture[0]).round().numpy().astype(np.uint8)).save(folder / "samples" / name)
    (folder / "samples" / "names.json").write_text(json.dumps(list(pictures)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
