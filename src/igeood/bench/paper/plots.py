"""The paper's figures, drawn from a benchmark's folder: its scores, what was tuned, and the kept outputs."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from igeood import figures, storage
from igeood.benchmark.observing import recall
from igeood.benchmark.results import Record
from igeood.benchmark.summary import Key, Summary, title
from igeood.calibration import threshold
from igeood.detectors import Detector, Ensemble, detector
from igeood.figures import Curve, CurvePanel, GaussianPanel, HistogramPanel, LayerPanel, LayerRow, Values
from igeood.metrics import tnr_at_tpr
from igeood.outputs import Outputs
from igeood.paper import toy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = "tiny-imagenet"  # the OOD set of the paper's histograms
BOXES = {"black-box": "igeood-logits", "grey-box": "igeood-logits", "white-box-fgsm": "igeood", "white-box": "igeood+"}
Drawn = Iterator[tuple[str, "Figure"]]  # a file's stem, and what is in it


def histograms(ours: Summary) -> Drawn:
    """Scores of IGEOOD in every setting, with the threshold that keeps 95% of the in-distribution images."""
    for key in ours.classifiers():
        panels = []
        for setting, method in BOXES.items():
            cells = [c for c in ours.of(setting, key) if c["method"] == method]
            if not cells:
                continue
            cell = next((c for c in cells if c["ood"] == SHOWN), cells[0])
            assert ours.results is not None  # noqa: S101 (there are cells; this tells the type checker)
            _, scores = storage.read(ours.results.folder / "scores" / cell["scores"], "scores")
            name, at = f"{setting}: {figures.STYLE[method].title}", float(threshold(scores["id"], tpr=cell["tpr"]))
            panels.append(HistogramPanel(name, scores["id"].numpy(), {title(cell["ood"]): scores["ood"].numpy()}, at))
        if panels:
            yield f"histograms-{_stem(key)}", figures.score_histograms(panels)


def curves(ours: Summary) -> Drawn:
    """TNR against temperature and against the input step, on the validation set."""
    panels = []
    for key in ours.classifiers():
        found = [{m: Curve(*tried) for m, tried in methods.items()} for methods in ours.searches(key).values()]
        if any(found):
            panels.append(CurvePanel(str(key), *found))
    if panels:
        yield "curves", figures.tuning_curves(panels)


def gaussianity(ours: Summary) -> Drawn:
    """The first channel of each layer against the normal density, and the layer's mean W."""
    for key, line in zip(ours.classifiers(), ours.networks, strict=True):
        inside, outside = kept(ours, line, "test"), _foreign(ours, key, line)
        if inside is None or outside is None:
            continue
        panels = []
        for layer in inside.features:
            known, foreign = (outputs.features[layer][:, 0].double().numpy() for outputs in (inside, outside))
            panels.append(GaussianPanel(layer, known, foreign, line["diagnostics"][layer]["shapiro_w"]))
        yield f"gaussianity-{_stem(key)}", figures.gaussianity(panels)


def layers(ours: Summary) -> Drawn:
    """Scores of each layer, and what the regression makes of them, for Mahalanobis and IGEOOD."""
    for key, line in zip(ours.classifiers(), ours.networks, strict=True):
        train, inside = (kept(ours, line, part) for part in ("train", "test"))
        outside = _foreign(ours, key, line)
        if train is None or inside is None or outside is None:
            continue
        rows = [_layer_row(method, train, inside, outside) for method in ("mahalanobis", "igeood")]
        yield f"layers-{_stem(key)}", figures.layer_histograms(rows)


def _layer_row(method: str, train: Outputs, inside: Outputs, outside: Outputs) -> LayerRow:
    """Half of the images to learn the weights from, at most 1,000; the others are shown."""
    made: Detector = detector(method).fit(train)
    assert isinstance(made, Ensemble)  # noqa: S101 (both methods are; this tells the type checker)
    learn_id, show_id = _split(inside)
    learn_ood, show_ood = _split(outside)
    made.fit_weights(learn_id, learn_ood)
    shown = [_columns(made, outputs) for outputs in (show_id, show_ood)]  # (N, P + 1) each
    names = [*made.columns_, "regression"]
    panels = [LayerPanel(n, a, b, tnr_at_tpr(a, b)) for n, a, b in zip(names, *(s.T for s in shown), strict=True)]
    return LayerRow(method, panels[:-1], panels[-1], made.weights_.tolist())


def _columns(made: Ensemble, outputs: Outputs) -> Values:
    """The scores that the regression reads, and last its own."""
    parts = [made.features_.layer_scores(outputs), made.score(outputs)]
    if made.output_ is not None:
        parts.insert(0, made.output_.score(outputs))
    return np.column_stack([np.asarray(part) for part in parts])


def _split(outputs: Outputs) -> tuple[Outputs, Outputs]:
    order = torch.randperm(len(outputs), generator=torch.Generator().manual_seed(0))
    size = min(1000, len(outputs) // 2)
    return outputs[order[:size]], outputs[order[size:]]


def kept(ours: Summary, line: Record, part: str) -> Outputs | None:
    """A network's outputs of its in-distribution images, from the benchmark's folder."""
    return _recall(ours, line["weights"], line["data"][part])


def _foreign(ours: Summary, key: Key, line: Record) -> Outputs | None:
    """Its outputs of the OOD set that the paper shows, or of the first that there is."""
    cells = [
        cell for setting in BOXES for cell in ours.of(setting, key) if cell["data"]["test"] == line["data"]["test"]
    ]
    cells.sort(key=lambda cell: cell["ood"] != SHOWN)
    digests = dict.fromkeys(cell["data"]["ood"] for cell in cells)
    return next((found for d in digests if (found := _recall(ours, line["weights"], d)) is not None), None)


def _recall(ours: Summary, weights: str, digest: str) -> Outputs | None:
    return None if ours.results is None else recall(ours.results.folder / "outputs", weights=weights, images=digest)


def _stem(key: Key) -> str:
    name = f"{key.network}-{title(key.in_distribution)}-{key.weights if key.file else ''}".lower()
    return "".join(c if c.isalnum() else "-" for c in name).strip("-")


FIGURES: dict[str, Callable[[Summary], Drawn]] = {
    "toy": lambda _: iter([("toy", toy.figure(toy.toy()))]),  # needs no results
    "histograms": histograms,
    "curves": curves,
    "gaussianity": gaussianity,
    "layers": layers,
}
