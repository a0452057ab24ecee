"""What a guard reads: arrays of logits, or whatever its model takes."""

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from igeood.detectors import Detector
from igeood.detectors.base import warn_of_probabilities
from igeood.errors import IgeoodWarning, InputError
from igeood.model.batches import Batch, NoRowsError, at_batch, batches
from igeood.model.failing import LostError, surviving
from igeood.model.fingerprint import Versions, fingerprint
from igeood.model.layers import Layers
from igeood.model.reader import Reader, choose_layers
from igeood.model.step import Attack, Channels, check_channels, check_epsilon, check_steppable, fgsm, stepped
from igeood.outputs import HEAD, INPUT, Keys, Outputs, Refused, recut, returned_blocks, take_over
from igeood.summary import Needs

OnError = Literal["raise", "refuse"]


class Inputs:
    """What both kinds of inputs have: the layers to read, and the weights that the guard was fitted with.

    Parameters
    ----------
    layers : "auto" or names
        What the user asked for.
    """

    model: nn.Module | None = None
    bare: nn.Module | None = None  # the model without its wrappers
    epsilon: float = 0.0
    mean: Channels | None = None
    std: Channels = 1.0
    layouts: Mapping[str, str] = {}
    head: tuple[Tensor, Tensor] | None = None  # weight and bias of the classifier's head, where it is read
    fingerprint: str | None = None  # of the weights that the guard was fitted with
    _versions: Versions | None = None
    _warned = False  # of weights that have changed

    def __init__(self, layers: Layers = "auto") -> None:
        self.wanted = layers
        self.layers = [] if layers == "auto" else [layers] if isinstance(layers, str) else list(layers)

    def at(self, name: str, number: int) -> AbstractContextManager[None]:
        """Errors in it name the batch; those of arrays name the row already."""
        return nullcontext() if self.model is None else at_batch(name, number)

    def named(self, source: Any, ids: Any, name: str) -> Any:
        """The same samples, known by their ids if there are any."""
        if ids is None:
            return source
        if self.model is not None:
            raise InputError("ids: a guard with a model knows its inputs by their content; leave them out")
        first, *others = _blocks(source, None, name, None)
        if others:
            raise InputError(f"ids: {name} come in blocks; give each block its own: Outputs(logits, ids=...)")
        return Outputs.of(first, ids=ids)

    def weights(self) -> str | None:
        """Fingerprint of the model's weights as they are."""
        return None if self.model is None else fingerprint(self.model)

    def settle(self, before: str | None = None) -> None:
        """The guard is fitted, with the weights of this moment; `before` is their fingerprint before the pass."""
        self.fingerprint, self._warned = self.weights(), False
        changes_itself = before not in (None, self.fingerprint)
        self._versions = None if self.model is None or changes_itself else Versions(self.model)

    def check_weights(self, *, strict: bool) -> None:
        """Raise if the model has other weights than the guard was fitted with; or warn, once, unless `strict`.

        Versions and places of the weights are compared; where they differ, or if strict, the weights themselves.
        """
        if self.model is None or self._versions is None:
            return
        if not strict and (self._warned or not self._versions.changed()):
            return
        if self.weights() == self.fingerprint:
            self._versions = Versions(self.model)
            return
        change = "model: its weights have changed since the guard was fitted"
        if strict:
            raise InputError(f"{change}; fit it again first")
        self._warned = True
        cure = "its classes and threshold are of the old weights: fit and calibrate again"
        warnings.warn(f"{change}; {cure}", IgeoodWarning, stacklevel=3)


class ArrayInputs(Inputs):
    """Logits as arrays, with features where layers are read: nothing to run.

    Parameters
    ----------
    layers : "auto" or names
        Features to read; "auto" takes those that the method needs of what the training samples have.
    """

    def read(self, layers: Sequence[str], layouts: Any = None, statistic: str = "mean") -> None:  # noqa: ARG002
        """Read these blocks from now on."""
        self.layers = list(layers)

    def prepare(self, batch: Outputs, needs: Needs) -> None:
        """Decide which features to read, with the first training rows."""
        self.layers = needs.blocks(batch.features if self.wanted == "auto" else needs.named(self.layers))

    def batches(
        self, source: Any, name: str = "logits", labels: Any = None, refused: Refused | None = None
    ) -> Iterator[Any]:
        """An array, or an iterable of blocks, in blocks of a fixed number of rows; `refused` as in `Outputs`."""
        if refused is not None and hasattr(source, "on_error"):  # a file of logits
            source = copy.copy(source)
            source.on_error = "refuse"
        return recut(_blocks(source, labels, "logits" if name == "x" else name, refused))

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


def _blocks(source: Any, labels: Any, name: str, refused: Refused | None) -> Iterator[Outputs]:
    """The whole, checked at once; or each block of an iterable, which is `Outputs`, logits, or `(logits, labels)`."""
    if isinstance(source, tuple) and len(source) == 2 and getattr(source[0], "ndim", 0) == 2:
        source, labels = source
    is_rows = isinstance(source, (list, tuple)) and not (source and _is_block(source[0]))
    if is_rows or hasattr(source, "__array__") or not isinstance(source, Iterable):
        yield _numbered(Outputs.of(source, labels, name, refused=refused), None, refused)
        return
    if labels is not None:
        raise InputError(f"labels: {name} come in blocks; give each block its own: (logits, labels)")
    block, first = None, 0
    for item in source:
        logits, classes = item if isinstance(item, (tuple, list)) and len(item) == 2 else (item, None)
        given: dict[str, Any] = {"labels": classes, "name": name, "first": first, "refused": refused}
        block = item if isinstance(item, Outputs) else Outputs(logits, **given)
        block = block[torch.arange(len(block))]  # a copy: its owner may use the memory again
        block = _numbered(block, first, refused)
        first += len(block)
        yield block
    if block is None:
        raise NoRowsError(f"{name}: empty: no block of logits; give a new source if it was a generator, read already")


def _numbered(block: Outputs, first: int | None, refused: Refused | None) -> Outputs:
    """A block whose rows are numbered from `first`; rows that it has refused are noted, or else an error."""
    if refused is None:
        for row, why in (block.refused or {}).items():
            if 0 <= row - block.first < len(block):
                raise InputError(f"row {row}: {why}; remove that row, or use on_error='refuse'")
        return block if first is None else block.replace(first=first)
    if block.refused is not refused:
        take_over(block, first or 0, refused)
    return block.replace(first=first or 0, refused=refused)


def _is_block(item: Any) -> bool:
    """Whether an item of a list is a block of rows, or a pair `(logits, labels)`, not one row."""
    logits = item[0] if isinstance(item, (tuple, list)) and item else item
    return isinstance(logits, Outputs) or getattr(logits, "ndim", 0) == 2


class ModelInputs(Inputs):
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
    """

    def __init__(
        self, model: nn.Module, layers: Layers = "auto", *, epsilon: float = 0.0, mean: Channels | None = None,
        std: Channels = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(layers)
        check_epsilon(epsilon)
        # as it is, it exchanges buffers in every pass, of which ranks may have unequal numbers
        self.model: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        self.epsilon = epsilon
        self.mean = None if mean is None else check_channels(mean, "mean")
        self.std = check_channels(std, "std", positive=True)
        self.read(self.layers)

    def read(self, layers: Sequence[str], layouts: Mapping[str, str] | None = None, statistic: str = "mean") -> None:
        """Read these blocks from now on."""
        names = list(dict.fromkeys(str(layer).split("|")[0] for layer in layers if not str(layer).startswith("|")))
        special = [str(layer) for layer in layers if str(layer).startswith("|")]
        is_input = {block: block.startswith(INPUT) for block in special}
        returns = [block[1:] for block in special if block != HEAD and not is_input[block]]
        self.reader = Reader(
            self.model, names, statistic=statistic, layouts=layouts, head=HEAD in special,
            inputs=any(is_input.values()), returns=returns,
        )  # fmt: skip
        self.bare = self.reader.bare
        self.layers, self.layouts = [*self.reader.layers, *[HEAD] * (HEAD in special)], self.reader.layouts

    def prepare(self, batch: Batch, needs: Needs) -> None:
        """Decide which layers to read, and how, with the first training samples."""
        if self.epsilon:
            check_steppable(batch.x)
        names = self.layers
        if self.wanted == "auto":
            names = choose_layers(self.model, batch, needs.layers, head=needs.head)
        blocks = needs.named([*names, INPUT])
        self.read(needs.blocks([*blocks, *returned_blocks(needs.returns)]), None, needs.statistic)
        self.reader.prepare(batch)
        self.head = self.reader.head

    def batches(
        self, source: Any, name: str = "x", labels: Any = None, refused: Refused | None = None
    ) -> Iterator[Any]:
        """Batches of a loader, or of one tensor, array, pair or mapping; `refused` as in `Outputs`."""
        return batches(source if labels is None else (source, labels), name, refused)

    def outputs(self, batch: Batch, *, labels: bool = False, keys: bool = False) -> Outputs:
        """Run a batch through the model."""
        with torch.no_grad():
            return self.reader(batch, labels=labels, keys=keys)

    def keys(self, batch: Batch) -> Keys:
        """Keys of a batch's samples, (N,)."""
        return batch.keys

    def stepped(
        self, batch: Batch | LostError, detector: Detector, epsilons: Sequence[float]
    ) -> tuple[Outputs, list[Outputs]]:
        """Clean outputs, and those after the input step (Eq. 6), for each size of it."""
        if isinstance(batch, LostError):
            raise batch

        def read(rows: Batch) -> tuple[Outputs, list[Outputs]]:
            return stepped(self.reader, rows, detector, epsilons, self.std)

        with torch.no_grad():
            return read(batch) if batch.refused is None else surviving(read, batch, batch.refused)

    def attacked(
        self, batch: Batch, detector: Detector, size: float, epsilons: Sequence[float]
    ) -> tuple[list[Outputs], Attack]:
        """Outputs of FGSM samples made from a batch, for each size of the input step; and what the attack did."""
        batch = self.reader.place(batch)
        with torch.no_grad():
            clean = self.reader(batch, labels=True)
            labels = clean.logits.argmax(dim=1) if clean.labels is None else clean.labels
            x = fgsm(lambda z: self.reader(batch.with_x(z)).logits, batch.x, labels, size, mean=self.mean, std=self.std)
            fooled, outputs = stepped(self.reader, batch.with_x(x), detector, epsilons, self.std)
            right = float((fooled.logits.argmax(dim=1) == labels).double().mean())
            moved = float((x - batch.x).abs().flatten(1).amax(dim=1).mean())
        return outputs, Attack(len(batch), moved, right)


def is_numpy(data: Any) -> bool:
    """Whether results go back as NumPy arrays: for arrays, lists of numbers or of arrays, and outputs made of them."""
    if isinstance(data, (list, tuple)):
        return bool(data) and (isinstance(data[0], (int, float)) or is_numpy(data[0]))
    return data.numpy if isinstance(data, Outputs) else hasattr(data, "__array__") and not isinstance(data, Tensor)


def collector(on_error: OnError) -> Refused | None:
    """What notes bad samples, or None where they are errors."""
    if on_error not in ("raise", "refuse"):
        raise InputError.unknown("on_error", on_error, ["raise", "refuse"])
    return {} if on_error == "refuse" else None


def check_lost(results: Sequence[Any], name: str, refused: Refused | None, least: int) -> None:
    """Raise if no batch could be read, of `least` samples or more: then the fault is not a sample's."""
    lost = [batch for batch in results if isinstance(batch, LostError)]
    if refused and len(lost) == len(results) and sum(map(len, lost)) >= least:
        problem = f"none of {sum(map(len, lost))} samples can be read; the first: {next(iter(refused.values()))}"
        raise InputError(f"{name}: {problem}; fix that") from lost[0].__cause__
