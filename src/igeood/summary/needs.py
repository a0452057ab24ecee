"""What a detector needs of a classifier and of its training data."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from igeood.errors import InputError
from igeood.outputs import HEAD, INPUT, returned_blocks

LayerChoice = Literal["none", "last", "last two", "all", "convolutions", "norms"]
Group = Literal["label", "predicted", "correct"]
Sums = Literal["none", "mean", "diagonal", "full"]

_LEVELS = get_args(Sums)
_NARROWER = {"last two": ["none", "last"], "all": ["none", "last", "last two"]}  # what a choice of layers serves too


@dataclass(frozen=True)
class Needs:
    """What a detector needs; whoever has a model extracts just that, and a summary holds just that.

    Attributes
    ----------
    layers : {"none", "last", "last two", "all", "convolutions", "norms"}
        Which layers: none for logits alone; "all" means the ends of the network's blocks; "last" the input of the
        classifier's head, or without a linear head the end of the last block; "last two" that and the block before;
        "convolutions" all but the first, and blocks of them; "norms" batch norms.
    statistic : {"mean", "gram", "moments"}
        Of a feature map: its mean over space; row sums of Gram matrices; mean and deviation of a batch norm's input.
    head : bool
        The head itself: weight and bias that make logits of its input, which is read too.
    inputs : bool
        The model's own input, for a detector that runs a model itself.
    returns : tuple of str
        Tensors (N, m) that the model returns by name beside its logits; each is a block, `|name`.
    labels : bool
        The true class of each training row.
    sums : {"none", "mean", "diagonal", "full"}
        Sums over the rows of each group: means, and the scatter about them.
    group : {"label", "predicted", "correct"}
        By what rows are grouped for sums and ranges; "correct" leaves out the rows that the classifier gets wrong.
    transform : callable, optional
        Applied to the features (N, k) before they are summed.
    ranges : bool
        The minimum and maximum of each channel and group.
    holdout : bool
        Leave the rows whose hash is below a tenth out of the ranges; the sample keeps them.
    samples : tuple of {"logits", "features", "statistics"}
        Which rows to keep: logits alone, or logits with pooled features, or with other statistics of feature maps.
        They share the memory budget.
    """

    layers: LayerChoice = "none"
    statistic: str = "mean"
    head: bool = False
    inputs: bool = False
    returns: tuple[str, ...] = ()
    labels: bool = False
    sums: Sums = "none"
    group: Group = "label"
    transform: Callable[[Tensor], Tensor] | None = None
    ranges: bool = False
    holdout: bool = False
    samples: tuple[str, ...] = ()

    @property
    def reads_layers(self) -> bool:
        """Whether hidden layers are read."""
        return self.layers != "none" or self.head

    @property
    def is_summed(self) -> bool:
        """Whether rows are summed at all."""
        return self.sums != "none" or self.ranges

    def describe(self) -> dict[str, Any]:
        """The needs as plain values; a transform by its name."""
        plain = {**asdict(self), "samples": list(self.samples), "returns": list(self.returns)}
        return {**plain, "transform": getattr(self.transform, "__qualname__", None)}

    @property
    def ending(self) -> str:
        """What the names of blocks have after the layer's."""
        return "" if self.statistic == "mean" else f"|{self.statistic}"

    def named(self, layers: Iterable[str]) -> list[str]:
        """The blocks of these layers; special ones, and those that have the statistic's name, stay as they are."""
        return [name if name.startswith("|") or name.endswith(self.ending) else name + self.ending for name in layers]

    def blocks(self, available: Iterable[str]) -> list[str]:
        """Which of the available blocks of features to read, in their order."""
        ending, available = self.ending, list(available)
        names = [name for name in available if (name.endswith(ending) if ending else "|" not in name)]
        if self.layers in ("last", "last two"):
            if HEAD in available:  # it is the end of the last block, as the classifier sees it
                names = [*(names[-2:-1] or names), HEAD]
            names = names[-1 if self.layers == "last" else -2 :]
        else:
            names = (names if self.layers != "none" else []) + [HEAD] * (self.head and HEAD in available)
        returned = [name for name in available if name in returned_blocks(self.returns)]
        return [*(name for name in available if self.inputs and name.startswith(INPUT)), *names, *returned]


def joined(needs: Iterable[Needs]) -> list[Needs]:
    """As few needs as cover all of these: what is summed alike, of the same statistic, is summed together."""
    groups: dict[Any, list[Needs]] = {}
    for one in sorted(needs, key=lambda one: not one.is_summed):  # what is not summed joins those that are
        own = (one.statistic, one.group, one.transform, one.holdout) if one.is_summed else None
        alike = next((key for key in groups if one.layers == "none" or key[0] == one.statistic), None)
        groups.setdefault(own or alike or (one.statistic, "label", None, False), []).append(one)
    return [_join(group, key) for key, group in groups.items()]


def _join(needs: list[Needs], key: tuple[Any, ...]) -> Needs:
    layers = max((one.layers for one in needs), key=get_args(LayerChoice).index)
    flags = {name: any(getattr(one, name) for one in needs) for name in ("head", "inputs", "labels", "ranges")}
    sums = max((one.sums for one in needs), key=_LEVELS.index)
    parts = {n: tuple(dict.fromkeys(p for one in needs for p in getattr(one, n))) for n in ("samples", "returns")}
    asked: dict[str, Any] = {**flags, **parts}
    return Needs(layers, key[0], group=key[1], transform=key[2], holdout=key[3], sums=sums, **asked)


def check_covers(summary: dict[str, Any], wanted: dict[str, Any], who: str) -> None:
    """Raise unless a summary that was made for some needs serves others."""
    is_summed = wanted["sums"] != "none" or wanted["ranges"]
    served = {
        "sums": _LEVELS.index(wanted["sums"]) <= _LEVELS.index(summary["sums"]),
        **{name: summary[name] or not wanted[name] for name in ("head", "inputs", "labels", "ranges")},
        **{name: set(wanted[name]) <= set(summary[name]) for name in ("samples", "returns")},
        "statistic": wanted["layers"] == "none" or wanted["statistic"] == summary["statistic"],
        "layers": wanted["layers"] in (summary["layers"], *_NARROWER.get(summary["layers"], ["none"])),
        **{name: wanted[name] == summary[name] or not is_summed for name in ("group", "transform", "holdout")},
    }
    for name in (name for name, is_served in served.items() if not is_served):
        problem = f"{who} needs {name} {wanted[name]!r}, but it was made with {summary[name]!r}"
        raise InputError(f"summary: {problem}; make it with a guard of this method")
