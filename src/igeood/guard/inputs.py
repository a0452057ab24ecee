"""What a guard reads: arrays of logits, or whatever its model takes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from igeood.detectors import Detector
from igeood.detectors.base import warn_of_probabilities
from igeood.errors import InputError
from igeood.model.batches import Batch, at_batch, batches
from igeood.model.fingerprint import Versions, fingerprint
from igeood.model.layers import Layers, choose_layers
from igeood.model.reader import Reader
from igeood.model.step import Attack, Channels, attack, check_channels, check_floating, stepped
from igeood.outputs import HEAD, Keys, Outputs, recut
from igeood.summary import Needs


class ArrayInputs:
    """Logits as arrays, with features where layers are read: nothing to run.

    Parameters
    ----------
    layers : "auto" or names
        Features to read; "auto" takes those that the method needs of what the training samples have.
    """

    model: nn.Module | None = None
    fingerprint: str | None = None
    epsilon = 0.0
    layouts: Mapping[str, str] = {}

    def __init__(self, layers: Layers = "auto") -> None:
        self.wanted = layers
        self.layers = [] if layers == "auto" else [layers] if isinstance(layers, str) else list(layers)

    def read(self, layers: Sequence[str], layouts: Any = None, statistic: str = "mean") -> None:  # noqa: ARG002
        """Read these blocks from now on."""
        self.layers = list(layers)

    def weights(self) -> str | None:
        """There are none."""
        return None

    def at(self, name: str, number: int) -> AbstractContextManager[None]:  # noqa: ARG002
        """Errors name the row, so they need no batch."""
        return nullcontext()

    def prepare(self, batch: Outputs, needs: Needs) -> None:
        """Decide which features to read, with the first training rows."""
        self.layers = needs.blocks(batch.features if self.wanted == "auto" else self.layers)

    def settle(self, fingerprint: str | None = None) -> None:
        """Nothing to watch after a fit."""

    def check_weights(self, *, strict: bool) -> bool:  # noqa: ARG002
        """There are no weights that could have changed."""
        return True

    def batches(self, source: Any, name: str = "logits", labels: Any = None) -> Iterator[Outputs]:
        """An array, or an iterable of blocks, in blocks of a fixed number of rows."""
        return recut(_blocks(source, labels, "logits" if name == "x" else name))

    def outputs(self, batch: Outputs, *, labels: bool = False, keys: bool = False) -> Outputs:  # noqa: ARG002
        """The outputs of a batch, with the layers that the guard reads, and keys that stay if they are wanted."""
        for layer in self.layers:
            if layer not in batch.features:
                have = ", ".join(map(repr, batch.features)) or "none"
                raise InputError(f"no features of layer {layer!r}, which the guard reads; these have {have}; add them")
        outputs = batch.only(self.layers)
        return outputs.keyed() if keys else outputs

    def keys(self, batch: Outputs) -> Keys:
        """Keys of a batch's samples, (N,): of what the guard reads of them."""
        return self.outputs(batch).keys

    def stepped(self, batch: Outputs, detector: Detector, epsilons: Sequence[float]) -> tuple[Outputs, list[Outputs]]:
        """Clean outputs, and the same for each size of the step, which must be 0."""
        if any(epsilons):
            raise InputError("epsilons: an input step needs the model; make the guard with grey_box(model)")
        if batch.first == 0 and not detector.probabilities:
            warn_of_probabilities(batch.logits)
        clean = self.outputs(batch)
        return clean, [clean] * len(epsilons)

    def attacked(self, *_: Any) -> tuple[Any, Attack]:
        """Arrays cannot be attacked."""
        raise InputError("ood: 'fgsm' makes samples with the model's gradient; a guard of logits has no model")


def _blocks(source: Any, labels: Any, name: str) -> Iterator[Outputs]:
    """The whole, checked at once; or each block of an iterable, which is `Outputs`, logits, or `(logits, labels)`."""
    if not _is_blocks(source):
        if isinstance(source, tuple) and len(source) == 2 and getattr(source[0], "ndim", 0) == 2:
            source, labels = source
        yield Outputs.of(source, labels, name)
        return
    if labels is not None:
        raise InputError(f"labels: {name} come in blocks; give each block its own: (logits, labels)")
    first = -1
    for item in source:
        first = max(first, 0)
        if isinstance(item, Outputs):
            block = item
        else:
            logits, classes = item if isinstance(item, (tuple, list)) and len(item) == 2 else (item, None)
            block = Outputs(logits, labels=classes, name=name, first=first)
        block = block[torch.arange(len(block))]  # a copy: its owner may use the memory again
        block.first = first
        first += len(block)
        yield block
    if first < 0:
        raise InputError(f"{name}: empty: no block of logits; give a new source if it was a generator, read already")


def _is_blocks(source: Any) -> bool:
    """Whether this is an iterable of blocks, not one array or one pair of them."""
    if isinstance(source, (Outputs, Mapping, str)) or hasattr(source, "__array__"):
        return False
    if not isinstance(source, (list, tuple)):
        return isinstance(source, Iterable)
    item = source[0] if source else None
    if isinstance(item, (tuple, list)):
        return bool(item) and getattr(item[0], "ndim", 0) == 2
    return isinstance(item, Outputs) or (isinstance(source, list) and getattr(item, "ndim", 0) == 2)


class ModelInputs:
    """Whatever the model takes: batches, tensors, mappings.

    Parameters
    ----------
    model : Module
        The classifier; left as it is found.
    layers : "auto" or names
        Layers to read; "auto" takes those that the method needs.
    epsilon : float
        Size of the input step, in pixel units.
    mean, std : float or one for each channel
        Of the input's normalisation; without a mean, adversarial samples are clamped only if inputs lie in [0, 1].
    layouts : mapping, optional
        As in `Reader`.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Layers = "auto",
        *,
        epsilon: float = 0.0,
        mean: Channels | None = None,
        std: Channels = 1.0,
        layouts: Mapping[str, str] | None = None,
    ) -> None:
        self.model, self.epsilon = model, epsilon
        self.mean = None if mean is None else check_channels(mean, "mean")
        self.std = check_channels(std, "std", positive=True)
        self.wanted = layers
        names: list[str] = [] if layers == "auto" else [layers] if isinstance(layers, str) else list(layers)
        self._fingerprint: str | None = None  # of the weights that the guard was fitted with
        self._versions: Versions | None = None
        self._warned = False  # of weights that have changed
        self._reader: Reader | None = None
        self.read(names, layouts)

    def read(self, layers: Sequence[str], layouts: Mapping[str, str] | None = None, statistic: str = "mean") -> None:
        """Read these blocks from now on."""
        names = list(
            dict.fromkeys(layer.split("|")[0] if isinstance(layer, str) else layer for layer in layers if layer != HEAD)
        )
        self._reader = Reader(self.model, names, statistic=statistic, head=HEAD in layers, layouts=layouts)

    @property
    def reader(self) -> Reader:
        """Runs the model."""
        assert self._reader is not None  # noqa: S101 (`__init__` makes one)
        return self._reader

    @property
    def layers(self) -> list[str]:
        """The layers that are read."""
        return self.reader.layers

    @property
    def layouts(self) -> Mapping[str, str]:
        """Which axis of each layer's output has the channels."""
        return self.reader.layouts

    def prepare(self, batch: Batch, needs: Needs) -> None:
        """Decide which layers to read, and how, with the first training samples."""
        names = self.layers
        if self.wanted == "auto":
            names = choose_layers(self.model, batch, needs.layers)
        self.read([*needs.blocks(names)], None, needs.statistic)
        self.reader.prepare(batch)

    def weights(self) -> str:
        """Fingerprint of the model's weights as they are."""
        return fingerprint(self.model)

    def at(self, name: str, number: int) -> AbstractContextManager[None]:
        """Errors in it name the batch."""
        return at_batch(name, number)

    @property
    def fingerprint(self) -> str:
        """Of the weights that the guard was fitted with."""
        return self._fingerprint or fingerprint(self.model)

    def settle(self, weights: str | None = None) -> None:
        """The guard is fitted, with the weights of this moment; `weights` is their fingerprint before the pass."""
        self._fingerprint = fingerprint(self.model)
        changes_itself = weights is not None and weights != self._fingerprint
        self._versions = None if changes_itself else Versions(self.model)
        self._warned = False

    def check_weights(self, *, strict: bool) -> bool:
        """Whether the model still has the weights that the guard was fitted with; raises if that is `strict`.

        Versions and places of the weights are compared; where they differ, or if strict, the weights themselves.
        Without `strict`, only the first call after a change returns False.
        """
        if self._versions is None or not (strict or (self._versions.changed() and not self._warned)):
            return True
        if fingerprint(self.model) == self._fingerprint:
            self._versions = Versions(self.model)
            return True
        if strict:
            raise InputError("model: its weights have changed since the guard was fitted; fit it again first")
        self._warned = True
        return False

    def batches(self, source: Any, name: str = "x", labels: Any = None) -> Iterator[Batch]:
        """Batches of a loader, or of one tensor, array, pair or mapping."""
        if isinstance(source, Outputs):
            raise InputError(f"{name}: this guard has a model and takes its inputs, not outputs; use guard.detector")
        return batches(source if labels is None else (source, labels), name)

    def outputs(self, batch: Batch, *, labels: bool = False, keys: bool = False) -> Outputs:
        """Run a batch through the model."""
        with torch.no_grad():
            return self.reader(batch, labels=labels, keys=keys)

    def keys(self, batch: Batch) -> Keys:
        """Keys of a batch's samples, (N,)."""
        return batch.keys

    def stepped(self, batch: Batch, detector: Detector, epsilons: Sequence[float]) -> tuple[Outputs, list[Outputs]]:
        """Clean outputs, and those after the input step (Eq. 6), for each size of it."""
        with torch.no_grad():
            return stepped(self.reader, batch, detector, epsilons, self.std)

    def attacked(
        self, batch: Batch, detector: Detector, size: float, epsilons: Sequence[float]
    ) -> tuple[list[Outputs], Attack]:
        """Outputs of FGSM samples made from a batch, for each size of the input step; and what the attack did."""
        check_floating(batch.x)
        batch = self.reader.place(batch)
        with torch.no_grad():
            clean = self.reader(batch, labels=batch.labels is not None)
            labels = clean.logits.argmax(dim=1) if clean.labels is None else clean.labels
            x: Tensor = attack(self.reader, batch, size, self.mean, self.std)
            fooled, outputs = stepped(self.reader, batch.with_x(x), detector, epsilons, self.std)
            right = float((fooled.logits.argmax(dim=1) == labels).double().mean())
            moved = float((x - batch.x).abs().flatten(1).amax(dim=1).mean())
        return outputs, Attack(len(batch), moved, right)


def is_numpy(data: Any) -> bool:
    """Whether results go back as NumPy arrays: for arrays, lists of numbers, and outputs made of them."""
    if isinstance(data, Outputs):
        return data.numpy
    if isinstance(data, (list, tuple)):
        return bool(data) and not any(isinstance(item, (Tensor, dict, tuple, Outputs)) for item in data)
    return isinstance(data, np.ndarray) or (hasattr(data, "__array__") and not isinstance(data, Tensor))
