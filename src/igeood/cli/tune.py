"""`igeood tune`: a guard's temperature, input step and weights, chosen with samples of what should be refused."""

from typing import TYPE_CHECKING, Any

import click

from igeood.cli._guards import Sources, Watched, check_new, load_guard, replacing, source_options
from igeood.cli._shared import json_option, seed_option, tell
from igeood.cli.progress import progress_bars
from igeood.errors import InputError

if TYPE_CHECKING:
    from igeood.outputs import Keys


@click.command()
@click.argument("guard", type=click.Path())
@click.option("--train", required=True, help="What the guard was fitted on: it is fitted again.")
@click.option("--id", "id_data", required=True, help="In-distribution samples that training has not seen.")
@click.option("--ood", required=True, help="Samples to refuse; or fgsm: adversarial ones, made with the model.")
@click.option("--share", default=0.5, show_default=True, help="Part of --id that is used; calibrate leaves it out.")
@click.option("--tpr", default=0.95, show_default=True, help="Share of in-distribution samples to keep.")
@seed_option("Of the share and the folds.")
@replacing
@source_options
@json_option
def tune(
    guard: str, train: str, id_data: str, ood: str, share: float, tpr: float, seed: int, out: str | None,
    force: bool, sources: Sources, as_json: bool,
) -> None:  # fmt: skip
    """Choose what GUARD leaves open, so that it refuses most of the OOD samples.

    A guard's file has no training samples, so it is fitted again on --train. The guard wants calibrating afterwards.
    """
    check_new(out, force, train, id_data, ood, replaced=guard)
    target = guard if out is None else out
    loaded = load_guard(guard, sources)
    before = loaded.fitted_on
    with progress_bars() as report:
        learnt = Watched(sources.open(train, loaded, training=True), "fit", report)
        known = Watched(sources.open(id_data, loaded), "in-distribution", report)
        foreign: Any = ood if ood == "fgsm" else Watched(sources.open(ood, loaded), "OOD", report)
        loaded.fit(learnt)
        _check_same(before, loaded.fitted_on)
        steps = lambda done, total: report("temperatures", done, total)  # noqa: E731
        loaded.tune(known, foreign, share=share, tpr=tpr, seed=seed, progress=steps)
    loaded.save(target)
    found = loaded.tuning
    assert found is not None  # noqa: S101 (tune has just set it)
    best = None if found.temperature is None else found.temperature.best
    record = {
        "temperature": best and best.temperature, "epsilon": found.epsilon, "tnr": found.after,
        "tnr_before": found.before, "tpr": tpr, "id": found.n_id, "ood": found.n_ood, "out": target,
    }  # fmt: skip
    what = [] if best is None else [f"temperature {best.temperature:g}"]
    what += [f"input step {found.epsilon:g}"] if loaded.inputs.model is not None else []
    what += [f"{100 * found.after:.1f}% of {found.n_ood:,} OOD samples refused at {100 * tpr:g}% kept"]
    what += [f"before {100 * found.before:.1f}%"]
    tell(as_json, record, f"{target}: {', '.join(what)}; calibrate it next")


def _check_same(before: "Keys", now: "Keys") -> None:
    """Raise where a guard was fitted again on other samples; files of earlier versions do not tell."""
    import numpy as np

    foreign, missing = int((~np.isin(now, before)).sum()), int((~np.isin(before, now)).sum())
    what = f"{foreign} of {len(now)} samples are not those" if foreign else f"lacks {missing} of {len(before)} samples"
    if len(before) and (foreign or missing):
        raise InputError(f"train: {what} that the guard was fitted on; give the same file, or fit a new guard")
