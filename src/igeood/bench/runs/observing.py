"""Outputs of a network, kept on disk by content: weights, images, layers and statistic make the key.

Images go through the network in shards, and each shard is a file of its own: a run that is killed loses one of them.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from igeood.bench.datasets import ImageSet
from igeood.bench.runs.network import Network
from igeood.detectors import Detector
from igeood.errors import GuardFileError
from igeood.files import read_record, write_record
from igeood.guard.inputs import ModelInputs
from igeood.model.batches import Batch, as_batch
from igeood.model.reader import Reader, choose_layers
from igeood.model.step import Attack
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
        self._layers = cache(lambda kind: choose_layers(network.model, self._sample, kind, head=kind == "all"))
        # blocks of those tensors that the network returns by name
        self._returned = cache(lambda names: list(Reader(network.model, returns=names)(self._sample).features))
        self._memory: dict[tuple[str, ...], Outputs] = {}

    def _inputs(self, needs: Needs) -> tuple[str, ModelInputs]:
        """What reads all that the needs ask for, and its name; most methods read the block ends' means."""
        kind = needs.layers if needs.layers in ("convolutions", "norms") else "all"
        inputs = ModelInputs(self.network.model, (), mean=self.network.mean, std=self.network.std)
        returned = self._returned(needs.returns)
        inputs.read([*self._layers(kind), *returned], None, needs.statistic)
        return "-".join([kind, needs.statistic, *(block[1:] for block in returned)]), inputs

    def head(self, needs: Needs) -> tuple[Tensor, Tensor] | None:
        """Weight and bias of the classifier's head, if it is linear."""
        _, inputs = self._inputs(needs)
        inputs.reader.prepare(self._sample)
        return inputs.reader.head

    def outputs(self, images: ImageSet, needs: Needs, part: str = "test") -> Outputs:
        """Logits, features, labels and keys."""
        name, inputs = self._inputs(needs)

        def make(batches: list[Batch]) -> Tensors:
            return _tensors(Outputs.concat([inputs.outputs(batch, labels=True, keys=True) for batch in batches]))

        place = (name, part, images.digest)
        if place not in self._memory:
            self._memory[place] = _outputs(self._kept(f"clean-{name}", images, make, part, layers=inputs.layers))
        return self._memory[place]

    def attacked(
        self, images: ImageSet, scorer: Detector, train: str, size: float, epsilons: Sequence[float]
    ) -> tuple[list[Outputs], Attack]:
        """Outputs of FGSM samples made from labelled images, for each size of the input step; and what the attack did.

        `train` is the digest of what the scorer learnt from.
        """
        name, inputs = self._inputs(scorer.needs)

        def make(batches: list[Batch]) -> Tensors:
            parts = [inputs.attacked(batch, scorer, size, epsilons) for batch in batches]
            strengths = [torch.tensor([[a.linf, a.accuracy]] * a.samples, dtype=torch.float64) for _, a in parts]
            return {**_stacked([outputs for outputs, _ in parts]), "attack": torch.cat(strengths)}

        about = self._step(scorer, train, epsilons) if any(epsilons) else {}
        tensors = self._kept(f"fgsm-{name}", images, make, "fgsm", size=size, layers=inputs.layers, **about)
        return _unstacked(tensors, len(epsilons)), Attack(len(images), *tensors["attack"].mean(dim=0).tolist())

    def stepped(self, images: ImageSet, scorer: Detector, train: str, epsilons: Sequence[float]) -> list[Outputs]:
        """Outputs after the input step, for each of its sizes; `train` is the digest of what the scorer learnt from."""
        name, inputs = self._inputs(scorer.needs) if scorer.needs.reads_layers else ("", self._logits(scorer.needs))

        def make(batches: list[Batch]) -> Tensors:
            return _stacked([inputs.stepped(batch, scorer, epsilons)[1] for batch in batches])

        about = {**self._step(scorer, train, epsilons), **({"layers": inputs.layers} if inputs.layers else {})}
        tensors = self._kept("-".join(filter(None, ["step", name])), images, make, "step", **about)
        return _unstacked(tensors, len(epsilons))

    def _logits(self, needs: Needs) -> ModelInputs:
        """What reads no layers."""
        inputs = ModelInputs(self.network.model, (), std=self.network.std)
        inputs.read(self._returned(needs.returns))
        return inputs

    def _step(self, scorer: Detector, train: str, epsilons: Sequence[float]) -> dict[str, Any]:
        """What the input step depends on."""
        leader = scorer.step_part
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
    tensors = [_tensors(outputs.only(shared).replace(labels=None).keyed()) for outputs in sizes]
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
