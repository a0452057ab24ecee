"""The reference classifiers of the paper."""

from igeood.networks.densenet import DenseNet, densenet_bc_100

__all__ = ["DenseNet", "densenet_bc_100"]
