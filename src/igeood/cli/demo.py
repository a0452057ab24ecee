"""`igeood demo`: the whole pipeline on embedded data."""

import json
from typing import TYPE_CHECKING, Any

import click

from igeood.cli._shared import json_option, seed_option
from igeood.cli.progress import progress_bars

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from igeood.demo import Demo, Flagged
    from igeood.report.standings import Standings

SHADES = " ░▒▓█"  # dark to bright, where there are no colours


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

    from igeood.benchmark.summary import Summary
    from igeood.demo import run
    from igeood.files import write_whole
    from igeood.report import make
    from igeood.report.standings import standings

    page = Path(out) / "report.html"
    with progress_bars() as progress:
        found = run(out, seed=seed, progress=progress)
        found.results.note(click.get_current_context().meta["igeood.line"])
        progress("writing the report", 0, 1)
        write_whole(page, make(found.results, made_on=date.today()).html.encode())
        progress("writing the report", 1, 1)
    summary = Summary(found.results)
    table = standings(summary, summary.classifiers()[0])
    assert table is not None  # noqa: S101 (it was measured just now; this tells the type checker)
    if as_json:
        click.echo(json.dumps(_record(found, table, str(page))))
    else:
        _tell(found, table, str(page))


def _record(found: "Demo", table: "Standings", page: str) -> dict[str, Any]:
    """The results for another program."""
    rows = [{"setting": r.setting, "method": r.method, **r.figures, "average": table.average(r)} for r in table.rows]
    guard = {"promise": found.guard.promise, "threshold": found.guard.threshold, "refused": found.refused}
    return {"verdict": table.verdict(), "percent": rows, "guard": guard, "out": str(found.folder), "report": page}


def _tell(found: "Demo", table: "Standings", page: str) -> None:
    """The results for a reader."""
    from rich.console import Console

    console = Console(highlight=False)
    line = found.results.networks.records[-1]
    right = f"{100 * line['accuracy']:.1f}% right on {line['test_images']} others"
    console.print(f"A residual network has learnt the digits 0 to 7 from {line['train_images']} images: {right}.")
    console.print("It has not seen 8 and 9, letters, photographs or noise. Which inputs was it not made for?\n")
    console.print(_table(table))
    console.print("\nAll but the baseline are tuned on small letters, which are in no column.")
    for sentence in table.verdict():
        console.print(sentence)
    console.print(f"\nThe guard (IGEOOD+, {found.guard.access}): {found.guard.promise}.")
    for title, (share, n) in found.refused.items():
        console.print(f"  {title:<16} {100 * share:5.1f}% of {n} refused")
    if found.flagged:
        console.print(
            "\nSome that it refused, the parts of the network that raised their score most, and p-values: "
            "the share of calibration digits that look at least as foreign.\n"
        )
        console.print(_pictures(found.flagged, console))
    console.print(f"guard:   {found.folder / 'guard.safetensors'}", soft_wrap=True)
    console.print(f"report:  {page}", soft_wrap=True)


def _table(standing: "Standings") -> "Table":
    """TNR and AUROC of each method, by access; the best of each in bold."""
    from rich import box
    from rich.table import Table

    from igeood.report.page import tabulate

    tnr, auroc = (tabulate(standing, metric) for metric in ("tnr", "auroc"))
    title = f"{tnr.title} / {auroc.title}, in percent"
    made = Table(box=box.SIMPLE_HEAD, title=title, padding=(0, 0, 0, 1), show_edge=False)
    made.add_column("", no_wrap=True)
    for name in tnr.header:
        made.add_column(name, justify="right")
    for group, methods in tnr.groups.items():
        made.add_row(f"[italic]{group.partition(',')[0]}[/]", *[""] * len(tnr.header))
        for name, cells in methods.items():
            pairs = zip(cells, auroc.groups[group][name], strict=True)
            texts = (f"[bold]{a.text}[/]/{b.text}" if a.best else f"{a.text}/{b.text}" for a, b in pairs)
            made.add_row(f"  {name}", *texts)
    return made


def _pictures(flagged: "list[Flagged]", console: "Console") -> "Table":
    """Refused inputs side by side, each with what the classifier said and what gave it away."""
    from rich.table import Table

    made = Table.grid(padding=(0, 2))
    made.add_row(*(f.title for f in flagged))
    made.add_row(*(_picture(f, coloured=console.color_system is not None) for f in flagged))
    made.add_row(*(f"taken for a {f.label}" for f in flagged))
    made.add_row(*(f"p-value {f.p_value:.2g}" for f in flagged))
    made.add_row(*(f"raised by {f.reason}\n" for f in flagged))
    return made


def _picture(flagged: "Flagged", *, coloured: bool) -> "Text":
    """An image in letters, 16 wide and 8 high: two pixels a letter in colours, else shades of grey."""
    from rich.text import Text

    small = flagged.image.reshape(3, 16, 2, 16, 2).mean(axis=(2, 4))  # (3, 16, 16)
    text = Text()
    for top, bottom in zip(small[:, ::2].transpose(1, 2, 0), small[:, 1::2].transpose(1, 2, 0), strict=True):
        for upper, lower in zip(top, bottom, strict=True):
            if coloured:
                colours = [f"rgb({','.join(str(round(v)) for v in pixel)})" for pixel in (upper, lower)]
                text.append("▀", style=f"{colours[0]} on {colours[1]}")
            else:
                text.append(SHADES[round((upper.mean() + lower.mean()) / 2 / 255 * (len(SHADES) - 1))])
        text.append("\n")
    return text
