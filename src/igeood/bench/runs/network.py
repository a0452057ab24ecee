"""A trained network to benchmark: its weights, what it was trained on, and how its inputs are normalised."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from igeood.bench.datasets import DATASETS, ImageSet
from igeood.bench.datasets.images import SIDE
from igeood.bench.networks import NETWORKS, build
from igeood.errors import InputError
from igeood.images import normalised
from igeood.model.factory import load_weights, make_model, read_weights
from igeood.model.fingerprint import fingerprint


@dataclass(frozen=True, eq=False)
class Network:
    """A classifier and what has to be known to use it.

    Attributes
    ----------
    name : str
        Of the architecture.
    file : str
        The weights' file name.
    weights : str
        Fingerprint of the weights.
    model : Module
        In evaluation mode.
    in_distribution : str
        The data set that it was trained on.
    mean, std : tuple of float
        Of its inputs' normalisation.
    size : int
        Pixels of each side of its inputs.
    """

    name: str
    file: str
    weights: str
    model: nn.Module
    in_distribution: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int = SIDE

    @property
    def about(self) -> dict[str, Any]:
        """What tells one network from another."""
        about = {"network": self.name, "weights": self.weights, "in_distribution": self.in_distribution}
        size = {} if self.size == SIDE else {"size": self.size}
        return {**about, "mean": list(self.mean), "std": list(self.std), **size}

    def batches(self, images: ImageSet, size: int) -> Iterator[tuple[Tensor, ...]]:
        """What the model takes: normalised images, `size` at a time, with their classes where they have any."""
        for start, pixels in zip(range(0, len(images), size), images.batches(size), strict=True):
            x = normalised(pixels, self.mean, self.std)
            yield (x,) if images.labels is None else (x, torch.from_numpy(images.labels[start : start + size]))


def load_network(
    spec: str,
    *,
    in_distribution: str | None = None,
    weights: str | os.PathLike[str] | None = None,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    size: int = SIDE,
) -> Network:
    """Load a network: a reference one from its weights, or any other from what makes it.

    Parameters
    ----------
    spec : str
        `PATH` of weights that say what they are, as those of `igeood train` do; or `NAME:PATH`, with NAME one of
        `igeood.bench.networks.NETWORKS`; or `MODULE:NAME` of a model of your own, or of what makes it.
    in_distribution : str, optional
        The data set that it was trained on, if the file does not say it.
    weights : path, optional
        Weights of a model of your own: .safetensors, or a state dict in .pt.
    mean, std : tuple of float
        Of its inputs' normalisation, if the file does not say it, and it is not the usual one of the data set.
    size : int
        Pixels of each side of its inputs.
    """
    name, _, rest = spec.partition(":")
    is_named = bool(rest) and (name in NETWORKS or (Path(rest).is_file() and not Path(spec).is_file()))
    is_own = bool(rest) and not is_named and not Path(spec).is_file()
    if weights is not None and not is_own:
        problem = f"{spec} names its weights itself; they belong to a network of your own, MODULE:NAME"
        raise InputError(problem, argument="weights")
    path = Path(os.path.expanduser((weights or spec) if is_own or not is_named else rest))  # noqa: PTH111 (any user's)
    tensors, about = ({}, {}) if is_own and weights is None else read_weights(path)
    if not (is_named or is_own):
        name = about.get("network") or about.get("architecture", "").split(" ")[0].lower()
        if name not in NETWORKS:
            cure = f"give NAME:{path}, with NAME one of {', '.join(NETWORKS)}; or MODULE:NAME and {{weights={path}}}"
            raise InputError(f"{path} does not say what it is", argument="network", cure=cure)
    trained_on = _trained_on(about.get("trained_on", ""), in_distribution or "", path)
    widths = [len(t) for t in tensors.values() if t.ndim == 2]  # of linear layers; one of width 1 is a part of a head
    classes = next((width for width in reversed(widths) if width > 1), 0)
    head = about.get("head", "linear")
    model = make_model(spec).eval() if is_own else build(name, classes, head=head)
    model = load_weights(model, path) if tensors else model
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    usual = DATASETS.get(trained_on)
    moments: dict[str, Any] = {
        key: given * (3 if len(given) == 1 else 1)
        or (tuple(map(float, about[key].split(","))) if key in about else getattr(usual, key, None))
        for key, given in (("mean", mean), ("std", std))
    }
    if not all(moments.values()):
        problem = f"{path} does not say how its inputs are normalised, nor does {trained_on}"
        raise InputError(problem, argument="network", cure="give mean and std")
    title = spec if is_own else name if head == "linear" else f"{name} {head}"
    return Network(title, path.name, fingerprint(model), model, trained_on, **moments, size=size)


def _trained_on(said: str, given: str, path: Path) -> str:
    """The set that a file names, or that the user names; they must agree."""
    said, given = (name.lower() if name.lower() in DATASETS else name for name in (said, given))
    if said and given not in ("", said):
        problem = f"{path} says that it was trained on {said}, not {given}"
        raise InputError(problem, argument="in_distribution", cure="leave it out")
    if not (said or given):
        raise InputError(f"{path} does not say what it was trained on", argument="in_distribution", cure="name it")
    return said or given
