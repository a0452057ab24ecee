"""A model's outputs: logits and hidden features, batch by batch."""

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from igeood.errors import InputError
from igeood.model.batches import Batch, at_batch, batches
from igeood.model.layers import KINDS, Layers, check_layers, choose_layers, strip
from igeood.model.runner import Runner, first_tensor, named_modules
from igeood.outputs import HEAD, Outputs


def _mean(features: Tensor, layout: str) -> Tensor:
    """The mean over all axes but samples and channels, (N, k); of two axes a copy, since the model may go on in place.

    Examples
    --------
    >>> _mean(torch.arange(6.0).reshape(1, 3, 2), "last"), _mean(torch.arange(6.0).reshape(1, 3, 2), "second")
    (tensor([[2., 3.]]), tensor([[0.5000, 2.5000, 4.5000]]))
    """
    if features.ndim == 2:
        return features.clone()
    return features.flatten(1, -2).mean(dim=1) if layout == "last" else features.flatten(2).mean(dim=2)


STATISTICS: dict[str, Callable[[Tensor, str], Tensor]] = {"mean": _mean}  # of features (N, ...) and their layout


class Reader(Runner):
    """Runs a model and reads blocks of features, from any thread; the model is left as found.

    Parameters
    ----------
    model : Module
        The classifier; of wrapped ones (`DataParallel`, `torch.compile`) the bare model is read.
    layers : names
        Keys of `model.named_modules()`.
    statistic : str
        Of each layer's output: a key of `STATISTICS`.
    head : bool
        Also read the input of the last linear layer, as block `HEAD`.
    layouts : mapping, optional
        For each layer which axis has the channels: "flat", "second" or "last". Without it `prepare` decides.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[str] = (),
        *,
        statistic: str = "mean",
        head: bool = False,
        layouts: Mapping[str, str] | None = None,
    ) -> None:
        if statistic not in STATISTICS:
            raise InputError.unknown("statistic", statistic, STATISTICS)
        self.layers, self.layouts = list(layers), dict(layouts or {})
        self.statistic = statistic
        self._wants_head, self._head = head, ""  # its name
        self._handles: list[Any] = []
        self._holders = 0
        self._passes: dict[int, tuple[int, dict[str, Tensor]]] = {}  # for each thread: samples, and blocks so far
        super().__init__(model)
        self._called = self.bare if layers or head else model

    def _look(self) -> None:
        super()._look()
        self._modules = named_modules(self.model)
        check_layers(self.model, self.layers)
        self.layers = [name if name in self._modules else strip(name) for name in self.layers]

    @property
    def head(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight (C, k) and bias (C,) of the last linear layer, where `prepare` has looked for it."""
        if not self._head:
            return None
        linear: Any = self._modules[self._head]
        return linear.weight.detach(), None if linear.bias is None else linear.bias.detach()

    def prepare(self, batch: Batch) -> None:
        """Decide the layouts and find the head, in one forward pass of up to three samples."""
        calls, logits = self.watch(batch)
        for layer in self.layers:
            call = calls.get(self._modules[layer])
            self.layouts[layer] = "flat" if call is None else call.layout
        if self._wants_head:
            ends = [
                call.module for call in calls.values() if isinstance(call.module, nn.Linear) and call.returns(logits)
            ]
            if not ends:
                raise InputError(
                    "model: no nn.Linear returns its logits, and this method reads the input of that layer; make the "
                    "model return its last linear layer's output, or use another method"
                )
            self._head = next(name for name, module in self._modules.items() if module is ends[-1])

    def __call__(self, batch: Batch, *, labels: bool = False, keys: bool = False) -> Outputs:
        """Outputs of one batch, with its labels and keys if wanted; differentiable where gradients are on."""
        if (self._wants_head and not self._head) or not self.layouts.keys() >= set(self.layers):
            self.prepare(batch)
        thread, features = threading.get_ident(), dict[str, Tensor]()
        with self.running():
            self._passes[thread] = len(batch), features
            try:
                logits = self.run(batch)
            finally:
                del self._passes[thread]
        blocks = {self._block(layer): layer for layer in self.layers} | ({HEAD: HEAD} if self._head else {})
        missing = [layer for block, layer in blocks.items() if block not in features]
        if missing:
            raise InputError(f"layers: {missing[0]!r} is not called in the model's forward pass; name another")
        classes = (
            batch.labels.clone() if labels and isinstance(batch.labels, Tensor) else batch.labels
        )  # may be a buffer
        ordered = {block: features[block] for block in blocks}
        return Outputs(logits, ordered, classes if labels else None, keys=batch.keys if keys else None)

    def _block(self, layer: str) -> str:
        return layer if self.statistic == "mean" else f"{layer}|{self.statistic}"

    def _enter(self) -> None:
        super()._enter()
        self._holders += 1
        if self._holders == 1:
            hooks = [(self._modules[layer], self._hook(layer)) for layer in self.layers]
            hooks += [(self._modules[self._head], self._head_hook)] if self._head else []
            self._handles = [module.register_forward_hook(hook) for module, hook in hooks]

    def _leave(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            for handle in self._handles:
                handle.remove()
        super()._leave()

    def _hook(self, layer: str) -> Callable[[nn.Module, Any, Any], None]:
        """Forward hook that keeps a layer's features; passes that are not this reader's are left alone."""
        block, statistic = self._block(layer), STATISTICS[self.statistic]

        def keep(_: nn.Module, __: Any, output: Any) -> None:
            samples, features = self._passes.get(threading.get_ident(), (0, None))
            if features is None:
                return
            if block in features:
                raise InputError(f"layers: {layer!r} is called twice in one forward pass; name a layer that runs once")
            tensor = first_tensor(output)
            if tensor is None or tensor.ndim < 2 or len(tensor) != samples:
                what = type(output).__name__ if tensor is None else f"a tensor of shape {tuple(tensor.shape)}"
                raise InputError(
                    f"layers: {layer!r} returns {what}, not features (N, k, ...) of N = {samples} samples; "
                    f"name another (or is it one sample? Give a batch: x[None])"
                )
            features[block] = statistic(_wide(tensor), self.layouts[layer])

        return keep

    def _head_hook(self, _: nn.Module, inputs: Any, __: Any) -> None:
        features = self._passes.get(threading.get_ident(), (0, None))[1]
        if features is not None:
            features[HEAD] = _wide(inputs[0]).clone()


def _wide(tensor: Tensor) -> Tensor:
    """At least float32: sums of many float16 values overflow."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def extract(
    model: nn.Module, loader: Any, layers: Layers = "auto", *, statistic: str = "mean", head: bool = False
) -> Outputs:
    """Logits, features, labels and keys of all samples of a loader, in one forward pass.

    Parameters
    ----------
    model : Module
        Returns logits: as a tensor, first in a tuple, or as `logits` of a mapping or an object.
    loader : iterable of batches
        Tensors, tuples `(x, y)`, or mappings of keywords; or one such batch.
    layers : "auto", "convolutions", "norms" or names
        "auto" takes the ends of the network's blocks; names are keys of `model.named_modules()`; () reads no layer.
    statistic : str
        Of each layer's output.
    head : bool
        Also read the input of the last linear layer.

    Returns
    -------
    Outputs
        On the model's device. For more data than memory holds, use `stream`.
    """
    with random_state_kept():
        parts = list(_stream(model, loader, layers, statistic=statistic, head=head, keys=True))
    with at_batch("loader", len(parts) - 1):
        return Outputs.concat(parts)


def stream(model: nn.Module, loader: Any, layers: Layers = ()) -> Iterator[Outputs]:
    """Outputs of each batch of a loader, without gradients; between batches the model is as it was."""
    return _stream(model, loader, layers)


def _stream(model: nn.Module, loader: Any, layers: Layers, *, keys: bool = False, **options: Any) -> Iterator[Outputs]:
    kind = "all" if layers == "auto" else layers
    searching = isinstance(kind, str) and kind in KINDS
    names = [] if searching else [layers] if isinstance(layers, str) else list(layers)
    reader = Reader(model, names, **options)  # before the first batch is drawn: bad names are errors at once
    for number, batch in enumerate(batches(loader, "loader")):
        with at_batch("loader", number), torch.inference_mode(False), torch.no_grad():
            if searching:
                reader, searching = Reader(model, choose_layers(model, batch, str(kind)), **options), False
            outputs = reader(batch, labels=True, keys=keys)
        yield outputs


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Python's, NumPy's and torch's random states as they were, even if a loader or a model draws from them.

    For work on a loader, not for single predictions: numbers that other threads draw meanwhile are drawn again.
    """
    python, legacy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.set_rng_state(torch_state)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
