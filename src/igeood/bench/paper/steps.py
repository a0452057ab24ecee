"""The white box with the paper's input steps, beside the same without a step."""

from igeood.bench.figures.drawing import look_of
from igeood.bench.paper import reported
from igeood.bench.paper.table import NETWORK, Table, pair
from igeood.bench.runs.averages import Averages, printed_name, title

LABEL = "tab:best_hyperparameters"
NOTE = "Mahalanobis has a step for each layer, IGEOOD and IGEOOD+ one on FR₀. T and ε are chosen on validation images; "
NOTE += "on adversarial ones T stays 1. With a step fewer images are measured on, and one split."


def input_steps(ours: Averages) -> list[Table]:
    """TNR with the step that was chosen, without one, and the paper's."""
    rows = []
    for key in ours.classifiers():
        for setting in ("white-box", "white-box-fgsm"):
            for cell in ours.of(f"{setting}-step", key):
                method, ood = cell["method"], cell["ood"]
                mine = ours.value(setting, key, ood, method, "tnr")
                place = {"setting": setting, "method": method, "ood": printed_name(ood), "metric": "tnr"}
                chosen = [f"{cell[name]:g}" for name in ("temperature", "epsilon") if cell[name] is not None]
                row = [
                    str(key),
                    setting,
                    look_of(method).title,
                    title(ood),
                    ", ".join(chosen),
                    f"{cell['id_images']:,}",
                ]
                row.append(pair((100 * cell["tnr"], None), reported.number(**place, **key.paper)))
                rows.append([*row, pair(None if mine is None else (mine, None), None)])
    header = [NETWORK, "setting", "method", "OOD set", "T, ε", "images", "TNR with the step", "without"]
    missing = "Empty cells need `igeood bench --setting white-box-step --setting white-box-fgsm-step`."
    return [Table(LABEL, "white box with input steps", header, rows, [NOTE, *[missing] * (not rows)])]
