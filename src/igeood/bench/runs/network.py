"""A trained network to benchmark: its weights, what it was trained on, and how its inputs are normalised."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from igeood.datasets import DATASETS, ImageSet
from igeood.errors import InputError
from igeood.fingerprints import fingerprint
from igeood.networks import NETWORKS, build, load_weights, read_weights
from igeood.networks.training import normalised


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

    def batches(self, images: ImageSet, size: int) -> Iterator[tuple[Tensor, ...]]:
        """What the model takes: normalised images, `size` at a time, with their classes where they have any."""
        start = 0
        for pixels in images.batches(size):
            x, end = normalised(pixels, self.mean, self.std), start + len(pixels)
            yield (x,) if images.labels is None else (x, torch.from_numpy(images.labels[start:end]))
            start = end


def load_network(spec: str, *, in_distribution: str | None = None) -> Network:
    """Load a reference network from its weights.

    Parameters
    ----------
    spec : str
        `PATH` of weights that say what they are, as those of `igeood train` do; or `NAME:PATH`, with NAME one of
        `igeood.networks.NETWORKS`.
    in_distribution : str, optional
        The data set that it was trained on, if the file does not say it.
    """
    name, _, rest = spec.partition(":")
    if name not in NETWORKS and Path(rest).is_file() and not Path(spec).is_file():
        build(name)  # tells which names there are
    path = Path(os.path.expanduser(rest if name in NETWORKS and rest else spec))  # noqa: PTH111 (any user's name)
    tensors, about = read_weights(path)
    if not (name in NETWORKS and rest):
        name = about.get("network") or about.get("architecture", "").split(" ")[0].lower()
        if name not in NETWORKS:
            names = ", ".join(NETWORKS)
            raise InputError(f"network: {path} does not say what it is; give NAME:{path}, with NAME one of {names}")
    said, given = (
        n.lower() if n.lower() in DATASETS else n for n in (about.get("trained_on", ""), in_distribution or "")
    )
    known = said or given
    if given not in ("", known):
        raise InputError(
            f"in-distribution: {path} says that it was trained on {said}, not {given}; leave the option out"
        )
    if not known:
        raise InputError(f"in-distribution: {path} does not say what it was trained on; add --in-distribution NAME")
    classes = next((len(t) for t in reversed(tensors.values()) if t.ndim == 2), 0)  # those of the last linear layer
    model = load_weights(build(name, classes), path)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    mean, std = (_numbers(about.get(key, ""), key, path) for key in ("mean", "std"))
    if not mean and known in DATASETS:
        mean, std = DATASETS[known].mean or (), DATASETS[known].std or ()
    if not (mean and std):
        raise InputError(
            f"network: {path} does not say how its inputs are normalised, and {known} has no usual way; "
            "`igeood train` writes files that say it"
        )
    return Network(name, path.name, fingerprint(model), model, known, mean, std)


def _numbers(text: str, key: str, path: Path) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise InputError(f"network: {path} says {key}={text!r}; expected numbers with commas between") from None
