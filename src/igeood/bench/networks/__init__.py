"""Reference classifiers of 32×32 images: their architectures, their weights, and how they are trained."""

from igeood.bench.networks.catalog import NETWORKS, build, resnet_10_16
from igeood.bench.networks.densenet import DenseNet, densenet_bc_100
from igeood.bench.networks.resnet import ResNet, resnet_34
from igeood.bench.networks.training import Accuracies, Recipe, Task, train
from igeood.bench.networks.weights import load_weights, read_weights

__all__ = [
    "NETWORKS", "Accuracies", "DenseNet", "Recipe", "ResNet", "Task", "build", "densenet_bc_100", "load_weights",
    "read_weights", "resnet_10_16", "resnet_34", "train",
]  # fmt: skip
