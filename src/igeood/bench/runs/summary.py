"""A benchmark's results as the tables and figures ask for them: by classifier, setting, method and OOD set."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from statistics import fmean

from igeood.benchmark.plan import GREY
from igeood.benchmark.results import Record, Results
from igeood.datasets import DATASETS, EMBEDDED, canonical
from igeood.errors import InputError

NAMED = ("black-box", "grey-box", "white-box-validation")  # settings that are tuned on a named set


@dataclass(frozen=True)
class Key:
    """A trained classifier as the tables' rows name it; without weights, the paper's."""

    network: str
    in_distribution: str
    weights: str = ""
    file: str = ""  # told where several have the same architecture

    def __str__(self) -> str:
        return f"{self.network}, {title(self.in_distribution)}" + (f" ({self.file})" if self.file else "")

    def fits(self, record: Record) -> bool:
        """Whether a record is of this classifier."""
        same = (record["network"], record["in_distribution"]) == (self.network, self.in_distribution)
        return same and self.weights in ("", record["weights"])

    @property
    def paper(self) -> dict[str, str]:
        """How the paper's numbers are asked for."""
        return {"network": self.network, "in_distribution": self.in_distribution}


def title(name: str) -> str:
    """A data set's name for tables.

    >>> title("tiny-imagenet"), title("idx:/data/FashionMNIST/raw")
    ('Tiny-ImageNet', 'FashionMNIST')
    """
    known = DATASETS.get(name) or EMBEDDED.get(name)
    if known:
        return known.title
    parts = [part for part in PurePath(name.partition(":")[2] or name).parts if part != "raw"]
    return parts[-1] if parts else name


class Summary:
    """Our results, ready to be asked for averages.

    Cells that were measured with different options (other images, another limit) are never mixed: the options that most
    cells have are shown, of equals the last ones, and `left_out` counts the others in each setting.

    Parameters
    ----------
    results : Results, optional
        A benchmark's folder; without it there is nothing of ours.
    validation : str, optional
        The set that was tuned on, where it has a name; by default iSUN, or else the first in the results.
    """

    def __init__(self, results: Results | None = None, validation: str | None = None) -> None:
        self.results = results
        every = results.cells.records if results else []
        self.cells = _alike(every)
        self.left_out = Counter(c["setting"] for c in every) - Counter(c["setting"] for c in self.cells)
        self.networks = self._shown_networks()
        tuned = list(dict.fromkeys(c["validation"] for c in self.cells if c["setting"] in NAMED))
        first = "isun" if "isun" in tuned or not tuned else tuned[0]
        self.validation = first if validation is None else canonical(validation)
        if tuned and self.validation not in tuned:
            raise InputError(f"validation: no results tuned on {self.validation!r}; there are {', '.join(tuned)}")

    def _shown_networks(self) -> list[Record]:
        """One record a network: of the images that most of its cells shown are measured on, else the last."""
        found: dict[str, Record] = {}
        for r in self.results.networks.records if self.results else []:
            tests = Counter(c["data"]["test"] for c in self.cells if c["weights"] == r["weights"] and "data" in c)
            fits = not tests or r["data"]["test"] == tests.most_common(1)[0][0]
            if fits or r["weights"] not in found:
                found[r["weights"]] = r
        return list(found.values())

    def classifiers(self) -> list[Key]:
        """Our classifiers."""
        kinds = Counter((n["network"], n["in_distribution"]) for n in self.networks)
        found = []
        for n in self.networks:
            kind = (n["network"], n["in_distribution"])
            found.append(Key(*kind, n["weights"], n["file"] if kinds[kind] > 1 else ""))
        return found

    def ood(self, setting: str, key: Key | None = None, methods: Sequence[str] = ()) -> list[str]:
        """OOD sets measured in a setting; for those of the methods that were run at all, by every one of them."""
        cells = self.of(setting, key)
        run = [method for method in methods if any(c["method"] == method for c in cells)]
        measured = {(c["method"], c["ood"]) for c in cells}
        return [ood for ood in dict.fromkeys(c["ood"] for c in cells) if all((m, ood) in measured for m in run)]

    def of(self, setting: str, key: Key | None = None, validation: str | None = None) -> list[Record]:
        """Cells of a setting."""
        wanted = {"white-box": "own", "white-box-fgsm": "fgsm"}.get(setting, validation or self.validation)
        found = [c for c in self.cells if (c["setting"], c["validation"]) == (setting, wanted)]
        return found if key is None else [c for c in found if key.fits(c)]

    def value(self, setting: str, key: Key, ood: str, method: str, metric: str) -> float | None:
        """A figure in percent, the mean over splits; None if it was not measured."""
        found = [100 * c[metric] for c in self.of(setting, key) if (c["ood"], c["method"]) == (ood, method)]
        return fmean(found) if found else None

    def tuning(self, setting: str, key: Key, method: str) -> Record | None:
        """What was found in tuning, for all OOD sets: the last record of the options that are shown."""
        wanted = {"white-box-fgsm": "fgsm"}.get(setting, self.validation)
        shown = {_options(c) for c in self.of(setting, key)}
        asked = (setting, method, wanted)
        for t in reversed(self.results.tunings.records if self.results else []):
            if (t["setting"], t["method"], t["validation"]) == asked and key.fits(t) and _options(t) in shown:
                return t
        return None

    def searches(self, key: Key) -> dict[str, dict[str, tuple[list[float], list[float], float]]]:
        """What was tried in tuning: by parameter and method the values, the TNR of each, and the value chosen."""
        found: dict[str, dict[str, tuple[list[float], list[float], float]]] = {"temperature": {}, "epsilon": {}}
        for setting, what, name in (("black-box", "trials", "temperature"), ("grey-box", "steps", "epsilon")):
            for method in GREY:
                record = self.tuning(setting, key, method)
                if record and record[what]:
                    found[name][method] = (*([point[i] for point in record[what]] for i in (0, 1)), record[name])
        return found


def _options(record: Record) -> str:
    """What a cell's figures depend on besides its place in a table and its OOD set."""
    data = {part: digest for part, digest in record.get("data", {}).items() if part != "ood"}
    return repr((data, *(record.get(name) for name in ("mean", "std", "tpr", "limit", "attack_size"))))


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
