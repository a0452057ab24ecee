"""Which weights a model has: their fingerprint, and a quick look at whether they are still the same."""

import hashlib
import zlib
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from igeood.errors import InputError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over the names, types, shapes and values of a model's parameters and buffers, 16 hex digits.

    What else is in its `state_dict` counts by its values where they are plain ones, and by its type where not.
    """
    digest = hashlib.sha256()
    for name, parts in _state(model):
        digest.update(f"{name} ".encode())
        for part in parts:
            digest.update(part)
    return digest.hexdigest()[:16]


def _sums(model: nn.Module) -> dict[str, int]:
    """A checksum of each value of a model's state."""
    sums = {}
    for name, parts in _state(model):
        sums[name] = 0
        for part in parts:
            sums[name] = zlib.crc32(part, sums[name])
    return sums


def _state(model: nn.Module) -> Iterator[tuple[str, list[bytes]]]:
    try:
        state = sorted(model.state_dict().items(), key=lambda entry: entry[0])
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise InputError(f"model: its state_dict() fails, which tells its weights ({what}); mend it") from error
    for name, value in state:
        try:
            parts = _content(value)
        except Exception as error:
            if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
                raise
            parts = [_kind(value)]  # a tensor whose values cannot be had
        yield name, parts


def _kind(value: Any) -> bytes:
    what = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__qualname__
    return f"{what}\n".encode()


def _content(value: Any) -> list[bytes]:
    """A value's kind and bytes, the same in every process."""
    if isinstance(value, Tensor):
        return [_kind(value), *_bytes(value.detach())]
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return [f"{value.dtype} {value.shape}\n".encode(), value.tobytes()]
    if isinstance(value, Mapping):
        return [_kind(value), *(part for pair in value.items() for item in pair for part in _content(item))]
    if isinstance(value, list | tuple):
        return [_kind(value), *(part for item in value for part in _content(item))]
    return [f"{value!r}\n".encode() if isinstance(value, _PLAIN) else _kind(value)]  # others may show an address


def _bytes(tensor: Tensor) -> list[bytes]:
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout == torch.sparse_coo:
        whole = tensor.coalesce()
        return _bytes(whole.indices()) + _bytes(whole.values())
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return [plain.flatten().view(torch.uint8).numpy().tobytes()] if plain.numel() else []


class WeightWatch:
    """The weights that a model had when the watch began.

    Each look compares versions and places of all tensors, and one value of each parameter: `.data` and fused
    optimisers change values without a new version. Only where these differ are all values compared, by checksums.
    A model that cannot be looked at is taken to be the same.

    Parameters
    ----------
    model : Module
        The classifier.
    moving : set of names
        What the model's own forward pass changes, which is not compared; it may grow.
    """

    def __init__(self, model: nn.Module, moving: AbstractSet[str] = frozenset()) -> None:
        self.fingerprint = fingerprint(model)
        self._moving, self._sums, self._noted = moving, _sums(model), _look(model)

    def changed(self, model: nn.Module) -> bool:
        """Whether the model has other weights than when the watch began."""
        try:
            look = _look(model)
            if look == self._noted or _different(look, self._noted) <= self._moving:
                return False
            if not _different(_sums(model), self._sums) <= self._moving:
                return True
        except Exception:  # noqa: BLE001 (whatever the model's own code raises, it can run)
            return False
        self._noted = look
        return False


@contextmanager
def own_changes(model: nn.Module, names: set[str]) -> Iterator[None]:
    """Add the names of what changes in a model's state here, by its own forward pass: a counter, a store."""
    before = [(*entry, _stamp(entry[-1])) for entry in _tensors(model)]
    try:
        yield
    finally:
        for name, table, key, value, stamp in before:
            if key not in table or table[key] is not value or _stamp(value) != stamp:
                names.add(name)


def _different(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def _tensors(model: nn.Module) -> Iterator[tuple[str, Any, str, Tensor]]:
    """The tensors of a model's state, with their names, and where they are."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        passing = getattr(module, "_non_persistent_buffers_set", ())
        for table in (module._parameters, module._buffers):
            for key, value in table.items():
                if value is not None and key not in passing and not is_lazy(value):
                    yield f"{prefix}.{key}" if prefix else key, table, key, value


def _stamp(tensor: Tensor) -> Any:
    try:
        place = tensor.data_ptr()
    except RuntimeError:  # sparse ones have none
        place = id(tensor)
    return place, None if tensor.is_inference() else tensor._version


def _look(model: nn.Module) -> dict[str, Any]:
    """A stamp of each tensor, and one value of each parameter."""
    stamps: dict[str, Any] = {}
    alike: dict[Any, list[tuple[str, Tensor]]] = {}
    with torch.inference_mode():
        for name, _, _, value in _tensors(model):
            stamps[name] = _stamp(value)
            if isinstance(value, nn.Parameter) and value.layout == torch.strided and value.numel():
                middle = sum(n // 2 * step for n, step in zip(value.shape, value.stride(), strict=True))
                probe = value.as_strided((1,), (1,), value.storage_offset() + middle)
                alike.setdefault((value.device, value.dtype), []).append((name, probe))
        for pairs in alike.values():
            bits = torch.cat([probe for _, probe in pairs]).view(torch.uint8).view(len(pairs), -1)  # so NaN is NaN
            for (name, _), value in zip(pairs, bits.tolist(), strict=True):
                stamps[name] += tuple(value)
    return stamps
