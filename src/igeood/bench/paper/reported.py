"""The numbers that the paper prints, one record a number, to compare with.

Percentages are as printed, times in seconds. What a number does not depend on is an empty string.

- `setting`: black-box, grey-box, white-box (tuned on OOD data), white-box-fgsm (tuned on adversarial data).
- `validation`: the data set that the method was tuned on; `own` for samples of the OOD set under test, `fgsm` for
  adversarial ones.
- `network`, `in_distribution`, `validation`, `ood`: `average` for a mean over them.
- `metric`: a number for each layer has its place, from 1, after a colon: `weight:1`, `condition_full:4`.

The paper is not always consistent with itself. Nothing is corrected here; the tests list where it is not.
"""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from igeood.errors import InputError

TABLES: dict[str, str] = {
    "tab:black_box_avg": "Logits only: mean over eight OOD sets.",
    "tab:white_box_avg": "All layers: mean over nine OOD sets, tuned on OOD or on adversarial data.",
    "tab:time_analysis": "Seconds that each step takes on one GPU.",
    "tab:model_accuracy": "Test accuracy of the six networks, by softmax and by nearest Fisher–Rao centroid.",
    "tab:adversarial_table": "Size of the FGSM perturbation and the accuracy that is left under it.",
    "tab:kl": "Fisher–Rao against Kullback–Leibler, as sum and as minimum over the classes.",
    "tab:best_hyperparameters": "Temperatures and noise magnitudes that tuning chose.",
    "tab:robust": "Mean TNR for each choice of the validation set.",
    "tab:seed_model_error": "Mean and spread over five trainings of one network.",
    "tab:grey_box_avg": "Logits and input gradients: mean over eight OOD sets.",
    "tab:other_comparisons": "All layers, tuned on OOD data, beside results quoted from other papers.",
    "tab:other_comparisons_adv": "All layers, tuned without OOD data, beside results quoted from other papers.",
    "tab:black_box_extended": "Logits only: each OOD set.",
    "tab:grey_box_extended": "Logits and input gradients: each OOD set.",
    "tab:wb_ood_extended": "All layers, tuned on OOD data: each OOD set.",
    "tab:wb_adv_extended": "All layers, tuned on adversarial data: each OOD set.",
    "fig:hist_maha_fr": "Weights of the three blocks in the logistic regression.",
    "sec:covariance": "Condition numbers of each block's covariance; the section has no label in the paper.",
}
"""What each label shows."""


@dataclass(frozen=True)
class Reported:
    """One number of the paper, and what it is a number of."""

    label: str
    setting: str
    network: str
    in_distribution: str
    validation: str
    ood: str
    method: str
    metric: str
    value: float
    spread: float | None
    """The standard deviation, where one is printed."""


@cache
def load() -> tuple[Reported, ...]:
    """All numbers, table after table, in the order of the print.

    >>> load()[0].label, load()[0].value, load()[0].spread
    ('tab:black_box_avg', 52.5, 16.0)
    """
    text = resources.files("igeood.paper").joinpath("reported.csv").read_text(encoding="utf-8")
    rows: Iterable[dict[str, Any]] = csv.DictReader(text.splitlines())
    numbers = ((row, float(row["value"]), float(row["spread"]) if row["spread"] else None) for row in rows)
    return tuple(Reported(**{**row, "value": value, "spread": spread}) for row, value, spread in numbers)


def find(**fields: str) -> list[Reported]:
    """Numbers whose fields equal all that is given; an empty list if there are none.

    Parameters
    ----------
    **fields : str
        Wanted values of `label`, `setting`, `network`, `in_distribution`, `validation`, `ood`, `method` or `metric`; an
        empty string wants those that the field does not concern.

    Examples
    --------
    >>> [best] = find(label="tab:black_box_avg", network="average", method="igeood-logits", metric="tnr")
    >>> best.value, best.spread
    (51.6, 24.0)
    """
    for field in fields:
        if field not in Reported.__annotations__:
            raise InputError.unknown("fields", field, Reported.__annotations__)
    return [one for one in load() if all(getattr(one, field) == value for field, value in fields.items())]


def first(**fields: str) -> float | None:
    """The value of the first number that `find` finds; None if there is none."""
    return next((one.value for one in find(**fields)), None)
