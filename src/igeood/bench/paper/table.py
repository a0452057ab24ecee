"""What the paper's tables share: cells with ours and the paper's, rows of classifiers, and the text."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from igeood.bench.figures.drawing import look_of
from igeood.bench.paper import reported
from igeood.bench.paper.reported import Number
from igeood.bench.runs.averages import Averages, Key, title

Cells = Mapping[str, Callable[[Key], str]]  # by column, the cell of a classifier
MISSING = "–"
NETWORK = "network, in-distribution"


@dataclass(frozen=True)
class Table:
    """A table as text: the paper's label, a title, a header, rows, and what the reader should know."""

    label: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """The table in Markdown, without rows that have no number."""
        lines = [f"### {self.title}", "", f"The paper's `{self.label}`.", ""]
        lines += ["| " + " | ".join(self.header) + " |", "|---|" + "---:|" * (len(self.header) - 1)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows if {*row[1:]} != {MISSING}]
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes), ""])


def tenths(value: float) -> str:
    """A number with one decimal, or with as many as the paper printed."""
    return max(f"{value:.1f}", f"{value:g}", key=len)


def pair(ours: Number, theirs: Number, show: Callable[[float], str] | None = None) -> str:
    """Our number, and the paper's in parentheses where it has one."""
    texts = []
    for number, usual in ((ours, "{:.1f}".format), (theirs, tenths)):
        value, spread = number or (None, None)
        deviation = "" if spread is None else f" ± {spread:.2g}"
        texts.append(MISSING if value is None else (show or usual)(value) + deviation)
    return texts[0] if theirs is None else "{} ({})".format(*texts)


def mean(values: Iterable[float | None]) -> Number:
    """Mean of the known values, and their deviation if there are several."""
    known = [value for value in values if value is not None]
    return (fmean(known), pstdev(known) if len(known) > 1 else None) if known else None


def titles(columns: Iterable[str | tuple[str, str]]) -> list[str]:
    """Headers of methods, or of settings and methods."""
    return [look_of(c).title if isinstance(c, str) else f"{c[0]}: {look_of(c[1]).title}" for c in columns]


def needed(networks: Iterable[Key] = (), sets: Iterable[str] = (), methods: Iterable[str] = ()) -> list[str]:
    """What the empty cells need, in one sentence; nothing if nothing is missing."""
    missing = {
        "a trained network": [str(key) for key in networks],
        "the sets": map(title, sets),
        "results of": titles(methods),
    }
    parts = [f"{what} ({text})" for what, each in missing.items() if (text := "; ".join(each))]
    return [f"Empty cells need {' and '.join(parts)}."] if parts else []


def rows_of(ours: Averages, label: str) -> list[Key]:
    """Our classifiers first, then those that only the paper has."""
    mine = ours.classifiers()
    theirs = [Key(r.network, r.in_distribution) for r in reported.find(label=label) if r.network != "average"]
    return [*mine, *(key for key in dict.fromkeys(theirs) if key.paper not in [k.paper for k in mine])]


def by_network(ours: Averages, label: str, name: str, columns: Cells, *notes: str) -> Table:
    """A table with a row for each classifier."""
    keys = rows_of(ours, label)
    rows = [[str(key), *(cell(key) for cell in columns.values())] for key in keys]
    return Table(label, name, [NETWORK, *columns], rows, [*notes, *needed(key for key in keys if not key.weights)])
