"""The paper's tables: our numbers with the paper's beside them, in parentheses; what is missing is shown as missing."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from igeood.benchmark.results import Record
from igeood.benchmark.summary import Key, Summary, title
from igeood.datasets import DATASETS
from igeood.figures import STYLE
from igeood.paper import reported

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
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """The table in Markdown."""
        what = reported.TABLES.get(self.label, "")
        told = f", where it is: {what[0].lower()}{what[1:]}" if what else "."
        lines = [f"### {self.title}", "", f"The paper's `{self.label}`{told}", ""]
        lines += ["| " + " | ".join(self.header) + " |", "|---|" + "---:|" * (len(self.header) - 1)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes), ""])


def method_title(name: str) -> str:
    """A method's name for tables."""
    return STYLE[name].title if name in STYLE else FOREIGN.get(name, name)


def pair(ours: float | None, theirs: float | None, form: str = ".1f") -> str:
    """Our number, and the paper's in parentheses where it has one."""
    first = MISSING if ours is None else f"{ours:{form}}"
    return first if theirs is None else f"{first} ({theirs:{form}})"


def _bold(cells: list[str], values: Sequence[float | None]) -> list[str]:
    """The cells with our best number in bold, unless all are the same."""
    printed = {f"{value:.1f}": value for value in values if value is not None}
    if len(printed) < 2:
        return cells
    best = max(printed, key=lambda text: printed[text])
    return [c.replace(best, f"**{best}**", 1) if c.split(" ")[0] == best else c for c in cells]


def rows_of(ours: Summary, label: str) -> list[Key]:
    """Our classifiers first, then those that only the paper has."""
    mine = ours.classifiers()
    theirs = [Key(r.network, r.in_distribution) for r in reported.find(label=label) if r.network != "average"]
    known = {(key.network, key.in_distribution) for key in mine}
    return [*mine, *(key for key in dict.fromkeys(theirs) if (key.network, key.in_distribution) not in known)]


def averages(ours: Summary, setting: str, label: str, methods: Sequence[str]) -> Table:
    """Means over OOD sets: Table 1, Table 2, and the grey box's."""
    rows = []
    for key in rows_of(ours, label):
        sets = ours.ood(setting, key, methods)
        row = [str(key), str(len(sets)) if sets else MISSING]
        for metric in ("tnr", "auroc"):
            values = [_mean([ours.value(setting, key, ood, method, metric) for ood in sets]) for method in methods]
            theirs = {"label": label, "setting": setting, "metric": metric, **key.paper}
            cells = [_spread(value, method=m, **theirs) for value, m in zip(values, methods, strict=True)]
            row += _bold(cells, [value and value[0] for value in values])
        rows.append(row)
    columns = [f"{method_title(m)}, {METRICS[metric]}" for metric in ("tnr", "auroc") for m in methods]
    over = ", ".join(map(title, ours.ood(setting))) or "none"
    note = f"Ours: mean ± deviation over OOD sets ({over}); in parentheses the paper's, over its own sets."
    header = ["network, in-distribution", "sets", *columns]
    return Table(label, f"{setting}: averages", header, rows, [note, *_how(ours, setting)])


def _mean(found: list[float | None]) -> tuple[float, float | None] | None:
    known = [value for value in found if value is not None]
    return (fmean(known), pstdev(known) if len(known) > 1 else None) if known else None


def _spread(ours: tuple[float, float | None] | None, **theirs: str) -> str:
    """Mean and deviation, where there is one; the paper's in parentheses."""
    paper = [(one.value, one.spread) for one in reported.find(**theirs)[:1]]
    first, *second = (
        MISSING if found is None else f"{found[0]:.1f}" + ("" if found[1] is None else f" ± {found[1]:.0f}")
        for found in (ours, *paper)
    )
    return f"{first} ({second[0]})" if second else first


def _how(ours: Summary, setting: str) -> list[str]:
    """How the setting was tuned, and on how many images."""
    cells = ours.of(setting)
    if not cells:
        return [f"Nothing of the {setting} was measured here."]
    tuned = {
        "white-box": "Tuned on 1,000 in-distribution images and 1,000 of the OOD set (half of a smaller one), "
        f"which are not measured on; means over {len({c['seed'] for c in cells})} splits.",
        "white-box-fgsm": "Tuned on adversarial images only; no OOD image is seen before the measurement.",
    }
    how = f"Temperature and step tuned on {title(ours.validation)}, which is not measured on, and on 1,000 "
    how += "in-distribution images (half of a smaller set), not measured on; the paper's on iSUN."
    if ours.validation == "none":
        how = "Not tuned: every method at its default temperature and step."
    counts = ", ".join(
        f"{title(ood)} {max(c['ood_images'] for c in cells if c['ood'] == ood):,}" for ood in ours.ood(setting)
    )
    images = f"Measured on {max(c['id_images'] for c in cells):,} in-distribution images; {counts}."
    notes = [f"{tuned.get(setting, how)} {images}"]
    more = Counter(c["validation"] for c in ours.cells if c["setting"] == setting and c not in cells)
    if more:
        told = ", ".join(f"{'not tuned' if name == 'none' else title(name)} ({n})" for name, n in more.items())
        notes.append(f"Also in the results, by what they were tuned on: {told}; `--validation` shows them.")
    if ours.left_out[setting]:
        notes.append(f"{ours.left_out[setting]} results of other options, or measured again, are not shown.")
    return notes


def extended(
    ours: Summary, setting: str, label: str, methods: Sequence[str], metrics: Iterable[str] = METRICS, what: str = ""
) -> list[Table]:
    """Each OOD set, for each metric and each of our classifiers; the paper's own where there is nothing of ours."""
    tables = []
    mine = [key for key in ours.classifiers() if ours.of(setting, key)]
    for key in mine or rows_of(Summary(), label):
        theirs = {"label": label, "setting": setting, **key.paper}
        printed = list(dict.fromkeys(r.ood for r in reported.find(**theirs) if r.ood != "average"))
        both = [o for o in ours.ood(setting, key, methods) if o in printed or not printed] if key.weights else printed
        sets = list(dict.fromkeys([*ours.ood(setting, key), *printed]))
        for metric in metrics:
            rows, shared = [], []
            for ood in sets:
                values = [ours.value(setting, key, ood, m, metric) for m in methods]
                paper = [reported.first(**theirs, ood=ood, method=m, metric=metric) for m in methods]
                rows.append([title(ood), *_bold([pair(v, p) for v, p in zip(values, paper, strict=True)], values)])
                if ood in both:
                    shared.append((values, paper))
            rows.append(_common(shared, len(methods)))
            header = ["OOD set", *map(method_title, methods)]
            name = f"{what or setting}: {key}: {METRICS[metric]}"
            tables.append(Table(label, name, header, rows, _how(ours, setting) if key.weights else ()))
    return tables


def _common(shared: list[tuple[list[float | None], list[float | None]]], columns: int) -> list[str]:
    """Means over the OOD sets that both have; over all of ours where the paper has none."""
    cells = []
    for i in range(columns):
        known, printed = ([v for both in shared if (v := both[side][i]) is not None] for side in (0, 1))
        theirs = fmean(printed) if printed and len(printed) == len(shared) else None
        cells.append(pair(fmean(known) if known else None, theirs))
    return [f"mean, sets: {len(shared)}", *cells]


def hyperparameters(ours: Summary) -> list[Table]:
    """Temperatures and steps that were found."""
    label = "tab:best_hyperparameters"
    columns = [("black-box", m) for m in LOGITS[1:]] + [("grey-box", m) for m in LOGITS[1:]]
    columns += [("white-box-fgsm", m) for m in WHITE]
    rows = []
    for key in rows_of(ours, label):
        row = [str(key)]
        for setting, method in columns:
            found = {r.metric: r.value for r in reported.find(label=label, setting=setting, method=method, **key.paper)}
            first, second = (_found(r, setting) for r in (ours.tuning(setting, key, method), found))
            row.append(f"{first}; {second}" if found else first)
        rows.append(row)
    header = ["network, in-distribution", *(f"{s}: {method_title(m)}" for s, m in columns)]
    note = "Each cell: ours; the paper's. T, or (T, ε) with ε in pixel units. Ours in the white box has no input "
    note += "step, and on adversarial samples it keeps temperature 1."
    return [Table(label, "hyper-parameters found", header, rows, [note])]


def _found(record: Record | None, setting: str) -> str:
    if not record:
        return MISSING
    parts = [f"{record[k]:.4g}" for k in ("temperature", "epsilon") if record.get(k) is not None]
    return parts[0] if setting == "black-box" else f"({', '.join(parts)})"


def validation_choice(ours: Summary) -> list[Table]:
    """Mean TNR for each set to tune on."""
    label, tables = "tab:robust", []
    columns = [("black-box", m) for m in LOGITS] + [("grey-box", m) for m in LOGITS[1:]]
    for key in rows_of(ours, label):
        mine = [
            c["validation"] for s in ("black-box", "grey-box") for c in ours.cells if c["setting"] == s and key.fits(c)
        ]
        theirs = [r.validation for r in reported.find(label=label, **key.paper) if r.validation != "average"]
        rows = []
        for validation in dict.fromkeys([*mine, *theirs]):
            row = ["none: defaults" if validation == "none" else title(validation)]
            for setting, method in columns:
                found = [c["tnr"] for c in ours.of(setting, key, validation) if c["method"] == method]
                asked = {"label": label, "validation": validation, "setting": setting, "method": method, **key.paper}
                row.append(pair(100 * fmean(found) if found else None, reported.first(**asked)))
            rows.append(row)
        header = ["tuned on", *(f"{s}: {method_title(m)}" for s, m in columns)]
        note = "Mean TNR over the sets measured, without the one tuned on; the paper's over its eight others."
        tables.append(Table(label, f"choice of the validation set: {key}", header, rows, [note]))
    return tables


def seeds(ours: Summary) -> list[Table]:
    """Mean and deviation over trainings of one architecture."""
    label, tables = "tab:seed_model_error", []
    kinds = [Key(k.network, k.in_distribution) for k in rows_of(ours, label)]
    for kind in dict.fromkeys(kinds):
        trainings = [k for k in ours.classifiers() if k.paper == kind.paper and ours.of("black-box", k)]
        theirs = {"label": label, **kind.paper}
        sets = [ood for key in trainings for ood in ours.ood("black-box", key)]
        sets += [r.ood for r in reported.find(**theirs) if r.ood in DATASETS]
        for metric in ("tnr", "auroc"):
            rows = []
            for ood in dict.fromkeys(sets):
                row = [title(ood)]
                for method in LOGITS:
                    mine = _mean([ours.value("black-box", key, ood, method, metric) for key in trainings])
                    row.append(_spread(mine, **theirs, ood=ood, method=method, metric=metric))
                rows.append(row)
            note = f"Trainings of ours: {len(trainings)}; the paper's mean ± deviation is over 5."
            header = ["OOD set", *map(method_title, LOGITS)]
            tables.append(Table(label, f"training seeds: {kind}: {METRICS[metric]}", header, rows, [note]))
    return tables


def accuracy(ours: Summary) -> list[Table]:
    """Test accuracy by softmax and by the nearest centroid."""
    columns = {"accuracy": "softmax", "accuracy_fisher_rao": "Fisher–Rao"}
    return [_of_networks(ours, "tab:model_accuracy", "accuracy", columns, ours.networks)]


def adversarial(ours: Summary) -> list[Table]:
    """Size of the adversarial samples, and the accuracy that they leave."""
    columns = {"linf": "mean L∞, normalised", "adversarial_accuracy": "accuracy left"}
    tuned = [ours.tuning("white-box-fgsm", key, method) for key in ours.classifiers() for method in WHITE]
    names = {"linf": "linf", "adversarial_accuracy": "accuracy", "test_images": "samples"}
    found = [{"weights": t["weights"], **{k: t["attack"][v] for k, v in names.items()}} for t in tuned if t]
    return [_of_networks(ours, "tab:adversarial_table", "adversarial samples", columns, found)]


def _of_networks(ours: Summary, label: str, what: str, columns: dict[str, str], records: list[Record]) -> Table:
    rows = []
    for key in rows_of(ours, label):
        row = [str(key)]
        for metric in columns:
            factor = 1 if metric == "linf" else 100
            mine = [factor * r[metric] for r in records if key.weights == r["weights"]]
            theirs = reported.first(label=label, metric=metric, **key.paper)
            row.append(pair(mine[-1] if mine else None, theirs, ".2f"))
        counts = [r["test_images"] for r in records if key.weights == r["weights"]]
        rows.append([*row, f"{counts[-1]:,}" if counts else MISSING])
    return Table(label, what, ["network, in-distribution", *columns.values(), "images"], rows)


def others(ours: Summary) -> list[Table]:
    """Other white-box methods, whose numbers are quoted as the paper reports them."""
    tables = []
    for label, setting, names in (
        ("tab:other_comparisons", "white-box", ("res-flow",)),
        ("tab:other_comparisons_adv", "white-box-fgsm", ("gram-matrix", "deconf-c", "res-flow")),
    ):
        rows, methods = [], (*names, *WHITE)
        for key in rows_of(ours, label):
            theirs = {"label": label, "metric": "tnr", **key.paper}
            printed = [r.ood for r in reported.find(**theirs) if r.ood != "average"]
            for ood in dict.fromkeys([*ours.ood(setting, key), *printed]):
                paper = (reported.first(**theirs, ood=ood, method=m) for m in methods)
                mine = (ours.value(setting, key, ood, m, "tnr") for m in methods)
                rows.append([str(key), title(ood), *(pair(v, p) for v, p in zip(mine, paper, strict=True))])
        header = ["network, in-distribution", "OOD set", *map(method_title, methods)]
        quoted = ", ".join(map(method_title, names))
        note = (
            f"In parentheses as the paper reports them; {quoted} and Mahalanobis there are quoted from their authors."
        )
        tables.append(Table(label, f"other white-box methods, {setting}: {METRICS['tnr']}", header, rows, [note]))
    return tables


def covariance(ours: Summary) -> list[Table]:
    """How Gaussian each layer is, and how well its covariance and the diagonal of it are conditioned."""
    tables = []
    for key, line in zip(ours.classifiers(), ours.networks, strict=True):
        rows = []
        for place, (layer, width) in enumerate(line["layers"], start=1):
            found = line["diagnostics"][layer]
            conditions = [
                pair(found[m], reported.first(label="sec:covariance", metric=f"{m}:{place}", **key.paper), ".2g")
                for m in ("condition_full", "condition_diagonal")
            ]
            rows.append([layer, str(width), f"{found['shapiro_w']:.3f}", *conditions, str(found["dead"])])
        header = ["layer", "channels", "mean W", "condition of the covariance", "of its diagonal", "dead channels"]
        note = "Ours is the ratio of the largest to the smallest eigenvalue; the paper's is in the infinity norm."
        tables.append(Table("sec:covariance", f"layers of {key}", header, rows, [note]))
    return tables


def _box(setting: str, average: str, each: str, methods: Sequence[str]) -> Callable[[Summary], list[Table]]:
    return lambda ours: [averages(ours, setting, average, methods), *extended(ours, setting, each, methods)]


TABLES: dict[str, Callable[[Summary], list[Table]]] = {
    "black-box": _box("black-box", "tab:black_box_avg", "tab:black_box_extended", LOGITS),
    "grey-box": _box("grey-box", "tab:grey_box_avg", "tab:grey_box_extended", LOGITS[1:]),
    "white-box": _box("white-box", "tab:white_box_avg", "tab:wb_ood_extended", WHITE),
    "white-box-fgsm": _box("white-box-fgsm", "tab:white_box_avg", "tab:wb_adv_extended", WHITE),
    "kl": lambda o: extended(o, "black-box", "tab:kl", KL, ("tnr",), "Fisher–Rao and KL, black-box"),
    "hyperparameters": hyperparameters,
    "validation-choice": validation_choice,
    "seeds": seeds,
    "accuracy": accuracy,
    "adversarial": adversarial,
    "others": others,
}
