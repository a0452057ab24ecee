"""What lies behind the table: scores, curves, contributions and pictures, each with its words."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from igeood import figures, storage
from igeood.benchmark.results import Record
from igeood.benchmark.summary import Key, Summary, title
from igeood.explanation import raised
from igeood.figures import NARROW, OOD_LABEL, Curve, HistogramPanel, Values
from igeood.metrics import exact_fraction
from igeood.report.drawing import Artist, Drawing, picture
from igeood.report.standings import Row, Standings

SIDES = {"most": "Most out-of-distribution", "least": "Least out-of-distribution"}


class Thumbnail(NamedTuple):
    """An image, and what was said of it."""

    source: str
    alt: str
    score: str
    verdict: str
    reason: str


class Pictures(NamedTuple):
    """A set's images with the highest and with the lowest scores."""

    name: str
    sides: dict[str, list[Thumbnail]]


@dataclass(frozen=True, eq=False)
class Scores:
    """What a benchmark kept of one cell."""

    cell: Record
    columns: list[str]
    tensors: Mapping[str, Tensor]

    @property
    def inside(self) -> Values:
        """(N,) scores of the in-distribution images."""
        return self.tensors["id"].double().numpy()

    @property
    def outside(self) -> Values:
        """(N,) scores of the OOD images."""
        return self.tensors["ood"].double().numpy()

    @property
    def threshold(self) -> float:
        """The first that keeps the wanted share of these in-distribution images: that of the table's TNR."""
        kept = math.ceil(exact_fraction(self.cell["tpr"], "tpr") * len(self.inside))
        return float(np.sort(self.inside)[kept - 1])

    def parts(self, side: str) -> Values | None:
        """(N, P) what each column added to each score, where that was kept."""
        found = self.tensors.get(f"{side}_parts")
        return None if found is None else found.double().numpy()


class Evidence:
    """Figures and pictures of one network.

    Parameters
    ----------
    ours : Summary
        The results.
    key : Key
        Which network.
    standing : Standings
        How its methods stand.
    artist : Artist
        Who draws.
    most : int
        Of so many OOD sets at most, the hardest ones.
    """

    def __init__(self, ours: Summary, key: Key, standing: Standings, artist: Artist, most: int) -> None:
        self.ours, self.key, self.standing, self.artist = ours, key, standing, artist
        tnr = standing.shown.figures["tnr"]
        hardest = sorted(tnr, key=lambda ood: tnr[ood])[:most]
        self.drawn = [ood for ood in tnr if ood in hardest]

    def note(self) -> str:
        """What the figures leave out, if anything."""
        row = self.standing.shown
        splits = len({cell["seed"] for cell in self.ours.of(row.setting, self.key) if cell["method"] == row.method})
        told = [f"Of the {len(self.drawn)} hardest OOD sets."] if len(self.drawn) < len(row.images) else []
        told += [f"Of the first of {splits} splits; the table has their means."] if splits > 1 else []
        return " ".join(told)

    def scores(self, row: Row, ood: str) -> Scores | None:
        """Of the first split; None if the folder does not hold them."""
        cells = (c for c in self.ours.of(row.setting, self.key) if (c["method"], c["ood"]) == (row.method, ood))
        cell = min(cells, key=lambda c: int(c["seed"]), default=None)
        if cell is None or self.ours.results is None:
            return None
        path = self.ours.results.folder / "scores" / cell["scores"]
        if not path.is_file():
            return None
        record, tensors = storage.read(path, "scores")
        return Scores(cell, record.get("columns", []), tensors)

    def _each(self, row: Row) -> Iterator[tuple[str, Scores]]:
        for ood in self.drawn:
            found = self.scores(row, ood)
            if found is not None:
                yield ood, found

    def histograms(self) -> list[Drawing]:
        """Scores of the shown method on each OOD set, with the threshold."""
        found = []
        for ood, scores in self._each(self.standing.shown):
            inside, outside, at = scores.inside, scores.outside, scores.threshold
            panel = HistogramPanel("", inside, {OOD_LABEL: outside}, at)
            kept, refused = 100 * np.mean(inside <= at), 100 * np.mean(outside > at)
            alt = (
                f"Histogram of scores: in-distribution median {np.median(inside):.3g}, {title(ood)} median "
                f"{np.median(outside):.3g}; the threshold {at:.3g} keeps {kept:.1f}% of {len(inside):,} known images "
                f"and refuses {refused:.1f}% of {len(outside):,} foreign ones."
            )
            caption = f"{title(ood)}: {refused:.1f}% refused"
            found.append(self.artist.draw(figures.score_histograms([panel], NARROW), alt, caption))
        return found

    def threshold_curves(self) -> list[Drawing]:
        """ROC and precision–recall on each OOD set, of the best of each family."""
        rows, found = self.standing.families(), []
        kinds = {"ROC": ("auroc", figures.roc_curves), "precision–recall": ("aupr", figures.precision_recall_curves)}
        for ood in self.drawn:
            read = {row.method: (row, scores) for row in rows if (scores := self.scores(row, ood)) is not None}
            for name, (metric, draw) in kinds.items():
                lines = {method: (scores.inside, scores.outside) for method, (_, scores) in read.items()}
                areas = ", ".join(f"{row.name} {100 * scores.cell[metric]:.1f}%" for row, scores in read.values())
                alt = f"{name} curves on {title(ood)}. {metric.upper()}: {areas}."
                if lines:
                    found.append(self.artist.draw(draw(lines), alt, f"{title(ood)}: {name}"))
        return found

    def tuning(self) -> list[Drawing]:
        """TNR on the validation images against temperature, and against the input step."""
        found = []
        for parameter, methods in self.ours.searches(self.key).items():
            if not methods:
                continue
            curves = {method: Curve(*tried) for method, tried in methods.items()}
            chosen = ", ".join(
                f"{figures.STYLE[method].title} {value:.4g} (best TNR {100 * max(reached):.1f}%)"
                for method, (_, reached, value) in methods.items()
            )
            name = "temperature" if parameter == "temperature" else "input step ε"
            figure = figures.tuning_curve(curves, log=parameter == "temperature")
            alt = f"TNR on the validation images against the {name}. Chosen: {chosen}."
            found.append(self.artist.draw(figure, alt, f"{name[0].upper()}{name[1:]}; the choice is marked"))
        return found

    def white_row(self) -> Row | None:
        """The best white-box row whose contributions were kept: IGEOOD's if there is one."""
        ranked = sorted(self.standing.ranked(), key=lambda row: row.family != "igeood")
        rows = (row for row in ranked if row.setting.startswith("white-box"))
        return next((row for row in rows if any(s.parts("id") is not None for _, s in self._each(row))), None)

    def contributions(self, row: Row) -> list[Drawing]:
        """What output and layers add to the score on average, in-distribution and on each OOD set."""
        found = []
        for ood, scores in self._each(row):
            parts = [part.mean(axis=0) for side in ("id", "ood") if (part := scores.parts(side)) is not None]
            if len(parts) < 2:
                continue
            each = ", ".join(f"{name} {a:.2g} and {b:.2g}" for name, a, b in zip(scores.columns, *parts, strict=True))
            alt = f"Mean contributions to the score, in-distribution and {title(ood)}: {each}."
            found.append(self.artist.draw(figures.contributions(scores.columns, *parts), alt, title(ood)))
        return found

    def pictures(self, count: int) -> list[Pictures]:
        """Images of extreme scores of the shown method: in-distribution, then of each OOD set."""
        each = [(ood, s) for ood, s in self._each(self.standing.shown) if "id_most" in s.tensors]
        sets = [(self.key.in_distribution, "id", scores) for _, scores in each[:1]]
        sets += [(ood, "ood", scores) for ood, scores in each]
        found = []
        for name, side, scores in sets:
            sides = {text: _thumbnails(scores, side, which, count) for which, text in SIDES.items()}
            found.append(Pictures(title(name) + (" (in-distribution)" if side == "id" else ""), sides))
        return found


def _thumbnails(scores: Scores, side: str, which: str, count: int) -> list[Thumbnail]:
    images, rows = (scores.tensors[f"{side}_{which}{end}"] for end in ("", "_rows"))
    values = scores.inside if side == "id" else scores.outside
    found = []
    for image, row in zip(images[:count].numpy(), rows[:count].tolist(), strict=True):
        verdict = "refused" if values[row] > scores.threshold else "kept"
        score, reason = f"{values[row]:.3g}".replace("-", "−"), _reason(scores, side, row)
        alt = f"image {row}, score {score}, {verdict}" + (f", raised most by {reason}" if reason else "")
        found.append(Thumbnail(picture(image), alt, score, verdict, reason))
    return found


def _reason(scores: Scores, side: str, row: int) -> str:
    """The part that raised the score most, against the in-distribution images' mean; empty where unknown."""
    parts, usual = scores.parts(side), scores.parts("id")
    if parts is None or usual is None:
        return ""
    name, above = next(iter(raised(scores.columns, parts[row], usual.mean(axis=0)).items()))
    return name if above > 0 else ""
