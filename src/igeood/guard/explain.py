"""Why a sample got its score: layers, classes, channels."""

from dataclasses import dataclass, field
from typing import Any

from igeood.detectors import Detector
from igeood.outputs import Array, Outputs, as_kind

SHOWN = 8  # columns in a line of text


@dataclass(frozen=True, eq=False)
class Explanation:
    """Reasons for the scores of N samples, in the kind of array that came in.

    Attributes
    ----------
    score : array
        (N,) what is explained.
    columns : list of str
        What the score is made of: the output, and the layers.
    contributions : array
        (N, P) what each column added. They sum to the score.
    usual : array or None
        (P,) what each column adds for training samples on average, where the method knows it.
    nearest : dict of array
        For each layer (N,) the nearest class there.
    channels : dict of array
        For each layer (N, top) the channels that add most to the distance from that class, in order.
    channel_shares : dict of array
        For each layer (N, top) the share of the squared distance that they add.
    centroid_distance : array or None
        (N, C) Fisher–Rao distance of the output to each class's centroid, where the method has centroids.
    """

    score: Array
    columns: list[str]
    contributions: Array
    nearest: dict[str, Array] = field(default_factory=dict)
    channels: dict[str, Array] = field(default_factory=dict)
    channel_shares: dict[str, Array] = field(default_factory=dict)
    centroid_distance: Array | None = None
    usual: Array | None = None

    def __str__(self) -> str:
        """A line for each sample: the score, and the columns by the size of what they added, above the usual."""
        lines, usual = [], [0.0] * len(self.columns) if self.usual is None else self.usual.tolist()
        end = "" if self.usual is None else f" ({sum(usual):.4g} is usual)"
        for row, (score, values) in enumerate(zip(self.score.tolist(), self.contributions.tolist(), strict=True)):
            parts = []
            above = [value - mean for value, mean in zip(values, usual, strict=True)]
            for value, name in sorted(zip(above, self.columns, strict=True), key=lambda pair: -abs(pair[0]))[:SHOWN]:
                near = f" (nearest class {int(self.nearest[name][row])})" if name in self.nearest else ""
                parts.append(f"{name} {value:+.3g}{near}")
            more = ["…"] * (len(above) > SHOWN)
            lines.append(f"sample {row}: score {score:.4g}{end or ' ='} " + ", ".join([*parts, *more]))
        return "\n".join(lines)


def explain(detector: Detector, outputs: Outputs, top: int = 5, *, to_numpy: bool = False) -> Explanation:
    """Explain the scores of outputs, as the detector sees them; in NumPy arrays if `to_numpy`."""
    batch = detector._scorable(outputs)
    contributions = detector._contributions(batch)
    reasons = {"contributions": contributions, "score": contributions.sum(dim=1), **detector._explain(batch, top)}

    def converted(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: converted(part) for name, part in value.items()}
        return as_kind(value, to_numpy)

    return Explanation(columns=detector.columns_, **converted(reasons))
