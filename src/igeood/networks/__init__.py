"""Reference classifiers of 32×32 images."""

from igeood.networks.densenet import DenseNet, densenet_bc_100
from igeood.networks.resnet import ResNet, resnet_34

__all__ = ["DenseNet", "ResNet", "densenet_bc_100", "resnet_34"]
