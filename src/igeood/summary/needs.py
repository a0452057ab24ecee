"""What a detector needs of a classifier and of its training data."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from igeood.errors import InputError
from igeood.outputs import HEAD, Outputs

LAYERS = ("none", "last", "any", "all")
SUMS = ("none", "mean", "diagonal", "full")


def by_label(outputs: Outputs) -> Tensor:
    """The true class of each row, (N,); 0 without labels."""
    return torch.zeros(len(outputs), dtype=torch.int64) if outputs.labels is None else outputs.labels.cpu()


def by_prediction(outputs: Outputs) -> Tensor:
    """The class that the classifier predicts, (N,)."""
    return outputs.logits.argmax(dim=1).cpu()


def by_unheld_label(outputs: Outputs) -> Tensor:
    """The true class of the rows that are not held back, −1 for the others, (N,)."""
    return torch.where(held_back(outputs), -1, by_label(outputs))


def held_back(outputs: Outputs) -> Tensor:
    """Which rows stay out of sums, to say what is usual: a tenth, by their keys, (N,) bool."""
    return torch.from_numpy(outputs.keys % np.uint64(10) == 0)


def by_correct(outputs: Outputs) -> Tensor:
    """The true class of the rows that the classifier gets right, −1 for the others, (N,)."""
    labels = by_label(outputs)
    return torch.where(by_prediction(outputs) == labels, labels, -1)


@dataclass(frozen=True)
class Needs:
    """What a detector needs. Whoever has a model reads just that, and a summary holds just that.

    Attributes
    ----------
    layers : {"none", "last", "any", "all"} or callable
        "all" means the ends of the network's blocks; "any" the same where layers can be read, and none elsewhere;
        "last" the input of the classifier's linear head, or the end of the last block. A function gets a `Trace` of the
        network and returns names of layers.
    pool : callable, optional
        Makes (N, m) of a layer's `Call`; by default the mean over space or tokens.
    head : bool
        The classifier's linear head: weight and bias, and its input.
    labels : bool
        The true class of each training row.
    sums : {"none", "mean", "diagonal", "full"} or class
        Sums over the rows of each group: means, and the scatter about them. A class of one's own has
        `of(features, groups, n_groups)`, adds with ``+``, and holds tensors in its attributes.
    group : callable
        Maps `Outputs` to the group of each row, (N,), for the sums; −1 leaves a row out.
    transform : callable, optional
        Applied to the features (N, k) before they are summed.
    samples : tuple of {"logits", "features"}
        Which rows to keep: logits alone, or logits with features. They share the memory budget.
    """

    layers: str | Callable[[Any], list[str]] = "none"
    pool: Callable[[Any], Tensor] | None = None
    head: bool = False
    labels: bool = False
    sums: str | type = "none"
    group: Callable[[Outputs], Tensor] = by_label
    transform: Callable[[Tensor], Tensor] | None = None
    samples: tuple[str, ...] = ()

    @property
    def reads_layers(self) -> bool:
        """Whether hidden layers are read, where they can be."""
        return self.layers != "none" or self.head

    @property
    def must_read_layers(self) -> bool:
        """Whether there is no doing without them."""
        return self.reads_layers and self.layers != "any"

    def describe(self) -> dict[str, Any]:
        """The needs as JSON values; functions and classes by their names."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = {name: value.__qualname__ if callable(value) else value for name, value in values.items()}
        return {**plain, "samples": list(self.samples)}

    @property
    def ending(self) -> str:
        """What the names of blocks have after the layer's."""
        return "" if self.pool is None else f"|{self.pool.__name__}"

    def named(self, layers: Iterable[str]) -> list[str]:
        """The blocks of these layers."""
        return [name if name == HEAD or name.endswith(self.ending) else name + self.ending for name in layers]

    def blocks(self, available: Iterable[str]) -> list[str]:
        """Which of the available blocks of features to read, in their order."""
        there = list(available)
        names = [name for name in there if name != HEAD and name.partition("|")[2] == self.ending[1:]]
        has_head = HEAD in there
        if self.layers == "last":
            return [HEAD] if has_head else names[-1:]
        chosen = [] if self.layers == "none" else names
        return [*chosen, HEAD] if self.head and has_head else chosen


def merge_needs(needs: Iterable[Needs]) -> list[Needs]:
    """Merges compatible needs: what is summed alike, of the same pool, is summed together."""
    groups: dict[Any, list[Needs]] = {}
    for need in sorted(needs, key=lambda need: need.sums == "none"):  # what is not summed joins those that are
        own = (need.pool, need.group, need.transform, need.sums if callable(need.sums) else None, _layers_key(need))
        if need.sums == "none":
            pooled = (need.pool, _layers_key(need))
            own = next((key for key in groups if need.layers == "none" or (key[0], key[-1]) == pooled), own)
        groups.setdefault(own, []).append(need)
    return [_merge(group) for group in groups.values()]


def _layers_key(need: Needs) -> Any:
    return need.layers if callable(need.layers) else None


def _merge(needs: list[Needs]) -> Needs:
    first = needs[0]
    layers = first.layers if callable(first.layers) else max((str(need.layers) for need in needs), key=LAYERS.index)
    sums = first.sums if callable(first.sums) else max((str(need.sums) for need in needs), key=SUMS.index)
    head = any(need.head for need in needs)
    labels = any(need.labels for need in needs)
    samples = tuple(dict.fromkeys(name for need in needs for name in need.samples))
    return replace(first, layers=layers, head=head, labels=labels, sums=sums, samples=samples)


def check_covers(summary: Mapping[str, Any], wanted: Mapping[str, Any], who: str) -> None:
    """Raise unless a summary that was made for some needs serves others; both as `Needs.describe` gives them."""
    for name in unserved(summary, wanted):
        problem = f"{who} needs {name} {wanted[name]!r}, but it was made with {summary[name]!r}"
        raise InputError(problem, argument="summary", cure="make it with a guard of this method")


def unserved(summary: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The needs that a summary, which was made for others, does not serve."""
    is_summed = wanted["sums"] != "none"
    served = {
        "sums": _at_most(wanted["sums"], summary["sums"], SUMS),
        "layers": _at_most(wanted["layers"], summary["layers"], LAYERS),
        "pool": wanted["layers"] == "none" or wanted["pool"] == summary["pool"],
        "head": summary["head"] or not wanted["head"],
        "labels": summary["labels"] or not wanted["labels"],
        "samples": set(wanted["samples"]) <= set(summary["samples"]),
        "group": wanted["group"] == summary["group"] or not is_summed,
        "transform": wanted["transform"] == summary["transform"] or not is_summed,
    }
    return [name for name, is_served in served.items() if not is_served]


def _at_most(wanted: str, there: str, order: tuple[str, ...]) -> bool:
    """Whether a choice is, or is part of, another; those that are no names in the order stand for themselves."""
    if wanted in order and there in order:
        return order.index(wanted) <= order.index(there)
    return wanted in (there, order[0])
