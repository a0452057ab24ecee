"""The one source of outputs: what a guard is given, arrays or whatever its model takes, becomes `Outputs`."""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from igeood.detectors import Detector
from igeood.errors import Finding, IgeoodWarning, InputError, NoRowsError, UnsuitedError
from igeood.keys import BLOCK_VALUES
from igeood.model.batch import Batch, Numbers, batches, is_batch
from igeood.model.fingerprint import Versions, fingerprint
from igeood.model.layers import Call, Layers
from igeood.model.reader import Reader, random_state_kept, reader_for
from igeood.model.step import Channels, check_channels, check_epsilon, check_steppable, stepped
from igeood.outputs import OnError, Outputs, checked_labels, class_numbers, label_names
from igeood.summary import Needs

Names = Sequence[str] | None


class Source:
    """Turns data into `Outputs`: a model with its layers, or arrays.

    Parameters
    ----------
    model : Module, optional
        The classifier; left as it is found. Without it data are arrays of logits, or `Outputs`.
    layers : "auto" or names
        What to read; "auto" takes what the method needs.
    epsilon : float
        Size of the input step, in pixel units.
    std : float or one for each channel
        Of the input's normalisation.

    Attributes
    ----------
    probabilities : bool
        The model, or the arrays, give probabilities, not logits.
    fingerprint : str, optional
        Of the weights that the guard was fitted with.
    fitted_device, fitted_autocast : str, optional
        The kind of device that the model was on in `fit`, and the type of torch's autocast, if it was on.
    findings : tuple of Finding
        What using the guard has found.
    """

    def __init__(
        self, model: nn.Module | None = None, layers: Layers = "auto", *, epsilon: float = 0.0, std: Channels = 1.0
    ) -> None:
        check_epsilon(epsilon)
        # as it is, it exchanges buffers in every pass, of which ranks may have unequal numbers
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.wanted = None if layers == "auto" else [layers] if isinstance(layers, str) else list(layers)
        self.epsilon = epsilon
        self.std = check_channels(std, "std", positive=True)
        self.probabilities = False  # the guard's detector says so
        self.reader = None if model is None else Reader(self.model, self.wanted or ())  # type: ignore[arg-type]
        self._blocks: Iterable[str] = self.wanted or ()  # of arrays
        self.identified: bool | None = None  # whether training samples have ids, or are known by their rows
        self.fingerprint: str | None = None
        self.fitted_device: str | None = None
        self.fitted_autocast: str | None = None
        self.findings: tuple[Finding, ...] = ()
        self._versions: Versions | None = None
        self._warned = False
        self.classes: Names = None  # by which labels that are names become numbers
        self.columns: dict[str, Any] | None = None  # of logits files, by which later ones are read

    @property
    def bare(self) -> nn.Module | None:
        """The model without its wrappers."""
        return None if self.reader is None else self.reader.bare

    @property
    def layers(self) -> list[str]:
        """Blocks of features that are read."""
        return list(self._blocks if self.reader is None else self.reader.blocks)

    @property
    def layouts(self) -> Mapping[str, str]:
        """Which axis of each layer has the channels."""
        return {} if self.reader is None else self.reader.layouts

    def prepare(self, item: Batch | Outputs, needs: Needs) -> None:
        """Decide what to read, with the first training samples."""
        if isinstance(item, Outputs):
            self._blocks = needs.blocks(item.features if self.wanted is None else needs.named(self.wanted))
            if needs.reads_layers and self.wanted is None and not self._blocks:
                raise UnsuitedError("no features", argument="outputs", cure="give features, or columns feature.<layer>")
            return
        if self.epsilon:
            check_steppable(item.x)
        self.reader = reader_for(self.model, item, needs, self.wanted)  # type: ignore[arg-type]

    def follow(self, blocks: Sequence[str], layouts: Mapping[str, str], needs: Needs) -> None:
        """Read these blocks, which a summary or a file names."""
        self._blocks = blocks
        self.reader = None if self.model is None else Reader(self.model, blocks, layouts, needs)

    def batches(
        self,
        data: Any,
        labels: Any = None,
        *,
        ids: Any = None,
        name: str = "x",
        on_error: OnError = "raise",
        needs: Needs | None = None,
        detector: Detector | None = None,
        keys: bool = False,
    ) -> Iterator[Outputs]:
        """Outputs of a loader, a tensor, arrays or files, batch by batch.

        Parameters
        ----------
        data, labels, ids
            What `Guard.fit` or `Guard.predict` was given.
        name : str
            What errors call the data.
        on_error : {"raise", "refuse"}
            Whether a bad row is an error, or a row that is not valid.
        needs : Needs, optional
            These are training samples: the first batch decides what is read for these needs, labels are read too.
        detector : Detector, optional
            Whose score the input step lowers; without it there is no step.
        keys : bool
            Whether samples are to be recognised.
        """
        is_prepared = needs is None
        is_fitted = is_prepared and self.fingerprint is not None
        if is_fitted and not self.findings and self.precision[1] != self.fitted_autocast:
            self._warn_of_autocast()
        items = self.items(data, labels, ids, name, on_error, training=needs is not None, keys=keys)
        for number, item in enumerate(items):
            with self.naming(name, number):
                if needs is not None and not is_prepared:
                    if len(item) == 0:
                        continue
                    self.prepare(item, needs)
                    is_prepared = True
                if detector is not None and self.epsilon:
                    outputs = self.step(item, detector, (self.epsilon,), on_error)[0]
                    outputs = outputs.replace(_keys=item.keys) if keys else outputs
                else:
                    outputs = self.read(item, labels=needs is not None, keys=keys, on_error=on_error)
            yield outputs

    @contextmanager
    def naming(self, name: str, number: int) -> Iterator[None]:
        """Errors of a model's batch say which batch it is."""
        try:
            yield
        except InputError as error:
            if self.model is None or isinstance(error, UnsuitedError):
                raise
            raise error.within(f"{name}: batch {number}") from error.__cause__

    def items(
        self,
        data: Any,
        labels: Any = None,
        ids: Any = None,
        name: str = "x",
        on_error: OnError = "raise",
        *,
        training: bool = False,
        keys: bool = False,
    ) -> Iterator[Any]:
        """Batches for the model, or blocks of arrays; labels that are names become numbers of `classes`.

        In `training`, data that are whole say what `classes` and `columns` are, and labels that fit no class are an
        error. Otherwise such labels are left out, and all of files that are not settled.
        """
        if isinstance(data, tuple) and len(data) == 2 and getattr(data[0], "ndim", 0) > 1:
            data, labels = data
        if training and self.classes is None and labels is not None:
            self.classes = label_names(labels)
        numbers = partial(self._numbers, training)
        if self.model is None:
            if hasattr(data, "settled"):  # a file of logits
                data = self._opened(data, on_error, training=training, keys=keys)
            yield from array_blocks(data, labels, ids, "logits" if name == "x" else name, on_error, numbers)
            return
        if ids is not None:
            raise InputError("a model's inputs are recognised by their content", argument="ids", cure="leave them out")
        yield from batches(data if labels is None else (data, labels), name, on_error, numbers)

    def _numbers(self, training: bool, labels: Any, logits: Tensor | None = None, first: int = 0) -> Any:
        """Labels as numbers of classes; where they fit none, an error in training, else None."""
        with nullcontext() if training else suppress(InputError):
            numbers = class_numbers(labels, self.classes, None if logits is None else logits.shape[1], first)
            return numbers if logits is None else checked_labels(numbers, logits, first)
        return None

    def _opened(self, file: Any, on_error: OnError, *, training: bool, keys: bool) -> Iterable[Outputs]:
        """The blocks of a file of logits, whose samples have keys where they are to be recognised."""
        file = file.settled(self.classes) if training else copy.copy(file)
        if training:
            self.columns = file.columns
            self.classes = file.classes or self.classes
        file.on_error = on_error
        file.columns = file.columns or self.columns
        file.labelled &= file.classes is not None
        file.identifies = None if training else self.identified
        return file if keys or training else (block for block, _ in file.blocks(ids=True))

    def reading(self, data: Any) -> AbstractContextManager[None]:
        """Around the use of `batches`: random states as they were, even if a loader draws from them."""
        is_loader = self.model is not None and not is_batch(data)
        return random_state_kept() if is_loader else nullcontext()

    def read(
        self, item: Batch | Outputs, *, labels: bool = False, keys: bool = False, on_error: OnError = "raise"
    ) -> Outputs:
        """Outputs of one batch or block, with the blocks of features that the guard reads."""
        if isinstance(item, Outputs):
            outputs = item.only(self._blocks)
        else:
            with torch.no_grad():
                outputs = self.reader(item, labels=labels, keys=keys, on_error=on_error)  # type: ignore[misc]
        return outputs.from_probabilities(on_error) if self.probabilities else outputs

    def step(
        self, item: Batch | Outputs, detector: Detector, epsilons: Sequence[float], on_error: OnError = "raise"
    ) -> list[Outputs]:
        """Outputs after the input step (Eq. 6), for each size of it; they have the answer on the clean input."""
        if not any(epsilons):
            return [self.read(item)] * len(epsilons)
        if isinstance(item, Outputs):
            raise InputError("a step needs the model", argument="epsilons", cure="make the guard with grey_box(model)")
        with torch.no_grad():
            return stepped(self.reader, item, detector, epsilons, self.std, on_error)  # type: ignore[arg-type]

    def weights(self) -> str | None:
        """Fingerprint of the model's weights as they are."""
        return None if self.model is None else fingerprint(self.model)

    def settle(self, before: str | None = None) -> None:
        """The guard is fitted, with the weights of this moment; `before` is their fingerprint before the pass."""
        self.fingerprint = self.weights()
        self.fitted_device, self.fitted_autocast = (None, None) if self.model is None else self.precision
        self.findings = ()
        self._warned = False
        changes_itself = before not in (None, self.fingerprint)
        self._versions = None if self.model is None or changes_itself else Versions(self.model)

    @property
    def precision(self) -> tuple[str, str | None]:
        """The kind of device that the model is on, and the type of torch's autocast there, if it is on."""
        weight = None if self.reader is None else self.reader.weight
        device = "cpu" if weight is None else weight.device.type
        is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        return device, str(torch.get_autocast_dtype(device)).removeprefix("torch.") if is_on else None

    def _warn_of_autocast(self) -> None:
        """Warn that torch's autocast is another than when the guard was fitted: scores differ."""
        now, before = (name or "off" for name in (self.precision[1], self.fitted_autocast))
        message = f"torch's autocast is {now}, and was {before} in fit, on {self.fitted_device}"
        cure = "use the guard as it was fitted, or fit and calibrate it again"
        self.findings = (Finding("other-autocast", "warning", message, cure),)
        warnings.warn(IgeoodWarning(self.findings[0]), stacklevel=5)

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
        problem = "its weights have changed since the guard was fitted"
        error = InputError(problem, argument="model", cure="fit and calibrate the guard again")
        if strict:
            raise error
        self._warned = True
        warnings.warn(IgeoodWarning(error), stacklevel=3)


def array_blocks(data: Any, labels: Any, ids: Any, name: str, on_error: OnError, numbers: Numbers) -> Iterator[Outputs]:
    """The whole, checked at once; or each block of an iterable, which is `Outputs`, logits, or `(logits, labels)`."""
    is_whole = _is_whole(data)
    if not is_whole and not (labels is None and ids is None):
        argument = "ids" if labels is None else "labels"
        raise InputError(f"{name} come in blocks", argument=argument, cure="give each block, as Outputs, its own")
    first = 0
    block = None
    for item in [(data, labels)] if is_whole else data:
        logits, own_labels = item if isinstance(item, (tuple, list)) and len(item) == 2 else (item, None)
        if isinstance(logits, Outputs):
            block = Outputs.of(logits, ids=ids)
        else:
            block = Outputs(logits, ids=ids, name=name, on_error=on_error, first=first)
        if own_labels is not None:
            block = block.replace(labels=numbers(own_labels, block.logits, first))
        if on_error == "raise":
            block.check_valid(first)
        first += len(block)
        yield block
    if block is None:
        raise NoRowsError("no block of logits", argument=name, cure="give samples; a generator is read once")


def _is_whole(data: Any) -> bool:
    """Whether these are rows, and not blocks of rows, or pairs `(logits, labels)` of blocks."""
    if not isinstance(data, (list, tuple)):
        return isinstance(data, Outputs) or hasattr(data, "__array__") or not isinstance(data, Iterable)
    item = data[0] if data else None
    logits = item[0] if isinstance(item, (tuple, list)) and item else item
    return not isinstance(logits, Outputs) and getattr(logits, "ndim", 0) != 2


def joined(parts: Iterable[Outputs]) -> Iterator[Outputs]:
    """The samples of small batches together, about a million values at a time: to sum up a few costs as much."""
    held: list[Outputs] = []
    values = 0
    for part in parts:
        held.append(part[torch.arange(len(part))])  # a copy: its owner may use the memory again
        values += part.nbytes // 4
        if values >= BLOCK_VALUES:
            yield Outputs.concat(held)
            held = []
            values = 0
    if held:
        yield Outputs.concat(held)


def extract(
    model: nn.Module,
    loader: Any,
    layers: Layers = "auto",
    *,
    pool: Callable[[Call], Tensor] | None = None,
    head: bool = False,
) -> Outputs:
    """Logits, features, labels and keys of all samples of a loader, in one forward pass.

    Parameters
    ----------
    model : Module
        Returns logits: as a tensor, first in a tuple, or as `logits` of a mapping or an object.
    loader : iterable of batches
        Tensors, tuples `(x, y)`, or mappings of keywords; or one such batch.
    layers : "auto" or names
        "auto" takes the ends of the network's blocks; names are keys of `model.named_modules()`; () reads no layer.
    pool : callable, optional
        Makes features (N, m) of a layer's `Call`; by default the mean.
    head : bool
        Also read the input of the last linear layer.
    """
    source = Source(model, layers)
    needs = Needs(layers="none" if source.wanted == [] else "all", pool=pool, head=head)
    with source.reading(loader):
        return Outputs.concat(source.batches(loader, name="loader", needs=needs, keys=True))


def is_numpy(data: Any) -> bool:
    """Whether results go back as NumPy arrays: for arrays, lists of numbers or of arrays, and outputs made of them."""
    if isinstance(data, (list, tuple)):
        return bool(data) and (isinstance(data[0], (int, float)) or is_numpy(data[0]))
    return data.numpy if isinstance(data, Outputs) else hasattr(data, "__array__") and not isinstance(data, Tensor)
