"""DenseNet-BC for 32×32 images (Huang et al., 2017): bottleneck layers and compression 0.5."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


class _Layer(nn.Module):
    """BN-ReLU-1×1, BN-ReLU-3×3: adds ``growth`` channels to its input."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate the new channels to ``x``: (N, c, H, W) → (N, c + growth, H, W)."""
        out = self.conv1(functional.relu(self.bn1(x)))
        out = self.conv2(functional.relu(self.bn2(out)))
        return torch.cat([x, out], dim=1)


class _Block(nn.Module):
    def __init__(self, layers: int, channels: int, growth: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(*(_Layer(channels + i * growth, growth) for i in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layer(x))


class _Transition(nn.Module):
    """BN-ReLU-1×1, then 2×2 average pooling."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, out_channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.avg_pool2d(self.conv1(functional.relu(self.bn1(x))), 2)


class DenseNet(nn.Module):
    """DenseNet-BC: a first convolution, three dense blocks with two transitions, a linear classifier.

    Parameters
    ----------
    depth : int
        Number of layers, ``6n + 4``.
    growth : int
        Channels that each layer adds.
    classes : int
        Width of the logits.
    """

    def __init__(self, *, depth: int, growth: int, classes: int) -> None:
        super().__init__()
        layers = (depth - 4) // 6
        more, channels = layers * growth, 2 * growth
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.block1 = _Block(layers, channels, growth)
        self.trans1 = _Transition(channels + more, channels := (channels + more) // 2)
        self.block2 = _Block(layers, channels, growth)
        self.trans2 = _Transition(channels + more, channels := (channels + more) // 2)
        self.block3 = _Block(layers, channels, growth)
        channels += more
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, classes) of normalised images (N, 3, 32, 32)."""
        out = self.trans1(self.block1(self.conv1(x)))
        out = self.block3(self.trans2(self.block2(out)))
        out = self.relu(self.bn1(out))
        return cast(Tensor, self.fc(out.mean(dim=(2, 3))))


def densenet_bc_100(classes: int = 10) -> DenseNet:
    """DenseNet-BC-100 with growth 12, the paper's first network: 769,162 parameters at ten classes.

    Its state-dict keys are ``conv1``, ``block1.layer.0.bn1``, …, ``trans1.conv1``, …, ``bn1``, ``fc``.

    >>> sum(p.numel() for p in densenet_bc_100().parameters())
    769162
    """
    return DenseNet(depth=100, growth=12, classes=classes)
