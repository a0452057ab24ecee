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
from igeood.model.layers import Layers, check_layers, choose_layers
from igeood.model.runner import Runner, first_tensor, named_modules, strip
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
    channels = features.ndim - 1 if layout == "last" else 1
    return features.mean(dim=[axis for axis in range(1, features.ndim) if axis != channels])


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

    Attributes
    ----------
    layers : list of str
        Without the prefixes of wrappers.
    layouts : dict
        As above; full once the reader is prepared.
    head : (Tensor, Tensor or None) or None
        Weight (C, k) and bias (C,) of the last linear layer, if it was wanted, once the reader is prepared.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[str] = (), *, statistic: str = "mean", head: bool = False,
        layouts: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        if statistic not in STATISTICS:
            raise InputError.unknown("statistic", statistic, STATISTICS)
        self.layers, self.layouts, self.statistic = list(layers), dict(layouts or {}), statistic
        self._prepared = not head and self.layouts.keys() >= set(self.layers)
        self._wants_head, self._head = head, ""  # the layer's name
        self._hooks: dict[str, Any] = {}  # for each block its handle, while anybody runs the model
        self._holders = 0
        self._passes: dict[int, tuple[int, dict[str, Tensor]]] = {}  # for each thread: samples, and blocks so far
        super().__init__(model)

    def _look(self) -> None:
        check_layers(self.model, [*self.layers, self._head] if self._head else self.layers)
        super()._look()
        self._modules = named_modules(self.model)
        self.layers = [name if name in self._modules else strip(name) for name in self.layers]

    @property
    def head(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of the last linear layer."""
        if not self._head:
            return None
        linear: Any = self._modules[self._head]
        return linear.weight.detach(), None if linear.bias is None else linear.bias.detach()

    @property
    def _blocks(self) -> dict[str, str]:
        """The layer of each block."""
        suffix = "" if self.statistic == "mean" else f"|{self.statistic}"
        return {f"{layer}{suffix}": layer for layer in self.layers} | ({HEAD: self._head} if self._head else {})

    def prepare(self, batch: Batch) -> None:
        """Decide the layouts and find the head, in one forward pass of up to three samples."""
        calls, logits = self.watch(batch)
        for layer in self.layers:
            call = calls.get(self._modules[layer])  # one that is missing cannot be read either
            self.layouts[layer] = "flat" if call is None else call.layout
        if self._wants_head:
            linear = {c.module for c in calls.values() if isinstance(c.module, nn.Linear) and c.returns(logits)}
            self._head = next((name for name, module in self._modules.items() if module in linear), "")
            if not self._head:
                cure = "make the model return its last linear layer's output, or use another method"
                raise InputError(f"model: no nn.Linear returns its logits, whose input is wanted; {cure}")
        self._prepared = True

    def __call__(self, batch: Batch, *, labels: bool = False, keys: bool = False) -> Outputs:
        """Outputs of one batch, with its labels and keys if wanted; differentiable where gradients are on."""
        if not self._prepared:
            self.prepare(batch)
        thread, blocks = threading.get_ident(), self._blocks
        features: dict[str, Tensor] = {}
        with self.running():
            self._passes[thread] = len(batch), features
            try:
                logits = self.run(self.bare if blocks else self.model, batch)
            finally:
                del self._passes[thread]
        for block, layer in blocks.items():
            if block not in features:
                raise InputError(f"layers: {layer!r} is not called in the model's forward pass; name another")
        classes = batch.labels if labels else None
        classes = classes.clone() if isinstance(classes, Tensor) else classes  # loaders may reuse it
        return Outputs(logits, {b: features[b] for b in blocks}, classes, keys=batch.keys if keys else None)

    def _enter(self) -> None:
        super()._enter()
        self._holders += 1
        for block, layer in self._blocks.items():
            if block not in self._hooks:
                self._hooks[block] = self._modules[layer].register_forward_hook(self._hook(block, layer))

    def _leave(self) -> None:
        self._holders -= 1
        while self._hooks and not self._holders:
            self._hooks.popitem()[1].remove()
        super()._leave()

    def _hook(self, block: str, layer: str) -> Callable[[nn.Module, Any, Any], None]:
        """Forward hook that keeps a layer's features; passes that are not this reader's are left alone."""

        def keep(_: nn.Module, inputs: Any, output: Any) -> None:
            samples, features = self._passes.get(threading.get_ident(), (0, None))
            if features is None:
                return
            if block in features:
                raise InputError(f"layers: {layer!r} is called twice in one forward pass; name a layer that runs once")
            tensor = first_tensor(inputs if block == HEAD else output)
            if tensor is None or tensor.ndim < 2 or len(tensor) != samples:
                what = type(output).__name__ if tensor is None else f"a tensor of shape {tuple(tensor.shape)}"
                raise InputError(
                    f"layers: {layer!r} returns {what}, not features (N, k, ...) of N = {samples} samples; "
                    f"name another (or is it one sample? Give a batch: x[None])"
                )
            # sums of many float16 values overflow
            wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
            features[block] = wide.clone() if block == HEAD else STATISTICS[self.statistic](wide, self.layouts[layer])

        return keep


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
        parts = list(stream(model, loader, layers, keys=True, statistic=statistic, head=head))
    with at_batch("loader", len(parts) - 1):
        return Outputs.concat(parts)


def stream(
    model: nn.Module, loader: Any, layers: Layers = (), *, keys: bool = False, **options: Any
) -> Iterator[Outputs]:
    """Outputs of each batch of a loader, without gradients; between batches the model is as it was.

    Parameters as in `extract`; `keys` are left out unless wanted.
    """
    kind = {"auto": "all", "convolutions": "convolutions", "norms": "norms"}.get(str(layers))
    names = [] if kind else [layers] if isinstance(layers, str) else list(layers)
    reader = Reader(model, names, **options)  # before the first batch: what cannot be read needs none to say so
    for number, batch in enumerate(batches(loader, "loader")):
        with at_batch("loader", number), torch.inference_mode(False), torch.no_grad():
            if kind and number == 0:
                reader = Reader(model, choose_layers(model, batch, kind), **options)
            outputs = reader(batch, labels=True, keys=keys)
        yield outputs


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Python's, NumPy's and torch's random states as they were, even if a loader or a model draws from them.

    For work on a loader, not for single predictions: numbers that other threads draw meanwhile are drawn again.
    """
    python, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)
