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

Number = tuple[float, float | None] | None  # a value and its deviation, if there is one


@dataclass(frozen=True)
class Reported:
    """One number of the paper, and what it is a number of; `spread` is the standard deviation, where one is printed."""

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


@cache
def load() -> tuple[Reported, ...]:
    """All numbers, table after table, in the order of the print.

    >>> load()[0].label, load()[0].value, load()[0].spread
    ('tab:black_box_avg', 52.5, 16.0)
    """
    text = resources.files("igeood.bench.paper").joinpath("reported.csv").read_text(encoding="utf-8")
    rows: Iterable[dict[str, Any]] = csv.DictReader(text.splitlines())
    return tuple(
        Reported(**{**row, "value": float(row["value"]), "spread": float(row["spread"]) if row["spread"] else None})
        for row in rows
    )


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
    numbers = list(load())
    for field, value in fields.items():
        numbers = [one for one in numbers if getattr(one, field) == value]
    return numbers


def number(**fields: str) -> Number:
    """Value and spread of the first number with these fields; None if there is none."""
    return next(((one.value, one.spread) for one in find(**fields)), None)


def columns(label: str) -> list[tuple[str, str]]:
    """Settings and methods of a table, in the order of the print."""
    return list(dict.fromkeys((one.setting, one.method) for one in find(label=label)))


def values(field: str, **fields: str) -> list[str]:
    """Values of a field that there are numbers of, in the order of the print, means apart.

    >>> values("validation", label="tab:grey_box_avg"), values("method", label="tab:grey_box_avg")
    (['isun'], ['odin', 'energy', 'igeood-logits'])
    """
    every = (getattr(one, field) for one in find(**fields))
    return list(dict.fromkeys(value for value in every if value not in ("", "average")))
