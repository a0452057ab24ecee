"""The white box with the paper's input steps, and what tuning saw of each size."""

from igeood.bench.figures.drawing import look_of
from igeood.bench.paper import reported
from igeood.bench.paper.table import MISSING, NETWORK, Table, pair
from igeood.bench.paper.tables import WHITE
from igeood.bench.runs.averages import Averages, printed_name, title

LABEL = "tab:best_hyperparameters"
NOTE = "Mahalanobis has a step for each layer, IGEOOD and IGEOOD+ one on FR₀. T and ε are chosen on validation images; "
NOTE += "on adversarial ones T stays 1. The last columns are the TNR on these validation images with a step of each "
NOTE += "size ε, 0 being none, at the best T that was tried. No other result without a step is of the same images."


def input_steps(ours: Averages) -> list[Table]:
    """TNR with the step that was chosen, the paper's, and on the validation images the TNR with each size."""
    rows = []
    tried: list[dict[float, float]] = []
    for key in ours.classifiers():
        for setting, label in WHITE.items():
            for cell in ours.of(f"{setting}-step", key):
                asked = {name: cell[name] for name in ("weights", "setting", "method", "seed", "limit")}
                tunings = (ours.results.tunings.find({**asked, "ood": ood}) for ood in (cell["ood"], ""))
                tuning = next((found["tuning"] for found in tunings if found), {"steps": [], "n_ood": MISSING})
                tried.append({s["epsilon"]: s["tnr"] for s in sorted(tuning["steps"], key=lambda s: s["tnr"])})
                theirs = {"setting": setting, "method": cell["method"], "ood": printed_name(cell["ood"])}
                theirs |= {"metric": "tnr", **key.paper}
                number = reported.number(label=label, **theirs) or reported.number(**theirs)
                chosen = [f"{cell[name]:g}" for name in ("temperature", "epsilon") if cell[name] is not None]
                place = [str(key), setting, look_of(cell["method"]).title, title(cell["ood"]), ", ".join(chosen)]
                rows.append([*place, f"{cell['id_images']:,}", pair((100 * cell["tnr"], None), number)])
                rows[-1].append(str(tuning["n_ood"]))
    sizes = sorted({size for each in tried for size in each})
    for row, each in zip(rows, tried, strict=True):
        row += [f"{100 * each[size]:.1f}" if size in each else MISSING for size in sizes]
    header = [NETWORK, "setting", "method", "OOD set", "T, ε", "images", "TNR as tuned", "validation images"]
    missing = "Sizes need `igeood bench --setting white-box-step --setting white-box-fgsm-step`, and its tunings.jsonl."
    notes = [NOTE] if sizes else [NOTE, missing]
    return [Table(LABEL, "white box with input steps", [*header, *(f"ε = {s:g}" for s in sizes)], rows, notes)]
