"""The reference classifiers by name."""

from collections.abc import Callable, Mapping

from torch import nn

from igeood.bench.networks.densenet import densenet_bc_100
from igeood.bench.networks.resnet import ResNet, resnet_34
from igeood.errors import InputError


def resnet_10_16(classes: int = 10) -> ResNet:
    """A ResNet of ten layers and 16 channels in its first stage: trained on a CPU in half an hour."""
    return ResNet((1, 1, 1, 1), classes, width=16)


NETWORKS: Mapping[str, Callable[[int], nn.Module]] = {
    "densenet-bc-100": densenet_bc_100,
    "resnet-34": resnet_34,
    "resnet-10-16": resnet_10_16,
}


def build(name: str, classes: int = 10) -> nn.Module:
    """A reference classifier with random weights.

    Parameters
    ----------
    name : str
        One of `NETWORKS`.
    classes : int
        Width of the logits.
    """
    if name not in NETWORKS:
        raise InputError.unknown("network", name, NETWORKS)
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 2:
        raise InputError(f"classes: must be a whole number, at least 2; got {classes!r}")
    return NETWORKS[name](classes)
