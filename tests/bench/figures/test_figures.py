"""Figures: what they show are the numbers, and files are repeatable."""

import sys

import numpy as np
import pytest

from igeood.bench.figures.curves import threshold_curves, tuning_curves
from igeood.bench.figures.drawing import save
from igeood.bench.figures.histograms import HistogramPanel, score_histograms
from igeood.metrics import aupr, auroc

RANDOM = np.random.default_rng(0)
KNOWN, FOREIGN = RANDOM.normal(0, 1, 400), RANDOM.normal(3, 1, 300)
T = np.geomspace(1, 1000, 31)[RANDOM.permutation(31)]
CURVES = {m: (T, 0.5 - 0.1 * (np.log10(T) - i) ** 2, 10.0**i) for i, m in enumerate(["odin", "energy"])}
SCORES = {"energy": (KNOWN, FOREIGN), "igeood+": (KNOWN, FOREIGN + 1), "msp": ([1, 2, 2], [2, 3])}
FIGURES = {
    "scores": lambda: score_histograms([HistogramPanel("Energy", KNOWN, {"SVHN": FOREIGN}, 1.5)] * 2),
    "curves": lambda: tuning_curves([("DenseNet", "temperature", CURVES)]),
}


@pytest.mark.parametrize(("name", "suffix"), [("scores", ".png"), ("curves", ".svg")])
def test_files_are_the_same_bytes_each_time_without_pyplot(name, tmp_path, monkeypatch, suffix):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    for stem in "ab":
        save(FIGURES[name](), tmp_path / f"{stem}{suffix}")
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


@pytest.mark.parametrize("method", SCORES)
def test_areas_below_the_curves_are_auroc_and_aupr(method):
    scores = SCORES[method]
    x, y = threshold_curves("ROC", {method: scores}).axes[0].lines[0].get_data()
    assert np.trapezoid(y, x) == pytest.approx(auroc(*scores), abs=0.005)  # some 200 points of many
    few = [each[:60] for each in scores]
    recall, precision = threshold_curves("precision–recall", {method: few}).axes[0].lines[0].get_data()
    assert (np.diff(recall, prepend=0.0) * precision).sum() == pytest.approx(aupr(*few))
