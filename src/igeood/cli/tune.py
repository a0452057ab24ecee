"""`igeood tune`: a guard's temperature, input step and weights, chosen with samples of what should be refused."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from igeood.cli import _shared
from igeood.cli._shared import Watched, open_samples
from igeood.errors import InputError
from igeood.terminal import method_option, progress_bars, search_option, seed_option, show

if TYPE_CHECKING:
    from igeood.guard.tuning import Search


@click.command()
@click.argument("guard", type=click.Path())
@click.option("--train", help="What the guard was fitted on: it is fitted again.")
@click.option("--summary", help="In place of --train: what `igeood fit --summary` wrote, one file or several.")
@click.option("--id", "id_data", required=True, help="In-distribution samples that training has not seen.")
@click.option("--ood", multiple=True, help="Samples to refuse, NAME=… of several kinds; or fgsm; none for deconf-c.")
@click.option("--share", default=0.5, show_default=True, help="Part of --id that is used; calibrate leaves it out.")
@_shared.tpr_option
@search_option
@method_option
@seed_option
@_shared.distinct_option
@_shared.memory_option
@_shared.out_option
@_shared.guard_options
def tune(
    guard: str, train: str | None, summary: str | None, id_data: str, ood: tuple[str, ...], share: float, tpr: float,
    search: "Search", seed: int, distinct: bool, budget: int, out: str | None, force: bool, as_json: bool,
    options: dict[str, Any], **source: Any,
) -> None:  # fmt: skip
    """Choose what GUARD leaves open, so that it refuses most of the OOD samples.

    --ood may be given several times, as NAME=FILE: then the answer also says how each kind is refused by a guard that
    has not seen it. fgsm stands for adversarial samples, made with the model.

    A guard's file has no training samples, so it is fitted again, on --train or on a --summary of it. Calibrate the
    guard afterwards. Files may be of any size: above --memory, a sample of their rows is used.
    """
    if (train is None) == (summary is None):
        raise click.UsageError("give --train, or --summary in its place")
    kinds = dict(_named(each, f"kind {i + 1}") for i, each in enumerate(ood))
    if len(kinds) < len(ood):
        raise InputError("ood: two kinds have the same name; give each NAME=FILE a name of its own")
    target = _shared.check_out(out, force, train or summary or "", id_data, *kinds.values(), replaced=guard)
    loaded = _shared.load_guard(guard, source)
    loaded = loaded.with_options(**options) if options else loaded
    with progress_bars() as report:
        known = Watched(open_samples([id_data], loaded, source), "in-distribution", report)
        foreign: Any = "fgsm" if ood else None
        if ood not in ((), ("fgsm",)):
            foreign = {k: Watched(open_samples([path], loaded, source), "OOD", report) for k, path in kinds.items()}
            foreign = foreign if len(foreign) > 1 else next(iter(foreign.values()))
        if train is None:
            loaded.fit(_shared.sum_of([summary or ""], report))
        else:
            loaded.fit(Watched(open_samples([train], loaded, source, training=True), "fit", report), budget=budget)
        loaded.tune(
            known, foreign, share=share, tpr=tpr, search=search, seed=seed, distinct=distinct, budget=budget,
            progress=partial(report, "temperatures"),
        )  # fmt: skip
    loaded.save(target)
    tuning: Any = loaded.tuning
    chosen = {"out": target, "temperature": tuning.temperature, "epsilon": tuning.epsilon, "tpr": tpr}
    rates = {"tnr": tuning.after, "tnr_before": tuning.before, "id": tuning.n_id, "ood": tuning.n_ood}
    if not ood:  # then they are none
        rates = {"mean_score": -tuning.after, "mean_score_before": -tuning.before, "id": tuning.n_id}
    names = {"tnr_of_unseen": "tnr", "tnr_of_unseen_before": "before"}
    unseen = {name: {kind: rates[rate] for kind, rates in tuning.left_out.items()} for name, rate in names.items()}
    show(as_json, {**chosen, **rates, **(unseen if tuning.left_out else {}), **_shared.health(loaded, as_json)})


def _named(given: str, default: str) -> tuple[str, str]:
    """Name and path of a kind, from NAME=PATH, or from a path, in which folders may be called key=value."""
    name, _, path = given.partition("=")
    return (name, path) if path and "/" not in name and not Path(given).exists() else (default, given)
