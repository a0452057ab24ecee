"""What a network makes of images, kept on disk by content: weights, images and layers make the key.

Images go through the network in shards, and each shard is a file of its own: a run that is killed loses one of them.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from igeood import storage
from igeood.benchmark.network import Network
from igeood.datasets import ImageSet
from igeood.detectors import Detector, MaxSoftmax, method_name
from igeood.errors import GuardFileError, InputError
from igeood.extraction import extract, resolve_layers
from igeood.inputs import ModelInputs, collect
from igeood.networks.training import normalised
from igeood.outputs import Outputs
from igeood.perturbation import Attack

log = logging.getLogger("igeood")

SHARD = 500  # images a file
BATCH = 25  # images that go through the network at a time: on a CPU larger ones leave the cache, and take twice as long
VERSION = 1  # raised when the same key would have other content

Progress = Callable[[str, int, int], None]  # what, images done, of how many
Tensors = dict[str, Tensor]


class Observer:
    """Runs a network, or reads what it gave before.

    Parameters
    ----------
    network : Network
        Whose outputs are wanted.
    folder : Path
        Where they are kept.
    progress : callable, optional
        Called after each shard that had to be made.
    """

    def __init__(self, network: Network, folder: Path, progress: Progress | None = None) -> None:
        self.network, self.folder, self.progress = network, folder, progress
        sample = normalised(torch.zeros(2, 3, 32, 32), network.mean, network.std)
        self.layers = resolve_layers(network.model, sample, "auto")

    def outputs(self, images: ImageSet, part: str = "test") -> Outputs:
        """Logits, features of all layers, and labels."""

        def make(chunk: ImageSet) -> Tensors:
            return _tensors(extract(self.network.model, self._batches(chunk), self.layers))

        return _outputs(self._kept({"kind": "clean", "part": part, "layers": self.layers}, images, make))

    def attacked(self, images: ImageSet, size: float) -> tuple[Outputs, Attack]:
        """Outputs of FGSM samples made from labelled images, and what the attack did."""
        eyes = ModelInputs(self.network.model, self.layers, mean=self.network.mean, std=self.network.std)

        def make(chunk: ImageSet) -> Tensors:
            (outputs,), attack = eyes.attack(self._batches(chunk), MaxSoftmax(), size)  # without a step, any detector
            figures = torch.tensor([[attack.linf, attack.accuracy]], dtype=torch.float64)
            return {**_tensors(outputs), "attack": figures.expand(len(chunk), 2)}

        kept = self._kept({"kind": "fgsm", "size": size, "layers": self.layers}, images, make)
        linf, accuracy = kept.pop("attack").mean(dim=0).tolist()
        return _outputs(kept), Attack(len(images), linf, accuracy)

    def stepped(self, images: ImageSet, detector: Detector, train: str, epsilons: Sequence[float]) -> list[Outputs]:
        """Logits after the detector's input step, for each of its sizes; `train` tells what it was fitted on."""
        eyes = ModelInputs(self.network.model, (), std=self.network.std)

        def make(chunk: ImageSet) -> Tensors:
            seen = eyes.see(self._batches(chunk), detector, epsilons=epsilons, keyed=False)
            return {"logits": torch.stack([part.logits for part in collect(seen)[1]], dim=1)}  # (n, E, C)

        what = {"kind": "step", "method": method_name(detector), "params": detector.params(), "train": train}
        kept = self._kept({**what, "epsilons": list(epsilons)}, images, make)["logits"]
        return [Outputs(kept[:, i].contiguous()) for i in range(len(epsilons))]

    def _batches(self, images: ImageSet) -> list[tuple[Tensor, ...]]:
        return list(self.network.batches(images, BATCH))

    def _kept(self, what: Mapping[str, Any], images: ImageSet, make: Callable[[ImageSet], Tensors]) -> Tensors:
        """Tensors of all images, shard by shard: from the disk where they are there, else made and put there."""
        about = {
            "version": VERSION, "network": self.network.name, "weights": self.network.weights,
            "mean": list(self.network.mean), "std": list(self.network.std),
            "data": images.name, "images": images.digest(), "count": len(images), **what,
        }  # fmt: skip
        folder = self.folder / key_of(about)
        if len(images) == 0:
            raise InputError(f"{images.name}: no image in it")
        shards = []
        for start in range(0, len(images), SHARD):
            path = folder / f"{start:06d}.safetensors"
            found = _read(path)
            if found is None:
                folder.mkdir(parents=True, exist_ok=True)
                found = make(images[start : start + SHARD])
                storage.write(path, about, found)
                if self.progress is not None:
                    done = min(start + SHARD, len(images))
                    why = about.get("part") or about.get("method", about["kind"])
                    self.progress(f"{self.network.name}: {images.title}, {why}", done, len(images))
            shards.append(found)
        return _joined(shards)


def recall(folder: Path, *, weights: str, images: str) -> Outputs | None:
    """Clean outputs that were kept before, of images whose digest begins so; None if they are not there whole."""
    for first in sorted(folder.glob("*/000000.safetensors")):
        try:
            with safe_open(first, framework="pt") as file:
                about = json.loads((file.metadata() or {}).get("igeood", "{}"))
            if (about.get("kind"), about.get("weights")) == ("clean", weights) and about["images"].startswith(images):
                shards = [_read(path) or {} for path in sorted(first.parent.glob("*.safetensors"))]
                if all(shards) and sum(len(shard["logits"]) for shard in shards) == about["count"]:
                    return _outputs(_joined(shards))
        except (SafetensorError, ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError):  # noqa: PERF203
            continue  # damaged, or none of ours: as if it were not there
    return None


def key_of(about: Mapping[str, Any]) -> str:
    """A file's name from all that its content depends on."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]


def _joined(shards: Sequence[Tensors]) -> Tensors:
    return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}


def _read(path: Path) -> Tensors | None:
    if not path.exists():
        return None
    try:
        return storage.read(path, "outputs")[1]
    except GuardFileError as error:
        log.warning("%s; it is made again", error)
        return None


def _tensors(outputs: Outputs) -> Tensors:
    features = {f"feature.{i:03d}.{layer}": value for i, (layer, value) in enumerate(outputs.features.items())}
    labels = {} if outputs.labels is None else {"labels": outputs.labels}
    return {"logits": outputs.logits, **features, **labels}


def _outputs(tensors: Tensors) -> Outputs:
    """The inverse of `_tensors`; the number in a feature's name keeps the layers in their order."""
    names = sorted(name for name in tensors if name.startswith("feature."))
    features = {name.split(".", 2)[2]: tensors[name] for name in names}
    return Outputs(tensors["logits"], features, tensors.get("labels"))
