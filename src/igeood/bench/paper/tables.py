"""The paper's tables: our numbers with the paper's beside them, in parentheses; what is missing is shown as missing."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, pstdev

from igeood.bench.datasets import DATASETS
from igeood.bench.figures.drawing import look_of
from igeood.bench.paper import reported
from igeood.bench.runs.averages import Averages, Key, title
from igeood.bench.runs.plan import NO_VALIDATION
from igeood.bench.runs.results import Record

MISSING = "–"
METRICS = {"tnr": "TNR at TPR-95%", "auroc": "AUROC", "aupr": "AUPR"}
NETWORK = "network, in-distribution"


@dataclass(frozen=True)
class Table:
    """A table as text: the paper's label, a title, a header, rows, and what the reader should know."""

    label: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """The table in Markdown."""
        lines = [f"### {self.title}", "", f"The paper's `{self.label}`.", ""]
        lines += ["| " + " | ".join(self.header) + " |", "|---|" + "---:|" * (len(self.header) - 1)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes), ""])


def pair(ours: float | None, theirs: float | None, form: str = ".1f") -> str:
    """Our number, and the paper's in parentheses where it has one."""
    first = MISSING if ours is None else f"{ours:{form}}"
    return first if theirs is None else f"{first} ({theirs:{form}})"


def _names(columns: Iterable[str | tuple[str, str]]) -> list[str]:
    """Headers of methods, or of settings and methods."""
    return [look_of(c).title if isinstance(c, str) else f"{c[0]}: {look_of(c[1]).title}" for c in columns]


def _bold(cells: list[str], values: Sequence[float | None]) -> list[str]:
    """The cells with our best number in bold, unless all are the same."""
    printed = {f"{value:.1f}": value for value in values if value is not None}
    if len(printed) < 2:
        return cells
    best = max(printed, key=lambda text: printed[text])
    return [c.replace(best, f"**{best}**", 1) if c.split(" ")[0] == best else c for c in cells]


def rows_of(ours: Averages, label: str) -> list[Key]:
    """Our classifiers first, then those that only the paper has."""
    mine = ours.classifiers()
    theirs = [Key(r.network, r.in_distribution) for r in reported.find(label=label) if r.network != "average"]
    known = [key.paper for key in mine]
    return [*mine, *(key for key in dict.fromkeys(theirs) if key.paper not in known)]


def averages(ours: Averages, setting: str, label: str) -> Table:
    """Means over OOD sets: Table 1, Table 2, and the grey box's."""
    rows, methods = [], reported.methods(label=label)
    for key in rows_of(ours, label):
        sets = ours.ood(setting, key, methods)
        row = [str(key), str(len(sets)) if sets else MISSING]
        for metric in ("tnr", "auroc"):
            values = [_mean([ours.value(setting, key, ood, method, metric) for ood in sets]) for method in methods]
            theirs = {"label": label, "setting": setting, "metric": metric, **key.paper}
            cells = [_spread(value, method=m, **theirs) for value, m in zip(values, methods, strict=True)]
            row += _bold(cells, [value and value[0] for value in values])
        rows.append(row)
    columns = [f"{name}, {METRICS[metric]}" for metric in ("tnr", "auroc") for name in _names(methods)]
    over = ", ".join(map(title, ours.ood(setting))) or "none"
    note = f"Ours: mean ± deviation over OOD sets ({over}); in parentheses the paper's, over its own sets."
    return Table(label, f"{setting}: averages", [NETWORK, "sets", *columns], rows, [note, *_how(ours, setting)])


def _mean(values: list[float | None]) -> tuple[float, float | None] | None:
    known = [value for value in values if value is not None]
    return (fmean(known), pstdev(known) if len(known) > 1 else None) if known else None


def _spread(ours: tuple[float, float | None] | None, **theirs: str) -> str:
    """Mean and deviation, where there is one; the paper's in parentheses."""
    paper = [(one.value, one.spread) for one in reported.find(**theirs)[:1]]
    first, *second = (
        MISSING if both is None else f"{both[0]:.1f}" + ("" if both[1] is None else f" ± {both[1]:.0f}")
        for both in (ours, *paper)
    )
    return f"{first} ({second[0]})" if second else first


def _how(ours: Averages, setting: str) -> list[str]:
    """How the setting was tuned, and on how many images."""
    cells = ours.of(setting)
    if not cells:
        return [f"Nothing of the {setting} was measured here."]
    how = f"Tuned on {title(ours.validation)}, which is not measured on, and on 1,000 in-distribution images (half of "
    how += "a smaller set), not measured on; the paper's on iSUN."
    if ours.validation == NO_VALIDATION:
        how = "Not tuned: every method at its default temperature and step."
    splits = len({c["seed"] for c in cells})
    known = {
        "white-box": "Tuned on 1,000 in-distribution images and 1,000 of the OOD set (half of a smaller one), "
        f"which are not measured on; means over {splits} splits.",
        "white-box-fgsm": "Tuned on adversarial images only; no OOD image is seen before the measurement.",
    }
    counts = {c["ood"]: c["ood_images"] for c in cells}
    images = ", ".join(f"{title(ood)} {n:,}" for ood, n in counts.items())
    measured = f"Measured on {max(c['id_images'] for c in cells):,} in-distribution images; {images}."
    notes = [f"{known.get(setting, how)} {measured}"]
    others = Counter(c["validation"] for c in ours.cells if c["setting"] == setting and c not in cells)
    if others:
        names = ", ".join(f"{_tuned_on(name)} ({n})" for name, n in others.items())
        notes.append(f"Also in the results, by what they were tuned on: {names}; `--validation` shows them.")
    if ours.left_out[setting]:
        notes.append(f"{ours.left_out[setting]} results of other options, or measured again, are not shown.")
    return notes


def _tuned_on(validation: str) -> str:
    return "none: defaults" if validation == NO_VALIDATION else title(validation)


def extended(
    ours: Averages, setting: str, label: str, metrics: Iterable[str] = METRICS, what: str = "", also: str = ""
) -> list[Table]:
    """Each OOD set, for each metric and each of our classifiers; the paper's own where there is nothing of ours.

    Methods are those of the label, and of the label `also`.
    """
    tables, methods = [], reported.methods(label=also or label)
    mine = [key for key in ours.classifiers() if ours.of(setting, key)]
    for key in mine or rows_of(Averages(), label):
        theirs = {"label": label, "setting": setting, **key.paper}
        printed = list(dict.fromkeys(r.ood for r in reported.find(**theirs) if r.ood != "average"))
        both = [o for o in ours.ood(setting, key, methods) if o in printed or not printed] if key.weights else printed
        for metric in metrics:
            rows, shared = [], []
            for ood in dict.fromkeys([*ours.ood(setting, key), *printed]):
                values = [ours.value(setting, key, ood, m, metric) for m in methods]
                paper = [reported.first(**theirs, ood=ood, method=m, metric=metric) for m in methods]
                rows.append([title(ood), *_bold([pair(v, p) for v, p in zip(values, paper, strict=True)], values)])
                shared += [(values, paper)] if ood in both else []
            rows.append(_common(shared, len(methods)))
            name = f"{what or setting}: {key}: {METRICS[metric]}"
            notes = _how(ours, setting) if key.weights else ()
            tables.append(Table(label, name, ["OOD set", *_names(methods)], rows, notes))
    return tables


def _common(shared: list[tuple[list[float | None], list[float | None]]], columns: int) -> list[str]:
    """Means over the OOD sets that both have; over all of ours where the paper has none."""
    cells = []
    for i in range(columns):
        known, printed = ([v for both in shared if (v := both[side][i]) is not None] for side in (0, 1))
        theirs = fmean(printed) if printed and len(printed) == len(shared) else None
        cells.append(pair(fmean(known) if known else None, theirs))
    return [f"mean, sets: {len(shared)}", *cells]


def _columns(label: str) -> list[tuple[str, str]]:
    """Settings and methods of a table, in the order of the print."""
    return list(dict.fromkeys((r.setting, r.method) for r in reported.find(label=label)))


def hyperparameters(ours: Averages) -> list[Table]:
    """Temperatures and steps that tuning chose."""
    label, rows = "tab:best_hyperparameters", []
    for key in rows_of(ours, label):
        row = [str(key)]
        for setting, method in _columns(label):
            theirs = reported.find(label=label, setting=setting, method=method, **key.paper)
            mine = ours.tuning(setting, key, method) or {}
            cells = [_chosen(record, setting) for record in (mine, {r.metric: r.value for r in theirs})]
            row.append("; ".join(cells if theirs else cells[:1]))
        rows.append(row)
    note = "Each cell: ours; the paper's. T, or (T, ε) with ε in pixel units. Ours in the white box has no input "
    note += "step, and on adversarial samples it keeps temperature 1."
    return [Table(label, "hyper-parameters found", [NETWORK, *_names(_columns(label))], rows, [note])]


def _chosen(record: Record, setting: str) -> str:
    parts = [f"{record[k]:.4g}" for k in ("temperature", "epsilon") if record.get(k) is not None]
    if not parts:
        return MISSING
    return parts[0] if setting == "black-box" else f"({', '.join(parts)})"


def validation_choice(ours: Averages) -> list[Table]:
    """Mean TNR for each set to tune on."""
    label, tables = "tab:robust", []
    for key in rows_of(ours, label):
        settings = dict.fromkeys(setting for setting, _ in _columns(label))
        mine = [c["validation"] for s in settings for c in ours.cells if c["setting"] == s and key.fits(c)]
        theirs = [r.validation for r in reported.find(label=label, **key.paper) if r.validation != "average"]
        rows = []
        for validation in dict.fromkeys([*mine, *theirs]):
            row = [_tuned_on(validation)]
            for setting, method in _columns(label):
                tnr = [100 * c["tnr"] for c in ours.of(setting, key, validation) if c["method"] == method]
                asked = {"label": label, "validation": validation, "setting": setting, "method": method, **key.paper}
                row.append(pair(fmean(tnr) if tnr else None, reported.first(**asked)))
            rows.append(row)
        note = "Mean TNR over the sets measured, without the one tuned on; the paper's over its eight others."
        header = ["tuned on", *_names(_columns(label))]
        tables.append(Table(label, f"choice of the validation set: {key}", header, rows, [note]))
    return tables


def seeds(ours: Averages) -> list[Table]:
    """Mean and deviation over trainings of one architecture."""
    label, tables = "tab:seed_model_error", []
    methods = reported.methods(label=label)
    for kind in dict.fromkeys(Key(k.network, k.in_distribution) for k in rows_of(ours, label)):
        trainings = [k for k in ours.classifiers() if k.paper == kind.paper and ours.of("black-box", k)]
        theirs = {"label": label, **kind.paper}
        sets = [ood for key in trainings for ood in ours.ood("black-box", key)]
        sets += [r.ood for r in reported.find(**theirs) if r.ood in DATASETS]
        for metric in ("tnr", "auroc"):
            rows = []
            for ood in dict.fromkeys(sets):
                means = {m: _mean([ours.value("black-box", key, ood, m, metric) for key in trainings]) for m in methods}
                cells = [_spread(mean, **theirs, ood=ood, method=m, metric=metric) for m, mean in means.items()]
                rows.append([title(ood), *cells])
            note = f"Trainings of ours: {len(trainings)}; the paper's mean ± deviation is over 5."
            name = f"training seeds: {kind}: {METRICS[metric]}"
            tables.append(Table(label, name, ["OOD set", *_names(methods)], rows, [note]))
    return tables


def accuracy(ours: Averages) -> list[Table]:
    """Test accuracy by softmax and by the nearest centroid."""
    columns = {"accuracy": "softmax", "accuracy_fisher_rao": "Fisher–Rao"}
    return [_of_networks(ours, "tab:model_accuracy", "accuracy", columns, ours.networks)]


def adversarial(ours: Averages) -> list[Table]:
    """Size of the adversarial samples, and the accuracy that they leave."""
    columns = {"linf": "mean L∞, normalised", "adversarial_accuracy": "accuracy left"}
    methods = reported.methods(setting="white-box-fgsm")
    tuned = [ours.tuning("white-box-fgsm", key, method) for key in ours.classifiers() for method in methods]
    attacks = [(t["weights"], t["tuning"]["attack"]) for t in tuned if t and t["tuning"]]
    records = [
        {"weights": weights, "linf": a["linf"], "adversarial_accuracy": a["accuracy"], "test_images": a["samples"]}
        for weights, a in attacks
    ]
    return [_of_networks(ours, "tab:adversarial_table", "adversarial samples", columns, records)]


def _of_networks(ours: Averages, label: str, what: str, columns: dict[str, str], records: list[Record]) -> Table:
    rows, by_weights = [], {record["weights"]: record for record in records}
    for key in rows_of(ours, label):
        mine = by_weights.get(key.weights, {})
        row = [str(key)]
        for metric in columns:
            value = mine[metric] * (1 if metric == "linf" else 100) if mine else None
            row.append(pair(value, reported.first(label=label, metric=metric, **key.paper), ".2f"))
        rows.append([*row, f"{mine['test_images']:,}" if mine else MISSING])
    return Table(label, what, [NETWORK, *columns.values(), "images"], rows)


def others(ours: Averages) -> list[Table]:
    """Other white-box methods, whose numbers are quoted as the paper reports them."""
    tables = []
    for label, setting in (("tab:other_comparisons", "white-box"), ("tab:other_comparisons_adv", "white-box-fgsm")):
        rows, methods = [], reported.methods(label=label)
        for key in rows_of(ours, label):
            theirs = {"label": label, "metric": "tnr", **key.paper}
            printed = [r.ood for r in reported.find(**theirs) if r.ood != "average"]
            for ood in dict.fromkeys([*ours.ood(setting, key), *printed]):
                paper = [reported.first(**theirs, ood=ood, method=m) for m in methods]
                mine = [ours.value(setting, key, ood, m, "tnr") for m in methods]
                rows.append([str(key), title(ood), *map(pair, mine, paper)])
        note = "In parentheses as the paper reports them; it quotes all but IGEOOD and IGEOOD+ from their authors."
        header = [NETWORK, "OOD set", *_names(methods)]
        tables.append(Table(label, f"other white-box methods, {setting}: {METRICS['tnr']}", header, rows, [note]))
    return tables


def covariance(ours: Averages) -> list[Table]:
    """How Gaussian each layer is, and how well its covariance and the diagonal of it are conditioned."""
    tables = []
    for key, line in zip(ours.classifiers(), ours.networks, strict=True):
        rows = []
        for place, (layer, width) in enumerate(line["layers"], start=1):
            layer_line = line["diagnostics"][layer]
            conditions = [
                pair(layer_line[m], reported.first(label="sec:covariance", metric=f"{m}:{place}", **key.paper), ".2g")
                for m in ("condition_full", "condition_diagonal")
            ]
            rows.append([layer, str(width), f"{layer_line['shapiro_w']:.3f}", *conditions, str(layer_line["dead"])])
        header = ["layer", "channels", "mean W", "condition of the covariance", "of its diagonal", "dead channels"]
        note = "Ours is the ratio of the largest to the smallest eigenvalue; the paper's is in the infinity norm."
        tables.append(Table("sec:covariance", f"layers of {key}", header, rows, [note]))
    return tables


def _box(average: str, each: str, setting: str, ours: Averages) -> list[Table]:
    return [averages(ours, setting, average), *extended(ours, setting, each, also=average)]


TABLES: dict[str, Callable[[Averages], list[Table]]] = {
    "black-box": partial(_box, "tab:black_box_avg", "tab:black_box_extended", "black-box"),
    "grey-box": partial(_box, "tab:grey_box_avg", "tab:grey_box_extended", "grey-box"),
    "white-box": partial(_box, "tab:white_box_avg", "tab:wb_ood_extended", "white-box"),
    "white-box-fgsm": partial(_box, "tab:white_box_avg", "tab:wb_adv_extended", "white-box-fgsm"),
    "kl": lambda ours: extended(ours, "black-box", "tab:kl", ("tnr",), "Fisher–Rao and KL, black-box"),
    "hyperparameters": hyperparameters,
    "validation-choice": validation_choice,
    "seeds": seeds,
    "accuracy": accuracy,
    "adversarial": adversarial,
    "others": others,
}
