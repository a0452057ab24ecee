"""`igeood tune`: a guard's temperature, input step and weights, chosen with samples of what should be refused."""

from functools import partial
from typing import Any

import click

from igeood.cli._shared import (
    Watched,
    budget_option,
    check_out,
    guard_options,
    load_guard,
    open_samples,
    out_option,
    tpr_option,
)  # fmt: skip
from igeood.terminal import progress_bars, seed_option, show


@click.command()
@click.argument("guard", type=click.Path())
@click.option("--train", required=True, help="What the guard was fitted on: it is fitted again.")
@click.option("--id", "id_data", required=True, help="In-distribution samples that training has not seen.")
@click.option("--ood", required=True, help="Samples to refuse; or fgsm: adversarial ones, made with the model.")
@click.option("--share", default=0.5, show_default=True, help="Part of --id that is used; calibrate leaves it out.")
@tpr_option
@seed_option
@budget_option
@out_option
@guard_options
def tune(
    guard: str, train: str, id_data: str, ood: str, share: float, tpr: float, seed: int, budget: int,
    out: str | None, force: bool, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Choose what GUARD leaves open, so that it refuses most of the OOD samples.

    A guard's file has no training samples, so it is fitted again on --train. Calibrate the guard afterwards.
    """
    target = check_out(out, force, train, id_data, ood, replaced=guard)
    loaded = load_guard(guard, options)
    with progress_bars() as report:
        known = Watched(open_samples(id_data, loaded, options), "in-distribution", report)
        foreign: Any = ood if ood == "fgsm" else Watched(open_samples(ood, loaded, options), "OOD", report)
        loaded.fit(Watched(open_samples(train, loaded, options, training=True), "fit", report), budget=budget << 20)
        loaded.tune(known, foreign, share=share, tpr=tpr, seed=seed, progress=partial(report, "temperatures"))
    loaded.save(target)
    tuning: Any = loaded.tuning
    chosen = {"out": target, "temperature": tuning.temperature, "epsilon": tuning.epsilon, "tpr": tpr}
    rates = {"tnr": tuning.after, "tnr_before": tuning.before, "id": tuning.n_id, "ood": tuning.n_ood}
    show(as_json, {**chosen, **rates})
