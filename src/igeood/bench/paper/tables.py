"""The paper's tables: our numbers with the paper's beside them, in parentheses; what is missing is shown as missing."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, pstdev

from igeood.bench.figures.drawing import look_of
from igeood.bench.paper import reported
from igeood.bench.paper.reported import Number
from igeood.bench.runs.averages import METRICS, Averages, Key, title
from igeood.bench.runs.plan import NO_VALIDATION
from igeood.bench.runs.results import Record

Pairs = list[tuple[Number, Number]]  # ours and the paper's
Cells = Mapping[str, Callable[[Key], str]]  # by column, the cell of a classifier
MISSING = "–"
NETWORK = "network, in-distribution"
HOW = {  # by setting, or what the others are tuned on
    "white-box": "Tuned on up to 1,000 images of each kind, which are not measured on; means over {splits} splits.",
    "white-box-fgsm": "Tuned on adversarial images only; no OOD image is seen before the measurement.",
    NO_VALIDATION: "Not tuned: every method at its default temperature and step.",
}
NAMED = "Tuned on {tuned} (the paper's on iSUN) and on up to 1,000 in-distribution images, which are not measured on."
QUOTED = "other methods, quoted from their authors, "
SEEDS, OTHERS = "tab:seed_model_error", ("tab:other_comparisons", "tab:other_comparisons_adv")


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


def pair(ours: Number, theirs: Number, show: Callable[[float], str] = "{:.1f}".format) -> str:
    """Our number, and the paper's in parentheses where it has one."""
    texts = []
    for value, spread in (number or (None, None) for number in (ours, theirs)):
        texts.append(MISSING if value is None else show(value) + ("" if spread is None else f" ± {spread:.0f}"))
    return texts[0] if theirs is None else "{} ({})".format(*texts)


def mean(values: Iterable[float | None]) -> Number:
    """Mean of the known values, and their deviation if there are several."""
    known = [value for value in values if value is not None]
    return (fmean(known), pstdev(known) if len(known) > 1 else None) if known else None


def _pairs(numbers: Pairs) -> list[str]:
    """Cells of one row from our numbers and the paper's, our best in bold unless all are the same."""
    cells, printed = [pair(*both) for both in numbers], {f"{ours[0]:.1f}": ours[0] for ours, _ in numbers if ours}
    best = max(printed, key=lambda text: printed[text]) if len(printed) > 1 else ""
    return [f"**{best}**{cell.removeprefix(best)}" if best and cell.split(" ")[0] == best else cell for cell in cells]


def _names(columns: Iterable[str | tuple[str, str]]) -> list[str]:
    """Headers of methods, or of settings and methods."""
    return [look_of(c).title if isinstance(c, str) else f"{c[0]}: {look_of(c[1]).title}" for c in columns]


def _columns(label: str) -> list[tuple[str, str]]:
    """Settings and methods of a table, in the order of the print."""
    return list(dict.fromkeys((r.setting, r.method) for r in reported.find(label=label)))


def _printed(field: str, **fields: str) -> list[str]:
    """Values of a field that the paper has numbers of, means apart."""
    return list(dict.fromkeys(v for r in reported.find(**fields) if (v := getattr(r, field)) not in ("", "average")))


def _both(ours: Averages, keys: Sequence[Key], sets: Sequence[str], methods: Sequence[str], /, **paper: str) -> Pairs:
    """Of each method, our mean over classifiers and OOD sets, and the paper's number with these fields."""
    setting, metric = paper["setting"], paper["metric"]
    mine = [mean(ours.value(setting, k, ood, m, metric) for k in keys for ood in sets) for m in methods]
    return [(number, reported.number(**paper, method=m)) for number, m in zip(mine, methods, strict=True)]


def rows_of(ours: Averages, label: str) -> list[Key]:
    """Our classifiers first, then those that only the paper has."""
    mine = ours.classifiers()
    theirs = [Key(r.network, r.in_distribution) for r in reported.find(label=label) if r.network != "average"]
    return [*mine, *(key for key in dict.fromkeys(theirs) if key.paper not in [k.paper for k in mine])]


def by_network(ours: Averages, label: str, name: str, columns: Cells, *notes: str) -> Table:
    """A table with a row for each classifier."""
    rows = [[str(key), *(cell(key) for cell in columns.values())] for key in rows_of(ours, label)]
    return Table(label, name, [NETWORK, *columns], rows, notes)


def averages(ours: Averages, setting: str, label: str) -> Table:
    """Means over OOD sets: Table 1, Table 2, and the grey box's."""
    rows, methods = [], reported.methods(label=label)
    for key in rows_of(ours, label):
        sets, theirs = ours.ood(setting, key, methods), {"label": label, "setting": setting, **key.paper}
        row = [str(key), str(len(sets)) if sets else MISSING]
        for metric in ("tnr", "auroc"):
            row += _pairs(_both(ours, [key], sets, methods, metric=metric, **theirs))
        rows.append(row)
    columns = [f"{name}, {METRICS[metric]}" for metric in ("tnr", "auroc") for name in _names(methods)]
    over = ", ".join(map(title, ours.ood(setting))) or "none"
    note = f"Ours: mean ± deviation over OOD sets ({over}); in parentheses the paper's, over its own sets."
    return Table(label, f"{setting}: averages", [NETWORK, "sets", *columns], rows, [note, *_how(ours, setting)])


def _how(ours: Averages, setting: str) -> list[str]:
    """How the setting was tuned, and on how many images."""
    cells = ours.of(setting)
    if not cells:
        return [f"Nothing of the {setting} was measured here."]
    how = HOW.get(setting) or HOW.get(ours.validation, NAMED)
    how = how.format(splits=len({c["seed"] for c in cells}), tuned=title(ours.validation))
    images = ", ".join(f"{title(ood)} {n:,}" for ood, n in {c["ood"]: c["ood_images"] for c in cells}.items())
    notes = [f"{how} Measured on {max(c['id_images'] for c in cells):,} in-distribution images; {images}."]
    if ours.left_out[setting]:
        notes.append(f"{ours.left_out[setting]} results of other options, or measured again, are not shown.")
    return notes


def extended(ours: Averages, label: str, what: str = "", also: str = "") -> list[Table]:
    """Each OOD set, for each metric and each of our classifiers; the paper's own where there is nothing of ours.

    Methods are those of the label, or of the label `also`. Trainings of one architecture are one in the table of seeds.
    """
    tables, methods = [], reported.methods(label=also or label)
    setting = next(r.setting for r in reported.find(label=label) if r.setting)
    metrics = [metric for metric in METRICS if reported.find(label=label, metric=metric)]
    groups: dict[Key, list[Key]] = {}
    for key in [k for k in ours.classifiers() if ours.of(setting, k)] or rows_of(Averages(), label):
        groups.setdefault(Key(**key.paper) if label == SEEDS else key, []).append(key)
    for key, trainings in groups.items():
        theirs = {"label": label, "setting": setting, **key.paper}
        printed = _printed("ood", **theirs)
        shared = [ood for ood in ours.ood(setting, key, methods) if ood in printed or not printed] or printed
        seeds = f"Trainings of ours: {sum(bool(k.weights) for k in trainings)}; the paper's are 5."
        notes = [*[seeds] * (label == SEEDS), *_how(ours, setting)]
        for metric in metrics:
            numbers = {
                ood: _both(ours, trainings, [ood], methods, metric=metric, ood=ood, **theirs)
                for ood in dict.fromkeys([*ours.ood(setting, key), *printed])
            }
            rows = [[title(ood), *_pairs(both)] for ood, both in numbers.items()]
            rows.append([f"mean, sets: {len(shared)}", *_common([numbers[ood] for ood in shared])])
            name = f"{what}{setting}: {key}: {METRICS[metric]}"
            tables.append(Table(label, name, ["OOD set", *_names(methods)], rows, notes))
    return tables


def _common(shared: Sequence[Pairs]) -> list[str]:
    """Means of each column over the OOD sets that both have; missing where one of them is."""
    cells = []
    for column in zip(*shared, strict=True):
        ours, theirs = (None if None in s else (fmean(n[0] for n in s if n), None) for s in zip(*column, strict=True))
        cells.append(pair(ours, theirs))
    return cells


def hyperparameters(ours: Averages) -> list[Table]:
    """Temperatures and steps that tuning chose."""
    label = "tab:best_hyperparameters"
    note = "Each cell: ours; the paper's. T, or (T, ε) with ε in pixel units. Ours in the white box has no input "
    note += "step, and on adversarial samples it keeps temperature 1."
    cells = {_names([column])[0]: partial(_chosen, ours, label, *column) for column in _columns(label)}
    return [by_network(ours, label, "hyper-parameters found", cells, note)]


def _chosen(ours: Averages, label: str, setting: str, method: str, key: Key) -> str:
    theirs = {r.metric: r.value for r in reported.find(label=label, setting=setting, method=method, **key.paper)}
    texts = []
    for record in (ours.tuning(setting, key, method) or {}, theirs):
        parts = [f"{record[k]:.4g}" for k in ("temperature", "epsilon") if record.get(k) is not None]
        texts.append("".join(parts[:1]) if setting == "black-box" else f"({', '.join(parts)})" if parts else "")
    return "; ".join(text or MISSING for text in texts[: 2 if theirs else 1])


def validation_choice(ours: Averages) -> list[Table]:
    """Mean TNR for each set to tune on."""
    label, rows = "tab:robust", []
    columns = _columns(label)
    note = "Mean TNR over the sets measured, without the one tuned on; the paper's over its eight others."
    for key in rows_of(ours, label):
        theirs, settings = {"label": label, **key.paper}, [setting for setting, _ in columns]
        sets = [c["validation"] for c in ours.cells if c["setting"] in settings and key.fits(c)]
        for validation in dict.fromkeys([*sets, *_printed("validation", **theirs)]):
            row = ["none: defaults" if validation == NO_VALIDATION else title(validation), str(key)]
            for setting, method in columns:
                tnr = [100 * c["tnr"] for c in ours.of(setting, key, validation) if c["method"] == method]
                number = reported.number(**theirs, validation=validation, setting=setting, method=method)
                row.append(pair((fmean(tnr), None) if tnr else None, number))
            rows.append(row)
    return [Table(label, "choice of the validation set", ["tuned on", NETWORK, *_names(columns)], rows, [note])]


def accuracy(ours: Averages) -> list[Table]:
    """Test accuracy by softmax and by the nearest centroid."""
    columns = {"accuracy": "softmax", "accuracy_fisher_rao": "Fisher–Rao"}
    shares = {n["weights"]: {**{m: 100 * n[m] for m in columns}, "images": n["test_images"]} for n in ours.networks}
    return [_of_networks(ours, "tab:model_accuracy", "accuracy", columns, shares)]


def adversarial(ours: Averages) -> list[Table]:
    """Size of the adversarial samples, and the accuracy that they leave."""
    columns = {"linf": "mean L∞, normalised", "adversarial_accuracy": "accuracy left"}
    methods = reported.methods(setting="white-box-fgsm")
    tuned = [ours.tuning("white-box-fgsm", key, method) for key in ours.classifiers() for method in methods]
    attacks = {t["weights"]: t["tuning"]["attack"] for t in tuned if t and t["tuning"]}
    values = {w: {**a, "adversarial_accuracy": 100 * a["accuracy"], "images": a["samples"]} for w, a in attacks.items()}
    return [_of_networks(ours, "tab:adversarial_table", "adversarial samples", columns, values)]


def _of_networks(ours: Averages, label: str, what: str, columns: dict[str, str], values: dict[str, Record]) -> Table:
    """A table of metrics of the networks themselves: values by their weights, and how many images these are of."""

    def cell(metric: str, key: Key) -> str:
        mine = (values[key.weights][metric], None) if key.weights in values else None
        return pair(mine, reported.number(label=label, metric=metric, **key.paper), "{:.2f}".format)

    cells = {name: partial(cell, metric) for metric, name in columns.items()}
    counts = {weights: f"{each['images']:,}" for weights, each in values.items()}
    return by_network(ours, label, what, {**cells, "images": lambda key: counts.get(key.weights, MISSING)})


def covariance(ours: Averages) -> list[Table]:
    """How Gaussian each layer is, and how well its covariance and the diagonal of it are conditioned."""
    label, rows = "sec:covariance", []
    note = "Ours is the ratio of the largest to the smallest eigenvalue; the paper's is in the infinity norm."
    header = [NETWORK, "layer", "channels", "mean W", "condition of the covariance", "of its diagonal", "dead channels"]
    for key, line in zip(ours.classifiers(), ours.networks, strict=True):
        for place, (layer, width) in enumerate(line["layers"], start=1):
            checks = line["diagnostics"][layer]
            row = [str(key), layer, str(width), f"{checks['shapiro_w']:.3f}"]
            for metric in ("condition_full", "condition_diagonal"):
                theirs = reported.number(label=label, metric=f"{metric}:{place}", **key.paper)
                row.append(pair((checks[metric], None), theirs, "{:.2g}".format))
            rows.append([*row, str(checks["dead"])])
    return [Table(label, "layers", header, rows, [note])] if rows else []


def _box(average: str, each: str, setting: str, ours: Averages) -> list[Table]:
    return [averages(ours, setting, average), *extended(ours, each, also=average)]


TABLES: dict[str, Callable[[Averages], list[Table]]] = {
    "black-box": partial(_box, "tab:black_box_avg", "tab:black_box_extended", "black-box"),
    "grey-box": partial(_box, "tab:grey_box_avg", "tab:grey_box_extended", "grey-box"),
    "white-box": partial(_box, "tab:white_box_avg", "tab:wb_ood_extended", "white-box"),
    "white-box-fgsm": partial(_box, "tab:white_box_avg", "tab:wb_adv_extended", "white-box-fgsm"),
    "kl": partial(extended, label="tab:kl", what="Fisher–Rao and KL, "),
    "hyperparameters": hyperparameters,
    "validation-choice": validation_choice,
    "seeds": partial(extended, label=SEEDS, what="training seeds, "),
    "accuracy": accuracy,
    "adversarial": adversarial,
    "others": lambda ours: [table for label in OTHERS for table in extended(ours, label, QUOTED)],
    "gaussianity": covariance,
}
