"""What the scripts of this folder measure on: a real network's outputs where they have been kept, made-up ones else."""

import json
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from igeood import Outputs

KEPT = Path(__file__).parents[1] / "build" / "reproduction" / "outputs"  # `make reproduction` keeps them there


@cache
def densenet(part: str) -> Outputs | None:
    """Outputs of DenseNet-BC-100 on CIFAR-10's "train" or "test" part; None where they have not been kept."""
    wanted = {"data": "cifar-10", "kind": "clean", "network": "densenet-bc-100", "part": part}
    for folder in sorted(KEPT.glob("*")):
        files = sorted(folder.glob("*.safetensors"))
        found = [_load(file) for file in files] if files and wanted.items() <= _about(files[0]).items() else []
        if found:
            return Outputs.concat(found)
    return None


def _about(file: Path) -> dict[str, object]:
    with safe_open(str(file), "pt") as handle:
        about: dict[str, object] = json.loads((handle.metadata() or {}).get("igeood", "{}"))
        return about


def _load(file: Path) -> Outputs:
    with safe_open(str(file), "pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (not a mapping)
    features = {name.split(".", 2)[2]: value for name, value in tensors.items() if name.startswith("feature.")}
    return Outputs(tensors["logits"], features, tensors["labels"])


def confident_logits(n: int, n_classes: int, margin: float = 12.0) -> tuple[Tensor, Tensor]:
    """Made-up logits (n, C) with a margin for the true class, and the classes."""
    labels = torch.arange(n) % n_classes
    logits = torch.randn(n, n_classes, generator=torch.Generator().manual_seed(0))
    logits[torch.arange(n), labels] += margin
    return logits, labels


def logits_of(n: int, n_classes: int) -> tuple[str, Tensor, Tensor]:
    """What they are, logits (n, C) and labels: the DenseNet's training outputs, repeated, if it has C classes."""
    real = densenet("train")
    if real is None or real.labels is None or real.n_classes != n_classes:
        return "made up", *confident_logits(n, n_classes)
    rows = torch.arange(n) % len(real)
    return "DenseNet", real.logits[rows].clone(), real.labels[rows]
