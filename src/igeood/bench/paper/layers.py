"""Layer by layer, from the kept outputs: weights that the regression learns, and minimum against sum over classes."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from igeood.bench.figures.drawing import look_of
from igeood.bench.figures.histograms import LayerPanel, LayerRow
from igeood.bench.paper import reported
from igeood.bench.paper.table import MISSING, NETWORK, Table, pair, rows_of
from igeood.bench.runs.averages import METRICS, Averages, Key, title
from igeood.bench.runs.cells import halves
from igeood.bench.runs.observing import recall
from igeood.bench.runs.plan import PAPER, TPR
from igeood.bench.runs.results import Record
from igeood.detectors import detector
from igeood.detectors.gaussians import IgeoodFeatures
from igeood.geometry import gaussian
from igeood.metrics import tnr_at_tpr
from igeood.outputs import Outputs

LABEL = "fig:hist_maha_fr"
OUTPUT = "output"
SHOWN = ("tiny-imagenet-resized", "tiny-imagenet-nearest", "tiny-imagenet")  # the paper's: the first that is there
Observed = tuple[Key, Record, str, Outputs, Outputs]  # with the OOD set, and outputs of both kinds


def kept(ours: Averages, line: Record, part: str) -> Outputs | None:
    """Outputs of the images whose digest a record has, from the benchmark's folder."""
    return recall(ours.results.folder / "outputs", weights=line["weights"], images=line["data"][part])


def rank(ood: str, wanted: Sequence[str]) -> int:
    """The place of an OOD set among those wanted; others come after them."""
    return wanted.index(ood) if ood in wanted else len(wanted)


def observed(ours: Averages, *wanted: str) -> Iterator[Observed]:
    """Classifiers with their outputs of the test images, and of the first OOD set of those wanted, or else any."""
    for key, line in zip(ours.classifiers(), ours.networks, strict=True):
        yield from list(_foreign(ours, key, line, wanted))[:1]


def _foreign(ours: Averages, key: Key, line: Record, wanted: tuple[str, ...] = ()) -> Iterator[Observed]:
    """Outputs of the test images, and of each OOD set that was kept, the wanted first."""
    cells = [c for setting in PAPER for c in ours.of(setting, key) if c["data"]["test"] == line["data"]["test"]]
    sets = {c["ood"]: c for c in cells}
    known = kept(ours, line, "test") if sets else None
    for ood in sorted(sets, key=lambda ood: rank(ood, wanted)):
        foreign = kept(ours, sets[ood], "ood")
        if known is not None and foreign is not None:
            yield key, line, ood, known, foreign


@lru_cache(maxsize=1)
def regressions(ours: Averages) -> list[tuple[Key, str, list[LayerRow]]]:
    """Scores of each layer and what the regression makes of them; SVHN as in the paper, where it was measured."""
    rows = []
    for key, line, ood, known, foreign in observed(ours, "svhn", *SHOWN):
        train = kept(ours, line, "train")
        methods = reported.values("method", label=LABEL)
        if train is not None:
            rows.append((key, ood, [_row(method, train, known, foreign) for method in methods]))
    return rows


def _row(method: str, train: Outputs, known: Outputs, foreign: Outputs) -> LayerRow:
    """Half of the images to learn the weights from, at most 1,000; the others are shown."""
    scorer = detector(method).fit(train)
    parts = ([outputs[torch.from_numpy(rows)] for rows in halves(len(outputs), 0)] for outputs in (known, foreign))
    (learn_id, show_id), (learn_ood, show_ood) = parts
    scorer.learn_weights(learn_id, learn_ood, tpr=TPR, seed=0)
    weights = scorer.state()["weights_"]
    shares = [scorer.terms(outputs) for outputs in (show_id, show_ood)]  # (N, P) each
    columns = [torch.column_stack([share / weights, share.sum(dim=1)]).numpy().T for share in shares]  # the score last
    triples = zip([*scorer.term_names, "regression"], *columns, strict=True)
    return method, [LayerPanel(name, a, b, tnr_at_tpr(a, b)) for name, a, b in triples], weights.tolist()


def weights(ours: Averages) -> list[Table]:
    """The regression's weight of each layer, for Mahalanobis and IGEOOD; the paper has the last three layers'."""
    methods = reported.values("method", label=LABEL)
    rows = []
    learnt = {key: (ood, lines) for key, ood, lines in regressions(ours)}
    for key in rows_of(ours, LABEL):
        ood, lines = learnt.get(key, ("", []))
        alphas = {m: dict(zip([p.layer for p in panels[:-1]], alpha, strict=True)) for m, panels, alpha in lines}
        layers = list(dict.fromkeys(name for alpha in alphas.values() for name in alpha))
        if not layers and reported.find(label=LABEL, **key.paper):
            layers = ["1", "2", "3"]
        layers.sort(key=OUTPUT.__ne__)  # it comes first; the last three are the paper's
        for place, layer in enumerate(layers, start=4 - len(layers)):
            row = [str(key), title(ood) if ood else MISSING, layer]
            for method in methods:
                theirs = reported.number(label=LABEL, method=method, metric=f"weight:{place}", **key.paper)
                mine = alphas.get(method, {}).get(layer)
                row.append(pair(None if mine is None else (mine, None), theirs, "{:.2g}".format))
            rows.append(row)
    note = "Ours multiply standardised scores, higher being more OOD; IGEOOD has the output as well. "
    note += "The paper's are of three blocks without the output, on SVHN, in units that it does not say."
    needs = [] if learnt else ["Empty cells need a benchmark's folder with kept outputs, of SVHN as in the paper."]
    header = [NETWORK, "OOD set", "layer", *(f"α, {look_of(method).title}" for method in methods)]
    return [Table(LABEL, "weights of layers", header, rows, [note, *needs])]


def reduction(ours: Averages) -> list[Table]:
    """TNR of FR on each layer by the minimum over classes (Eq. 11), and by the sum."""
    note = "All test images. Both grow with the distance: unlike that of the output, the sum is not negated. The "
    note += "paper has no numbers; it says that the sum did not improve results."
    tables = []
    for key, line in zip(ours.classifiers(), ours.networks, strict=True):
        train = kept(ours, line, "train")
        if train is None:
            continue
        scorer = IgeoodFeatures().fit(train)
        rows = []
        inside: dict[str, Tensor] = {}
        for _, _, ood, known, foreign in _foreign(ours, key, line):
            inside = inside or _reduced(scorer, known)
            outside = _reduced(scorer, foreign)
            rows.append([title(ood), *(f"{100 * tnr_at_tpr(inside[name], outside[name], TPR):.1f}" for name in inside)])
        if rows:
            name = f"minimum and sum over classes: {key}: {METRICS['tnr']}"
            tables.append(Table("eq:fr_score_layer", name, ["OOD set", *inside], rows, [note]))
    return tables


def _reduced(scorer: IgeoodFeatures, outputs: Outputs) -> dict[str, Tensor]:
    """Scores (N,) of each layer by minimum and by sum, by the name of the column."""
    columns = {}
    least = scorer.terms(outputs)
    for i, layer in enumerate(scorer.term_names):
        x = outputs.features[layer].double()
        std = scorer.std_[layer]
        columns[f"{layer}: minimum"] = least[:, i]
        columns[f"{layer}: sum"] = torch.stack([gaussian.distance(x, std, m, std) for m in scorer.mean_[layer]]).sum(0)
    return columns
