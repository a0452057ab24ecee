"""How a guard sees its inputs: through a model, or as logits that come as arrays."""

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from igeood.batches import Batch, at_batch, batches
from igeood.detectors import Detector
from igeood.errors import IgeoodWarning, InputError
from igeood.extraction import Layers, Reader, auto_layers, reading, resolve_layers
from igeood.fingerprints import WeightWatch, fingerprint, own_changes
from igeood.folding import Folded, parts, stand_in, unchanged
from igeood.outputs import Keys, Outputs, recut, row_keys
from igeood.perturbation import (
    Attack,
    Channels,
    check_channels,
    check_floating,
    fgsm,
    input_gradients,
    per_channel,
    signed_step,
)

_NO_KEYS: Keys = np.empty(0, dtype=np.uint64)
Select = Callable[[Keys], Tensor]  # keys → which rows, (N,) bool


@dataclass(frozen=True)
class Seen:
    """A batch: its samples' keys, their clean outputs, and the outputs to score, one for each size of the step."""

    keys: Keys
    clean: Outputs
    stepped: list[Outputs]


class ArrayInputs:
    """Logits as arrays, with the features where layers are wanted: nothing to run.

    Parameters
    ----------
    layers : "auto" or names
        Features to read; "auto" takes all that the training samples have.
    """

    model: nn.Module | None = None
    fingerprint: str | None = None
    epsilon = 0.0

    def __init__(self, layers: Layers = ()) -> None:
        self._wanted, self._searching = layers, False
        self.layers = [] if layers == "auto" else [layers] if isinstance(layers, str) else list(layers)

    def prepare(self) -> None:
        """Take the layers of the first block that is seen, if that was left to us."""
        self._searching = self._wanted == "auto"

    def settle(self) -> None:
        """Nothing to watch after a fit."""

    def see(
        self, source: Any, detector: Detector, *, name: str = "logits", select: Select | None = None,
        labels: Any = None, fitting: bool = False, epsilons: Sequence[float] = (0.0,), keyed: bool = True,  # noqa: ARG002
    ) -> Generator[Seen, None, None]:  # fmt: skip
        """An array, or an iterable of blocks, in blocks of a fixed number of rows."""
        if any(epsilons):
            raise InputError("epsilons: an input step needs the model; make the guard with grey_box(model)")
        first = 0
        for outputs in recut(_blocks(source, labels, name)):
            if self._searching:
                self.layers, self._searching = list(outputs.features), False
            self._check(outputs, detector, name, first)
            first += len(outputs)
            keys = row_keys(outputs.logits) if keyed else _NO_KEYS
            if select is not None:
                rows = select(keys)
                keys, outputs = keys[rows.numpy()], outputs[rows.to(outputs.logits.device)]  # noqa: PLW2901
            features = {layer: outputs.features[layer] for layer in self.layers}
            chosen = Outputs.checked(outputs.logits, features, outputs.labels, outputs.numpy)
            yield Seen(keys, chosen, [chosen])

    def _check(self, outputs: Outputs, detector: Detector, name: str, first: int) -> None:
        if outputs.n_classes != getattr(detector, "n_classes_", outputs.n_classes):
            raise InputError(
                f"{name}: {outputs.n_classes} columns, but the guard was fitted on {detector.n_classes_} classes; "
                f"give logits of the same model"
            )
        for layer in self.layers:
            if layer not in outputs.features:
                have = ", ".join(map(repr, outputs.features)) or "none"
                raise InputError(
                    f"{name}: no features of layer {layer!r}, which the guard reads; these have {have}; give all of its"
                )
        if detector.probabilities and first:  # of the first block, the detector's own message is right
            detector.read(outputs, first)

    def attack(self, *_: Any, **__: Any) -> tuple[list[Outputs], Attack]:
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
    first = 0
    for item in source:
        if isinstance(item, Outputs):
            block = item
        else:
            logits, classes = item if isinstance(item, (tuple, list)) and len(item) == 2 else (item, None)
            block = Outputs(logits, labels=classes, name=name, first=first)
        first += len(block)
        yield block


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
        Layers to read; "auto" is resolved by `prepare`.
    epsilon : float
        Size of the input step, in pixel units.
    mean, std : float or one for each channel
        Of the input's normalisation; without a mean, adversarial samples are clamped only if inputs lie in [0, 1].
    fold : bool
        Run a `Folded` stand-in where the model has one; no layers can be read from it.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        *,
        epsilon: float = 0.0,
        mean: Channels | None = None,
        std: Channels = 1.0,
        fold: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            hint = f"; did you mean method={model!r}?" if isinstance(model, str) else ""
            raise InputError(f"model: expected a torch.nn.Module, got {type(model).__name__}{hint}")
        self.model, self.epsilon, self.fold = model, epsilon, fold
        self._weights: WeightWatch | None = None  # those that the guard was fitted with
        self._moving: set[str] = set()  # what of the model's state its own forward pass changes
        self._warned = self._searching = False
        self._folded: tuple[list[Any], Folded | None] | None = None  # the model's parts, and its stand-in if it has one
        self.mean = None if mean is None else check_channels(mean, "mean")
        self.std = check_channels(std, "std", positive=True)
        self._wanted = layers
        self.layers = [] if layers == "auto" else resolve_layers(model, None, layers)

    def prepare(self) -> None:
        """Find the layers in the first batch that is seen, if that was left to us."""
        self._searching = self._wanted == "auto"

    def settle(self) -> None:
        """The guard is fitted, with the weights of this moment."""
        self._weights, self._warned = None, False
        with suppress(Exception):  # a model whose state cannot be told is not watched; `save` says why
            self._weights = WeightWatch(self.model, self._moving)

    @property
    def fingerprint(self) -> str:
        """Of the weights that the guard was fitted with."""
        return fingerprint(self.model) if self._weights is None else self._weights.fingerprint

    def _check_weights(self, name: str) -> None:
        """Raise where a threshold or a temperature would be set with other weights; warn, once, where one is used."""
        strict = name in ("id_data", "ood")
        if self._weights is None or (self._warned and not strict) or not self._weights.changed(self.model):
            return
        told = "model: its weights have changed since the guard was fitted"
        if strict:
            raise InputError(f"{told}; fit it again first")
        told = f"{told}, whose classes and threshold are of the old ones; fit and calibrate again"
        warnings.warn(told, IgeoodWarning, stacklevel=5)
        self._warned = True

    def see(
        self, source: Any, detector: Detector, *, name: str = "x", select: Select | None = None,
        labels: Any = None, fitting: bool = False, epsilons: Sequence[float] = (0.0,), keyed: bool = True,
    ) -> Generator[Seen, None, None]:  # fmt: skip
        """Run each batch through the model, and through the step where one is wanted."""
        if labels is not None:
            source = (source, labels)
        elif isinstance(source, Outputs):
            raise InputError(f"{name}: this guard has a model and takes its inputs, not outputs; use guard.detector")
        searching, self._searching = self._searching, False
        unchecked = not fitting
        width: int | None = getattr(detector, "n_classes_", None)
        for number, batch in enumerate(batches(source, name)):
            with at_batch(name, number):
                check_input(batch.x)
                keys = batch.keys if keyed else _NO_KEYS
                rows = slice(None) if select is None else select(keys)
                chosen = batch[rows]
                if len(chosen) == 0 < len(batch):
                    continue
                if searching and len(chosen):
                    self.layers, searching = auto_layers(self.model, chosen), False
                own = own_changes(self.model, self._moving)
                with own, reading(self._runner(chosen), self.layers) as reader, torch.no_grad():
                    clean, stepped = self._run(reader, reader.place(chosen), detector, epsilons, labels=fitting)
                if clean.n_classes != (width := width or clean.n_classes):
                    raise InputError(
                        f"model: gives {clean.n_classes} classes here, {width} before; they must be as many"
                    )
            if unchecked:  # after a pass, which shows what of the state moves by itself
                self._check_weights(name)
                unchecked = False
            yield Seen(keys[rows if isinstance(rows, slice) else rows.numpy()], clean, stepped)

    def _run(
        self, reader: Reader, batch: Batch, detector: Detector, epsilons: Sequence[float], *, labels: bool = False
    ) -> tuple[Outputs, list[Outputs]]:
        """Clean outputs, and those after a step that lowers the detector's score (Eq. 6), for each size of the step."""
        if not any(epsilons):
            clean = reader(batch, labels=labels)
            return clean, [clean] * len(epsilons)
        return self._step(reader, batch, detector, epsilons)

    def _step(
        self, reader: Reader, batch: Batch, detector: Detector, epsilons: Sequence[float]
    ) -> tuple[Outputs, list[Outputs]]:
        """One forward pass gives the clean outputs and the gradient, which all sizes share; no step, no second pass."""
        made: list[Outputs] = []
        targets: list[tuple[str, ...] | None] = []

        def objectives(x: Tensor) -> list[Tensor]:
            made[:] = [reader(batch.with_x(x))]
            steps = detector.step_scores(detector._scorable(made[0]))
            targets[:] = [layers for _, layers in steps]
            return [score for score, _ in steps]

        gradients = input_gradients(objectives, batch.x)
        clean = made[0].detached()

        def after(epsilon: float) -> Outputs:
            moved = (signed_step(batch.x, gradient, -epsilon, self.std) for gradient in gradients)
            return _merge(clean, [reader(batch.with_x(x)) for x in moved], targets)

        return clean, [after(epsilon) if epsilon else clean for epsilon in epsilons]

    def _runner(self, batch: Batch) -> nn.Module:
        """What runs: the model, or its stand-in with the weights of this moment."""
        if not self.fold or len(batch) == 0:
            return self.model

        def logits(model: nn.Module) -> Tensor:
            with reading(model) as reader, torch.no_grad():
                return reader(batch[slice(0, 2)]).logits

        now = parts(self.model)
        if self._folded is None or not unchanged(self._folded[0], now):
            self._folded = now, stand_in(self.model, logits)
        folded = self._folded[1]
        if folded is None:
            return self.model
        folded.renew()
        return folded

    def attack(
        self, source: Any, detector: Detector, size: float, *, select: Select | None = None,
        epsilons: Sequence[float] = (0.0,),
    ) -> tuple[list[Outputs], Attack]:  # fmt: skip
        """Outputs of FGSM samples made from the source, for each size of the input step; and what the attack did."""
        found: list[list[Outputs]] = []
        right = moved = 0.0
        for number, given in enumerate(batches(source, "id_data")):
            check_floating(given.x)
            chosen = given if select is None else given[select(given.keys)]
            if len(chosen) == 0:
                continue
            place = at_batch("id_data", number)
            with place, reading(self._runner(chosen), self.layers) as reader, torch.no_grad():
                batch = reader.place(chosen)
                clean = reader(batch, labels=True)
                labels = clean.logits.argmax(dim=1) if clean.labels is None else clean.labels
                x = self._fgsm(reader, batch, labels, size)
                outputs, stepped = self._run(reader, batch.with_x(x), detector, epsilons)
                right += float((outputs.logits.argmax(dim=1) == labels).sum())
                moved += float((x - batch.x).abs().flatten(1).amax(dim=1).sum())
                found.append(stepped)
        if not found:
            raise InputError("id_data: no sample to attack; give more, or a larger share")
        joined = [Outputs.concat(parts) for parts in zip(*found, strict=True)]
        n = len(joined[0])
        return joined, Attack(n, moved / n, right / n)

    def _fgsm(self, reader: Reader, batch: Batch, labels: Tensor, size: float) -> Tensor:
        x = batch.x
        if self.mean is not None:
            mean, std = (per_channel(v, x, name) for v, name in ((self.mean, "mean"), (self.std, "std")))
            low, high = -mean / std, (1.0 - mean) / std
        elif self.std == 1.0 and float(x.min()) >= 0.0 and float(x.max()) <= 1.0:
            low, high = x.new_zeros(()), x.new_ones(())
        else:
            low, high = x.new_full((), -torch.inf), x.new_full((), torch.inf)
        return fgsm(lambda z: reader(batch.with_x(z)).logits, x, labels, size, std=self.std, low=low, high=high)


def check_input(x: Tensor) -> None:
    """Raise where an input is not what a model takes: NaN or infinity, or images of bytes."""
    if x.device.type == "meta":
        raise InputError("is on the meta device, which holds no values; give real tensors")
    if x.dtype == torch.uint8:
        raise InputError("images of bytes (uint8); give floats, scaled and normalised as in training")
    if x.is_floating_point():
        bad = (~x.isfinite().flatten(1).all(dim=1)).nonzero()[:, 0] if x.ndim > 1 else torch.empty(0)
        if len(bad):
            raise InputError(
                f"sample {int(bad[0])} has NaN or infinity ({len(bad)} of {len(x)} samples do); remove those samples"
            )


def _merge(clean: Outputs, parts: list[Outputs], targets: list[tuple[str, ...] | None]) -> Outputs:
    """Outputs after the steps: all of the one step's, or each layer from its own step and the logits clean."""
    if targets == [None]:
        return parts[0]
    features = {
        layer: part.features[layer] for part, layers in zip(parts, targets, strict=True) for layer in layers or ()
    }
    return Outputs(clean.logits, features, clean.labels)


def collect(seen: Iterable[Seen]) -> tuple[Keys, list[Outputs]]:
    """Keys and stepped outputs of all batches."""
    parts = list(seen)
    if not parts:
        return np.empty(0, dtype=np.uint64), []
    stepped = [Outputs.concat(column) for column in zip(*(part.stepped for part in parts), strict=True)]
    return np.concatenate([part.keys for part in parts]), stepped


class ValidationSamples:
    """Samples to tune on: a share of the in-distribution ones, with OOD ones or with attacks on that share.

    Parameters
    ----------
    inputs : ArrayInputs or ModelInputs
        How they are seen.
    id_data, ood
        As in `Guard.tune`; they may be read more than once.
    select : callable
        Which of the in-distribution samples to use, by their keys.
    attack : float
        Size of the adversarial step.
    """

    def __init__(
        self, inputs: ArrayInputs | ModelInputs, id_data: Any, ood: Any, select: Select, attack: float
    ) -> None:
        for name, source in (("id_data", id_data), ("ood", ood)):
            if isinstance(source, Iterator):
                raise InputError(f"{name}: is read more than once; give a loader or a list, not a generator")
        if isinstance(ood, str) and ood != "fgsm":
            raise InputError(f"ood: expected OOD samples, got {ood!r}; give an array or a loader, or 'fgsm'")
        self.inputs, self.id_data, self.ood, self.select, self.attack = inputs, id_data, ood, select, attack
        self.used: Keys = np.empty(0, dtype=np.uint64)  # of the in-distribution samples that `see` has shown

    def see(self, detector: Detector, epsilons: Sequence[float]) -> tuple[list[Outputs], list[Outputs], Attack | None]:
        """Outputs of both kinds for each size of the input step, and what the attack did, if there was one."""
        known = self.inputs.see(self.id_data, detector, name="id_data", select=self.select, epsilons=epsilons)
        keys, inside = collect(known)
        if len(self.used) and not np.array_equal(np.sort(keys), np.sort(self.used)):
            raise InputError("id_data: gives other samples each time it is read; leave random augmentation out of it")
        self.used = keys
        if isinstance(self.ood, str):
            outside, report = self.inputs.attack(
                self.id_data, detector, self.attack, select=self.select, epsilons=epsilons
            )
            return inside, outside, report
        keys, outside = collect(self.inputs.see(self.ood, detector, name="ood", epsilons=epsilons))
        shared = int(np.isin(keys, self.used).sum())
        if shared:
            raise InputError(
                f"ood: {shared} of {len(keys)} samples are among the in-distribution ones too; remove them"
            )
        return inside, outside, None
