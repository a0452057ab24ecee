"""Reference classifiers of 32×32 images: their architectures, their weights, and how they are trained."""

from igeood.networks.catalog import NETWORKS, build, resnet_10_16
from igeood.networks.densenet import DenseNet, densenet_bc_100
from igeood.networks.resnet import ResNet, resnet_34
from igeood.networks.training import Accuracies, Recipe, Task, train
from igeood.networks.weights import load_weights, read_weights

__all__ = [
    "NETWORKS", "Accuracies", "DenseNet", "Recipe", "ResNet", "Task", "build", "densenet_bc_100", "load_weights",
    "read_weights", "resnet_10_16", "resnet_34", "train",
]  # fmt: skip
