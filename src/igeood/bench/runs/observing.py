"""Outputs of a network, kept on disk by content: weights, images, layers and statistic make the key.

Images go through the network in shards, and each shard is a file of its own: a run that is killed loses one of them.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from igeood.bench.adversarial import fgsm
from igeood.bench.datasets import ImageSet
from igeood.bench.runs.network import Network
from igeood.detectors import Detector, Weighted
from igeood.errors import GuardFileError
from igeood.files import read_record, write_record
from igeood.guard.source import Source
from igeood.model.batch import Batch, as_batch
from igeood.model.reader import Reader
from igeood.outputs import Outputs
from igeood.summary import Needs

SHARD = 500  # images a file
BATCH = 25  # images that go through the network at a time: on a CPU larger ones leave the cache, and take twice as long
CLEAN = "clean-all-mean"  # the block ends' means, which serve most methods

Notify = Callable[[str, int, int], None]  # what, done, of how many
Tensors = dict[str, Tensor]


class Observer:
    """Runs a network, or reads what it returned before.

    Parameters
    ----------
    network : Network
        Whose outputs are wanted.
    folder : Path
        Where they are kept.
    notify : callable, optional
        Called after each shard that had to be made.
    """

    def __init__(self, network: Network, folder: Path, notify: Notify | None = None) -> None:
        self.network = network
        self.folder = folder
        self.notify = notify
        generator = torch.Generator().manual_seed(0)
        self._sample = as_batch(torch.rand(3, 3, network.size, network.size, generator=generator))
        has_head = Reader(network.model).trace(self._sample).head is not None
        self._block_ends = Needs(layers="all", head=has_head)
        self._memory: dict[tuple[str, ...], Outputs] = {}
        self._sources: dict[str, Source] = {}

    def _source(self, needs: Needs, *, only_logits: bool = False) -> tuple[str, Source]:
        """A source of all that the needs ask for, and its name; most methods read the block ends' means."""
        name = "" if only_logits else "all-mean"
        wanted = Needs() if only_logits else self._block_ends
        if callable(needs.layers):
            name = f"{needs.layers.__name__}-{'mean' if needs.pool is None else needs.pool.__name__}"
            wanted = Needs(layers=needs.layers, pool=needs.pool)
        if name not in self._sources:  # the network runs to find its layers
            source = Source(self.network.model, std=self.network.std)
            source.prepare(self._sample, wanted)
            self._sources[name] = source
        return name, self._sources[name]

    def head(self, needs: Needs) -> tuple[Tensor, Tensor] | None:
        """Weight and bias of the classifier's head, if it is linear."""
        reader = self._source(needs)[1].reader
        return None if reader is None else reader.head

    def outputs(self, images: ImageSet, needs: Needs, part: str = "test") -> Outputs:
        """Logits, features, labels and keys."""
        name, source = self._source(needs)

        def make(batches: list[Batch]) -> Tensors:
            return _tensors(Outputs.concat([source.read(batch, labels=True, keys=True) for batch in batches]))

        place = (name, part, images.digest)
        if place not in self._memory:
            self._memory[place] = _outputs(self._kept(f"clean-{name}", images, make, part, layers=source.layers))
        return self._memory[place]

    def attacked(
        self, images: ImageSet, scorer: Detector, train: str, size: float, epsilons: Sequence[float]
    ) -> tuple[list[Outputs], dict[str, float]]:
        """Outputs of FGSM samples made from labelled images, for each size of the input step; and what the attack did.

        `train` is the digest of what the scorer learnt from.
        """
        name, source = self._source(scorer.needs)

        def make(batches: list[Batch]) -> Tensors:
            samples = fgsm(self.network.model, batches, size, mean=self.network.mean, std=self.network.std)
            parts = [source.step(batch, scorer, epsilons) for batch in samples]
            strength = torch.tensor([[samples.linf, samples.accuracy]], dtype=torch.float64)
            return {**_stacked(parts), "attack": strength.repeat(samples.samples, 1)}

        about = self._step(scorer, train, epsilons) if any(epsilons) else {}
        tensors = self._kept(f"fgsm-{name}", images, make, "fgsm", size=size, layers=source.layers, **about)
        linf, accuracy = tensors["attack"].mean(dim=0).tolist()
        return _unstacked(tensors, len(epsilons)), {"samples": len(images), "linf": linf, "accuracy": accuracy}

    def stepped(self, images: ImageSet, scorer: Detector, train: str, epsilons: Sequence[float]) -> list[Outputs]:
        """Outputs after the input step, for each of its sizes; `train` is the digest of what the scorer learnt from."""
        name, source = self._source(scorer.needs, only_logits=not scorer.needs.reads_layers)

        def make(batches: list[Batch]) -> Tensors:
            return _stacked([source.step(batch, scorer, epsilons) for batch in batches])

        about = {**self._step(scorer, train, epsilons), **({"layers": source.layers} if source.layers else {})}
        tensors = self._kept("-".join(filter(None, ["step", name])), images, make, "step", **about)
        return _unstacked(tensors, len(epsilons))

    def _step(self, scorer: Detector, train: str, epsilons: Sequence[float]) -> dict[str, Any]:
        """What the input step depends on."""
        leader = next(iter(scorer.parts.values())) if isinstance(scorer, Weighted) else scorer
        return {"by": type(leader).__name__, "params": leader.params(), "train": train, "epsilons": list(epsilons)}

    def _kept(
        self, kind: str, images: ImageSet, make: Callable[[list[Batch]], Tensors], part: str, **options: Any
    ) -> Tensors:
        """Tensors of all images, shard by shard: from the disk where they are there, else made and put there."""
        network = self.network
        total = len(images)
        about = {
            "kind": "outputs",
            "of": kind,
            "part": part,
            **network.about,
            "data": images.name,
            "images": images.digest,
            "count": total,
            **options,
        }
        folder = self.folder / f"{kind}-{network.weights}-{images.digest[:16]}-{key_of(about)}"
        shards = []
        for start in range(0, total, SHARD):
            path = folder / f"{start:06d}.safetensors"
            try:
                shards.append(read_record(path, "outputs")[1])
            except GuardFileError:  # it is missing, or damaged
                batches = network.batches(images[start : start + SHARD], BATCH)
                shards.append(make([as_batch(batch) for batch in batches]))
                write_record(path, about, shards[-1])
                if self.notify is not None:
                    self.notify(f"{network.name}: {images.title}, {part}", min(start + SHARD, total), total)
        return _joined(shards)


def recall(folder: Path, *, weights: str, images: str) -> Outputs | None:
    """Clean outputs that were kept, of images whose digest begins so; None if there are none."""
    for first in sorted(folder.glob(f"{CLEAN}-{weights}-{images}*/{0:06d}.safetensors")):
        with suppress(GuardFileError):
            paths = sorted(first.parent.glob("*.safetensors"))
            return _outputs(_joined([read_record(path, "outputs")[1] for path in paths]))
    return None


def key_of(about: Mapping[str, Any]) -> str:
    """A file's name from all that its content depends on."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]


def _joined(shards: Sequence[Tensors]) -> Tensors:
    return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}


def _tensors(outputs: Outputs) -> Tensors:
    features = {f"feature.{i:03d}.{block}": value for i, (block, value) in enumerate(outputs.features.items())}
    labels = {} if outputs.labels is None else {"labels": outputs.labels}
    keys = torch.from_numpy(outputs.keys.view(np.int64))
    return {"logits": outputs.logits, "keys": keys, **features, **labels}


def _stacked(parts: Sequence[Sequence[Outputs]]) -> Tensors:
    """Tensors of batches, of each the outputs for several sizes of a step, which become the second axis."""
    sizes = [Outputs.concat(of_size) for of_size in zip(*parts, strict=True)]
    shared = [block for block in sizes[0].features if all(block in outputs.features for outputs in sizes)]
    plain = [Outputs(each.logits, each.only(shared).features, keys=each.keys) for each in sizes]
    tensors = [_tensors(outputs) for outputs in plain]
    return {name: torch.stack([each[name] for each in tensors], dim=1) for name in tensors[0]}


def _unstacked(tensors: Tensors, sizes: int) -> list[Outputs]:
    """The inverse of `_stacked`."""
    return [_outputs({name: value[:, i] for name, value in tensors.items() if name != "attack"}) for i in range(sizes)]


def _outputs(tensors: Tensors) -> Outputs:
    """The inverse of `_tensors`; the number in a feature's name keeps the blocks in their order."""
    names = sorted(name for name in tensors if name.startswith("feature."))
    features = {name.split(".", 2)[2]: tensors[name].contiguous() for name in names}
    keys = tensors["keys"].contiguous().numpy().view(np.uint64)
    return Outputs(tensors["logits"].contiguous(), features, tensors.get("labels"), keys=keys)
