"""Why a sample got its score: layers, classes, channels."""

from dataclasses import dataclass, field
from typing import Any

from igeood.calibration import Calibration
from igeood.detectors import Detector
from igeood.outputs import Array, Outputs, as_kind

SHOWN = 8  # places in a line of text,
CLASSES_SHOWN = 3
CHANNELS_SHOWN = 3
RAREST = 1e-6  # what a tail says of rarer inputs is a guess


@dataclass(frozen=True, eq=False)
class Explanation:
    """Reasons for the scores of N samples, in the kind of array that came in.

    Attributes
    ----------
    score : array
        (N,) what is explained.
    columns : list of str
        What the score is made of: a layer or the output; where each has several readings, `place: reading`.
    contributions : array
        (N, P) what each column added. They sum to the score.
    rarity : array or None
        (N, P) the share of known inputs that are at least as extreme in a column, where the method knows it.
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
    threshold : array or None
        (N,) the score above which each sample is refused, by its predicted class if classes have their own; None
        before `calibrate`.
    """

    score: Array
    columns: list[str]
    contributions: Array
    nearest: dict[str, Array] = field(default_factory=dict)
    channels: dict[str, Array] = field(default_factory=dict)
    channel_shares: dict[str, Array] = field(default_factory=dict)
    centroid_distance: Array | None = None
    rarity: Array | None = None
    centroid_usual: Array | None = None
    likeliest: Array | None = None
    probability: Array | None = None
    classes: tuple[str, ...] | None = None
    threshold: Array | None = None

    def __str__(self) -> str:
        """A line for each sample: the score and its places, the rarest first, or by the size of what they added.

        The likeliest classes follow; or the nearest centroids, where the method has them.
        """
        lines = []
        for row, score in enumerate(self.score.tolist()):
            places = self._places(row)
            of = f"; {', '.join(places[:SHOWN])}" if self.columns != ["output"] else ""
            limit = "" if self.threshold is None else f" (threshold {float(self.threshold[row]):.4g})"
            lines.append(f"sample {row}: score {score:.4g}{limit}{of}{self._of_output(row)}")
        return "\n".join(lines)

    def _places(self, row: int) -> list[str]:
        """Each place with the rarest of its readings; or columns by the size of what they added."""
        if self.rarity is None:
            values = zip(self.columns, self.contributions[row].tolist(), strict=True)
            ordered = sorted(values, key=lambda pair: -abs(pair[1]))
            return [f"{name} {value:+.3g}{self._near(name, row)}" for name, value in ordered]
        rarest: dict[str, float] = {}
        shares = zip(self.columns, self.rarity[row].tolist(), strict=True)
        for name, share in sorted(shares, key=lambda pair: pair[1]):
            rarest.setdefault(name.rpartition(": ")[0], share)
        return [f"{place}: {one_in(share)}{self._near(place, row)}" for place, share in rarest.items()]

    def reason(self, row: int) -> str:
        """What of a sample is rarest, or adds most to its score, in a few words."""
        return self._places(row)[0].partition(" (")[0]

    def _near(self, place: str, row: int) -> str:
        """The nearest class of a layer, and its channels that stand out."""
        layer = place if place in self.nearest else f"|{place}"
        if layer not in self.nearest:
            return ""
        channels = ", ".join(str(int(channel)) for channel in self.channels[layer][row][:CHANNELS_SHOWN])
        return f" (nearest class {self._name(self.nearest[layer][row])}; channels {channels})"

    def _name(self, label: Any) -> str:
        return str(int(label)) if self.classes is None else self.classes[int(label)]

    def _of_output(self, row: int) -> str:
        """What a sample's output is like."""
        if self.likeliest is None or self.probability is None:
            return ""
        if self.centroid_distance is None:
            pairs = zip(self.likeliest[row][:CLASSES_SHOWN], self.probability[row], strict=False)
            return "; likeliest " + ", ".join(f"{self._name(label)} {float(p):.1%}" for label, p in pairs)
        parts = []
        for label in self.centroid_distance[row].argsort()[:CLASSES_SHOWN]:
            usual = "" if self.centroid_usual is None else f" (usual {float(self.centroid_usual[label]):.3g})"
            parts.append(f"{self._name(label)} at {float(self.centroid_distance[row][label]):.3g}{usual}")
        return f"; nearest centroids {', '.join(parts)}"


def one_in(share: float) -> str:
    """A share of known inputs in words.

    >>> one_in(1 / 900), one_in(0.7), one_in(1e-9)
    ('1 in 900', '1 in 1.4', 'less than 1 in 1,000,000')
    """
    if share < RAREST:
        return f"less than 1 in {1 / RAREST:,.0f}"
    number = float(f"{1.0 / share:.2g}")
    return f"1 in {number:,.0f}" if number >= 10 else f"1 in {number:g}"


def explain(
    detector: Detector,
    outputs: Outputs,
    top: int,
    classes: tuple[str, ...] | None,
    calibration: Calibration | None,
    *,
    to_numpy: bool,
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
    if calibration is not None:
        reasons["threshold"] = calibration.thresholds(outputs.predicted)

    def converted(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: converted(part) for name, part in value.items()}
        return as_kind(value, to_numpy)

    return Explanation(columns=detector.term_names, classes=classes, **converted(reasons))
