"""Why a sample got its score: layers, classes, channels."""

from dataclasses import dataclass, field
from typing import Any

from igeood.detectors import Detector
from igeood.outputs import Array, Outputs, as_kind

SHOWN, CLASSES_SHOWN = 8, 3  # columns and classes in a line of text


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
    centroid_usual : array or None
        (C,) mean distance of the training samples of each class to its centroid.
    likeliest, probability : array
        (N, top) the classes of the largest logits, in order, and their softmax at temperature 1.
    classes : tuple of str, or None
        The classes' names, where the guard knows them.
    """

    score: Array
    columns: list[str]
    contributions: Array
    nearest: dict[str, Array] = field(default_factory=dict)
    channels: dict[str, Array] = field(default_factory=dict)
    channel_shares: dict[str, Array] = field(default_factory=dict)
    centroid_distance: Array | None = None
    usual: Array | None = None
    centroid_usual: Array | None = None
    likeliest: Array | None = None
    probability: Array | None = None
    classes: tuple[str, ...] | None = None

    def __str__(self) -> str:
        """A line for each sample: the score, and the columns by the size of what they added, above the usual.

        Where the score is of the output alone, the nearest centroids follow, or else the likeliest classes.
        """
        lines = []
        usual = [0.0] * len(self.columns) if self.usual is None else self.usual.tolist()
        end = " =" if self.usual is None else f" ({sum(usual):.4g} is usual)"
        for row, (score, values) in enumerate(zip(self.score.tolist(), self.contributions.tolist(), strict=True)):
            parts = []
            above = [value - mean for value, mean in zip(values, usual, strict=True)]
            for value, name in sorted(zip(above, self.columns, strict=True), key=lambda pair: -abs(pair[0]))[:SHOWN]:
                near = f" (nearest class {self._name(self.nearest[name][row])})" if name in self.nearest else ""
                parts.append(f"{name} {value:+.3g}{near}")
            sum_of = f"{end} {', '.join(parts)}" if self.columns != ["output"] else ""
            lines.append(f"sample {row}: score {score:.4g}{sum_of}{self._of_output(row)}")
        return "\n".join(lines)

    def _name(self, label: Any) -> str:
        return str(int(label)) if self.classes is None else self.classes[int(label)]

    def _of_output(self, row: int) -> str:
        """What a sample's output is like, where the score has no parts of layers."""
        if self.nearest or self.usual is not None or self.likeliest is None or self.probability is None:
            return ""
        if self.centroid_distance is None:
            pairs = zip(self.likeliest[row][:CLASSES_SHOWN], self.probability[row], strict=False)
            return "; likeliest " + ", ".join(f"{self._name(label)} {float(p):.1%}" for label, p in pairs)
        parts = []
        for label in self.centroid_distance[row].argsort()[:CLASSES_SHOWN]:
            usual = "" if self.centroid_usual is None else f" (usual {float(self.centroid_usual[label]):.3g})"
            parts.append(f"{self._name(label)} at {float(self.centroid_distance[row][label]):.3g}{usual}")
        return f"; nearest centroids {', '.join(parts)}"


def explain(
    detector: Detector, outputs: Outputs, top: int, classes: tuple[str, ...] | None, *, to_numpy: bool
) -> Explanation:
    """Explain the scores of outputs; in NumPy arrays if `to_numpy`."""
    terms = detector.terms(outputs)
    largest = outputs.logits.double().softmax(dim=1).topk(min(top, outputs.n_classes), dim=1)
    reasons = {
        "contributions": terms,
        "score": terms.sum(dim=1),
        "likeliest": largest.indices,
        "probability": largest.values,
        **detector.explain(outputs, top),
    }

    def converted(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: converted(part) for name, part in value.items()}
        return as_kind(value, to_numpy)

    return Explanation(columns=detector.term_names, classes=classes, **converted(reasons))
