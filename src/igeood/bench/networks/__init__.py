"""Reference classifiers of 32×32 images: their architectures, their weights, and how they are trained."""

from igeood.bench.networks.catalog import NETWORKS, DenseNet, ResNet, build, densenet_bc_100, resnet_10_16, resnet_34
from igeood.bench.networks.training import Progress, Recipe, Task, normalised, train
from igeood.bench.networks.weights import load_weights, read_weights

__all__ = [
    "NETWORKS", "DenseNet", "Progress", "Recipe", "ResNet", "Task", "build", "densenet_bc_100", "load_weights",
    "normalised", "read_weights", "resnet_10_16", "resnet_34", "train",
]  # fmt: skip
