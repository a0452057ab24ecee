"""`igeood report`: a benchmark's results as one page."""

from datetime import date
from pathlib import Path

import click

from igeood.cli._shared import FILE, FOLDER, json_option, show


@click.command()
@click.argument("results", type=FOLDER)
@click.option("--out", type=FILE, help="The file to write; by default RESULTS/report.html.")
@click.option("--guard", type=FILE, help="A guard's file; by default RESULTS/guard.safetensors.")
@click.option("--validation", help="Set that was tuned on, if the results have several.")
@json_option
def report(results: str, out: str | None, guard: str | None, validation: str | None, as_json: bool) -> None:
    """Make one self-contained HTML page of RESULTS, a folder of `igeood bench`.

    It needs no other file and no network: mail it, print it, or open it on a phone.
    """
    from igeood.bench.report import make
    from igeood.bench.runs import Results
    from igeood.files import write_whole

    path, existing = None if guard is None else Path(guard), Results.existing(results)
    page = make(existing, made_on=date.today(), guard=path, validation=validation)
    out = out or str(Path(results) / "report.html")
    write_whole(out, page.html.encode())
    show(as_json, {"out": out, "bytes": len(page.html.encode()), "verdicts": page.verdicts})
