"""`igeood bench`: methods × data sets."""

import json
from typing import Any

import click

from igeood.cli._shared import FOLDER, json_option, root_option, seed_option
from igeood.cli.progress import progress_bars

_COUNT, _SPLITS = click.IntRange(min=40), click.IntRange(1, 1000)


@click.command()
@click.option("--network", "networks", multiple=True, required=True, help="Weights: PATH, or NAME:PATH.")
@click.option("--in-distribution", help="What the networks were trained on, where their files don't say it.")
@click.option("--ood", multiple=True, help="OOD set to measure on; by default all that are there.")
@click.option("--validation", multiple=True, help="OOD set to tune on, or none; by default isun, if it is there.")
@click.option("--setting", "settings", multiple=True, help="By default all but white-box-validation.")
@click.option("--method", "methods", multiple=True, help="By default all of the setting.")
@click.option("--limit", default=300, show_default=True, type=_COUNT, help="Images of each kind in the grey box.")
@click.option("--images", type=_COUNT, help="Images of each test set at most; up to half of them are to tune on.")
@click.option("--train", type=click.IntRange(min=1), help="Training images at most, evenly spaced.")
@click.option("--splits", default=5, show_default=True, type=_SPLITS, help="Random splits of the white box.")
@seed_option("Of the (first) split.")
@click.option("--out", default="igeood-results", show_default=True, type=FOLDER, help="Folder of the results.")
@root_option
@json_option
def bench(
    networks: tuple[str, ...], in_distribution: str | None, ood: tuple[str, ...], validation: tuple[str, ...],
    settings: tuple[str, ...], methods: tuple[str, ...], out: str, root: str | None, as_json: bool, **counts: Any,
) -> None:  # fmt: skip
    """Measure methods × data sets on trained networks.

    --network, --ood, --validation, --setting and --method may be given several times. Sets are those of `igeood data
    list`, folder:PATH, idx:PATH or demo:NAME. Settings are black-box, grey-box (which runs the network anew for each
    method: hence --limit), white-box (tuned on samples of the OOD set, split at random), white-box-fgsm (on adversarial
    ones) and white-box-validation (on --validation, as black and grey box are).

    What was measured before is not measured again. Outputs of the networks are kept in the results' folder --out.
    `igeood paper` makes tables and figures of it.
    """
    from igeood.bench.runs import PAPER, Plan, load_network, run
    from igeood.detectors import METHODS

    loaded = [load_network(spec, in_distribution=in_distribution) for spec in networks]
    tuned_on = validation or _present(root, ["isun"])
    chosen: dict[str, Any] = {"settings": settings or PAPER, "methods": methods or tuple(METHODS)}
    plan = Plan(ood=ood or _present(root), validation=tuned_on, **chosen, **counts)
    click.echo(f"sets: {', '.join(plan.ood)}; tuned on: {', '.join(tuned_on) or 'none'}", err=True)
    with progress_bars() as report:

        def done(number: int, total: int, record: dict[str, Any]) -> None:
            report("cells", number, total)
            click.echo(json.dumps(record, sort_keys=True) if as_json else _line(record))

        results = run(loaded, plan, out, root=root, notify=report, done=done)
    results.note(click.get_current_context().obj)
    click.echo(f"{len(results.cells.records)} results in {out}; `igeood paper all --results {out}`", err=True)


def _present(root: str | None, names: list[str] | None = None) -> tuple[str, ...]:
    """Names of the data sets of which anything is there."""
    from igeood.bench.datasets import DATASETS, data_root
    from igeood.bench.datasets.store import begun

    return tuple(name for name in names or DATASETS if begun(DATASETS[name], data_root(root)))


def _line(record: dict[str, Any]) -> str:
    place = " ".join(str(record[name]) for name in ("network", "setting", "method", "ood", "seed"))
    return f"{place}: " + "  ".join(f"{name.upper()} {100 * record[name]:.1f}" for name in ("tnr", "auroc", "aupr"))
