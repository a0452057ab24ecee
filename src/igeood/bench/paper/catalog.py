"""Each table and figure of the paper by its name: our numbers, and the paper's beside them."""

from pathlib import Path

from igeood.bench.figures.drawing import save
from igeood.bench.paper import toy
from igeood.bench.paper.plots import FIGURES
from igeood.bench.paper.tables import TABLES, Table, covariance
from igeood.bench.paper.timing import timing
from igeood.bench.runs import Network, Results
from igeood.bench.runs.averages import Averages, title
from igeood.errors import InputError

NAMES = ("toy", *(name for name in TABLES if name != "others"), "timing", "others", *(n for n in FIGURES if n != "toy"))
NOTES = {  # below the figures
    "curves": "TNR on the validation images, {}; what was chosen for each method is marked.\n",
    "gaussianity": "The OOD set is Tiny-ImageNet where it was measured, else the first of the results.\n",
    "layers": "The OOD set is Tiny-ImageNet where it was measured, else the first of the results.\n",
}


def make(
    name: str,
    results: Results | None = None,
    *,
    out: str | Path,
    validation: str | None = None,
    networks: list[Network] | None = None,
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
    networks : list of Network, optional
        To measure their times.

    Returns
    -------
    str
        In Markdown: the tables, or the figures' paths.
    """
    if name not in NAMES:
        raise InputError.unknown("name", name, ["all", *NAMES])
    ours = Averages(results, validation)
    if name not in FIGURES:
        tables = timing(ours, networks or []) if name == "timing" else TABLES[name](ours)
        return "\n".join(table.markdown() for table in tables) or f"### {name}\n\nNothing was measured.\n"
    lines = [table.markdown() for table in covariance(ours)] if name == "gaussianity" else []
    for stem, figure in FIGURES[name](ours):
        Path(out).mkdir(parents=True, exist_ok=True)
        path = Path(out) / f"{stem}.png"
        save(figure, path)
        lines.append(f"![{stem}]({path})\n")
    note = NOTES.get(name, "").format(title(ours.validation))
    lines += [note] * bool(note) if lines else ["Nothing to draw: `--results` names the folder of a benchmark.\n"]
    return "\n".join([_toy().markdown() if name == "toy" else f"### {name}\n", *lines])


def _toy() -> Table:
    """The numbers of the example in one dimension."""
    rows = [
        [name, *(f"{100 * e.auroc:.1f}" for e in sets.values()), *(f"{100 * e.tnr_at_tpr:.1f}" for e in sets.values())]
        for name, sets in toy.toy().evaluations.items()
    ]
    columns = [f"{ood}: {metric}" for metric in ("AUROC", "TNR at TPR-95%") for ood in (toy.OOD_I, toy.OOD_II)]
    note = "What each score knows is in the text of `igeood.bench.paper.toy`; the paper prints no numbers here."
    return Table("fig:toy_example", "toy example in one dimension", ["score", *columns], rows, [note])
