"""`igeood report`: a benchmark's results as one page."""

from datetime import date
from pathlib import Path

import click

from igeood.cli._shared import json_option, tell


@click.command()
@click.argument("results", type=click.Path(file_okay=False))
@click.option("--out", type=click.Path(dir_okay=False), help="The file to write; by default RESULTS/report.html.")
@click.option("--guard", type=click.Path(dir_okay=False), help="A guard's file; by default RESULTS/guard.safetensors.")
@click.option("--validation", help="Set that was tuned on, if the results have several.")
@json_option
def report(results: str, out: str | None, guard: str | None, validation: str | None, as_json: bool) -> None:
    """Make one self-contained HTML page of RESULTS, a folder of `igeood bench`.

    It needs no other file and no network: mail it, print it, or open it on a phone.
    """
    from igeood.benchmark import Results
    from igeood.files import write_whole
    from igeood.report import make

    found = Results.existing(results)
    made = make(found, made_on=date.today(), guard=None if guard is None else Path(guard), validation=validation)
    content = made.html.encode()
    out = str(Path(results) / "report.html") if out is None else out
    write_whole(out, content)
    record = {"out": out, "bytes": len(content), "verdicts": made.verdicts}
    tell(as_json, record, "\n".join(f"{network}: {told[0]}" for network, told in made.verdicts.items()))
    click.echo(f"{out}: {len(content) / 1e6:.2f} MB", err=True)
