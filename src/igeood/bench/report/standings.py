"""How the methods stand: the rows of the table, their averages, and the verdict in words."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

from igeood.bench.figures.drawing import look_of
from igeood.bench.runs.averages import METRICS, Averages, Key, title
from igeood.bench.runs.plan import TPR
from igeood.detectors import METHODS

ACCESS = {"black-box": "black box", "grey-box": "grey box"}  # in the order of what a method may use
ACCESS |= dict.fromkeys(("white-box-validation", "white-box-fgsm", "white-box"), "white box")
ACCESS |= {"untuned": "every method"}
OURS = ("fisher-rao-product", "logits-product", "probe")  # of the same family as the paper's
TUNED = {"own": "tuned on samples of each OOD set", "fgsm": "tuned on adversarial samples", "none": "not tuned"}


@dataclass(frozen=True)
class Row:
    """One method in one setting: percentages by metric and OOD set, and the number of OOD images."""

    setting: str
    method: str
    validation: str
    figures: dict[str, dict[str, float]]
    images: dict[str, int]

    @property
    def family(self) -> str:
        """What the method is a variant of: `igeood` for `igeood-logits` and `igeood+`."""
        return "igeood" if self.method in OURS else self.method.split("-")[0].rstrip("+")

    @property
    def name(self) -> str:
        """The method's name for readers; where two methods of one title stand together, with its own."""
        title = look_of(self.method).title
        is_shared = self.setting == "untuned" and sum(m.title == title for m in METHODS.values()) > 1
        return f"{title} ({self.method})" if is_shared else title

    def __str__(self) -> str:
        if self.setting == "untuned":
            return f"{self.name} ({TUNED['none']})"
        known = METHODS.get(self.method)
        is_tuned = known is None or known.tunes
        return f"{self.name} ({group_title(self.setting, self.validation) if is_tuned else ACCESS[self.setting]})"


def group_title(setting: str, validation: str) -> str:
    """A setting in words.

    >>> group_title("white-box", "own")
    'white box, tuned on samples of each OOD set'
    """
    return f"{ACCESS[setting]}, {TUNED.get(validation, f'tuned on {title(validation)}')}"


@dataclass(frozen=True)
class Standings:
    """A network's rows, the OOD sets that any of them has, and those that all of them have."""

    rows: Sequence[Row]
    sets: Sequence[str]
    compared: Sequence[str]

    def average(self, row: Row, metric: str = "tnr") -> float | None:
        """Over the sets that are compared, in percent; None if the row lacks one."""
        if not row.images.keys() >= set(self.compared):
            return None
        return fmean(row.figures[metric][ood] for ood in self.compared)

    def ranked(self, rows: Iterable[Row] | None = None) -> list[Row]:
        """Rows by their average TNR, then AUROC, the highest first; those without an average are left out."""
        whole = [row for row in (self.rows if rows is None else rows) if self.average(row) is not None]
        return sorted(whole, key=lambda row: [-(self.average(row, m) or 0.0) for m in ("tnr", "auroc")])

    @property
    def leader(self) -> Row:
        """The row with the highest average."""
        return self.ranked()[0]

    @property
    def shown(self) -> Row:
        """The row whose scores and pictures are shown: the best of IGEOOD, or else the leader."""
        return next((row for row in self.ranked() if row.family == "igeood"), self.leader)

    def families(self) -> list[Row]:
        """The best row of each family, the leader first."""
        best: dict[str, Row] = {}
        for row in self.ranked():
            best.setdefault(row.family, row)
        return list(best.values())

    def groups(self) -> dict[str, list[Row]]:
        """Rows by setting, as the table groups them."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(group_title(row.setting, row.validation), []).append(row)
        return groups

    def verdict(self) -> list[str]:
        """Who is ahead, by how much, and where it is weakest: sentences, the first the most important."""
        sentences = [self._ahead(), *self._without_ood(), *self._weakest(self.leader, self.leader.name)]
        if self.shown != self.leader:
            sentences += self._weakest(self.shown, str(self.shown))
        return sentences

    def by_access(self) -> list[str]:
        """The best of each setting, where there are several."""
        ranked = {name: self.ranked(rows) for name, rows in self.groups().items()}
        sentences = [self._within(name, *rows) for name, rows in ranked.items() if rows]
        return sentences if len(sentences) > 1 else []

    def _within(self, name: str, best: Row, *rest: Row) -> str:
        """The best of a setting, and the best of IGEOOD there, or of the others."""
        rival = next((r for r in rest if "igeood" in (r.family, best.family) and r.family != best.family), None)
        beside = f", {rival.name} {self._tnr(rival)}" if rival else ""
        return f"{name[0].upper()}{name[1:]}: {best.name} {self._tnr(best)}{beside}."

    def _ahead(self) -> str:
        leader, others = self.leader, self.families()[1:]
        n = len(self.compared)
        over = f"on {title(self.compared[0])}" if n == 1 else f"on average over {n} OOD sets"
        kept = f"while {100 * TPR:g}% of known ones are kept, {over}"
        start = f"{leader} refuses {self._tnr(leader)} of foreign inputs {kept}"
        if not others:
            return f"{start}. No method of another family was measured."
        own = next((row for row in others if row.family == "igeood"), None)
        rival = own or others[0]
        first, second = (round(self.average(row) or 0.0, 1) for row in (leader, rival))  # as they are printed
        gap = first - second
        if gap < 0.05:
            return f"{start}; {rival} is level with it."
        who = f"{rival}, the best of IGEOOD" if own else f"{rival}, the best of the other families"
        behind = f"IGEOOD is behind by {gap:.1f} points" if own else f"{gap:.1f} points less"
        noise = " (within the sampling error of so few images)" if gap < 2 * self._error(leader, rival) else ""
        return f"{start}; {who}, refuses {self._tnr(rival)}: {behind}{noise}."

    def _without_ood(self) -> list[str]:
        """If the leader has seen samples of the OOD sets: who is ahead of those that have not."""
        others = self.ranked(row for row in self.rows if row.validation != "own")
        if self.leader.validation != "own" or not others:
            return []
        start = "Its tuning saw samples of these sets, which few have in practice"
        return [f"{start}; without, {others[0]} refuses {self._tnr(others[0])}."]

    def _weakest(self, row: Row, who: str) -> list[str]:
        tnr = {ood: row.figures["tnr"][ood] for ood in self.compared}
        worst = min(tnr, key=lambda ood: tnr[ood])
        is_even = max(tnr.values()) - tnr[worst] < 0.05
        return [] if is_even else [f"{who} is weakest on {title(worst)}, where it refuses {tnr[worst]:.1f}%."]

    def _tnr(self, row: Row) -> str:
        return f"{self.average(row):.1f}%"

    def _error(self, *rows: Row) -> float:
        """Standard error of a difference of averages, in points, as if all images were drawn anew for each row."""
        each = [(row.figures["tnr"][ood] / 100, row.images[ood]) for row in rows for ood in self.compared]
        return 100 * math.sqrt(sum(p * (1 - p) / n for p, n in each)) / len(self.compared)


def standings(ours: Averages, key: Key) -> Standings | None:
    """A network's; None if nothing of it was measured."""
    rows = []
    for setting, method in product(ACCESS, dict.fromkeys([*METHODS, *(cell["method"] for cell in ours.cells)])):
        cells = [cell for cell in ours.of(setting, key) if cell["method"] == method]
        images = {cell["ood"]: cell["ood_images"] for cell in cells}
        figures = {m: {ood: ours.value(setting, key, ood, method, m) or 0.0 for ood in images} for m in METRICS}
        rows += [Row(setting, method, cells[0]["validation"], figures, images)] if cells else []
    if not rows:
        return None
    sets = list(dict.fromkeys(ood for row in rows for ood in row.images))
    shared = [ood for ood in sets if all(ood in row.images for row in rows)]
    widest = max((list(row.images) for row in rows), key=len)
    return Standings(rows, sets, shared or widest)
