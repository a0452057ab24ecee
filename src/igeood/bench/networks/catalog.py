"""Classifiers of 32×32 images: DenseNet-BC (Huang et al., 2017) and ResNet (He et al., 2016), and their table."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from igeood.errors import InputError


class _DenseLayer(nn.Module):
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


class _DenseBlock(nn.Sequential):
    def __init__(self, layers: int, channels: int, growth: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(*(_DenseLayer(channels + i * growth, growth) for i in range(layers)))


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

    With the defaults it is the paper's first network. Its state-dict keys are ``conv1``, ``block1.layer.0.bn1``, …,
    ``trans1.conv1``, …, ``bn1``, ``fc``.

    Parameters
    ----------
    classes : int
        Width of the logits.
    depth : int
        Number of layers, ``6n + 4``.
    growth : int
        Channels that each layer adds.
    """

    def __init__(self, classes: int = 10, *, depth: int = 100, growth: int = 12) -> None:
        super().__init__()
        layers = (depth - 4) // 6
        more = layers * growth  # channels that a block adds
        channels = 2 * growth
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.block1 = _DenseBlock(layers, channels, growth)
        self.trans1 = _Transition(channels + more, (channels + more) // 2)
        channels = (channels + more) // 2
        self.block2 = _DenseBlock(layers, channels, growth)
        self.trans2 = _Transition(channels + more, (channels + more) // 2)
        channels = (channels + more) // 2
        self.block3 = _DenseBlock(layers, channels, growth)
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


class _BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out_channels:
            project = nn.Conv2d(channels, out_channels, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet of basic blocks: a first convolution, four stages, a linear classifier.

    Parameters
    ----------
    classes : int
        Width of the logits.
    blocks : tuple of int
        Number of blocks in each of the four stages; (3, 4, 6, 3) is ResNet-34.
    width : int
        Channels of the first stage; each further one doubles them.
    """

    def __init__(self, classes: int = 10, *, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.layer1 = _stage(width, width, blocks[0], stride=1)
        self.layer2 = _stage(width, 2 * width, blocks[1], stride=2)
        self.layer3 = _stage(2 * width, 4 * width, blocks[2], stride=2)
        self.layer4 = _stage(4 * width, 8 * width, blocks[3], stride=2)
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images: (N, 3, 32, 32) → (N, classes)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
        return cast(Tensor, self.fc(out.mean(dim=(2, 3))))


def _stage(channels: int, out_channels: int, blocks: int, stride: int) -> nn.Sequential:
    rest = (_BasicBlock(out_channels, out_channels, 1) for _ in range(blocks - 1))
    return nn.Sequential(_BasicBlock(channels, out_channels, stride), *rest)


class DeConfHead(nn.Module):
    r"""The head of DeConf-C (Hsu et al., 2020) in place of a linear one: logits :math:`f_i = h_i / g`.

    :math:`h_i = \cos(w_i, z)`, with 1e-4 added to both norms; :math:`g = \mathrm{sigmoid}(\mathrm{BN}(v \cdot z + b))`.
    The weights w are not decayed.
    """

    class _Cosine(nn.Module):
        def __init__(self, width: int, classes: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(nn.init.kaiming_normal_(torch.empty(classes, width)))
            self.weight.no_decay = True  # type: ignore[attr-defined]

        def forward(self, z: Tensor) -> Tensor:
            return _directions(z) @ _directions(self.weight).T

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.h = DeConfHead._Cosine(width, classes)
        self.g = nn.Sequential(nn.Linear(width, 1), nn.BatchNorm1d(1), nn.Sigmoid())

    def forward(self, z: Tensor) -> dict[str, Tensor]:
        """Logits and cosines, each (N, classes), of features (N, width)."""
        h = self.h(z)
        return {"logits": h / self.g(z), "h": h}


def _directions(rows: Tensor) -> Tensor:
    directions: Tensor = rows / (torch.linalg.vector_norm(rows, dim=1, keepdim=True) + 1e-4)
    return directions


HEADS = ("linear", "deconf-c")
NETWORKS: Mapping[str, Callable[[int], nn.Module]] = {
    "densenet-bc-100": DenseNet,
    "densenet-bc-22": partial(DenseNet, depth=22),
    "resnet-34": ResNet,
    "resnet-10-16": partial(ResNet, blocks=(1, 1, 1, 1), width=16),  # trained on a CPU in half an hour
}


def build(name: str, classes: int = 10, *, head: str = "linear") -> nn.Module:
    """A reference classifier with random weights.

    Parameters
    ----------
    name : str
        One of `NETWORKS`.
    classes : int
        Width of the logits.
    head : {"linear", "deconf-c"}
        With a `DeConfHead` the network returns a mapping of `logits` and `h`.

    Examples
    --------
    >>> [sum(p.numel() for p in build(name).parameters()) for name in ("densenet-bc-100", "resnet-34")]
    [769162, 21282122]
    """
    if name not in NETWORKS:
        raise InputError.unknown("network", name, NETWORKS)
    if classes < 2:
        raise InputError(f"must be at least 2; got {classes!r}", argument="classes")
    if head not in HEADS:
        raise InputError.unknown("head", head, HEADS)
    model = NETWORKS[name](classes)
    if head == "deconf-c":
        model.fc = DeConfHead(cast(nn.Linear, model.fc).in_features, classes)
    return model
