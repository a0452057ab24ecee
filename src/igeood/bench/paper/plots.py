"""The paper's figures, drawn from a benchmark's folder: its scores, what was tuned, and the kept outputs."""

from collections.abc import Callable, Iterator

import torch

from igeood.bench.figures.curves import tuning_curves
from igeood.bench.figures.drawing import Figure, look_of
from igeood.bench.figures.histograms import HistogramPanel, LayerPanel, LayerRow, layer_histograms, score_histograms
from igeood.bench.figures.histograms import gaussianity as draw_gaussianity
from igeood.bench.paper import reported, toy
from igeood.bench.runs.averages import Averages, Key, title
from igeood.bench.runs.cells import halves
from igeood.bench.runs.observing import recall
from igeood.bench.runs.plan import PAPER, TPR
from igeood.bench.runs.results import Record
from igeood.detectors import detector
from igeood.metrics import tnr_at_tpr
from igeood.outputs import Outputs

SHOWN = "tiny-imagenet"  # the OOD set of the paper's histograms
Drawn = Iterator[tuple[str, Figure]]  # a file's stem, and what is in it


def histograms(ours: Averages) -> Drawn:
    """Scores of IGEOOD in every setting, with the threshold that keeps 95% of the in-distribution images."""
    for key in ours.classifiers():
        panels = []
        for setting in PAPER:
            method = reported.methods(setting=setting, ood="average", network="average")[-1]  # IGEOOD's column is last
            cells = [c for c in ours.of(setting, key) if c["method"] == method]
            for cell in sorted(cells, key=lambda c: c["ood"] != SHOWN)[:1]:
                scores, name = ours.scores(cell), f"{setting}: {look_of(method).title}"
                foreign = {title(cell["ood"]): scores.arrays["ood"]}
                panels.append(HistogramPanel(name, scores.arrays["id"], foreign, scores.threshold))
        if panels:
            yield f"histograms-{_stem(key)}", score_histograms(panels)


def curves(ours: Averages) -> Drawn:
    """TNR against temperature and against the input step, on the validation set, of the paper's methods."""
    panels, methods = [], reported.methods(setting="grey-box")
    for key in ours.classifiers():
        for parameter, tried in ours.searches(key).items():
            searches = {method: search for method, search in tried.items() if method in methods}
            panels += [(str(key), parameter, searches)] if searches else []
    if panels:
        yield "curves", tuning_curves(panels)


def gaussianity(ours: Averages) -> Drawn:
    """The first channel of each layer against the normal density, and the layer's mean W."""
    for key, line, known, foreign in _observed(ours):
        panels = [
            LayerPanel(layer, known.features[layer][:, 0], foreign.features[layer][:, 0], checks["shapiro_w"])
            for layer, checks in line["diagnostics"].items()
        ]
        yield f"gaussianity-{_stem(key)}", draw_gaussianity(panels)


def layers(ours: Averages) -> Drawn:
    """Scores of each layer, and what the regression makes of them, for Mahalanobis and IGEOOD."""
    for key, line, known, foreign in _observed(ours):
        train, methods = kept(ours, line, "train"), reported.methods(label="fig:hist_maha_fr")
        if train is not None:
            yield f"layers-{_stem(key)}", layer_histograms([_row(m, train, known, foreign) for m in methods])


def _row(method: str, train: Outputs, known: Outputs, foreign: Outputs) -> LayerRow:
    """Half of the images to learn the weights from, at most 1,000; the others are shown."""
    scorer = detector(method).fit(train)
    parts = ([outputs[torch.from_numpy(rows)] for rows in halves(len(outputs), 0)] for outputs in (known, foreign))
    (learn_id, show_id), (learn_ood, show_ood) = parts
    scorer.learn_weights(learn_id, learn_ood, tpr=TPR, seed=0)
    weights = scorer.state()["weights_"]
    shares = [torch.as_tensor(scorer.contributions(outputs)) for outputs in (show_id, show_ood)]  # (N, P) each
    columns = [torch.column_stack([share / weights, share.sum(dim=1)]).numpy().T for share in shares]  # the score last
    triples = zip([*scorer.columns_, "regression"], *columns, strict=True)
    return method, [LayerPanel(name, a, b, tnr_at_tpr(a, b)) for name, a, b in triples], weights.tolist()


def kept(ours: Averages, line: Record, part: str) -> Outputs | None:
    """Outputs of the images whose digest a record has, from the benchmark's folder."""
    return recall(ours.results.folder / "outputs", weights=line["weights"], images=line["data"][part])


def _observed(ours: Averages) -> Iterator[tuple[Key, Record, Outputs, Outputs]]:
    """Classifiers with their outputs of the test images, and of the OOD set that the paper shows, or the first."""
    for key, line in zip(ours.classifiers(), ours.networks, strict=True):
        cells = [c for setting in PAPER for c in ours.of(setting, key) if c["data"]["test"] == line["data"]["test"]]
        for cell in sorted(cells, key=lambda cell: cell["ood"] != SHOWN)[:1]:
            known, foreign = kept(ours, line, "test"), kept(ours, cell, "ood")
            if known is not None and foreign is not None:
                yield key, line, known, foreign


def _stem(key: Key) -> str:
    name = f"{key.network}-{title(key.in_distribution)}-{key.weights if key.file else ''}".lower()
    return "".join(c if c.isalnum() else "-" for c in name).strip("-")


FIGURES: dict[str, Callable[[Averages], Drawn]] = {
    "toy": lambda _: iter([("toy", toy.figure(toy.toy()))]),  # needs no results
    "histograms": histograms,
    "curves": curves,
    "gaussianity": gaussianity,
    "layers": layers,
}
