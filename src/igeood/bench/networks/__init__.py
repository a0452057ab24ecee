"""Reference classifiers of 32×32 images: their architectures, their weights, and how they are trained."""

from igeood.bench.networks.catalog import HEADS, NETWORKS, DenseNet, ResNet, build
from igeood.bench.networks.training import Progress, Recipe, Task, normalised, train
from igeood.bench.networks.weights import load_weights, read_weights

__all__ = [
    "HEADS", "NETWORKS", "DenseNet", "Progress", "Recipe", "ResNet", "Task", "build", "load_weights", "normalised",
    "read_weights", "train",
]  # fmt: skip
