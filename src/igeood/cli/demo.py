"""`igeood demo`: the whole pipeline on embedded data."""

import click

from igeood.cli._shared import FOLDER, json_option, seed_option, show
from igeood.cli.progress import progress_bars


@click.command()
@click.option("--out", default="igeood-demo", show_default=True, type=FOLDER, help="Folder of everything.")
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
    from igeood.files import write_whole

    page = Path(out) / "report.html"
    with progress_bars() as report:
        result = run(out, seed=seed, notify=report)
    result.results.note(click.get_current_context().obj)
    made = make(result.results, made_on=date.today())
    write_whole(page, made.html.encode())
    verdict = [sentence for sentences in made.verdicts.values() for sentence in sentences]
    guard = {"promise": result.guard.promise, "threshold": result.guard.threshold, "refused": result.refused}
    why = {f.title: f"taken for {f.label}, p-value {f.p_value:.2g}, raised by {f.reason}" for f in result.flagged}
    show(as_json, {"verdict": verdict, **guard, "why": why, "out": out, "report": str(page)})
