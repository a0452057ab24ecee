"""What lies behind the table: scores, curves, contributions and pictures, each with its words."""

from collections.abc import Iterator

from igeood.bench.figures import curves
from igeood.bench.figures.drawing import NARROW, look_of
from igeood.bench.report.drawing import Drawing, draw, histogram, number
from igeood.bench.report.standings import Row, Standings
from igeood.bench.runs.averages import Averages, Key, Scores, title
from igeood.images import picture

SIDE = 48  # pixels of a picture's longer side at most
SIDES = {"most": "Most out-of-distribution", "least": "Least out-of-distribution"}


Thumbnail = dict[str, str]  # an image's source, its row, its score, and the reason


class Evidence:
    """Figures and pictures of one network.

    Parameters
    ----------
    ours : Averages
        The results.
    key : Key
        Which network.
    standing : Standings
        How its methods stand.
    most : int
        Of so many OOD sets at most, the hardest ones.
    """

    def __init__(self, ours: Averages, key: Key, standing: Standings, most: int) -> None:
        self.ours = ours
        self.key = key
        self.standing = standing
        tnr = standing.shown.figures["tnr"]
        hardest = sorted(tnr, key=lambda ood: tnr[ood])[:most]
        self.drawn = [ood for ood in tnr if ood in hardest]

    def note(self) -> str:
        """What the figures leave out, if anything."""
        row = self.standing.shown
        splits = len({cell["seed"] for cell in self.ours.of(row.setting, self.key) if cell["method"] == row.method})
        notes = [f"Of the {len(self.drawn)} hardest OOD sets."] if len(self.drawn) < len(row.images) else []
        notes += [f"Of the first of {splits} splits; the table has their means."] if splits > 1 else []
        return " ".join(notes)

    def scores(self, row: Row) -> Iterator[tuple[str, Scores]]:
        """For each OOD set drawn that the row has, the scores of the first split."""
        cells = [c for c in self.ours.of(row.setting, self.key) if c["method"] == row.method]
        first = {c["ood"]: c for c in sorted(cells, key=lambda c: -int(c["seed"]))}
        return ((ood, self.ours.scores(first[ood])) for ood in self.drawn if ood in first)

    def histograms(self) -> Iterator[Drawing]:
        """Scores of the shown method on each OOD set, with the threshold that keeps 95% of these very images."""
        for ood, scores in self.scores(self.standing.shown):
            yield histogram(title(ood), scores.arrays["id"], scores.arrays["ood"], scores.threshold)

    def threshold_curves(self) -> Iterator[Drawing]:
        """ROC and precision–recall on each OOD set, of the best of each family."""
        families = [(row, dict(self.scores(row))) for row in self.standing.families()]
        for ood in self.drawn:
            rows = [(row, scores[ood]) for row, scores in families if ood in scores]
            pairs = {row.method: (scores.arrays["id"], scores.arrays["ood"]) for row, scores in rows}
            for kind, metric in (("ROC", "auroc"), ("precision–recall", "aupr")):
                areas = ", ".join(f"{row.name} {100 * scores.cell[metric]:.1f}%" for row, scores in rows)
                alt = f"{kind} curves on {title(ood)}. {metric.upper()}: {areas}."
                yield draw(curves.threshold_curves(kind, pairs), alt, f"{title(ood)}: {kind}")

    def tuning(self) -> Iterator[Drawing]:
        """TNR on the validation images against temperature, and against the input step."""
        names = {"temperature": "temperature", "epsilon": "input step ε"}
        for parameter, methods in self.ours.searches(self.key).items():
            if methods:
                chosen = ", ".join(
                    f"{look_of(method).title} {value:.4g} (best TNR {100 * max(reached):.1f}%)"
                    for method, (_, reached, value) in methods.items()
                )
                figure = curves.tuning_curves([("", parameter, methods)], NARROW)
                alt = f"TNR on the validation images against the {names[parameter]}. Chosen: {chosen}."
                yield draw(figure, alt, f"{names[parameter].capitalize()}; the choice is marked")

    def white_row(self) -> Row | None:
        """The best white-box row, IGEOOD's if there is one: its contributions are drawn."""
        rows = [row for row in self.standing.ranked() if row.setting.startswith("white-box")]
        return min(rows, key=lambda row: row.family != "igeood", default=None)

    def contributions(self, row: Row) -> Iterator[Drawing]:
        """What output and layers add to the score on average, in-distribution and on each OOD set."""
        for ood, scores in self.scores(row):
            means = [scores.arrays[f"{side}_parts"].mean(axis=0) for side in ("id", "ood")]
            each = ", ".join(f"{name} {a:.2g} and {b:.2g}" for name, a, b in zip(scores.columns, *means, strict=True))
            alt = f"Mean contributions to the score, in-distribution and {title(ood)}: {each}."
            yield draw(curves.contributions(scores.columns, *means), alt, title(ood))

    def pictures(self, count: int) -> dict[str, dict[str, list[Thumbnail]]]:
        """Images of extreme scores of the shown method, by set and side: in-distribution, then each OOD set."""
        each = list(self.scores(self.standing.shown))
        sets = [(f"{title(self.key.in_distribution)} (in-distribution)", "id", scores) for _, scores in each[:1]]
        sets += [(title(ood), "ood", scores) for ood, scores in each]
        return {
            name: {text: list(_thumbnails(scores, side, which, count)) for which, text in SIDES.items()}
            for name, side, scores in sets
        }


def _thumbnails(scores: Scores, side: str, which: str, count: int) -> Iterator[Thumbnail]:
    images, rows = (scores.arrays[f"{side}_{which}{end}"][:count] for end in ("", "_rows"))
    for image, row in zip(images, rows.tolist(), strict=True):
        score = number(scores.arrays[side][row])
        yield {"source": picture(image, SIDE), "row": row, "score": score, "reason": scores.reason(side, row)}
