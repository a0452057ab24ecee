"""How the methods stand: the rows of the table, their averages, and who leads in words."""

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
OURS = ("evidence", "probe")  # of the same family as the paper's
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

    def lead(self) -> str:
        """Who leads, and by how much, in a sentence."""
        leader = self.leader
        others = self.families()[1:]
        n = len(self.compared)
        over = f"on {title(self.compared[0])}" if n == 1 else f"on average over {n} OOD sets"
        share = f"{self._tnr(leader)} of foreign images {over} while {100 * TPR:g}% of known ones are kept"
        if not others:
            return f"{self._who(leader)} refuses {share}; no method of another family was measured."
        own = next((row for row in others if row.family == "igeood"), None)
        rival = own or others[0]
        first, second = (round(self.average(row) or 0.0, 1) for row in (leader, rival))  # as they are printed
        gap = first - second
        if gap < 0.05:
            return f"{self._who(leader)} and {self._who(rival)} are level: each refuses {share}."
        place = "the best of the IGEOOD family" if own else "the best of the other families"
        noise = ", which is within the sampling error" if gap < 2 * self._error(leader, rival) else ""
        behind = f"{self._who(rival)}, {place}, refuses {self._tnr(rival)}, {gap:.1f} points less{noise}"
        return f"{self._who(leader)} leads: it refuses {share}; {behind}."

    def _who(self, row: Row) -> str:
        """A row in a sentence: with its setting where there are several."""
        return row.name if len(self.groups()) == 1 else str(row)

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
