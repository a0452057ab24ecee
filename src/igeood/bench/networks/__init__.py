"""Reference classifiers of 32×32 images: their architectures, and how they are trained."""

from igeood.bench.networks.catalog import HEADS, NETWORKS, DenseNet, ResNet, build
from igeood.bench.networks.training import Progress, Recipe, Task, learning_task, train

__all__ = ["HEADS", "NETWORKS", "DenseNet", "Progress", "Recipe", "ResNet", "Task", "build", "learning_task", "train"]
