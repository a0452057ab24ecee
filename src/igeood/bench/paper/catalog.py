"""Each table and figure of the paper by its name: our numbers, and the paper's beside them."""

from pathlib import Path

from igeood import figures
from igeood.benchmark import Network, Results
from igeood.benchmark.summary import Summary, title
from igeood.errors import InputError
from igeood.paper import toy
from igeood.paper.plots import FIGURES
from igeood.paper.tables import TABLES, Table, covariance
from igeood.paper.timing import timing

NAMES = (
    "toy", "black-box", "grey-box", "white-box", "white-box-fgsm", "kl", "hyperparameters", "validation-choice",
    "seeds", "accuracy", "adversarial", "timing", "others", "histograms", "curves", "gaussianity", "layers",
)  # fmt: skip

NOTES = {  # below the figures
    "curves": "TNR on the validation images, {}; what was chosen for each method is marked.\n",
    "gaussianity": "The OOD set is Tiny-ImageNet where it was measured, else the first of the results.\n",
    "layers": "The OOD set is Tiny-ImageNet where it was measured, else the first of the results.\n",
}
NOTHING = "Nothing to draw: `--results` names the folder of a benchmark that has it.\n"


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
    ours = Summary(results, validation)
    if name == "timing":
        return "\n".join(table.markdown() for table in timing(ours, networks or []))
    if name in TABLES:
        return "\n".join(table.markdown() for table in TABLES[name](ours)) or f"### {name}\n\nNothing was measured.\n"
    found = _toy().markdown() if name == "toy" else f"### {name}\n"
    lines = [table.markdown() for table in covariance(ours)] if name == "gaussianity" else []
    for stem, figure in FIGURES[name](ours):
        Path(out).mkdir(parents=True, exist_ok=True)
        path = Path(out) / f"{stem}.png"
        figures.save(figure, path)
        lines.append(f"![{stem}]({path})\n")
    if not lines:
        lines = [NOTHING]
    elif name in NOTES:
        lines.append(NOTES[name].format(title(ours.validation)))
    return "\n".join([found, *lines])


def _toy() -> Table:
    """The numbers of the example in one dimension."""
    found = toy.toy().evaluations
    rows = [
        [name, *(f"{100 * e.auroc:.1f}" for e in sets.values()), *(f"{100 * e.tnr_at_tpr:.1f}" for e in sets.values())]
        for name, sets in found.items()
    ]
    columns = [f"{ood}: {metric}" for metric in ("AUROC", "TNR at TPR-95%") for ood in (toy.OOD_I, toy.OOD_II)]
    note = "What each score is, and may know, is in the text of `igeood.paper.toy`; the paper prints no numbers here."
    return Table("fig:toy_example", "toy example in one dimension", ["score", *columns], rows, [note])
