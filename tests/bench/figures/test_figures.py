"""Figures: what they show, that letters stay legible and inside, and that files are repeatable."""

import sys

import numpy as np
import pytest

from igeood.bench.figures import curves, histograms
from igeood.bench.figures.curves import threshold_curves, tuning_curves
from igeood.bench.figures.drawing import ID_COLOUR, NARROW, OOD_LABEL, ood_colours, save
from igeood.bench.figures.histograms import HistogramPanel, LayerPanel, layer_histograms, score_histograms
from igeood.metrics import aupr, auroc

RANDOM = np.random.default_rng(0)
KNOWN, FOREIGN = RANDOM.normal(0, 1, 400), RANDOM.normal(3, 1, 300)
T, EPSILON = np.geomspace(1, 1000, 31), np.linspace(0, 0.004, 21)
METHODS = ["odin", "energy", "igeood-logits"]
CURVES = {m: (T, 0.5 - 0.1 * (np.log10(T) - i) ** 2, 10.0**i) for i, m in enumerate(METHODS)}
STEPS = dict.fromkeys(["odin", "igeood-logits"], (EPSILON, 0.5 - 1e4 * (EPSILON - 0.001) ** 2, 0.001))
SCORES = {"energy": (KNOWN, FOREIGN), "igeood+": (KNOWN, FOREIGN + 1), "msp": ([1, 2, 2], [2, 3])}


def row(method, n=3):
    panels = [LayerPanel(f"block{i}", KNOWN, FOREIGN, 0.5) for i in range(n)]
    return method, [*panels, LayerPanel("regression", KNOWN, FOREIGN, 0.951)], [1.0, -3.6, -0.13]


WIDE = {
    "scores": lambda: score_histograms([HistogramPanel("Energy", KNOWN, {"SVHN": FOREIGN}, 1.5)] * 2),
    "curves": lambda: tuning_curves([("DenseNet", "temperature", CURVES), ("ResNet", "epsilon", STEPS)]),
    "gaussianity": lambda: histograms.gaussianity([LayerPanel("conv0", KNOWN, FOREIGN, 0.987)] * 2),
    "layers": lambda: layer_histograms([row("mahalanobis", 1), row("igeood", 4)]),
}
PHONE = {
    "scores": lambda: score_histograms([HistogramPanel("", KNOWN, {OOD_LABEL: FOREIGN}, 1.5)], NARROW),
    "roc": lambda: threshold_curves("ROC", SCORES),
    "precision–recall": lambda: threshold_curves("precision–recall", SCORES),
    "temperature": lambda: tuning_curves([("", "temperature", CURVES)], NARROW),
    "contributions": lambda: curves.contributions(["output", "a $5_ layer"], [0.1, -2.0], [3.0, 1.0]),
}


def axes_of(figure):
    return figure.axes or [axes for part in figure.subfigs for axes in part.axes]


def patch(axes, name):
    handles, names = axes.get_legend_handles_labels()
    return handles[names.index(name)]


@pytest.mark.parametrize("name", WIDE)
def test_every_axis_is_labelled_every_letter_large_enough_and_nothing_overlaps(name):
    figure = WIDE[name]()
    figure.draw_without_rendering()
    for axes in axes_of(figure):
        assert axes.get_ylabel()
        assert axes.get_title()
        assert axes.get_xlabel() or figure.get_supxlabel()
        texts = [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts, *axes.get_xticklabels()]
        assert min(text.get_fontsize() for text in texts) >= 8
    boxes = [legend.get_window_extent() for legend in figure.legends]
    boxes += [axes.title.get_window_extent() for axes in axes_of(figure)]
    page = figure.bbox.padded(1.0)
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])
        assert page.x0 <= box.x0 < box.x1 <= page.x1


@pytest.mark.parametrize("name", PHONE)
def test_narrow_figures_keep_their_letters_inside(name):
    figure = PHONE[name]()
    figure.draw_without_rendering()
    drawn = figure.get_tightbbox()  # inches
    assert min(drawn.x0, drawn.y0) >= 0
    assert drawn.x1 <= figure.get_figwidth() == NARROW
    assert drawn.y1 <= figure.get_figheight()


@pytest.mark.parametrize(("name", "suffix"), [("scores", ".png"), ("layers", ".svg")])
def test_files_are_the_same_bytes_each_time_without_pyplot(name, tmp_path, monkeypatch, suffix):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    figure = WIDE[name]()
    for stem, drawn in (("a", figure), ("b", figure), ("c", WIDE[name]())):
        save(drawn, tmp_path / f"{stem}{suffix}")
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_densities_have_mass_one_and_outliers_and_the_threshold_are_shown():
    sets = {"calm": KNOWN, "wild": np.append(KNOWN, 1e6), "constant": np.full(30, 2.0), "one": [0.0]}
    figure = score_histograms([HistogramPanel(name, x, {"SVHN": x}, -40.0) for name, x in sets.items()])
    axes = dict(zip(sets, figure.axes, strict=True))
    for name in ("calm", "constant", "one"):
        for label in ("SVHN", "in-distribution"):
            values, edges, _ = patch(axes[name], label).get_data()
            assert float((values * np.diff(edges)).sum()) == pytest.approx(1.0)
    assert axes["wild"].get_xlim()[1] < 20
    assert axes["wild"].get_xlabel() != axes["calm"].get_xlabel()  # it says that the axis is cut
    assert list(patch(axes["calm"], "threshold δ").get_xdata()) == [-40.0, -40.0]
    assert axes["calm"].get_xlim()[0] <= -40.0


def test_sets_have_colours_of_their_own():
    names = ["mine", "TinyImageNet", "yours", "SVHN", "CIFAR-10", "LSUN"]
    assert len({*ood_colours(names).values(), ID_COLOUR}) == len(names) + 1
    assert ood_colours(names)["LSUN"] == ood_colours(["lsun"])["lsun"]


def test_curves_mark_the_choice():
    order = RANDOM.permutation(len(T))
    shuffled = {method: (x[order], y[order], chosen) for method, (x, y, chosen) in CURVES.items()}
    (axes,) = tuning_curves([("DenseNet", "temperature", shuffled)]).axes
    for line, (*_, chosen) in zip(axes.lines, CURVES.values(), strict=True):
        assert line.get_xdata()[line.get_markevery()[0]] == pytest.approx(chosen)
        assert (np.diff(line.get_xdata()) > 0).all()


@pytest.mark.parametrize("method", SCORES)
def test_areas_below_the_curves_are_auroc_and_aupr(method):
    scores = SCORES[method]
    x, y = threshold_curves("ROC", {method: scores}).axes[0].lines[0].get_data()
    assert (x[0], y[0], x[-1], y[-1]) == (0, 0, 1, 1)
    assert np.trapezoid(y, x) == pytest.approx(auroc(*scores), abs=0.005)  # some 200 points of many
    few = [each[:60] for each in scores]
    recall, precision = threshold_curves("precision–recall", {method: few}).axes[0].lines[0].get_data()
    assert (np.diff(recall, prepend=0.0) * precision).sum() == pytest.approx(aupr(*few))
