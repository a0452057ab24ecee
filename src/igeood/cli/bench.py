"""`igeood bench`: methods × data sets."""

import json
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from igeood.benchmark import Network, Plan


@click.command()
@click.option("--network", "networks", multiple=True, required=True, help="Weights: PATH, or NAME:PATH. Repeatable.")
@click.option("--in-distribution", help="What the networks were trained on, where their files don't say it.")
@click.option(
    "--ood",
    multiple=True,
    help="OOD set to measure on, as `igeood data list` names it, or folder:PATH, idx:PATH, demo:NAME. Repeatable; by "
    "default all.",
)
@click.option(
    "--validation",
    multiple=True,
    help="OOD set to tune black and grey box on, or none. Repeatable; by default isun, if it is there.",
)
@click.option(
    "--setting",
    "settings",
    multiple=True,
    help="black-box, grey-box, white-box, white-box-fgsm (by default these four), or white-box-validation: a white box "
    "tuned on --validation. Repeatable.",
)
@click.option(
    "--method",
    "methods",
    multiple=True,
    help="msp, odin, energy, kl-sum, kl-min, igeood-logits, igeood-logits-min; in the white box mahalanobis, igeood, "
    "igeood+. Repeatable; by default all.",
)
@click.option(
    "--limit",
    default=300,
    show_default=True,
    type=click.IntRange(min=40),
    help="Images of each kind in the grey box, which runs the network anew for each method.",
)
@click.option(
    "--images",
    type=click.IntRange(min=40),
    help="Images of each test set at most, evenly spaced; up to half of them are for tuning.",
)
@click.option("--train", type=click.IntRange(min=1), help="Training images at most, evenly spaced.")
@click.option(
    "--splits",
    default=5,
    show_default=True,
    type=click.IntRange(min=1),
    help="Random splits into tuned on and measured on, in the white box.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**32 - 1), help="Of the (first) split.")
@click.option(
    "--out",
    default="igeood-results",
    show_default=True,
    type=click.Path(file_okay=False),
    help="Folder of the results.",
)
@click.option("--root", type=click.Path(file_okay=False), help="Where the data are; $IGEOOD_DATA by default.")
@click.option("--json", "as_json", is_flag=True, help="Print each cell as a JSON line.")
def bench(
    networks: tuple[str, ...], in_distribution: str | None, ood: tuple[str, ...], validation: tuple[str, ...],
    settings: tuple[str, ...], methods: tuple[str, ...], limit: int, images: int | None, train: int | None,
    splits: int, seed: int, out: str, root: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure methods × data sets on trained networks.

    What was measured before is not measured again. Outputs of the networks are kept in the results' folder.
    `igeood paper` makes tables and figures of it.
    """
    from igeood import METHODS
    from igeood.benchmark import PAPER, Plan, load_network

    loaded = [load_network(spec, in_distribution=in_distribution) for spec in networks]
    chosen = validation or _present(root, ["isun"])
    common = {network.in_distribution for network in loaded}  # several: each is foreign to the others
    plan = Plan(
        ood=ood or _present(root, None, leave_out=[*chosen, *(common if len(common) == 1 else ())]),
        settings=settings or PAPER, methods=methods or tuple(METHODS), validation=chosen, limit=limit,
        images=images, train=train, splits=splits, seed=seed,
    )  # fmt: skip
    if not chosen and {"black-box", "grey-box"} & set(plan.settings):
        click.echo("no --validation: black and grey box keep their default temperature and step", err=True)
    click.echo(f"in {out}; OOD sets: {', '.join(plan.ood)}", err=True)
    _run(loaded, plan, out, root, as_json)


def _present(root: str | None, names: list[str] | None, leave_out: list[str] | None = None) -> tuple[str, ...]:
    """Names of those data sets that are there; one that is there in part only, or damaged, is an error."""
    from igeood import datasets
    from igeood.datasets.store import begun

    wanted = [name for name in names or datasets.DATASETS if name not in (leave_out or [])]
    found = [name for name in wanted if begun(datasets.DATASETS[name], datasets.data_root(root))]
    for name in found:
        datasets.load(name, root=root)
    return tuple(found)


def _run(networks: "list[Network]", plan: "Plan", out: str, root: str | None, as_json: bool) -> None:
    """Run with a bar on a terminal and plain lines elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    from igeood.benchmark import Results, run

    terminal = sys.stderr.isatty()
    with Progress(console=Console(stderr=True), disable=not terminal, transient=True) as bars:
        cells, images = bars.add_task("cells", total=None), bars.add_task("images", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bars.update(images, description=what, completed=done, total=total)
            if not terminal:
                click.echo(f"{what}: {done:,} of {total:,} images", err=True)

        def done(number: int, total: int, record: dict[str, Any]) -> None:
            bars.update(cells, completed=number, total=total)
            if as_json:
                click.echo(json.dumps(record, sort_keys=True))
            else:
                click.echo(_line(record))

        before = len(Results(out).cells.records)
        results = run(networks, plan, out, root=root, progress=progress, done=done)
        results.note(click.get_current_context().meta["igeood.line"])
        total = len(results.cells.records)
    told = f"{total - before} new results, {total} in {results.cells.path}"
    click.echo(f"{told}; `igeood paper all --results {out}`", err=True)


def _line(record: dict[str, Any]) -> str:
    where = f"{record['network']} {record['setting']} {record['method']} {record['ood']}"
    split = f" split {record['seed']}" if record["setting"] == "white-box" else ""
    figures = "  ".join(f"{name.upper()} {100 * record[name]:.1f}" for name in ("tnr", "auroc", "aupr"))
    return f"{where}{split}: {figures}"
