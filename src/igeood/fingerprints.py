"""Which weights a model has: their fingerprint, and a quick look at whether they are still the same."""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over the names, types, shapes and values of a model's parameters and buffers, 16 hex digits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        digest.update(plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return digest.hexdigest()[:16]


class WeightWatch:
    """The weights that a model had when the watch began.

    Each look compares versions and places of all tensors, and one value of each parameter: `.data` and fused
    optimisers change values without a new version. Only where these differ is the fingerprint taken again.

    Parameters
    ----------
    model : Module
        The classifier.
    """

    def __init__(self, model: nn.Module) -> None:
        self.fingerprint = fingerprint(model)
        self._note(model)

    def _note(self, model: nn.Module) -> None:
        self._model = model
        self._tables = [t for m in model.modules() for t in (m._parameters, m._buffers, m._modules)]
        self._stamps = self._look()
        self._probes: dict[torch.device, list[Tensor]] = {}
        for parameter in model.parameters():
            if parameter.numel() and parameter.layout == torch.strided:
                middle = parameter.detach()[tuple(n // 2 for n in parameter.shape)]  # a view: it follows the values
                self._probes.setdefault(parameter.device, []).append(middle)
        self._values = self._probe()

    def _look(self) -> list[Any]:
        return [_stamp(value) for table in self._tables for value in table.values()]

    def _probe(self) -> list[Tensor]:
        return [torch.stack(views) for views in self._probes.values()]

    def changed(self, model: nn.Module) -> bool:
        """Whether the model has other weights than when the watch began."""
        if model is self._model and self._look() == self._stamps and all(map(torch.equal, self._probe(), self._values)):
            return False
        self._note(model)
        return fingerprint(model) != self.fingerprint


def _stamp(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return id(value)
    return value.data_ptr(), None if value.is_inference() else value._version
