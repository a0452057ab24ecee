"""Loaders of every kind that a guard may be given, and models that go wrong in the middle of one."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from models import Net
from runs import split
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

Pair = tuple[Tensor, Tensor]
MARK = 50.0  # a value that no image has: the models below go wrong at it


class Stream(IterableDataset):
    """Samples one by one, without a length."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def __iter__(self) -> Iterator[Any]:
        return iter(list(zip(*self.pair, strict=True)))


class Reused:
    """A loader that fills the same two buffers again and again."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def __iter__(self) -> Iterator[Pair]:
        x, y = (torch.empty_like(part[:10]) for part in self.pair)
        for one, other in split(self.pair):
            yield x[: len(one)].copy_(one), y[: len(one)].copy_(other)


class Once:
    """A loader that goes on where it stopped, as one over a stream does."""

    def __init__(self, pair: Pair) -> None:
        self.left = split(pair)

    def __iter__(self) -> Iterator[Pair]:
        while self.left:
            yield self.left.pop(0)


class Stops(Dataset):
    """A dataset with a bug: it raises StopIteration, which ends its loader."""

    def __init__(self, pair: Pair, after: int) -> None:
        self.pair, self.after = pair, after

    def __len__(self) -> int:
        return len(self.pair[0])

    def __getitem__(self, i: int) -> Any:
        if i >= self.after:
            raise StopIteration
        return self.pair[0][i], self.pair[1][i]


def _read_only(pair: Pair) -> list[Any]:
    made = [tuple(part.numpy().copy() for part in batch) for batch in split(pair)]
    for batch in made:
        for array in batch:
            array.flags.writeable = False
    return made


def _strided(pair: Pair) -> list[Any]:
    return [(x.repeat_interleave(2, dim=0)[::2], y) for x, y in split(pair)]


def _backwards(pair: Pair) -> list[Any]:
    return [(np.ascontiguousarray(x.numpy()[::-1])[::-1], y.numpy()) for x, y in split(pair)]


# Loaders whose result is that of the plain batches.
GOOD: dict[str, Callable[[Pair], Any]] = {
    "one pair": lambda pair: pair,
    "a torch loader": lambda pair: DataLoader(TensorDataset(*pair), batch_size=10),
    "a loader of a stream": lambda pair: DataLoader(Stream(pair), batch_size=10),
    "a generator": lambda pair: (batch for batch in split(pair)),
    "a loader that goes on": Once,
    "the same buffers again": Reused,
    "batches of one": lambda pair: split(pair, 1),
    "a last batch of one": lambda pair: split(pair, len(pair[0]) - 1),
    "an empty batch between": lambda pair: [*split(pair)[:1], (pair[0][:0], pair[1][:0]), *split(pair)[1:]],
    "mappings": lambda pair: [{"x": x, "labels": y} for x, y in split(pair)],
    "arrays": lambda pair: [(x.numpy(), y.numpy()) for x, y in split(pair)],
    "read-only arrays": _read_only,
    "arrays of negative stride": _backwards,
    "lists of labels": lambda pair: [(x, y.tolist()) for x, y in split(pair)],
    "more in a batch": lambda pair: [(x, y, "path", None) for x, y in split(pair)],
    "double precision": lambda pair: [(x.double(), y) for x, y in split(pair)],
    "not contiguous": _strided,
    "inputs with gradients": lambda pair: [(x.clone().requires_grad_(), y) for x, y in split(pair)],
    "channels last": lambda pair: [(x.to(memory_format=torch.channels_last), y) for x, y in split(pair)],
    "int32 labels": lambda pair: [(x, y.int()) for x, y in split(pair)],
}


@dataclass(frozen=True)
class Bad:
    """A loader that cannot be used: what it is made of, and where the fault is; in labels, or in all."""

    make: Callable[[Pair], Any]
    place: str
    labels: bool = False


def _second(change: Callable[[Tensor, Tensor], Any]) -> Callable[[Pair], list[Any]]:
    """Batches of which the second is changed."""
    return lambda pair: [change(*batch) if i == 1 else batch for i, batch in enumerate(split(pair))]


def _with_nan(x: Tensor, y: Tensor) -> Pair:
    x = x.clone()
    x[3, 1, 0, 0] = torch.nan
    return x, y


BAD: dict[str, Bad] = {
    "nothing": Bad(lambda _: [], "no batch in the loader"),
    "an exhausted generator": Bad(lambda _: iter(()), "no batch in the loader|is read more than once"),
    "a number": Bad(lambda _: 3, "got int"),
    "none": Bad(lambda _: None, "got NoneType"),
    "a batch that is none": Bad(_second(lambda *_: None), "batch 1: .* got NoneType"),
    "a batch of text": Bad(_second(lambda *_: "text"), "batch 1: .* got str"),
    "a batch of pairs": Bad(_second(lambda x, y: ((x, x), y)), "batch 1: .* got tuple of tuple"),
    "an empty tuple": Bad(_second(lambda *_: ()), "batch 1: .* got tuple"),
    "a mapping without tensors": Bad(_second(lambda _, y: {"path": "a", "labels": y}), "batch 1: .*'path'"),
    "a mapping of other names": Bad(_second(lambda x, _: {"pixels": x}), "batch 1: .*'pixels'"),
    "another number of channels": Bad(_second(lambda x, y: (x[:, :1], y)), r"batch 1: .*\(\d+, 1, 4, 4\)"),
    "an axis too few": Bad(_second(lambda x, y: (x[:, :, 0, 0], y)), r"batch 1: .*\(\d+, 2\)"),
    "integers": Bad(_second(lambda x, y: (x.long(), y)), "batch 1: .*int64"),
    "bytes": Bad(_second(lambda x, y: (x.to(torch.uint8), y)), r"batch 1: .*uint8"),
    "NaN": Bad(_second(_with_nan), r"batch 1: .*(sample|row) 3 has NaN"),
    "values without storage": Bad(_second(lambda x, y: (x.to("meta"), y)), "batch 1: .*meta"),
    "a label too few": Bad(_second(lambda x, y: (x, y[1:])), "batch 1: labels: ", labels=True),
    "labels in a column": Bad(_second(lambda x, y: (x, y[:, None])), "batch 1: labels: ", labels=True),
    "labels of floats": Bad(_second(lambda x, y: (x, y.float())), "batch 1: labels: ", labels=True),
    "labels of no class": Bad(_second(lambda x, y: (x, y + 9)), "batch 1: labels: 10 at position 0", labels=True),
    "labels of text": Bad(_second(lambda x, _: (x, ["cat"] * len(x))), "batch 1: labels: ", labels=True),
}


class BrokenError(Exception):
    """An exception of the user's own."""


class RetryError(RuntimeError):
    """One that derives from a common kind, and has a meaning of its own."""


def _raising(error: BaseException) -> Callable[[Pair], Iterable[Any]]:
    def make(pair: Pair) -> "Iterable[Any]":
        class Breaks:
            def __iter__(self) -> Iterator[Pair]:
                yield split(pair)[0]
                raise error

        return Breaks()

    return make


ERRORS = [
    OSError("the disk is gone"),
    BrokenError("mine"),
    RetryError("again"),
    KeyError("a"),
    KeyboardInterrupt(),
    SystemExit(3),
]
# Loaders that raise in the middle, by the name of what they raise: the user must get that and nothing else.
RAISING = {type(error).__name__: (_raising(error), type(error)) for error in ERRORS}


@dataclass(frozen=True)
class Fault:
    """What a model does at a marked batch: in place of its logits (N, C) it gives something else, or raises.

    The error has this place in it, and this cause; where it is the user's own exception, that passes through.
    """

    act: Callable[[Tensor], Any]
    place: str = ""
    cause: type[BaseException] | None = None
    passes: type[BaseException] | None = None


def _throw(error: BaseException) -> Callable[[Tensor], Any]:
    def act(_: Tensor) -> Any:
        raise error

    return act


FAULTS: dict[str, Fault] = {
    "None": Fault(lambda _: None, "model: returned NoneType"),
    "text": Fault(lambda _: "logits", "model: returned str"),
    "an empty mapping": Fault(lambda _: {}, "model: returned NoneType"),
    "a mapping of many": Fault(lambda f: {"hidden": f[:, :2], "out": f}, "mapping of 'hidden', 'out'"),
    "one number a sample": Fault(lambda f: f[:, 0], r"got \(\d+,\)"),
    "one number": Fault(lambda f: f.sum(), r"got \(\)"),
    "maps": Fault(lambda f: f[:, :, None, None], r"got \(\d+, 3, 1, 1\)"),
    "a sample too few": Fault(lambda f: f[1:], r"\d rows for \d+ samples"),
    "a class too many": Fault(lambda f: torch.cat([f, f[:, :1]], dim=1), "4 (classes here, 3 before|columns)"),
    "NaN": Fault(
        lambda f: f * torch.where(torch.arange(len(f)) == len(f) - 1, torch.nan, 1.0)[:, None],
        r"logits: row \d has NaN",
    ),
    "infinity": Fault(lambda f: f + torch.inf, r"logits: row 0 has \+inf"),
    "complex numbers": Fault(lambda f: f * 1j, "complex64"),
    "RuntimeError": Fault(
        _throw(RuntimeError("mat1 and mat2\nshapes")), "RuntimeError: mat1 and mat2 shapes", RuntimeError
    ),
    "ValueError": Fault(_throw(ValueError("no")), "ValueError: no", ValueError),
    "TypeError": Fault(_throw(TypeError("x" * 900)), "TypeError: x{100,}…", TypeError),
    "IndexError": Fault(_throw(IndexError("out of range")), "IndexError: out of range", IndexError),
    "AssertionError": Fault(_throw(AssertionError()), "AssertionError", AssertionError),
    "an exception of the user's": Fault(_throw(BrokenError("mine")), passes=BrokenError),
    "a derived exception": Fault(_throw(RetryError("again")), passes=RetryError),
    "memory that runs out": Fault(_throw(torch.OutOfMemoryError("no memory")), passes=torch.OutOfMemoryError),
    "memory of the machine": Fault(_throw(RuntimeError("DefaultCPUAllocator: no memory")), passes=RuntimeError),
    "KeyboardInterrupt": Fault(_throw(KeyboardInterrupt()), passes=KeyboardInterrupt),
    "SystemExit": Fault(_throw(SystemExit(3)), passes=SystemExit),
}


class Faulty(Net):
    """A network that goes wrong where a batch is marked."""

    fault = Fault(lambda logits: logits)

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return self.fault.act(logits) if bool((x > MARK / 2).any()) else logits


def marked(pair: Pair) -> list[Pair]:
    """Batches of which the second is marked."""
    made = [(x.clone(), y) for x, y in split(pair)]
    made[1][0][:, 0, 0, 0] = MARK
    return made
