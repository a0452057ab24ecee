"""The paper's figures, drawn from a benchmark's folder: its scores, what was tuned, and the kept outputs."""

import math
from collections.abc import Callable, Iterator

from igeood.bench.figures.curves import tuning_curves
from igeood.bench.figures.drawing import Figure, look_of
from igeood.bench.figures.histograms import HistogramPanel, LayerPanel, layer_histograms, score_histograms
from igeood.bench.figures.histograms import gaussianity as draw_gaussianity
from igeood.bench.paper import reported, toy
from igeood.bench.paper.layers import LABEL, SHOWN, observed, rank, regressions
from igeood.bench.paper.networks import HEAD
from igeood.bench.runs.averages import Averages, Key, title
from igeood.bench.runs.plan import PAPER

Drawn = Iterator[tuple[str, Figure]]  # a file's stem, and what is in it


def histograms(ours: Averages) -> Drawn:
    """Scores of IGEOOD in every setting, with the threshold that keeps 95% of the in-distribution images."""
    for key in ours.classifiers():
        panels = []
        for setting in PAPER:
            *_, method = reported.values("method", setting=setting, ood="average", network="average")  # IGEOOD's
            cells = [c for c in ours.of(setting, key) if c["method"] == method and ours.kept(c).exists()]
            for cell in sorted(cells, key=lambda c: rank(c["ood"], SHOWN))[:1]:
                scores = ours.scores(cell)
                name = f"{setting}: {look_of(method).title}"
                foreign = {title(cell["ood"]): scores.arrays["ood"]}
                panels.append(HistogramPanel(name, scores.arrays["id"], foreign, scores.threshold))
        if panels:
            yield f"histograms-{_stem(key)}", score_histograms(panels)


def curves(ours: Averages) -> Drawn:
    """TNR against temperature and against the input step, on the validation set, of the paper's methods."""
    panels = []
    methods = reported.values("method", setting="grey-box")
    for key in ours.classifiers():
        for parameter, tried in ours.searches(key).items():
            searches = {method: search for method, search in tried.items() if method in methods}
            panels += [(str(key), parameter, searches)] if searches else []
    if panels:
        yield "curves", tuning_curves(panels)


def gaussianity(ours: Averages) -> Drawn:
    """The first channel of each layer against the normal density, and the layer's mean W."""
    for key, line, _, known, foreign in observed(ours, *SHOWN):
        panels = []
        for layer in (layer for layer, _ in line["layers"] if not layer.startswith(HEAD)):
            first, foreign_first = (outputs.features[layer][:, 0] for outputs in (known, foreign))
            w = line["diagnostics"][layer]["shapiro_w"]
            panels.append(LayerPanel(layer, first, foreign_first, math.nan if w is None else w))
        yield f"gaussianity-{_stem(key)}", draw_gaussianity(panels)


def layers(ours: Averages) -> Drawn:
    """Scores of each layer, and what the regression makes of them, for Mahalanobis and IGEOOD."""
    for key, _, rows in regressions(ours):
        theirs = {m: [r.value for r in reported.find(label=LABEL, method=m, **key.paper)] for m, *_ in rows}
        yield f"layers-{_stem(key)}", layer_histograms(rows, theirs)


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
