"""`igeood report`: a benchmark's results as one page."""

import json
from datetime import date
from pathlib import Path

import click


@click.command()
@click.argument("results", type=click.Path(file_okay=False))
@click.option("--out", type=click.Path(dir_okay=False), help="The file to write; by default RESULTS/report.html.")
@click.option("--guard", type=click.Path(dir_okay=False), help="A guard's file; by default RESULTS/guard.safetensors.")
@click.option("--validation", help="Set that was tuned on, if the results have several.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
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
    out = out or str(Path(results) / "report.html")
    write_whole(out, content)
    if as_json:
        click.echo(json.dumps({"out": out, "bytes": len(content), "verdicts": made.verdicts}, ensure_ascii=False))
        return
    for network, sentences in made.verdicts.items():
        click.echo(f"{network}: {sentences[0]}")
    click.echo(f"{out}: {len(content) / 1e6:.2f} MB", err=True)
