"""A folder of images, a sub-folder a class: guard a classifier of them, and name the foreign files with reasons.

The files are made here, from scikit-learn's digits; point `ImageFolder` at folders of your own.
"""

import tempfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import igeood


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Grey 8×8 images of a folder; the class of each is the place of its sub-folder in the alphabet."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*/*.png"))
        self.classes = sorted({file.parent.name for file in self.files})

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(self.files[index]) as image:
            pixels = np.asarray(image.convert("L").resize((8, 8)), dtype=np.float32) / 255
        return torch.from_numpy(pixels)[None], self.classes.index(self.files[index].parent.name)


def write_images(root: Path) -> None:
    """Digits 0…7 in three parts, and two folders of foreign images: digits 8 and 9."""
    images, digits = load_digits().images, load_digits().target
    for i, (pixels, digit) in enumerate(zip(images, digits, strict=True)):
        part = ("train", "train", "held-out", "test")[i % 4] if digit < 8 else ("foreign", "validation")[i % 2]
        folder = root / part / str(digit)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(folder / f"{i:04}.png")


def train(loader: DataLoader[tuple[Tensor, int]]) -> nn.Module:
    """A small convolutional network, trained for a few seconds."""
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    middle = nn.Sequential(nn.Conv2d(16, 32, 3, 2, padding=1), nn.BatchNorm2d(32), nn.ReLU())
    top = nn.Sequential(nn.Flatten(), nn.Linear(512, 64), nn.BatchNorm1d(64), nn.ReLU())
    model = nn.Sequential(OrderedDict(stem=stem, middle=middle, top=top, head=nn.Linear(64, 8)))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(12):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def main() -> None:
    """Fit, tune on some foreign images, calibrate, and judge others."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_images(root)
        parts = {part: ImageFolder(root / part) for part in ("train", "held-out", "test", "validation", "foreign")}
        loaders = {part: DataLoader(data, batch_size=128) for part, data in parts.items()}
        guard = igeood.white_box(train(loaders["train"]), method="probe").fit(loaders["train"])
        guard.tune(loaders["held-out"], ood=loaders["validation"])
        guard.calibrate(loaders["held-out"], tpr=0.95)  # leaves out what tune used
        print(f"{guard.promise}; {100 * guard.predict(loaders['test']).is_ood.float().mean():.1f}% of test refused")
        verdict, reasons = guard.predict(loaders["foreign"]), str(guard.explain(loaders["foreign"])).splitlines()
        print(f"foreign images: {int(verdict.is_ood.sum())} of {len(verdict)} refused, the first three:")
        for i in verdict.is_ood.nonzero()[:3, 0].tolist():
            file = parts["foreign"].files[i].relative_to(root)
            print(f"  {file} p={verdict.p_value[i]:.4f}, taken for a {int(verdict.label[i])}; {reasons[i]}")


if __name__ == "__main__":
    main()
