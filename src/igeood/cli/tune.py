"""`igeood tune`: a guard's temperature, input step and weights, chosen with samples of what should be refused."""

from functools import partial
from typing import Any

import click

from igeood.cli import _shared
from igeood.cli._shared import Watched, open_samples
from igeood.terminal import method_option, progress_bars, seed_option, show


@click.command()
@click.argument("guard", type=click.Path())
@click.option("--train", help="The guard's training samples: it is fitted again.")
@click.option("--summary", help="In place of --train: what `igeood fit --summary` wrote, one file or several.")
@click.option("--id", "id_data", required=True, help="In-distribution samples that training has not seen.")
@click.option("--ood", required=True, multiple=True, help="Samples to refuse. Repeatable.")
@click.option("--share", default=0.5, show_default=True, help="Part of --id that is used; calibrate leaves it out.")
@_shared.tpr_option
@method_option
@seed_option
@_shared.memory_option
@_shared.out_option
@_shared.guard_options
def tune(
    guard: str,
    train: str | None,
    summary: str | None,
    id_data: str,
    ood: tuple[str, ...],
    out: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Choose what GUARD leaves open, so that it refuses most of the OOD samples.

    A guard's file has no training samples, so it is fitted again, on --train or on a --summary of it. Calibrate the
    guard afterwards. Files may be of any size: above --memory, a sample of their rows is used.
    """
    if (train is None) == (summary is None):
        raise click.UsageError("give --train, or --summary in its place")
    target = _shared.check_out(out, options["force"], train or summary or "", id_data, *ood, replaced=guard)
    loaded = _shared.load_guard(guard, options)
    loaded = loaded.with_options(**options["options"]) if options["options"] else loaded
    budget = options["budget"]
    with progress_bars() as report:
        id_samples = Watched(open_samples([id_data], loaded, options), "in-distribution", report)
        ood_samples = Watched(open_samples(ood, loaded, options), "OOD", report)
        if summary is not None:
            loaded.fit(_shared.sum_of([summary], report, loaded.detector.needs))
        else:
            samples = open_samples([str(train)], loaded, options, training=True)
            loaded.fit(Watched(samples, "fit", report), budget=budget)
        chosen = {name: options[name] for name in ("share", "tpr", "seed")}
        loaded.tune(id_samples, ood_samples, budget=budget, progress=partial(report, "temperatures"), **chosen)
    loaded.save(target)
    tuning: Any = loaded.tuning
    record = {
        "out": target,
        "temperature": tuning.temperature,
        "epsilon": tuning.epsilon,
        "tpr": options["tpr"],
        "tnr": tuning.after,
        "tnr_before": tuning.before,
        "id": tuning.n_id,
        "ood": tuning.n_ood,
    }
    show(as_json, {**record, **_shared.health(loaded, as_json)})
