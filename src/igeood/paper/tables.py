"""The paper's tables: our numbers with the paper's beside them, in parentheses; what is missing is shown as missing."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from igeood.benchmark import Results
from igeood.benchmark.results import Record
from igeood.datasets import DATASETS
from igeood.figures import STYLE
from igeood.paper import reported
from igeood.paper.reported import Reported

MISSING = "–"
LOGITS = ("msp", "odin", "energy", "igeood-logits")
WHITE = ("mahalanobis", "igeood", "igeood+")
KL = ("igeood-logits", "igeood-logits-min", "kl-min", "kl-sum")
METRICS = {"tnr": "TNR at TPR-95%", "auroc": "AUROC", "aupr": "AUPR"}
FOREIGN = {"gram-matrix": "Gram matrices", "deconf-c": "DeConf-C", "res-flow": "Residual flow"}


@dataclass(frozen=True)
class Table:
    """A table as text: the paper's label, a title, a header, rows, and what the reader should know."""

    label: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default=())

    def markdown(self) -> str:
        """The table in Markdown."""
        lines = [f"### {self.title}", ""]
        if self.label:
            lines += [f"The paper's `{self.label}`. {reported.TABLES.get(self.label, '')}".rstrip(), ""]
        lines += ["| " + " | ".join(self.header) + " |", "|---|" + "---:|" * (len(self.header) - 1)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes), ""])


@dataclass(frozen=True)
class Key:
    """A trained classifier as the tables' rows name it."""

    network: str
    in_distribution: str

    def __str__(self) -> str:
        return f"{self.network}, {title(self.in_distribution)}"


def title(name: str) -> str:
    """A data set's name for tables."""
    if name in DATASETS:
        return DATASETS[name].title
    return name.partition(":")[2].rstrip("/").rpartition("/")[2] or name


def method_title(name: str) -> str:
    """A method's name for tables."""
    return STYLE[name].title if name in STYLE else FOREIGN.get(name, name)


class Ours:
    """Our results, ready to be asked for averages.

    Parameters
    ----------
    results : Results
        A benchmark's folder.
    validation : str, optional
        The set that black and grey box were tuned on; by default iSUN, or else the first in the results.
    """

    def __init__(self, results: Results, validation: str | None = None) -> None:
        self.results = results
        self.cells = _last(
            results.cells.records, ("network", "weights", "setting", "method", "validation", "ood", "seed")
        )
        self.networks = _last(results.networks.records, ("network", "weights"))
        tuned = [c["validation"] for c in self.cells if c["setting"] in ("black-box", "grey-box")]
        self.validation = validation or ("isun" if "isun" in tuned else tuned[0] if tuned else "isun")

    def classifiers(self) -> list[Key]:
        """Our classifiers."""
        return list(dict.fromkeys(Key(n["network"], n["in_distribution"]) for n in self.networks))

    def ood(self, setting: str) -> list[str]:
        """OOD sets measured in a setting."""
        return list(dict.fromkeys(c["ood"] for c in self.of(setting)))

    def of(self, setting: str, key: Key | None = None, validation: str | None = None) -> list[Record]:
        """Cells of a setting."""
        wanted = {"white-box": "own", "white-box-fgsm": "fgsm"}.get(setting, validation or self.validation)
        return [
            c
            for c in self.cells
            if (c["setting"], c["validation"]) == (setting, wanted)
            and (key is None or (c["network"], c["in_distribution"]) == (key.network, key.in_distribution))
        ]

    def value(
        self, setting: str, key: Key, ood: str, method: str, metric: str, validation: str | None = None
    ) -> float | None:
        """A figure in percent, the mean over splits and trainings; None if it was not measured."""
        found = [100 * c[metric] for c in self.of(setting, key, validation) if (c["ood"], c["method"]) == (ood, method)]
        return fmean(found) if found else None

    def tuning(self, setting: str, key: Key, method: str) -> Record | None:
        """What was found in tuning, for all OOD sets."""
        wanted = {"white-box-fgsm": "fgsm"}.get(setting, self.validation)
        asked = {"setting": setting, "method": method, "validation": wanted, "network": key.network}
        return self.results.tunings.find({**asked, "in_distribution": key.in_distribution})


def _last(records: Iterable[Record], fields: Sequence[str]) -> list[Record]:
    """Of records with the same fields, the last."""
    return list({tuple(r.get(f) for f in fields): r for r in records}.values())


def pair(ours: float | None, theirs: float | None, digits: int = 1) -> str:
    """Our number, and the paper's in parentheses where it has one."""
    first = MISSING if ours is None else f"{ours:.{digits}f}"
    return first if theirs is None else f"{first} ({theirs:.{digits}f})"


def _printed(found: list[Reported]) -> float | None:
    return found[0].value if found else None


def _bold(cells: list[str], values: Sequence[float | None]) -> list[str]:
    """The cells with our best number in bold, unless all are the same."""
    known = [value for value in values if value is not None]
    if len({f"{value:.1f}" for value in known}) < 2:
        return cells
    best = f"{max(known):.1f}"
    return [f"**{c.split(' ')[0]}**{c[len(c.split(' ')[0]) :]}" if c.split(" ")[0] == best else c for c in cells]


def _keys(ours: Ours, label: str) -> list[Key]:
    """Our classifiers first, then those that only the paper has."""
    theirs = [Key(r.network, r.in_distribution) for r in reported.find(label=label) if r.network != "average"]
    return list(dict.fromkeys([*ours.classifiers(), *theirs]))


def averages(ours: Ours, setting: str, label: str, methods: Sequence[str]) -> Table:
    """Means over OOD sets: Table 1, Table 2, and the grey box's."""
    rows = []
    for key in _keys(ours, label):
        sets = [ood for ood in ours.ood(setting) if ours.value(setting, key, ood, methods[-1], "tnr") is not None]
        row = [str(key), str(len(sets)) if sets else MISSING]
        for metric in ("tnr", "auroc"):
            values = [_mean(ours, setting, key, method, metric) for method in methods]
            printed = [_paper_average(label, setting, key, method, metric) for method in methods]
            cells = [_spread(v, p) for v, p in zip(values, printed, strict=True)]
            row += _bold(cells, [None if v is None else v[0] for v in values])
        rows.append(row)
    columns = [f"{method_title(m)}, {METRICS[metric]}" for metric in ("tnr", "auroc") for m in methods]
    notes = [
        f"Ours: mean ± deviation over OOD sets ({_sets(ours.ood(setting))}); in parentheses the paper, over its own."
    ]
    return Table(
        label,
        f"{setting}: averages",
        ["network, in-distribution", "sets", *columns],
        rows,
        [*notes, *_how(ours, setting)],
    )


def _mean(ours: Ours, setting: str, key: Key, method: str, metric: str) -> tuple[float, float] | None:
    found = [ours.value(setting, key, ood, method, metric) for ood in ours.ood(setting)]
    known = [value for value in found if value is not None]
    return (fmean(known), pstdev(known)) if known else None


def _paper_average(label: str, setting: str, key: Key, method: str, metric: str) -> tuple[float, float | None] | None:
    options = {"label": label, "setting": setting, "method": method, "metric": metric}
    found = reported.find(**options, network=key.network, in_distribution=key.in_distribution)
    return (found[0].value, found[0].spread) if found else None


def _spread(ours: tuple[float, float] | None, theirs: tuple[float, float | None] | None) -> str:
    first = MISSING if ours is None else f"{ours[0]:.1f} ± {ours[1]:.0f}"
    if theirs is None:
        return first
    return f"{first} ({theirs[0]:.1f}" + ("" if theirs[1] is None else f" ± {theirs[1]:.0f}") + ")"


def _sets(names: Iterable[str]) -> str:
    return ", ".join(title(name) for name in names) or "none"


def _how(ours: Ours, setting: str) -> list[str]:
    """How the setting was tuned, and on how many images."""
    cells = ours.of(setting)
    if not cells:
        return [f"Nothing of the {setting} was measured here."]
    tuned = {
        "white-box": "Tuned on 1,000 images of the OOD set (half of a smaller one), measured on the others; "
        f"means over {len({c['seed'] for c in cells})} splits.",
        "white-box-fgsm": "Tuned on adversarial images only; no OOD image is seen before the measurement.",
    }
    how = f"Temperature and step tuned on {title(ours.validation)}, which is not measured on; the paper's on iSUN."
    if ours.validation == "none":
        how = "Not tuned: every method at its default temperature and step."
    counts = ", ".join(
        f"{title(ood)} {max(c['ood_images'] for c in cells if c['ood'] == ood):,}" for ood in ours.ood(setting)
    )
    return [tuned.get(setting, how), f"Images: {max(c['id_images'] for c in cells):,} in-distribution; {counts}."]


def extended(
    ours: Ours, setting: str, label: str, methods: Sequence[str], metrics: Iterable[str] = METRICS
) -> list[Table]:
    """Each OOD set, for each of our classifiers and each metric."""
    tables = []
    for key in [k for k in ours.classifiers() if ours.of(setting, k)]:
        theirs = {"label": label, "setting": setting, "network": key.network, "in_distribution": key.in_distribution}
        printed = list(dict.fromkeys(r.ood for r in reported.find(**theirs) if r.ood != "average"))
        sets = list(dict.fromkeys([*ours.ood(setting), *printed]))
        for metric in metrics:
            rows, shared = [], []
            for ood in sets:
                values = [ours.value(setting, key, ood, m, metric) for m in methods]
                paper = [_printed(reported.find(**theirs, ood=ood, method=m, metric=metric)) for m in methods]
                rows.append([title(ood), *_bold([pair(v, p) for v, p in zip(values, paper, strict=True)], values)])
                if values[-1] is not None and (ood in printed or not printed):
                    shared.append((values, paper))
            rows.append(_common(shared, len(methods)))
            header = ["OOD set", *map(method_title, methods)]
            tables.append(Table(label, f"{setting}: {key}: {METRICS[metric]}", header, rows))
    return tables


def _common(shared: list[tuple[list[float | None], list[float | None]]], columns: int) -> list[str]:
    """Means over the OOD sets that both have; over all of ours where the paper has none."""
    cells = []
    for i in range(columns):
        mine = [values[i] for values, _ in shared]
        paper = [values[i] for _, values in shared]
        known, printed = ([value for value in side if value is not None] for side in (mine, paper))
        theirs = fmean(printed) if printed and len(printed) == len(shared) else None
        cells.append(pair(fmean(known) if known else None, theirs))
    return [f"mean of {len(shared)} sets", *cells]


def hyperparameters(ours: Ours) -> list[Table]:
    """Temperatures and steps that were found."""
    label = "tab:best_hyperparameters"
    columns = [("black-box", m) for m in LOGITS[1:]] + [("grey-box", m) for m in LOGITS[1:]]
    columns += [("white-box-fgsm", m) for m in WHITE]
    rows = []
    for key in _keys(ours, label):
        row = [str(key)]
        for setting, method in columns:
            theirs = {"label": label, "setting": setting, "method": method, "network": key.network}
            found = {r.metric: r.value for r in reported.find(**theirs, in_distribution=key.in_distribution)}
            first, second = _found(ours.tuning(setting, key, method), setting), _found(found, setting)
            row.append(f"{first}; {second}" if found else first)
        rows.append(row)
    header = ["network, in-distribution", *(f"{s}: {method_title(m)}" for s, m in columns)]
    note = "Each cell: ours; the paper's. T, or (T, ε) with ε in pixel units. Ours in the white box has no input step."
    return [Table(label, "hyper-parameters found", header, rows, [note])]


def _found(record: Record | None, setting: str) -> str:
    if not record:
        return MISSING
    parts = [f"{record[k]:.4g}" for k in ("temperature", "epsilon") if record.get(k) is not None]
    return parts[0] if setting == "black-box" else f"({', '.join(parts)})"


def validation_choice(ours: Ours) -> list[Table]:
    """Mean TNR for each set to tune on."""
    label, tables = "tab:robust", []
    columns = [("black-box", m) for m in LOGITS] + [("grey-box", m) for m in LOGITS[1:]]
    for key in [k for k in ours.classifiers() if ours.of("black-box", k)]:
        mine = [c["validation"] for c in ours.cells if c["setting"] in ("black-box", "grey-box")]
        same = {"label": label, "network": key.network, "in_distribution": key.in_distribution}
        theirs = [r.validation for r in reported.find(**same) if r.validation != "average"]
        rows = []
        for validation in dict.fromkeys([*mine, *theirs]):
            row = ["none: defaults" if validation == "none" else title(validation)]
            for setting, method in columns:
                found = [c["tnr"] for c in ours.of(setting, key, validation) if c["method"] == method]
                printed = _printed(reported.find(**same, validation=validation, setting=setting, method=method))
                row.append(pair(100 * fmean(found) if found else None, printed))
            rows.append(row)
        header = ["tuned on", *(f"{s}: {method_title(m)}" for s, m in columns)]
        note = "Mean TNR over the sets measured, without the one tuned on; the paper's over its eight others."
        tables.append(Table(label, f"choice of the validation set: {key}", header, rows, [note]))
    return tables


def seeds(ours: Ours) -> list[Table]:
    """Mean and deviation over trainings of one architecture."""
    label, tables = "tab:seed_model_error", []
    for key in [k for k in ours.classifiers() if ours.of("black-box", k)]:
        n = len({c["weights"] for c in ours.of("black-box", key)})
        theirs = {"label": label, "network": key.network, "in_distribution": key.in_distribution}
        sets = [*ours.ood("black-box"), *(r.ood for r in reported.find(**theirs) if r.ood in DATASETS)]
        for metric in ("tnr", "auroc"):
            rows = [
                [title(ood), *(_over_trainings(ours, key, ood, m, metric, theirs) for m in LOGITS)]
                for ood in dict.fromkeys(sets)
            ]
            note = f"Mean ± deviation over {n} training{'s' if n > 1 else ', so without a spread'}; the paper's over 5."
            header = ["OOD set", *map(method_title, LOGITS)]
            tables.append(Table(label, f"training seeds: {key}: {METRICS[metric]}", header, rows, [note]))
    return tables


def _over_trainings(ours: Ours, key: Key, ood: str, method: str, metric: str, theirs: dict[str, str]) -> str:
    cells = [c for c in ours.of("black-box", key) if (c["ood"], c["method"]) == (ood, method)]
    found = [100 * c[metric] for c in cells]
    paper = reported.find(**theirs, ood=ood, method=method, metric=metric)
    printed = (paper[0].value, paper[0].spread) if paper else None
    return _spread((fmean(found), pstdev(found)) if found else None, printed)


def accuracy(ours: Ours) -> list[Table]:
    """Test accuracy by softmax and by the nearest centroid."""
    return [
        _of_networks(
            ours,
            "tab:model_accuracy",
            "accuracy",
            {"accuracy": "softmax", "accuracy_fisher_rao": "Fisher–Rao"},
            ours.networks,
        )
    ]


def adversarial(ours: Ours) -> list[Table]:
    """Size of the adversarial samples, and the accuracy that they leave."""
    found = [
        {**t, "linf": t["attack"]["linf"], "adversarial_accuracy": t["attack"]["accuracy"]}
        for t in ours.results.tunings.records
        if t.get("attack")
    ]
    return [
        _of_networks(
            ours,
            "tab:adversarial_table",
            "adversarial samples",
            {"linf": "mean L∞, normalised", "adversarial_accuracy": "accuracy left"},
            found,
        )
    ]


def _of_networks(ours: Ours, label: str, what: str, columns: dict[str, str], records: list[Record]) -> Table:
    rows = []
    for key in _keys(ours, label):
        row = [str(key)]
        for metric in columns:
            factor, digits = (1, 2) if metric == "linf" else (100, 2)
            mine = [
                factor * r[metric]
                for r in records
                if (r["network"], r["in_distribution"]) == (key.network, key.in_distribution)
            ]
            theirs = reported.find(label=label, network=key.network, in_distribution=key.in_distribution, metric=metric)
            row.append(pair(fmean(mine) if mine else None, _printed(theirs), digits))
        rows.append(row)
    return Table(label, what, ["network, in-distribution", *columns.values()], rows)


def others(ours: Ours) -> list[Table]:
    """Other white-box methods, whose numbers are quoted as the paper reports them."""
    tables = []
    for label, setting, names in (
        ("tab:other_comparisons", "white-box", ("res-flow",)),
        ("tab:other_comparisons_adv", "white-box-fgsm", ("gram-matrix", "deconf-c", "res-flow")),
    ):
        rows = []
        for key in _keys(ours, label):
            theirs = {"label": label, "network": key.network, "in_distribution": key.in_distribution, "metric": "tnr"}
            printed = [r.ood for r in reported.find(**theirs) if r.ood != "average"]
            mine = ours.ood(setting) if ours.of(setting, key) else []
            for ood in dict.fromkeys([*mine, *printed]):
                paper = [_printed(reported.find(**theirs, ood=ood, method=m)) for m in (*names, *WHITE)]
                values = [None] * len(names) + [ours.value(setting, key, ood, m, "tnr") for m in WHITE]
                rows.append([str(key), title(ood), *(pair(v, p) for v, p in zip(values, paper, strict=True))])
        header = ["network, in-distribution", "OOD set", *map(method_title, (*names, *WHITE))]
        note = "In parentheses as the paper reports them, from the works that it quotes; they were not run here."
        tables.append(Table(label, f"other white-box methods, {setting}: {METRICS['tnr']}", header, rows, [note]))
    return tables


TABLES: dict[str, Callable[[Ours], list[Table]]] = {
    "black-box": lambda o: [
        averages(o, "black-box", "tab:black_box_avg", LOGITS),
        *extended(o, "black-box", "tab:black_box_extended", LOGITS),
    ],
    "grey-box": lambda o: [
        averages(o, "grey-box", "tab:grey_box_avg", LOGITS[1:]),
        *extended(o, "grey-box", "tab:grey_box_extended", LOGITS[1:]),
    ],
    "white-box": lambda o: [
        averages(o, "white-box", "tab:white_box_avg", WHITE),
        *extended(o, "white-box", "tab:wb_ood_extended", WHITE),
    ],
    "white-box-fgsm": lambda o: [
        averages(o, "white-box-fgsm", "tab:white_box_avg", WHITE),
        *extended(o, "white-box-fgsm", "tab:wb_adv_extended", WHITE),
    ],
    "kl": lambda o: extended(o, "black-box", "tab:kl", KL, ("tnr",)),
    "hyperparameters": hyperparameters,
    "validation-choice": validation_choice,
    "seeds": seeds,
    "accuracy": accuracy,
    "adversarial": adversarial,
    "others": others,
}
