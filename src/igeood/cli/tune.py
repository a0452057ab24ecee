"""`igeood tune`: a guard's temperature, input step and weights, chosen with samples of what should be refused."""

from functools import partial
from typing import Any

import click

from igeood.cli import _shared
from igeood.cli._shared import open_samples
from igeood.terminal import method_option, progress_bars, seed_option, show


@click.command()
@click.argument("guard", type=click.Path())
@click.option("--train", metavar="DATA", help="Training samples, to fit the guard again.")
@click.option("--summary", metavar="FILES", help="Instead of --train: what `igeood fit --summary` wrote.")
@click.option("--id", "id_data", metavar="DATA", required=True, help="In-distribution samples not used in training.")
@click.option("--ood", metavar="DATA", required=True, multiple=True, help="OOD samples, to be refused. Repeatable.")
@click.option("--share", default=0.5, help="Share of --id to use; the rest is left for `igeood calibrate`.")
@_shared.tpr_option
@method_option
@seed_option
@_shared.memory_option
@_shared.out_option
@_shared.guard_options
def tune(
    guard: str, train: str | None, summary: str | None, id_data: str, ood: tuple[str, ...], **options: Any
) -> None:
    """Tune GUARD so that it refuses more of the OOD samples.

    It chooses the method's temperature, input step and weights, if it has them. A guard's file has no training samples:
    the guard is fitted again, on --train or on a --summary of it. DATA has the formats of `igeood fit`; if there are
    more samples than --memory holds, a part of them is used. Calibrate the guard afterwards.
    """
    if (train is None) == (summary is None):
        raise click.UsageError("give either --train or --summary")
    target = _shared.check_out(options["out"], options["force"], train or summary or "", id_data, *ood, replaced=guard)
    loaded = _shared.load_guard(guard, options)
    loaded = loaded.with_options(**options["options"]) if options["options"] else loaded
    budget = options["budget"]
    with progress_bars() as report:
        id_samples = open_samples([id_data], loaded, options, report, "in-distribution")
        ood_samples = open_samples(ood, loaded, options, report, "OOD")
        if summary is not None:
            loaded.fit(_shared.sum_of([summary], report, loaded.detector.needs))
        else:
            samples = open_samples([str(train)], loaded, options, report, "fit", training=True)
            loaded.fit(samples, classes=loaded.classes, budget=budget)
        chosen = {name: options[name] for name in ("share", "tpr", "seed")}
        loaded.tune(id_samples, ood_samples, budget=budget, progress=partial(report, "temperatures"), **chosen)
    loaded.save(target)
    tuning: Any = loaded.tuning
    record = {"out": target, "temperature": tuning.temperature, "epsilon": tuning.epsilon, "tpr": options["tpr"]}
    record |= {"tnr": tuning.after, "tnr_before": tuning.before, "id": tuning.n_id, "ood": tuning.n_ood}
    show(options["as_json"], {**record, **_shared.health(loaded, options["as_json"])})
