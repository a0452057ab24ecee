"""`igeood demo`: the whole pipeline on embedded data."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from igeood.cli._shared import json_option, seed_option, show
from igeood.cli.progress import progress_bars

if TYPE_CHECKING:
    from igeood.bench.demo import Demo
    from igeood.bench.report.standings import Standings


@click.command()
@click.option(
    "--out", default="igeood-demo", show_default=True, type=click.Path(file_okay=False), help="Folder of everything."
)
@seed_option("Of training and every split.")
@json_option
def demo(out: str, seed: int, as_json: bool) -> None:
    """See it work: train a small classifier, guard it, compare the methods, write a report.

    Needs no download. The classifier learns the digits 0 to 7, and then meets 8 and 9, letters, photographs and noise.
    What is in --out already is not done again.
    """
    from datetime import date
    from pathlib import Path

    from igeood.bench.demo import run
    from igeood.bench.report import make
    from igeood.bench.report.standings import standings
    from igeood.bench.runs.averages import Averages
    from igeood.files import write_whole

    page = Path(out) / "report.html"
    with progress_bars() as report:
        result = run(out, seed=seed, progress=report)
        result.results.note(click.get_current_context().obj)
        write_whole(page, make(result.results, made_on=date.today()).html.encode())
    averages = Averages(result.results)
    table = standings(averages, averages.classifiers()[0])
    assert table is not None  # noqa: S101 (for the type checker)
    rows = [{"setting": r.setting, "method": r.method, **r.figures, "average": table.average(r)} for r in table.rows]
    guard = {"promise": result.guard.promise, "threshold": result.guard.threshold, "refused": result.refused}
    record = {"verdict": table.verdict(), "percent": rows, "guard": guard, "out": out, "report": str(page)}
    show(as_json, record, "\n".join([*_lines(result, table), f"report:  {page}"]))


def _lines(result: "Demo", table: "Standings") -> Iterator[str]:
    """The results for a reader."""
    yield "A small residual network has learnt the digits 0 to 7. Which inputs was it not made for?\n"
    yield f"{'in percent, averages over the OOD sets':<60}{'TNR':>6}{'AUROC':>7}"
    for row in table.ranked():
        yield f"{row!s:<60}{table.average(row):6.1f}{table.average(row, 'auroc'):7.1f}"
    yield ""
    yield from table.verdict()
    yield f"\nThe guard ({result.guard.access}): {result.guard.promise}."
    for title, (share, n) in result.refused.items():
        yield f"  {title:<16} {100 * share:5.1f}% of {n} refused"
    for flagged in result.flagged:
        yield f"{flagged.title}: taken for {flagged.label}, p-value {flagged.p_value:.2g}, raised by {flagged.reason}"
    yield f"\nguard:   {result.folder / 'guard.safetensors'}"
