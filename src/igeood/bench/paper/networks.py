"""The paper's tables of the networks themselves: what tuning chose, accuracies, and how Gaussian the layers are."""

import math
from functools import partial

from igeood.bench.paper import reported
from igeood.bench.paper.table import MISSING, NETWORK, Table, by_network, needed, pair, rows_of, titles
from igeood.bench.runs.averages import Averages, Key
from igeood.bench.runs.results import Record

HEAD = "fc."  # parts of a classifier's head, such as DeConf-C's, which are no layers


def hyperparameters(ours: Averages) -> list[Table]:
    """Temperatures and steps that tuning chose."""
    label = "tab:best_hyperparameters"
    note = "Each cell: ours; the paper's. T, or (T, ε) with ε in pixel units. Ours in the white box has no input step "
    note += "here (the table of input steps has it), and on adversarial samples it keeps temperature 1."
    cells = {titles([column])[0]: partial(_chosen, ours, label, *column) for column in reported.columns(label)}
    return [by_network(ours, label, "hyper-parameters found", cells, note)]


def _chosen(ours: Averages, label: str, setting: str, method: str, key: Key) -> str:
    theirs = {r.metric: r.value for r in reported.find(label=label, setting=setting, method=method, **key.paper)}
    texts = []
    for record in (ours.tuning(setting, key, method) or {}, theirs):
        parts = [f"{record[k]:.4g}" for k in ("temperature", "epsilon") if record.get(k) is not None]
        texts.append("".join(parts[:1]) if setting == "black-box" else f"({', '.join(parts)})" if parts else "")
    return "; ".join(text or MISSING for text in texts[: 2 if theirs else 1])


def accuracy(ours: Averages) -> list[Table]:
    """Test accuracy by softmax and by the nearest centroid."""
    columns = {"accuracy": "softmax", "accuracy_fisher_rao": "Fisher–Rao"}
    shares = {n["weights"]: {**{m: 100 * n[m] for m in columns}, "images": n["test_images"]} for n in ours.networks}
    return [_of_networks(ours, "tab:model_accuracy", "accuracy", columns, shares)]


def adversarial(ours: Averages) -> list[Table]:
    """Size of the adversarial samples, and the accuracy that they leave."""
    columns = {"linf": "mean L∞, normalised", "adversarial_accuracy": "accuracy left"}
    methods = reported.values("method", setting="white-box-fgsm")
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
    label = "sec:covariance"
    rows = []
    lines = {line["weights"]: line for line in ours.networks}
    note = "W is Shapiro–Wilk's of each class and channel, averaged. A row is dominant if its diagonal exceeds the sum "
    note += "of the others' absolute values, the usual definition; or the sum of the others with their signs, as the "
    note += "paper writes, which says that most rows are. The paper's condition numbers are in the infinity norm. "
    note += "Singular: channels depend linearly on each other, or are dead."
    header = [NETWORK, "layer", "channels", "mean W", "dominant rows", "dominant, signed sum"]
    header += ["condition of the covariance, 2-norm", "infinity norm", "of its diagonal, either norm", "dead channels"]
    shares = {"shapiro_w": "{:.3f}", "dominant": "{:.0%}", "dominant_signed": "{:.0%}"}
    conditions = {"condition_full": "", "condition_infinity": "condition_full"}  # by ours, the paper's
    conditions["condition_diagonal"] = "condition_diagonal"
    keys = rows_of(ours, label)
    for key in keys:
        line = lines.get(key.weights, {"layers": [[f"{i}", MISSING] for i in range(1, 5)], "diagnostics": {}})
        layers = [(layer, width) for layer, width in line["layers"] if not layer.startswith(HEAD)]
        for place, (layer, width) in enumerate(layers, start=1):
            checks = line["diagnostics"].get(layer, {})
            theirs = [reported.number(label=label, metric=f"{c}:{place}", **key.paper) for c in conditions.values()]
            if checks or any(theirs):
                known = {name: checks[name] for name in shares if checks.get(name) is not None}
                row = [text.format(known[name]) if name in known else MISSING for name, text in shares.items()]
                mine = [(checks[name] or math.inf, None) if checks else None for name in conditions]  # None: not finite
                row += [pair(*both, _condition) for both in zip(mine, theirs, strict=True)]
                rows.append([str(key), layer, str(width), *row, str(checks.get("dead", MISSING))])
    return [Table(label, "layers", header, rows, [note, *needed(key for key in keys if not key.weights)])]


def _condition(number: float) -> str:
    return f"{number:.2g}" if math.isfinite(number) else "singular"
