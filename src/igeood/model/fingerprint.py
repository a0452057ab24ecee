"""Which weights a model has: their fingerprint, and a quick look at whether they are still the same."""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from igeood.model.layers import strip


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over the names, types, shapes and values of a model's parameters and buffers, 16 hex digits.

    Wrappers (`DataParallel`, `torch.compile`) do not count. State that is no tensor counts by its type.
    """
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items(), key=lambda entry: strip(entry[0])):
        digest.update(f"{strip(name)} ".encode())
        for part in _content(value):
            digest.update(part)
    for module in model.modules():
        for constant in sorted(_constants(module)):
            digest.update(constant)
    return digest.hexdigest()[:16]


def _constants(module: nn.Module) -> Iterator[bytes]:
    """A digest of each constant of frozen TorchScript, which parameters have become; files change their order."""
    if not isinstance(module, torch.jit.ScriptModule) or hasattr(module, "training"):  # frozen ones have no modes
        return
    graph: Any = module.inlined_graph  # held: its nodes are valid as long
    for node in graph.findAllNodes("prim::Constant"):
        if "value" in node.attributeNames() and node.kindOf("value") == "t":
            yield hashlib.sha256(b"".join(_content(node.t("value")))).digest()


def _content(value: Any) -> Iterator[Any]:
    """A value's kind and bytes, the same in every process."""
    if isinstance(value, Tensor) and not is_lazy(value):
        yield f"{value.dtype} {tuple(value.shape)}\n".encode()
        if value.numel() and not value.is_meta:
            dense = value.detach().dequantize() if value.is_quantized else value.detach().to_dense()
            plain = dense.cpu().resolve_conj().resolve_neg().contiguous()
            yield plain.flatten().view(torch.uint8).numpy()
    else:
        yield f"{type(value).__qualname__}\n".encode()
        for item in value if isinstance(value, (tuple, list)) else ():  # the packed weights of quantised layers
            yield from _content(item)


class Versions:
    """A quick look at whether a model's parameters and buffers are still the same, by their version counters.

    `.data` in place and fused optimisers change values without a new version: the fingerprint shows those.

    Parameters
    ----------
    model : Module
        The classifier.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tensors = [*model.parameters(), *model.buffers()]  # held: no other tensor gets their identity
        self._modules = list(model.modules())
        self._stamps = self._look()

    def changed(self) -> bool:
        """Whether a tensor or a module was replaced, moved or written to since this was made."""
        return self._look() != self._stamps

    def _look(self) -> list[Any]:
        """Identity, place in memory and version of each tensor, where it has them, and identities of the modules."""
        stamps: list[Any] = []
        for module in self._modules:
            stamps += map(id, module._modules.values())
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is None:
                    continue
                is_placed = not is_lazy(tensor) and tensor.layout is torch.strided
                version = 0 if is_lazy(tensor) or tensor.is_inference() else tensor._version
                stamps.append((id(tensor), tensor.data_ptr() if is_placed else 0, version))
        return stamps
