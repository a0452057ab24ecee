"""Guards of every method, by every access that it has, made from the same small data each time.

As a program it makes them in a process of its own, or those of many arrays, which torch shares out among threads, and
writes what they are and what they say to a folder:

    python reruns.py FOLDER THREADS [many]
"""

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import igeood
from igeood.guard import Guard
from igeood.outputs import Outputs

CLASSES = 5
LAYERS = ["2", "5", "8"]
PRECISIONS = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Case:
    """A method, how its guard sees the inputs (arrays, or a model with that access), and in which precision."""

    method: str
    access: str
    precision: str

    def __str__(self) -> str:
        return f"{self.method}-{self.access}-{self.precision}"

    @property
    def dtype(self) -> torch.dtype:
        return PRECISIONS[self.precision]


def accesses(method: str) -> tuple[str, ...]:
    return ("arrays", "white") if igeood.METHODS[method].needs_layers else ("arrays", "black", "grey")


CASES = {
    str(case): case
    for method in sorted(igeood.METHODS)
    for access in accesses(method)
    for case in (Case(method, access, precision) for precision in PRECISIONS)
}

TUNED = [
    name for name, case in CASES.items() if case.access == "arrays" and case.precision == "float32"
]  # it takes long


def images(n: int, seed: int, noise: float = 0.4, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Noisy copies of one pattern for each class, (n, 3, 10, 10), and their classes."""
    draw = torch.Generator().manual_seed(seed)
    patterns = torch.rand(CLASSES, 3, 10, 10, generator=torch.Generator().manual_seed(77))
    labels = torch.arange(n) % CLASSES
    x = patterns[labels] + noise * torch.rand(n, 3, 10, 10, generator=draw)
    return x + shift * torch.rand(n, 3, 1, 1, generator=draw), labels


@cache
def network(dtype: torch.dtype) -> nn.Module:
    """Convolutions and batch norms whose buffers have seen images, a last layer that is sure of its classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 12, 3, stride=2), nn.BatchNorm2d(12), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, CLASSES),
        )  # fmt: skip
    with torch.no_grad():
        x, labels = images(200, 9)
        net(x)
        net.eval()
        hidden = net[:-1](x)
        means = torch.stack([hidden[labels == c].mean(dim=0) for c in range(CLASSES)])
        centred = means - means.mean(dim=0)
        size = 8.0 / centred.square().sum(dim=1).mean()
        net[-1].weight.copy_(size * centred)
        net[-1].bias.copy_(-0.5 * size * (means.square().sum(dim=1) - means.mean(dim=0).square().sum()))
    return net.to(dtype)


@cache
def seen(dtype: torch.dtype, part: str) -> Any:
    """A part of the data: its inputs and labels."""
    x, labels = {
        "train": lambda: images(60, 1),
        "validation": lambda: images(120, 2),
        "ood": lambda: images(60, 3, shift=3.0),
        "calibration": lambda: images(40, 4),
        "test": lambda: (torch.cat([images(71, 5)[0], images(20, 6, shift=2.0)[0]]), torch.arange(91) % CLASSES),
    }[part]()
    return x.to(dtype), labels


@cache
def outputs(dtype: torch.dtype, part: str) -> Outputs:
    """The same part as the network's outputs, always by one pass: what a guard of arrays gets."""
    made = igeood.extract(network(torch.float32), [seen(torch.float32, part)], LAYERS)
    features = {layer: value.to(dtype) for layer, value in made.features.items()}
    return Outputs(made.logits.to(dtype), features, made.labels)


def data(case: Case, part: str, rows: Any = slice(None)) -> Any:
    """Rows of a part, as the guard of this case takes them."""
    if case.access == "arrays":
        return outputs(case.dtype, part)[rows]
    x, labels = seen(case.dtype, part)
    return [(x[rows], labels[rows])]


def blocks(case: Case, part: str, size: int) -> Any:
    """A part in batches of `size`."""
    n = len(seen(case.dtype, part)[0])
    pieces = [data(case, part, slice(start, start + size)) for start in range(0, n, size)]
    return pieces if case.access == "arrays" else [batch for piece in pieces for batch in piece]


def shuffle(part: str) -> Tensor:
    """Another order of a part's samples."""
    return torch.randperm(len(seen(torch.float32, part)[0]), generator=torch.Generator().manual_seed(8))


def start(case: Case) -> Guard:
    """A guard of this case, not fitted."""
    if case.access == "arrays":
        return Guard(igeood.detector(case.method))
    net = network(case.dtype)
    if case.access == "white":
        return igeood.white_box(net, method=case.method, layers=LAYERS)
    if case.access == "grey":
        return igeood.grey_box(net, method=case.method, epsilon=0.002)
    return igeood.black_box(net, method=case.method)


def make(case: Case, *, tuned: bool = False) -> Guard:
    """A guard of this case from fit to calibrate."""
    guard = start(case).fit(data(case, "train"))
    if tuned:
        guard.tune(data(case, "validation"), data(case, "ood"))
    return guard.calibrate(data(case, "calibration"))


def many(n: int, seed: int, dtype: torch.dtype) -> Outputs:
    """Outputs of n samples with two wide layers."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % CLASSES
    logits = torch.randn(n, CLASSES, generator=draw)
    logits[torch.arange(n), labels] += 6.0
    features = {}
    for layer, width in (("early", 48), ("late", 64)):
        means = torch.randn(CLASSES, width, generator=torch.Generator().manual_seed(width))
        features[layer] = (means[labels] + torch.randn(n, width, generator=draw)).to(dtype)
    return Outputs(logits.to(dtype), features, labels)


def make_many(case: Case) -> tuple[Guard, Outputs]:
    """A guard of this case's method on many arrays, and others to judge."""
    guard = Guard(igeood.detector(case.method)).fit(many(700, 1, case.dtype))
    return guard.calibrate(many(100, 2, case.dtype)), many(700, 3, case.dtype)


def content(guard: Guard, samples: Any) -> dict[str, np.ndarray]:
    """Everything that a guard says of samples, and its threshold, as arrays."""
    verdict = guard.predict(samples)
    said = {name: np.asarray(getattr(verdict, name)) for name in ("is_ood", "score", "p_value", "label")}
    return {**said, "threshold": np.array(guard.threshold), "scores": np.asarray(guard.calibration.scores)}


def main(folder: Path, *, large: bool) -> None:
    """Write a guard file for each case, and one file of what they say."""
    said = {"threads": np.array(torch.get_num_threads())}
    for name, case in CASES.items():
        if large and case.access != "arrays":
            continue
        guard, samples = make_many(case) if large else (make(case, tuned=name in TUNED), data(case, "test"))
        guard.save(folder / f"{name}.safetensors")
        said |= {f"{name}/{part}": values for part, values in content(guard, samples).items()}
    np.savez(folder / "said.npz", **said)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))  # OMP_NUM_THREADS alone gives no more than there are cores
    main(Path(sys.argv[1]), large="many" in sys.argv[3:])
