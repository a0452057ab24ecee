"""Each table and figure of the paper by its name: our numbers, and the paper's beside them."""

from collections.abc import Sequence
from pathlib import Path

from igeood.bench.figures.drawing import save
from igeood.bench.paper.layers import reduction, weights
from igeood.bench.paper.plots import FIGURES
from igeood.bench.paper.steps import input_steps
from igeood.bench.paper.tables import TABLES as OF_RECORDS
from igeood.bench.paper.timing import timing
from igeood.bench.runs import Network, Results
from igeood.bench.runs.averages import Averages, title
from igeood.errors import InputError

TABLES = {**OF_RECORDS, "layers": weights, "layer-reduction": reduction, "input-steps": input_steps}
NAMES = tuple(dict.fromkeys([*TABLES, "timing", *FIGURES]))
_SHOWN = "The OOD set is {}Tiny-ImageNet, in the copy most like the paper's, or else the first of the results.\n"
_CURVES = "TNR on the validation images, {}; what was chosen for each method is marked.\n"
_POOLED = "Each set is standardised by itself, all classes together; W is of each class by itself, averaged. "
_SPLIT = "IGEOOD is at T = 1; weights are learnt on one half of the images, of one split, and the other half is shown. "
NOTES = {  # below the figures
    "curves": _CURVES,
    "gaussianity": _POOLED + _SHOWN.format(""),
    "layers": _SPLIT + _SHOWN.format("SVHN, or "),
}


LEGEND = 'Numbers are ours, and in parentheses the paper\'s. Bold: our best of a row. "mean, sets: n": over the n OOD '
LEGEND += "sets that the methods and the paper all have, copies of a set counting once. –: not measured.\n"
NOTHING = "Nothing is {} without a benchmark's folder, `--results`, with its tunings, `scores` and `outputs`.\n"


def make(
    name: str,
    results: Results | None = None,
    *,
    out: Path | str,
    validation: str | None = None,
    networks: Sequence[Network] = (),
) -> str:
    """Make one of the paper's tables or figures.

    Parameters
    ----------
    name : str
        One of `NAMES`.
    results : Results, optional
        A benchmark's; without it every cell of ours is missing.
    out : path
        Folder of the figures.
    validation : str, optional
        The set that black and grey box were tuned on, where there are several in the results.
    networks : sequence of Network
        To measure their times.

    Returns
    -------
    str
        In Markdown: the tables, or the figures' paths.
    """
    if name not in NAMES:
        raise InputError.unknown("name", name, ["all", *NAMES])
    ours = Averages(results, validation)
    tables = timing(ours, networks) if name == "timing" else TABLES[name](ours) if name in TABLES else []
    parts = [table.markdown() for table in tables]
    figures = dict(FIGURES[name](ours)) if name in FIGURES else {}
    for stem, figure in figures.items():
        path = Path(out) / f"{stem}.png"
        save(figure, path)
        parts.append(f"![{stem}]({path})\n")
    note = NOTES.get(name, "").format(title(ours.validation)) if figures else ""
    if not parts or (name in FIGURES and not figures):
        note = NOTHING.format("drawn" if name in FIGURES else "shown")
    head = [] if tables else [f"### {name}\n"]
    return "\n".join([*head, *parts, note] if note else [*head, *parts])
