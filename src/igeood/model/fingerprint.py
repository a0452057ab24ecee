"""Which weights a model has: their fingerprint, and a quick look at whether they are still the same."""

import hashlib
import operator
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
    return digest.hexdigest()[:16]


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
    """Version counters and places of a model's parameters and buffers: a quick look at whether they have changed.

    `.data` and fused optimisers change values without a new version: the fingerprint shows those.

    Parameters
    ----------
    model : Module
        The classifier.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tables: list[tuple[Any, list[Any]]] = []  # where modules and tensors are, and which were there
        for module in model.modules():
            lasting = {} if module._non_persistent_buffers_set else module._buffers
            tables: list[Any] = [module._modules, module._parameters, lasting]
            self._tables += [(table, list(table.values())) for table in tables if table]
        state = model.state_dict(keep_vars=True).values()
        tensors = [tensor for tensor in state if isinstance(tensor, Tensor) and not is_lazy(tensor)]
        self._placed = [tensor for tensor in tensors if tensor.layout is torch.strided]
        self._counted = [tensor for tensor in tensors if not tensor.is_inference()]  # others have no counter
        self._before = self._stamps()

    def changed(self) -> bool:
        """Whether a module or tensor was replaced, moved or written to since this was made."""
        for table, values in self._tables:
            if len(table) != len(values) or any(map(operator.is_not, table.values(), values)):
                return True
        return self._stamps() != self._before

    def _stamps(self) -> tuple[list[int], list[int]]:
        return [tensor.data_ptr() for tensor in self._placed], [tensor._version for tensor in self._counted]
