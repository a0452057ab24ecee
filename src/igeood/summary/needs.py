"""What a detector needs of a classifier and of its training data."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from igeood.errors import InputError
from igeood.outputs import HEAD

LayerChoice = Literal["none", "last", "last two", "all", "convolutions", "norms"]
Group = Literal["label", "predicted", "correct"]
Sums = Literal["none", "mean", "diagonal", "full"]

_LEVELS = get_args(Sums)


@dataclass(frozen=True)
class Needs:
    """What a detector needs; whoever has a model extracts just that, and a summary holds just that.

    Attributes
    ----------
    layers : {"none", "last", "last two", "all", "convolutions", "norms"}
        Which layers: none for logits alone; "all" means the ends of the network's blocks.
    statistic : str
        Of a feature map: "mean" over space.
    head : bool
        The input of the classifier's last linear layer, unpooled.
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
    labels: bool = False
    sums: Sums = "none"
    group: Group = "label"
    transform: Callable[[Tensor], Tensor] | None = None
    ranges: bool = False
    holdout: bool = False
    samples: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        """The needs as plain values; a transform by its name."""
        plain = {**asdict(self), "samples": list(self.samples)}
        return {**plain, "transform": getattr(self.transform, "__qualname__", None)}

    def blocks(self, available: Iterable[str]) -> list[str]:
        """Which of the available blocks of features to read, in their order."""
        ending = "" if self.statistic == "mean" else f"|{self.statistic}"
        names = [name for name in available if name != HEAD and (name.endswith(ending) if ending else "|" not in name)]
        if self.layers == "none":
            names = []
        elif self.layers in ("last", "last two"):
            names = names[-1 if self.layers == "last" else -2 :]
        return [*names, *[HEAD] * self.head]


def check_covers(summary: dict[str, Any], wanted: dict[str, Any], who: str) -> None:
    """Raise unless a summary that was made for some needs serves others."""
    is_summed = wanted["sums"] != "none" or wanted["ranges"]
    served = {
        "sums": _LEVELS.index(wanted["sums"]) <= _LEVELS.index(summary["sums"]),
        **{name: summary[name] or not wanted[name] for name in ("head", "labels", "ranges")},
        "samples": set(wanted["samples"]) <= set(summary["samples"]),
        "statistic": wanted["layers"] == "none" or wanted["statistic"] == summary["statistic"],
        "layers": wanted["layers"] in ("none", summary["layers"])
        or (summary["layers"] == "all" and wanted["layers"] in ("last", "last two")),
        **{name: wanted[name] == summary[name] or not is_summed for name in ("group", "transform", "holdout")},
    }
    for name in (name for name, is_served in served.items() if not is_served):
        problem = f"{who} needs {name} {wanted[name]!r}, but it was made with {summary[name]!r}"
        raise InputError(f"summary: {problem}; make it with a guard of this method")
