"""The paper's tables: our numbers with the paper's beside them, in parentheses; what is missing is shown as missing."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from igeood.bench.figures.drawing import look_of
from igeood.bench.paper import reported
from igeood.bench.paper.networks import accuracy, adversarial, covariance, hyperparameters
from igeood.bench.paper.reported import Number
from igeood.bench.paper.table import MISSING, NETWORK, Table, mean, needed, pair, rows_of, tenths, titles
from igeood.bench.runs.averages import METRICS, Averages, Key, one_each, printed_name, title
from igeood.bench.runs.plan import NO_VALIDATION, TUNED_ON
from igeood.bench.runs.results import Record

Pairs = list[tuple[Number, Number]]  # ours and the paper's
HOW = {  # by setting, or what the others are tuned on
    "white-box": "Tuned on up to 1,000 images of each kind, which are not measured on; means over splits: {splits}.",
    "white-box-fgsm": "Tuned on adversarial images only; no OOD image is seen before the measurement.",
    NO_VALIDATION: "Not tuned: every method at its default temperature and step.",
}
NAMED = "Tuned on {tuned} (the paper's on iSUN) and on up to 1,000 in-distribution images, which are not measured on."
QUOTED = "other methods, quoted from their authors, "
COPIES = "Averages count a set once. Of its copies they take the literature's resized one, else the one resized by the "
COPIES += "nearest pixel, else the smooth one: the paper's copies are aliased."
OVERALL = "Ours: the mean over networks that are the paper's, where each method was run on all of them, two at least."
SEEDS = "tab:seed_model_error"
OTHERS = ("tab:other_comparisons", "tab:other_comparisons_adv")
NO_OOD = {"gram": "untuned", "deconf-c": "grey-box"}  # no OOD sample is used by them: where their results are
LENT = "Ours of {} use no OOD sample: they were measured in the setting {}, on {:,} in-distribution images."


def _both(ours: Averages, keys: Sequence[Key], sets: Sequence[str], methods: Sequence[str], /, **paper: str) -> Pairs:
    """Of each method, our mean over classifiers and all of the OOD sets, and the paper's number with these fields."""
    pairs = []
    for method in methods:
        values = [[ours.value(paper["setting"], k, ood, method, paper["metric"]) for k in keys] for ood in sets]
        whole = all(any(value is not None for value in of_set) for of_set in values)
        mine = mean(value for of_set in values for value in of_set) if whole else None
        pairs.append((mine, reported.number(**paper, method=method)))
    return pairs


def _pairs(numbers: Pairs) -> list[str]:
    """Cells of one row from our numbers and the paper's, our best in bold unless all are the same."""
    cells = [pair(*both) for both in numbers]
    printed = {f"{ours[0]:.1f}": ours[0] for ours, _ in numbers if ours}
    best = max(printed, key=lambda text: printed[text]) if len(printed) > 1 else ""
    return [f"**{best}**{cell.removeprefix(best)}" if best and cell.split(" ")[0] == best else cell for cell in cells]


def averages(ours: Averages, setting: str, label: str) -> Table:
    """Means over OOD sets: Table 1, Table 2, and the grey box's; the last row is the mean over classifiers."""
    rows = []
    methods = reported.values("method", label=label)
    keys = rows_of(ours, label)
    for key in keys:
        sets = one_each(ours.ood(setting, key, methods))
        theirs = {"label": label, "setting": setting, **key.paper}
        row = [str(key), str(len(sets)) if sets else MISSING]
        for metric in ("tnr", "auroc"):
            row += _pairs(_both(ours, [key], sets, methods, metric=metric, **theirs))
        rows.append(row)
    overall = [_over_networks(ours, label, setting, methods, metric) for metric in ("tnr", "auroc")]
    rows.append(["average", "", *overall[0], *overall[1]])
    columns = [f"{name}, {METRICS[metric]}" for metric in ("tnr", "auroc") for name in titles(methods)]
    over = ", ".join(map(title, one_each(ours.ood(setting)))) or "none"
    note = f"Ours: mean ± deviation over OOD sets ({over}); in parentheses the paper's, over its own sets."
    cells = [cell for cell in ours.of(setting) if cell["method"] in methods]
    notes = [note, *_how(ours, setting, cells), *_copies(ours.ood(setting)), *needed(k for k in keys if not k.weights)]
    return Table(label, f"{setting}: averages", [NETWORK, "sets", *columns], rows, notes)


def _over_networks(ours: Averages, label: str, setting: str, methods: Sequence[str], metric: str) -> list[str]:
    """Of each method the mean over networks, ours and the paper's: ours if all methods have several that it has too."""
    paper = {"setting": setting, "metric": metric, "label": label}
    keys = [key for key in ours.classifiers() if reported.find(**paper, **key.paper)]
    oods = [one_each(ours.ood(setting, key, methods)) for key in keys]
    each = [_both(ours, [key], sets, methods, **paper) for key, sets in zip(keys, oods, strict=True)]
    mine = [[ours and ours[0] for ours, _ in column] for column in zip(*each, strict=True)] or [[]] * len(methods)
    run = [values for values in mine if any(value is not None for value in values)]
    alike = len({(key.network, key.in_distribution) for key in keys}) > 1 and all(None not in values for values in run)
    theirs = [reported.number(**paper, network="average", method=method) for method in methods]
    return [pair(mean(values) if alike else None, number) for values, number in zip(mine, theirs, strict=True)]


def _copies(sets: Sequence[str]) -> list[str]:
    """The note on copies of one set, where there are several, or one that is not the paper's."""
    return [COPIES] if [printed_name(name) for name in sets] != sets else []


def _how(ours: Averages, setting: str, cells: Sequence[Record]) -> list[str]:
    """How the setting was tuned, and on how many images and splits these cells were measured."""
    cells = [cell for cell in cells if "lent" not in cell]
    if not cells:
        return [f"Nothing of the {setting} was measured here: empty cells need `igeood bench --setting {setting}`."]
    how = HOW.get(setting) or HOW.get(ours.validation, NAMED)
    splits = Counter(place for place, _ in {((c["weights"], c["method"], c["ood"]), c["seed"]) for c in cells})
    how = how.format(splits=_or(splits.values()), tuned=title(ours.validation))
    images = {c["ood"]: _or(other["ood_images"] for other in cells if other["ood"] == c["ood"]) for c in cells}
    each = ", ".join(f"{title(ood)} {n}" for ood, n in images.items())
    notes = [f"{how} Measured on {_or(c['id_images'] for c in cells)} in-distribution images; {each}."]
    left = sum(ours.left_out[setting, weights] for weights in {c["weights"] for c in cells})
    if left:
        notes.append(f"{left} results of other options, or measured again, are not shown.")
    return notes


def _or(counts: Iterable[int]) -> str:
    """The numbers that occur."""
    return " or ".join(f"{n:,}" for n in sorted({*counts}))


def extended(ours: Averages, label: str, what: str = "", also: str = "") -> list[Table]:
    """Each OOD set, for each metric and each classifier, ours and the paper's.

    Methods are those of the label, or of the label `also`. Trainings of one architecture are one in the table of seeds.
    """
    tables = []
    methods = reported.values("method", label=also or label)
    setting = next(r.setting for r in reported.find(label=label) if r.setting)
    ours = _lent(ours, setting, methods) if label in OTHERS else ours
    metrics = [metric for metric in METRICS if reported.find(label=label, metric=metric)]
    groups: dict[Key, list[Key]] = {}
    for key in rows_of(ours, label):
        if {c["method"] for c in ours.of(setting, key)} & {*methods} or reported.find(label=label, **key.paper):
            groups.setdefault(Key(**key.paper) if label == SEEDS else key, []).append(key)
    for key, trainings in groups.items():
        theirs = {"label": label, "setting": setting, **key.paper}
        for metric in metrics if trainings[0].weights else ():
            rows = _set_rows(ours, trainings, methods, metric=metric, **theirs)
            notes = _set_notes(ours, trainings, methods, **theirs)
            name = f"{what}{setting}: {key}: {METRICS[metric]}"
            tables.append(Table(label, name, ["OOD set", *titles(methods)], rows, notes))
    absent = [key for key, trainings in groups.items() if not trainings[0].weights]
    if absent:
        printed = [{"label": label, "setting": setting, **key.paper} for key in absent]
        rows = [row for paper in printed for row in _printed_rows(methods, metrics, **paper)]
        name = f"{what}{setting}: {' / '.join(METRICS[m] for m in metrics)} of networks that are not here"
        notes = [*needed(absent), *(_how(ours, setting, []) if not ours.of(setting) else [])]
        tables.append(Table(label, name, [NETWORK, "OOD set", *titles(methods)], rows, notes))
    if reported.find(label=label, network="average"):
        rows = [[METRICS[metric], *_over_networks(ours, label, setting, methods, metric)] for metric in metrics]
        name = f"{what}{setting}: average over networks"
        tables.append(Table(label, name, ["metric", *titles(methods)], rows, [OVERALL]))
    return tables


def _printed_rows(methods: Sequence[str], metrics: Sequence[str], /, **paper: str) -> list[list[str]]:
    """What the paper alone has of a classifier: a row for each OOD set, all metrics in one cell."""
    key = Key(paper["network"], paper["in_distribution"])
    rows = []
    for ood in dict.fromkeys(r.ood for r in reported.find(**paper)):
        row = [str(key), title(ood)]
        printed = {(r.method, r.metric): r for r in reported.find(**paper, ood=ood)}
        for method in methods:
            numbers = [printed[method, metric] for metric in metrics if (method, metric) in printed]
            texts = [pair((number.value, number.spread), None, tenths) for number in numbers]
            row.append(f"{MISSING} ({' / '.join(texts)})" if texts else MISSING)
        rows.append(row)
    return rows


def _set_rows(ours: Averages, keys: Sequence[Key], methods: Sequence[str], /, **paper: str) -> list[list[str]]:
    """A row for each OOD set, copies of one set side by side; then means over the sets that both have, and averages."""
    setting = paper["setting"]
    printed = reported.values("ood", **paper)
    own = {m: dict.fromkeys(c["ood"] for k in keys for c in ours.of(setting, k) if c["method"] == m) for m in methods}
    every = {ood: None for key in keys for ood in ours.ood(setting, key, methods)}
    measured = {ood: None for sets in own.values() for ood in sets}
    order = list(dict.fromkeys([*map(printed_name, measured), *printed]))
    missing = [ood for ood in printed if ood not in map(printed_name, measured)]
    numbers = {
        ood: _both(ours, keys, [ood], methods, ood=printed_name(ood), **paper)
        for ood in sorted([*measured, *missing], key=lambda ood: order.index(printed_name(ood)))
    }
    rows = [[title(ood), *_pairs(both)] for ood, both in numbers.items()]
    shared = [ood for ood in one_each(list(every)) if printed_name(ood) in printed or not printed]
    if shared:
        rows.append([f"mean, sets: {len(shared)}", *_common([numbers[ood] for ood in shared])])
    if reported.find(**paper, ood="average"):
        both = [_both(ours, keys, one_each(list(sets)), [m], ood="average", **paper)[0] for m, sets in own.items()]
        rows.append(["average, each over its own sets", *(pair(*numbers) for numbers in both)])
    return rows


def _set_notes(ours: Averages, keys: Sequence[Key], methods: Sequence[str], /, **paper: str) -> list[str]:
    """How a table by OOD sets was made, and what it lacks."""
    setting = paper["setting"]
    cells = [cell for key in keys for cell in ours.of(setting, key) if cell["method"] in methods]
    notes = [f"Trainings of ours: {len(keys)}; the paper's are 5."] if paper["label"] == SEEDS else []
    notes += _how(ours, setting, cells)
    run, measured = ({cell[name]: None for cell in cells} for name in ("method", "ood"))
    lent = {c["method"]: c["id_images"] for c in cells if "lent" in c}
    missing = [ood for ood in reported.values("ood", **paper) if ood not in map(printed_name, measured)]
    notes += [LENT.format(look_of(method).title, NO_OOD[method], n) for method, n in lent.items()]
    notes += _copies([*measured])
    return notes + (needed(sets=missing, methods=[m for m in methods if m not in run]) if cells else [])


def _lent(ours: Averages, setting: str, methods: Sequence[str]) -> Averages:
    """The results, where methods that use no OOD sample have a place in this setting too."""
    other = copy.copy(ours)
    missing = [m for m in NO_OOD if m in methods and m not in {cell["method"] for cell in ours.of(setting)}]
    cells = [c for c in ours.cells if c["method"] in missing and c["setting"] == NO_OOD[c["method"]]]
    there = {(c["weights"], c["method"], c["ood"]): c for c in cells}.values()
    lent = [{**cell, "setting": setting, "validation": TUNED_ON[setting][0], "lent": True} for cell in there]
    other.cells = [*ours.cells, *lent]
    return other


def _common(shared: Sequence[Pairs]) -> list[str]:
    """Means of each column over the OOD sets that both have; missing where one of them is."""
    cells = []
    for column in zip(*shared, strict=True):
        ours, theirs = (_whole([number and number[0] for number in side]) for side in zip(*column, strict=True))
        cells.append(pair(ours, theirs))
    return cells


def _whole(values: Sequence[float | None]) -> Number:
    """The mean if all values are known."""
    known = [value for value in values if value is not None]
    return (round(fmean(known), 1), None) if known and len(known) == len(values) else None


def validation_choice(ours: Averages) -> list[Table]:
    """Mean TNR for each set to tune on; the last row of a network is the mean over these sets."""
    label = "tab:robust"
    rows = []
    absent: dict[str, None] = {}
    columns = reported.columns(label)
    names = {NO_VALIDATION: "none: defaults", "average": "average"}
    note = "Mean TNR over the sets measured, without the one tuned on; the paper's over its eight others."
    for key in rows_of(ours, label):
        theirs = {"label": label, **key.paper}
        tuned_on = dict.fromkeys(c["validation"] for c in ours.cells if c["setting"] in dict(columns) and key.fits(c))
        mine = {name: [_tuned_on(ours, key, name, *column) for column in columns] for name in tuned_on}
        named = [numbers for name, numbers in mine.items() if name != NO_VALIDATION]
        printed = [name for name in reported.values("validation", **theirs) if name not in map(printed_name, mine)]
        absent |= dict.fromkeys(printed)
        mine["average"] = [mean(number and number[0] for number in column) for column in zip(*named, strict=True)]
        for name in [*tuned_on, *printed, "average"]:
            of = {"validation": printed_name(name), **theirs}
            paper = [reported.number(**of, setting=setting, method=method) for setting, method in columns]
            rows.append([names.get(name) or title(name), str(key)])
            rows[-1] += map(pair, mine.get(name) or [None] * len(columns), paper)
    untried = ", ".join(map(title, absent))
    notes = [note, f"Empty cells need the sets to tune on, `--validation`: {untried}."] if untried else [note]
    return [Table(label, "choice of the validation set", ["tuned on", NETWORK, *titles(columns)], rows, notes)]


def _tuned_on(ours: Averages, key: Key, validation: str, setting: str, method: str) -> Number:
    """Our mean TNR over OOD sets that are no copy of the one tuned on."""
    cells = [cell for cell in ours.of(setting, key, validation) if cell["method"] == method]
    sets = one_each([c["ood"] for c in cells if printed_name(c["ood"]) != printed_name(validation)])
    tnr = mean(100 * cell["tnr"] for cell in cells if cell["ood"] in sets)
    return tnr and (tnr[0], None)


def seeds(ours: Averages) -> list[Table]:
    """Several trainings of one network: detection, and their accuracy."""
    rows = []
    for key in dict.fromkeys(Key(**key.paper) for key in rows_of(ours, SEEDS)):
        mine = mean(100 * line["accuracy"] for line in ours.networks if key.fits(line))
        paper = reported.number(label=SEEDS, metric="accuracy", **key.paper)
        rows.append([str(key), pair(mine, paper, "{:.2f}".format)])
    table = Table(SEEDS, "training seeds: test accuracy", [NETWORK, "softmax"], rows)
    return [*extended(ours, SEEDS, "training seeds, "), table]


def variants(
    ours: Averages, name: str, method: str, labels: Mapping[str, str], forms: Mapping[str, Record]
) -> list[Table]:
    """One method in several forms, a row each, on every OOD set; the paper's own numbers are the last row."""
    tables = []
    for setting, label in labels.items():
        for key in ours.classifiers() or rows_of(ours, label)[:1]:
            every = {form: _cells_of(ours, form, method, forms[form], setting, key) for form in forms}
            run = [{c["seed"] for c in cells} for cells in every.values() if cells]
            cells = {form: [c for c in cells if all(c["seed"] in s for s in run)] for form, cells in every.items()}
            if run or reported.find(label=label, **key.paper):
                table = _forms(label, f"{name}: {setting}: {key}: {METRICS['tnr']}", method, setting, key, cells)
                how = _how(ours, setting, [c for each in cells.values() for c in each])
                tables.append(replace(table, notes=[*how, *table.notes]))
    return tables


def _cells_of(ours: Averages, form: str, method: str, options: Record, setting: str, key: Key) -> list[Record]:
    """Cells of a form: those of its own method where it has one, else those of the method with these options."""
    own = [cell for cell in ours.of(setting, key) if cell["method"] == OWN_METHODS.get(form)]
    return own or [cell for cell in ours.variant(**options).of(setting, key) if cell["method"] == method]


def _forms(label: str, name: str, method: str, setting: str, key: Key, cells: Mapping[str, Sequence[Record]]) -> Table:
    """One method on one classifier: TNR by the cells of each form, means over splits, and the paper's."""
    theirs = {"setting": setting, "method": method, "metric": "tnr", **key.paper}
    measured = dict.fromkeys(c["ood"] for each in cells.values() for c in each)
    sets = list(measured) or reported.values("ood", label=label, **key.paper)
    tnr = {form: {o: mean(100 * c["tnr"] for c in each if c["ood"] == o) for o in sets} for form, each in cells.items()}
    tnr["the paper's"] = {
        ood: reported.number(label=label, ood=printed_name(ood), **theirs)
        or reported.number(ood=printed_name(ood), **theirs)
        for ood in sets
    }
    rows = [[form, *_with_mean({o: n and n[0] for o, n in numbers.items()})] for form, numbers in tnr.items()]
    absent = "; ".join(form for form, each in cells.items() if not each)
    notes = _copies(sets) + ([f"Empty cells need results of: {absent}."] if absent else [])
    return Table(label, name, [look_of(method).title, *map(title, sets), "mean"], rows, notes)


def _with_mean(values: Mapping[str, float | None]) -> list[str]:
    """Cells of numbers by OOD set, and their mean over sets if all are there; copies of a set count once."""
    whole = _whole([values[ood] for ood in one_each(list(values))])
    return [*(pair(mean([value]), None) for value in values.values()), pair(whole, None)]


def _box(average: str, each: str, setting: str, ours: Averages) -> list[Table]:
    return [averages(ours, setting, average), *extended(ours, each, also=average)]


WHITE = {"white-box": "tab:wb_ood_extended", "white-box-fgsm": "tab:wb_adv_extended"}
READINGS: dict[str, Record] = {
    "as printed": {},
    "σ′ on both sides": {"ood_sigma": "both"},
    "means for each predicted class": {"ood_sigma": "both", "ood_means": "predicted"},
}
CENTROIDS: dict[str, Record] = {
    "centroids at T, T by a sweep": {},
    "centroids at T = 1": {"centroid_temperature": 1.0},
    "centroids by SGD": {"solver": "sgd"},
    "T by Bayesian search": {"search": "bayes"},
}
OWN_METHODS = {"centroids by SGD": "igeood-logits-sgd"}  # forms that were options in older records
TABLES: dict[str, Callable[[Averages], list[Table]]] = {
    "black-box": partial(_box, "tab:black_box_avg", "tab:black_box_extended", "black-box"),
    "grey-box": partial(_box, "tab:grey_box_avg", "tab:grey_box_extended", "grey-box"),
    "white-box": partial(_box, "tab:white_box_avg", WHITE["white-box"], "white-box"),
    "white-box-fgsm": partial(_box, "tab:white_box_avg", WHITE["white-box-fgsm"], "white-box-fgsm"),
    "equation-12": partial(variants, name="Eq. 12 in three readings", method="igeood+", labels=WHITE, forms=READINGS),
    "centroids": partial(
        variants,
        name="centroids and search",
        method="igeood-logits",
        labels={"black-box": "tab:black_box_extended"},
        forms=CENTROIDS,
    ),
    "kl": partial(extended, label="tab:kl", what="Fisher–Rao and KL, "),
    "hyperparameters": hyperparameters,
    "validation-choice": validation_choice,
    "seeds": seeds,
    "accuracy": accuracy,
    "adversarial": adversarial,
    "others": lambda ours: [table for label in OTHERS for table in extended(ours, label, QUOTED)],
    "gaussianity": covariance,
}
