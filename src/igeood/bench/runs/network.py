"""A trained network to benchmark: its weights, what it was trained on, and how its inputs are normalised."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from igeood.bench.datasets import DATASETS, ImageSet
from igeood.bench.networks import NETWORKS, build, load_weights, normalised, read_weights
from igeood.errors import InputError
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
    """

    name: str
    file: str
    weights: str
    model: nn.Module
    in_distribution: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def about(self) -> dict[str, Any]:
        """What tells one network from another."""
        about = {"network": self.name, "weights": self.weights, "in_distribution": self.in_distribution}
        return {**about, "mean": list(self.mean), "std": list(self.std)}

    def batches(self, images: ImageSet, size: int) -> Iterator[tuple[Tensor, ...]]:
        """What the model takes: normalised images, `size` at a time, with their classes where they have any."""
        for start, pixels in zip(range(0, len(images), size), images.batches(size), strict=True):
            x = normalised(pixels, self.mean, self.std)
            yield (x,) if images.labels is None else (x, torch.from_numpy(images.labels[start : start + size]))


def load_network(spec: str, *, in_distribution: str | None = None) -> Network:
    """Load a reference network from its weights.

    Parameters
    ----------
    spec : str
        `PATH` of weights that say what they are, as those of `igeood train` do; or `NAME:PATH`, with NAME one of
        `igeood.bench.networks.NETWORKS`.
    in_distribution : str, optional
        The data set that it was trained on, if the file does not say it.
    """
    name, _, rest = spec.partition(":")
    is_named = bool(rest) and (name in NETWORKS or (Path(rest).is_file() and not Path(spec).is_file()))
    path = Path(os.path.expanduser(rest if is_named else spec))  # noqa: PTH111 (any user's name)
    tensors, about = read_weights(path)
    if not is_named:
        name = about.get("network") or about.get("architecture", "").split(" ")[0].lower()
        if name not in NETWORKS:
            names = ", ".join(NETWORKS)
            raise InputError(f"network: {path} does not say what it is; give NAME:{path}, with NAME one of {names}")
    trained_on = _trained_on(about.get("trained_on", ""), in_distribution or "", path)
    classes = next((len(t) for t in reversed(tensors.values()) if t.ndim == 2), 0)  # those of the last linear layer
    model = load_weights(build(name, classes), path)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    usual = DATASETS.get(trained_on)
    mean, std = (
        tuple(map(float, about[key].split(","))) if key in about else getattr(usual, key, None)
        for key in ("mean", "std")
    )
    if not (mean and std):
        cure = "`igeood train` writes files that say it"
        raise InputError(f"network: {path} does not say how its inputs are normalised, nor does {trained_on}; {cure}")
    return Network(name, path.name, fingerprint(model), model, trained_on, mean, std)


def _trained_on(said: str, given: str, path: Path) -> str:
    """The set that a file names, or that the user names; they must agree."""
    said, given = (name.lower() if name.lower() in DATASETS else name for name in (said, given))
    if said and given not in ("", said):
        raise InputError(f"in-distribution: {path} says that it was trained on {said}, not {given}; leave it out")
    if not (said or given):
        raise InputError(f"in-distribution: {path} does not say what it was trained on; add --in-distribution NAME")
    return said or given
