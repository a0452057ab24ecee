"""ResNet for 32×32 images (He et al., 2016): a 3×3 first convolution and no first pooling."""

from typing import cast

from torch import Tensor, nn
from torch.nn import functional


class _Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet of basic blocks: a first convolution, four stages, a linear classifier.

    Parameters
    ----------
    blocks : tuple of int
        Number of blocks in each of the four stages; (3, 4, 6, 3) is ResNet-34.
    classes : int
        Width of the logits.
    width : int
        Channels of the first stage; each further one doubles them.
    """

    def __init__(self, blocks: tuple[int, int, int, int] = (3, 4, 6, 3), classes: int = 10, width: int = 64) -> None:
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
    rest = (_Block(out_channels, out_channels, 1) for _ in range(blocks - 1))
    return nn.Sequential(_Block(channels, out_channels, stride), *rest)


def resnet_34(classes: int = 10) -> ResNet:
    """ResNet-34 for 32×32 images, with random weights.

    >>> sum(p.numel() for p in resnet_34().parameters())
    21282122
    """
    return ResNet(classes=classes)
