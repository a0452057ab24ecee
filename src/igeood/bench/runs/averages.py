"""A benchmark's results as tables and figures need them: by classifier, setting, method and OOD set."""

import copy
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from statistics import fmean
from typing import Any

import numpy as np

from igeood.bench.datasets import DATASETS, EMBEDDED, canonical
from igeood.bench.datasets.loading import NEAREST, smooth_name
from igeood.bench.runs.plan import TPR, TUNED_ON
from igeood.bench.runs.results import Record, Results
from igeood.detectors.gaussians import OOD_SUFFIX
from igeood.errors import InputError
from igeood.files import read_record
from igeood.metrics import exact_fraction

METRICS = {"tnr": f"TNR at TPR-{100 * TPR:g}%", "auroc": "AUROC", "aupr": "AUPR"}
RESIZED = "-resized"  # the end of a name of the literature's copy
Search = tuple[list[float], list[float], float]  # values tried, the TNR of each, and the value chosen


@dataclass(frozen=True)
class Key:
    """A trained classifier as the tables' rows name it; without weights, the paper's."""

    network: str
    in_distribution: str
    weights: str = ""
    file: str = ""  # only where several have the same architecture

    def __str__(self) -> str:
        return f"{self.network}, {title(self.in_distribution)}" + (f" ({self.file})" if self.file else "")

    def fits(self, record: Record) -> bool:
        """Whether a record is of this classifier."""
        return self.paper.items() <= record.items() and self.weights in ("", record["weights"])

    @property
    def paper(self) -> dict[str, str]:
        """The fields that select the paper's numbers."""
        return {"network": self.network, "in_distribution": self.in_distribution}


def title(name: str) -> str:
    """A data set's name for tables.

    >>> title("tiny-imagenet"), title("idx:/data/FashionMNIST/raw")
    ('Tiny-ImageNet', 'FashionMNIST')
    """
    if (base := smooth_name(name)) != name:
        return f"{title(base)} (nearest)"
    known = DATASETS.get(name) or EMBEDDED.get(name)
    if known:
        return known.title
    parts = [part for part in PurePath(name.partition(":")[2] or name).parts if part != "raw"]
    return parts[-1] if parts else name


def printed_name(name: str) -> str:
    """The paper's name of a set, of which there are copies: resized by the nearest pixel, or by others.

    >>> printed_name("tiny-imagenet-nearest"), printed_name("tiny-imagenet-resized"), printed_name("svhn")
    ('tiny-imagenet', 'tiny-imagenet', 'svhn')
    """
    return smooth_name(name).removesuffix(RESIZED)


def one_each(sets: Sequence[str]) -> list[str]:
    """Of the copies of a set the one nearest the paper's: the literature's, else by the nearest pixel, else smooth.

    >>> one_each(["tiny-imagenet", "svhn", "tiny-imagenet-nearest"])
    ['svhn', 'tiny-imagenet-nearest']
    """
    ranked = sorted(sets, key=lambda name: (name.endswith(RESIZED), name.endswith(NEAREST)))
    chosen = {printed_name(name): name for name in ranked}  # the last of each
    return [name for name in sets if name in chosen.values()]


class Averages:
    """Results with their means.

    Cells that were measured with different options (other images, another limit) are never mixed: the options that most
    cells have are shown, of equals the last ones; `left_out` counts the others by setting and weights. Cells of a
    method with options of its own, or tuned by another search, are left to `variant`.

    Parameters
    ----------
    results : Results, optional
        A benchmark's folder; without it there is nothing of ours.
    validation : str, optional
        The set that was tuned on, where it has a name; by default iSUN, or else the first in the results.
    """

    def __init__(self, results: Results | None = None, validation: str | None = None) -> None:
        self.results = results or Results(os.devnull)  # a folder that is not there has no records
        every = [record for record in self.results.cells.records if not _variant(record)]
        self.cells = _alike(every)
        counts = [Counter((c["setting"], c["weights"]) for c in cells) for cells in (every, self.cells)]
        self.left_out = counts[0] - counts[1]
        records = self.results.networks.records
        measured = {(c["weights"], c["data"]["test"]) for c in self.cells}
        fitting = [r for r in records if (r["weights"], r["data"]["test"]) in measured]
        # the last record of each network, of images that cells shown are measured on if there is one
        self.networks = list({r["weights"]: r for r in [*records, *fitting]}.values())
        tuned = list(dict.fromkeys(c["validation"] for c in self.cells if c["setting"] not in TUNED_ON))
        first = "isun" if "isun" in tuned or not tuned else tuned[0]
        self.validation = first if validation is None else canonical(validation)
        if tuned and self.validation not in tuned:
            raise InputError.unknown("validation", self.validation, tuned)

    def variant(self, **options: Any) -> "Averages":
        """Results of methods with these options, or tuned by this `search`; without any, these results."""
        other = copy.copy(self)
        other.cells = _alike(record for record in self.results.cells.records if _variant(record) == options)
        return other

    def classifiers(self) -> list[Key]:
        """Our classifiers, in the order of `networks`."""
        kinds = [(n["network"], n["in_distribution"]) for n in self.networks]
        pairs = zip(kinds, self.networks, strict=True)
        return [Key(*kind, n["weights"], n["file"] if kinds.count(kind) > 1 else "") for kind, n in pairs]

    def of(self, setting: str, key: Key | None = None, validation: str | None = None) -> list[Record]:
        """Cells of a setting."""
        (tuned_on,) = TUNED_ON.get(setting, (validation or self.validation,))
        cells = [c for c in self.cells if (c["setting"], c["validation"]) == (setting, tuned_on)]
        return cells if key is None else [c for c in cells if key.fits(c)]

    def ood(self, setting: str, key: Key | None = None, methods: Sequence[str] = ()) -> list[str]:
        """OOD sets measured in a setting; with methods, those that all have but the ones with fewer sets than most."""
        cells = self.of(setting, key)
        measured = [{c["ood"] for c in cells if c["method"] == method} for method in methods]
        run = sorted(filter(None, measured), key=len)
        usual = [sets for sets in run if len(sets) >= len(run[(len(run) - 1) // 2])]  # the lower median
        return [ood for ood in dict.fromkeys(c["ood"] for c in cells) if all(ood in sets for sets in usual)]

    def value(self, setting: str, key: Key, ood: str, method: str, metric: str) -> float | None:
        """A metric in percent, the mean over splits; None if it was not measured."""
        values = [100 * c[metric] for c in self.of(setting, key) if (c["ood"], c["method"]) == (ood, method)]
        return fmean(values) if values else None

    def tuning(self, setting: str, key: Key, method: str) -> Record | None:
        """What tuning chose, for all OOD sets: the last record of the options that are shown."""
        (tuned_on,) = TUNED_ON.get(setting, (self.validation,))
        shown = {_options(c) for c in self.of(setting, key)}
        asked = {"setting": setting, "method": method, "validation": tuned_on}
        tunings = (t for t in reversed(self.results.tunings.records) if asked.items() <= t.items() and key.fits(t))
        return next((t for t in tunings if _options(t) in shown), None)

    def searches(self, key: Key) -> dict[str, dict[str, Search]]:
        """What tuning tried, by parameter and method."""
        searches: dict[str, dict[str, Search]] = {"temperature": {}, "epsilon": {}}
        for setting, parameter in (("black-box", "temperature"), ("grey-box", "epsilon")):
            for method in dict.fromkeys(c["method"] for c in self.of(setting, key)):
                record = self.tuning(setting, key, method) or {}
                trials = (record.get("tuning") or {}).get("steps" if parameter == "epsilon" else "trials")
                if trials and record["tuning"].get("n_ood") != 0:  # without OOD samples there is no TNR
                    values, tnr = ([trial[name] for trial in trials] for name in (parameter, "tnr"))
                    searches[parameter][method] = (values, tnr, record[parameter])
        return searches

    def kept(self, cell: Record) -> Path:
        """The file of a cell's scores, which a copy of the records alone has not."""
        return self.results.folder / "scores" / str(cell.get("scores"))

    def scores(self, cell: Record) -> "Scores":
        """What was kept of a cell."""
        record, tensors = read_record(self.kept(cell), "scores")
        return Scores(cell, record["columns"], {name: tensor.numpy() for name, tensor in tensors.items()})


@dataclass(frozen=True, eq=False)
class Scores:
    """What a benchmark kept of one cell: arrays by side (`id`, `ood`) and content, and the names of the columns."""

    cell: Record
    columns: list[str]
    arrays: dict[str, np.ndarray[Any, Any]]

    @property
    def threshold(self) -> float:
        """The first that keeps the wanted share of these in-distribution images: that of the table's TNR."""
        known = np.sort(self.arrays["id"])
        return float(known[math.ceil(exact_fraction(TPR, "tpr") * len(known)) - 1])

    def reason(self, side: str, row: int) -> str:
        """The part that raised a score most above the in-distribution mean; empty if none did."""
        usual = self.arrays["id_parts"].mean(axis=0)
        name, above = next(iter(raised(self.columns, self.arrays[f"{side}_parts"][row], usual).items()))
        return name if above > 0 and len(self.columns) > 1 else ""


def _options(record: Record) -> str:
    """What a cell's numbers depend on besides its place in a table and its OOD set."""
    data = {part: digest for part, digest in record["data"].items() if part != "ood"}
    return repr((data, _variant(record), *(record.get(name) for name in ("mean", "std", "limit", "attacked"))))


def _variant(record: Record) -> Record:
    """What a record has that ordinary ones do not: options of the method, and a search that is not the sweep."""
    search = record.get("search", "sweep")
    return {**(record.get("options") or {}), **({} if search == "sweep" else {"search": search})}


def _alike(records: Iterable[Record]) -> list[Record]:
    """Of each classifier, setting and validation set, the cells of one set of options; of equal cells the last."""
    groups: dict[tuple[str, ...], dict[str, dict[tuple[str, ...], Record]]] = {}
    for r in records:
        where = (r["network"], r["weights"], r["setting"], r["validation"])
        options = groups.setdefault(where, {})
        cells = options.pop(_options(r), {})
        options[_options(r)] = {**cells, (r["method"], r["ood"], str(r["seed"])): r}  # the last used comes last
    chosen = [max(reversed(options.values()), key=len) for options in groups.values()]
    return [record for cells in chosen for record in cells.values()]


def raised(columns: Sequence[str], contributions: Sequence[float], usual: Sequence[float]) -> dict[str, float]:
    """How much each part of the network raised a score above what is usual, the most first.

    Parameters
    ----------
    columns : sequence of str
        As in `Explanation`; a layer's distance and its distance to OOD statistics (IGEOOD+) count as one part.
    contributions, usual : sequence of float
        Of the sample, and on average of in-distribution ones.

    >>> raised(["output", "a", "a (OOD)"], [1.0, 2.0, 3.0], [0.5, -1.0, 1.5])
    {'a': 4.5, 'output': 0.5}
    """
    parts: dict[str, float] = {}
    for column, value, mean in zip(columns, contributions, usual, strict=True):
        part = column.removesuffix(OOD_SUFFIX)
        parts[part] = parts.get(part, 0.0) + float(value) - float(mean)
    return dict(sorted(parts.items(), key=lambda pair: -pair[1]))
