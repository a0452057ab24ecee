"""A small trained classifier of images, and what it was and was not made for."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def images(n, seed, *, flipped=False):
    """Noisy prototypes of four classes; those that are half flipped are out-of-distribution."""
    prototypes = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (n,), generator=generator)
    chosen = prototypes[labels] if not flipped else 0.4 * prototypes[labels] + 0.6 * prototypes[labels].flip(-1)
    return (0.2 + 0.6 * chosen + 0.15 * torch.randn(n, 3, 8, 8, generator=generator)).clamp(0, 1), labels


def loader(n, seed, **options):
    return DataLoader(TensorDataset(*images(n, seed, **options)), batch_size=64)


def train_model():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4),
    )  # fmt: skip
    x, y = images(800, 1)
    parameters = list(net.parameters())
    for _ in range(25):  # by hand: torch.optim takes seconds to import
        gradients = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=0.3)
    return net.eval()


@pytest.fixture(scope="session")
def model():
    return train_model()


@pytest.fixture(scope="session")
def data():
    """Loaders and tensors: training, held-out, OOD validation, test and foreign images; makers of more."""
    return SimpleNamespace(
        images=images, loader=loader, train=loader(800, 1), held_out=loader(400, 2), ood=loader(200, 5, flipped=True),
        test=images(300, 3)[0], foreign=images(200, 4, flipped=True)[0],
    )  # fmt: skip
