"""An image classifier of one's own, guarded by its hidden layers: fit, calibrate, predict, explain, save, load."""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import igeood


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
        self.conv2 = nn.Sequential(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after))
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv2(self.conv1(x)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """A stem, three stages, a pooled head: named as torchvision names them."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.layer1, self.layer2, self.layer3 = Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer3(self.layer2(self.layer1(self.conv1(x)))).mean(dim=(2, 3)))


def train(model: nn.Module, loader: DataLoader, epochs: int) -> None:
    """Plain training; a guard only ever sees the result."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def main() -> None:
    """Train on the digits 0…7, guard, and judge 8 and 9."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    known = labels < 8  # the network learns 0…7; 8 and 9 are what it was not made for
    x, y, foreign = images[known], labels[known], images[~known]
    order = torch.randperm(len(x))
    parts = [TensorDataset(x[rows], y[rows]) for rows in (order[:800], order[800:1150], order[1150:])]
    model = SmallResNet(classes=8)
    train(model, DataLoader(parts[0], batch_size=64, shuffle=True), epochs=4)
    model.eval()
    train_loader, held_out_loader, test_loader = (DataLoader(part, batch_size=256) for part in parts)

    guard = igeood.white_box(model).fit(train_loader).calibrate(held_out_loader, tpr=0.95)
    print(f"layers read: {', '.join(guard.layers)}")
    print(f"promise: {guard.promise}")
    for name, data in (("digits 0…7", test_loader), ("digits 8, 9", foreign), ("noise", torch.rand(300, 1, 8, 8))):
        print(f"{name:<12} {100 * guard.predict(data).is_ood.float().mean():5.1f}% refused")
    print(guard.explain(foreign[:1]))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "guard.safetensors"
        guard.save(path)
        again = igeood.load(path, model)
        print(f"loaded guard agrees: {torch.equal(again.score(foreign), guard.score(foreign))}")


if __name__ == "__main__":
    main()
