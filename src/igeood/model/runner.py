"""A model in evaluation mode: how it is called, and what its modules return."""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from igeood.errors import InputError
from igeood.model.batches import Batch

_WRAPPERS = ("module", "_orig_mod")  # where DataParallel, DistributedDataParallel and torch.compile hold a model
Width = tuple[int, bool]  # of a module's output: channels, and whether they are the last axis


def strip(name: str) -> str:
    """A dotted name without the parts that wrappers add.

    Examples
    --------
    >>> strip("module._orig_mod.layer1.0"), strip("layer1.0")
    ('layer1.0', 'layer1.0')
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def bare(model: nn.Module) -> nn.Module:
    """The model inside of `DataParallel`, `DistributedDataParallel` and `torch.compile`."""
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) or "_orig_mod" in model._modules:
        model = next(model.children())
    return model


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """A model's modules by the names that they have in the bare model, which itself is left out."""
    modules = {"": bare(model)}
    for name, module in sorted(modules[""].named_modules(), key=lambda entry: strip(entry[0]) != entry[0]):
        modules.setdefault(name if strip(name) in modules else strip(name), module)
    return {name: module for name, module in modules.items() if name}


@dataclass(frozen=True)
class Call:
    """One call of a module in a forward pass of N samples.

    Parameters
    ----------
    module : Module
        The module.
    output : Tensor
        A copy of what it returned, (N, k, ...).
    layout : str
        Which axis of the output has the channels: "flat" (the second of two), "second" or "last".
    """

    module: nn.Module
    output: Tensor
    layout: str

    @property
    def channels(self) -> int:
        """Width of the feature vector."""
        return self.output.shape[-1 if self.layout == "last" else 1]

    @property
    def size(self) -> int:
        """Values of each channel: pixels or tokens."""
        return self.output.shape[1:].numel() // max(1, self.channels)

    def returns(self, whole: Tensor) -> bool:
        """Whether the output is that of the whole, such as the model's logits."""
        return self.output.shape == whole.shape and torch.equal(self.output.float(), whole.float())


class Runner:
    """Runs a model in evaluation mode, from any thread, and leaves it as found.

    Parameters
    ----------
    model : Module
        The classifier, wrapped or not.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            hint = f"did you mean method={model!r}?" if isinstance(model, str) else "give the classifier"
            raise InputError(f"model: expected a torch.nn.Module, got {type(model).__name__}; {hint}")
        self.model, self.bare = model, bare(model)
        self._look()

    def _look(self) -> None:
        """Note the model's modules: walking through them takes longer than to see that they are the same."""
        self._tree = [(module, tuple(module._modules.values())) for module in self.model.modules()]
        self._tensors = list(self.model.parameters())

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold the model in evaluation mode, and put everything back afterwards. Nests; threads may overlap."""
        with _lock:
            self._enter()
        try:
            yield
        finally:
            with _lock:
                self._leave()

    def _enter(self) -> None:
        if any(tuple(module._modules.values()) != children for module, children in self._tree):
            self._look()
        hold = _holds.setdefault(self.bare, _Hold([]))
        hold.count += 1
        training = [module for module, _ in self._tree if module.training]
        for module in training:
            module.training = False
        hold.training += training

    def _leave(self) -> None:
        hold = _holds[self.bare]
        hold.count -= 1
        while hold.training and not hold.count:
            hold.training.pop().training = True

    def place(self, batch: Batch) -> Batch:
        """A copy of the batch on the model's device, in its precision: the model may work in place."""
        parameters = self._tensors
        dtypes = [p.dtype for p in parameters if p.is_floating_point()]

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if not parameters:
                return value.clone()
            fits = value.dtype in dtypes or not dtypes or not value.is_floating_point()
            dtype = value.dtype if fits else max(set(dtypes), key=dtypes.count)
            return value.to(parameters[0].device, dtype, copy=True)

        return batch.mapped(move)

    def run(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits of a batch, in a `running` block."""
        copies = self.place(batch)
        logits = logits_of(model(*copies.inputs, **copies.keywords))
        if logits.ndim == 2 and len(logits) != len(batch):
            raise InputError(
                f"model: returned {len(logits)} rows for {len(batch)} samples; make it return one for each"
            )
        return logits

    def watch(self, batch: Batch) -> tuple[dict[nn.Module, Call], Tensor]:
        """Calls of the modules that return (N, k, ...), in the order of their ends; and the logits.

        Up to three samples of the batch are run. Modules that are called twice are left out.
        """
        sample, thread = batch[:3], threading.get_ident()
        calls: dict[nn.Module, Call] = {}
        counts: dict[nn.Module, int] = {}
        width: Width | None = None

        def hook(module: nn.Module, _: object, output: object) -> None:
            nonlocal width
            if threading.get_ident() != thread:
                return
            width = _width(module) or width
            counts[module] = counts.get(module, 0) + 1
            tensor = first_tensor(output)
            if tensor is not None and tensor.ndim >= 2 and len(tensor) == len(sample):
                calls[module] = Call(module, tensor.clone(), _layout(tensor, width))

        modules = [m for m in self.bare.modules() if m is not self.bare and not isinstance(m, torch.jit.ScriptModule)]
        with self.running(), torch.no_grad(), ExitStack() as hooks:
            for module in modules:
                hooks.callback(module.register_forward_hook(hook).remove)
            logits = self.run(self.bare, sample)
        return {module: call for module, call in calls.items() if counts[module] == 1}, logits


@dataclass
class _Hold:
    """The modules that go back to training when nobody holds their model in evaluation mode any more."""

    training: list[nn.Module]
    count: int = 0


_lock = threading.Lock()
_holds: "weakref.WeakKeyDictionary[nn.Module, _Hold]" = weakref.WeakKeyDictionary()


def logits_of(output: Any) -> Tensor:
    """Logits in what a model returned: a tensor, a tuple's first, a mapping's or an object's `logits`."""
    if isinstance(output, Mapping):
        tensors = {name: value for name, value in output.items() if isinstance(value, Tensor)}
        if "logits" not in output and len(tensors) > 1:
            raise InputError(f"model: returned a mapping of {', '.join(map(repr, tensors))}; name the logits 'logits'")
        output = output.get("logits", next(iter(tensors.values()), None))
    tensor = first_tensor(getattr(output, "logits", output))
    if tensor is None:
        raise InputError(
            f"model: returned {type(output).__name__}; make it return logits (N, C), or an object with them"
        )
    return tensor


def first_tensor(output: object) -> Tensor | None:
    """The tensor that a module returned, or the first of several."""
    values = output if isinstance(output, (tuple, list)) else (output,)
    return next((value for value in values if isinstance(value, Tensor)), None)


_WIDTHS: tuple[tuple[Any, Callable[[Any], int], bool], ...] = (
    (nn.modules.conv._ConvNd, lambda m: m.out_channels, False),
    (nn.modules.batchnorm._NormBase, lambda m: m.num_features, False),
    (nn.GroupNorm, lambda m: m.num_channels, False),
    (nn.Linear, lambda m: m.out_features, True),
    (nn.LayerNorm, lambda m: m.normalized_shape[-1], True),
    (nn.Embedding, lambda m: m.embedding_dim, True),
    (nn.MultiheadAttention, lambda m: m.embed_dim, True),
    (nn.RNNBase, lambda m: (m.proj_size or m.hidden_size) * (1 + m.bidirectional), True),
)


def _width(module: nn.Module) -> Width | None:
    """Width of the output of a module with weights; None for containers, activations, pooling."""
    return next(((width(module), last) for kinds, width, last in _WIDTHS if isinstance(module, kinds)), None)


def _layout(output: Tensor, width: Width | None) -> str:
    """Which axis has the channels: where the module before has put them, if its width is there; else the other one.

    With nothing known they are the last of three axes (a sequence), and the second of more (an image).
    """
    if output.ndim == 2:
        return "flat"
    channels, last = width or (output.shape[1], output.ndim == 3)
    if width and output.shape[-1 if last else 1] != channels == output.shape[1 if last else -1]:
        last = not last  # transposed since, as patches are into tokens
    return "last" if last else "second"
