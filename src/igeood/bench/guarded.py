"""What a guard does with sets of images: how many it keeps and refuses, and pictures with reasons, in one file."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from igeood.bench.datasets import ImageSet
from igeood.bench.runs import Network
from igeood.files import read_record, write_record
from igeood.guard import Guard, Verdict
from igeood.guard.explain import one_in

FILE = "guarded.safetensors"  # beside the results that a report is made of
BATCH = 32
MOST = 4  # pictures of what should happen
FEW = 2  # pictures of what should not
RARE = 0.05  # of known inputs: what is less rare is no reason


@dataclass(frozen=True)
class Picture:
    """One image that was judged: what the network took it for and how surely, the verdict, and why in words."""

    row: int
    label: int
    confidence: float
    score: float
    p_value: float
    is_ood: bool
    reason: str


@dataclass(frozen=True, eq=False)
class Judged:
    """A set of images under a guard.

    Attributes
    ----------
    name, title : str
        Of the set.
    is_known : bool
        Whether it is in-distribution.
    refused : float
        The share that the guard refuses.
    scores : Tensor
        (N,) of all images.
    images : Tensor
        (m, 3, H, W) bytes, of the pictures.
    pictures : list of Picture
        Those refused first; evenly spaced among the scores, so neither the easiest nor the hardest.
    """

    name: str
    title: str
    is_known: bool
    refused: float
    scores: Tensor
    images: Tensor
    pictures: list[Picture]


@dataclass(frozen=True, eq=False)
class Guarded:
    """All sets under one guard."""

    promise: str
    threshold: float
    accuracy: float
    sets: list[Judged]

    def save(self, folder: Path) -> None:
        """Write it into a folder of results."""
        about = [{k: v for k, v in vars(one).items() if not isinstance(v, Tensor)} for one in self.sets]
        for one in about:
            one["pictures"] = [asdict(picture) for picture in one["pictures"]]
        tensors = {f"{kind}:{s.name}": getattr(s, kind) for s in self.sets for kind in ("scores", "images")}
        figures = {"promise": self.promise, "threshold": self.threshold, "accuracy": self.accuracy}
        write_record(folder / FILE, {"kind": "guarded", **figures, "sets": about}, tensors)

    @classmethod
    def load(cls, folder: Path) -> "Guarded | None":
        """Read it from a folder of results; None if there is none."""
        if not (folder / FILE).is_file():
            return None
        record, tensors = read_record(folder / FILE, "guarded")
        sets = []
        for one in record["sets"]:
            pictures: Any = [Picture(**picture) for picture in one["pictures"]]
            kept: dict[str, Any] = {kind: tensors[f"{kind}:{one['name']}"] for kind in ("scores", "images")}
            sets.append(Judged(**{**one, **kept, "pictures": pictures}))
        return cls(record["promise"], record["threshold"], record["accuracy"], sets)


def judged(guard: Guard, network: Network, images: ImageSet, *, is_known: bool) -> Judged:
    """What a guard does with a set of images that it has not seen."""
    verdict = guard.predict(list(network.batches(images, BATCH)))
    score = torch.as_tensor(verdict.score).cpu()
    is_ood = torch.as_tensor(verdict.is_ood).cpu()
    counts = {True: FEW if is_known else MOST, False: MOST if is_known else FEW}
    rows = [row for refused in (True, False) for row in _spaced(score, is_ood == refused, counts[refused])]
    pictures = list(_pictures(guard, network, images, verdict, rows))
    pixels = torch.from_numpy(np.ascontiguousarray(images[rows].images()))
    return Judged(images.name, images.title, is_known, float(is_ood.double().mean()), score, pixels, pictures)


def _spaced(score: Tensor, chosen: Tensor, count: int) -> list[int]:
    """Up to so many of the chosen rows (N,), evenly spaced among their scores."""
    rows = chosen.nonzero()[:, 0]
    order = rows[score[rows].argsort(stable=True)]
    places = (
        [(2 * i + 1) * len(order) // (2 * count) for i in range(count)] if len(order) > count else range(len(order))
    )
    return [int(order[place]) for place in places]


def _pictures(
    guard: Guard, network: Network, images: ImageSet, verdict: Verdict, rows: Iterable[int]
) -> Iterable[Picture]:
    for row in rows:
        batch = list(network.batches(images[[row]], BATCH))
        with torch.no_grad():
            confidence = float(network.model(batch[0][0]).softmax(dim=1).max())
        explained: Any = guard.explain(batch)
        rarest = min(explained.rarities(0).items(), key=lambda pair: pair[1], default=("", 1.0))
        yield Picture(
            row,
            int(verdict.label[row]),
            confidence,
            float(verdict.score[row]),
            float(verdict.p_value[row]),
            bool(verdict.is_ood[row]),
            f"{rarest[0].rpartition(': ')[0]}: {one_in(rarest[1])}" if rarest[1] < RARE else "",
        )
