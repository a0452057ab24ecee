"""A model in evaluation mode: where it is, how it is called, and what its modules return."""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from igeood.errors import InputError
from igeood.model.batches import Batch

_WRAPPERS = ("module", "_orig_mod")  # where DataParallel, DistributedDataParallel and torch.compile hold a model


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
    """A model's modules by the names that they have in the bare model; itself is not among them."""
    modules: dict[str, nn.Module] = {}
    for name, module in sorted(bare(model).named_modules(), key=lambda entry: strip(entry[0]) != entry[0]):
        modules.setdefault(strip(name) if strip(name) not in modules else name, module)
    del modules[""]
    return modules


@dataclass(frozen=True)
class Call:
    """One call of a module in a forward pass of N samples.

    Parameters
    ----------
    module : Module
        The module.
    output : Tensor or None
        A copy of what it returned, if that is (N, k, ...).
    layout : str
        Which axis of the output has the channels: "flat" (of two, the second), "second" or "last".
    """

    module: nn.Module
    output: Tensor | None = None
    layout: str = "flat"

    @property
    def channels(self) -> int:
        """Width of the feature vector."""
        return 0 if self.output is None else self.output.shape[-1 if self.layout == "last" else 1]

    @property
    def size(self) -> int:
        """Values of each channel: pixels or tokens."""
        return 0 if self.output is None else self.output.shape[1:].numel() // max(1, self.channels)

    def returns(self, whole: Tensor | None) -> bool:
        """Whether the output is that of the whole, such as the model's logits."""
        same_shape = self.output is not None and whole is not None and self.output.shape == whole.shape
        return same_shape and torch.equal(self.output.float(), whole.float())  # type: ignore[union-attr]


class Runner:
    """Runs a model in evaluation mode and leaves it as found. What does not change between calls is prepared once.

    Parameters
    ----------
    model : Module
        The classifier, wrapped or not.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            hint = f"; did you mean method={model!r}?" if isinstance(model, str) else "; give the classifier"
            raise InputError(f"model: expected a torch.nn.Module, got {type(model).__name__}{hint}")
        self.model = self._called = model
        self.bare = bare(model)
        self._look()

    def _look(self) -> None:
        """Note the model's modules and the devices and precisions of its parameters."""
        self._tree = [(module, tuple(module._modules.values())) for module in self.model.modules()]
        owned = [(module, key) for module, _ in self._tree for key, p in module._parameters.items() if p is not None]
        self._first = owned[0] if owned else None
        parameters = [getattr(module, key) for module, key in owned]
        self._device: torch.device | None = parameters[0].device if parameters else None
        if self._device is not None and self._device.type == "meta":
            raise InputError("model: its weights are on the meta device, which holds no values; load them first")
        self._kind = parameters[0].dtype if parameters else None
        self._dtypes = [p.dtype for p in parameters if p.is_floating_point()]

    def _is_stale(self) -> bool:
        """Whether a module was replaced or the model moved since the last look."""
        if any(tuple(module._modules.values()) != children for module, children in self._tree):
            return True
        if self._first is None:
            return False
        first = self._first[0]._parameters.get(self._first[1])
        return first is None or first.device != self._device or first.dtype != self._kind

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold the model in evaluation mode; put everything back afterwards. Nests; threads may overlap."""
        with _lock:
            self._enter()
        try:
            yield
        finally:
            with _lock:
                self._leave()

    def _enter(self) -> None:
        if self._is_stale():
            self._look()
        modes = _modes.setdefault(self.bare, _Modes([]))
        modes.holders += 1
        training = [module for module, _ in self._tree if module.training]
        for module in training:
            module.training = False
        modes.training += training

    def _leave(self) -> None:
        modes = _modes[self.bare]
        modes.holders -= 1
        if modes.holders == 0:
            for module in modes.training:
                module.training = True
            modes.training = []

    def place(self, batch: Batch) -> Batch:
        """The batch on the model's device, in its precision."""

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if self._dtypes and value.is_floating_point() and value.dtype not in self._dtypes:
                return value.to(self._device, self._dtypes[0])
            return value if self._device is None else value.to(self._device)

        keywords = {name: move(value) for name, value in batch.keywords.items()}
        return Batch(tuple(map(move, batch.inputs)), keywords, batch.labels)

    def run(self, batch: Batch) -> Tensor:
        """Logits of a batch, in a `running` block. The model gets copies, since it may work in place."""
        placed = self.place(batch)
        inputs = [value.clone() if isinstance(value, Tensor) else value for value in placed.inputs]
        keywords = {k: value.clone() if isinstance(value, Tensor) else value for k, value in placed.keywords.items()}
        logits = logits_of(self._called(*inputs, **keywords))
        if logits.ndim == 2 and len(logits) != len(batch):
            rows = f"returned {len(logits)} rows for {len(batch)} samples"
            raise InputError(f"model: {rows}; make it return a row for each sample")
        return logits

    def watch(self, batch: Batch) -> tuple[dict[nn.Module, Call], Tensor]:
        """Each module's call in a pass of up to 3 samples, in the order of their ends; and the logits.

        Modules that are called twice are left out.
        """
        sample = batch[:3]
        calls: dict[nn.Module, Call] = {}
        repeated: set[nn.Module] = set()
        width: tuple[int, bool] | None = None

        def hook(module: nn.Module, _: object, output: object) -> None:
            nonlocal width
            width = _width(module) or width
            if module in calls:
                repeated.add(module)
            tensor = first_tensor(output)
            usable = tensor is not None and tensor.ndim >= 2 and len(tensor) == len(sample)
            calls[module] = Call(module, tensor.clone(), _layout(tensor, width)) if usable else Call(module)  # type: ignore[union-attr, arg-type]

        with self.running(), torch.no_grad(), _hooked(self.bare, hook):
            logits = Runner(self.bare).run(sample)
        return {module: call for module, call in calls.items() if module not in repeated}, logits


@contextmanager
def _hooked(model: nn.Module, hook: Callable[..., None]) -> Iterator[None]:
    """A forward hook on every module that can have one; the model itself apart."""
    modules = [m for m in model.modules() if m is not model and not isinstance(m, torch.jit.ScriptModule)]
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Modes:
    """How many calls hold a model in evaluation mode, and which modules go back to training after the last."""

    training: list[nn.Module]
    holders: int = 0


_lock = threading.Lock()
_modes: "weakref.WeakKeyDictionary[nn.Module, _Modes]" = weakref.WeakKeyDictionary()


def logits_of(output: Any) -> Tensor:
    """Logits in what a model returned: a tensor, a tuple's first, a mapping's or an object's `logits`."""
    if isinstance(output, Mapping):
        tensors = {name: value for name, value in output.items() if isinstance(value, Tensor)}
        if "logits" not in output and len(tensors) > 1:
            raise InputError(f"model: returned a mapping of {', '.join(map(repr, tensors))}; name the logits 'logits'")
        output = output.get("logits", next(iter(tensors.values()), None))
    tensor = first_tensor(getattr(output, "logits", output))
    if tensor is None:
        kind = type(output).__name__
        raise InputError(f"model: returned {kind}; make it return logits (N, C), or an object that has them")
    return tensor


def first_tensor(output: object) -> Tensor | None:
    """The tensor that a module returned, or the first of several."""
    if isinstance(output, (tuple, list)):
        return next((value for value in output if isinstance(value, Tensor)), None)
    return output if isinstance(output, Tensor) else None


_WIDTHS: tuple[tuple[Any, str, bool], ...] = (
    (nn.modules.conv._ConvNd, "out_channels", False),
    ((nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm), "num_features", False),
    (nn.GroupNorm, "num_channels", False),
    (nn.Linear, "out_features", True),
    (nn.LayerNorm, "normalized_shape", True),
    (nn.Embedding, "embedding_dim", True),
    (nn.MultiheadAttention, "embed_dim", True),
)


def _width(module: nn.Module) -> tuple[int, bool] | None:
    """Channels that a module with weights returns, and whether they are the last axis; None for other modules."""
    for kinds, attribute, last in _WIDTHS:
        if isinstance(module, kinds):
            width = getattr(module, attribute)
            return (width if isinstance(width, int) else width[-1]), last
    if isinstance(module, nn.RNNBase):
        return (module.proj_size or module.hidden_size) * (1 + module.bidirectional), True
    return None


def _layout(output: Tensor, width: tuple[int, bool] | None) -> str:
    """Which axis has the channels: where the module before has put them, if its width is there; else the other one.

    With nothing known they are the last of three axes (a sequence), and the second of more (an image).
    """
    if output.ndim == 2:
        return "flat"
    channels, last = width or (0, output.ndim == 3)
    if width and output.shape[-1 if last else 1] != channels == output.shape[1 if last else -1]:
        last = not last  # transposed since, as patches are into tokens
    return "last" if last else "second"
