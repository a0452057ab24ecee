"""Figures: what they show and say, that colours are the same everywhere, and that files are whole and repeatable."""

import sys

import numpy as np
import pytest
from matplotlib.colors import to_hex

from igeood import figures
from igeood.detectors import METHODS
from igeood.errors import InputError, MissingExtraError
from igeood.figures import NARROW, Curve, CurvePanel, GaussianPanel, HistogramPanel, LayerPanel, LayerRow
from igeood.metrics import aupr, auroc

RANDOM = np.random.default_rng(0)
INSIDE, OUTSIDE = RANDOM.normal(0, 1, 400), RANDOM.normal(3, 1, 300)
T, EPSILON = np.geomspace(1, 1000, 30), np.linspace(0, 0.004, 21)
CURVES = {m: (T, 0.5 - 0.1 * (np.log10(T) - i) ** 2) for i, m in enumerate(["odin", "energy", "igeood-logits"])}
STEPS = dict.fromkeys(["odin", "igeood-logits"], (EPSILON, 0.5 - 1e4 * (EPSILON - 0.001) ** 2))


def _layers(n):
    return [LayerPanel(f"block{i}", INSIDE, OUTSIDE, 0.5) for i in range(n)]


def _row(method, n=3):
    return LayerRow(method, _layers(n), LayerPanel("Regression", INSIDE, OUTSIDE, 0.951), [1.0, -3.6, -0.13])


FIGURES = {
    "scores": lambda: figures.score_histograms([HistogramPanel("Energy", INSIDE, {"SVHN": OUTSIDE}, 1.5)] * 2),
    "curves": lambda: figures.tuning_curves([CurvePanel("DenseNet", CURVES, STEPS), CurvePanel("ResNet", {}, STEPS)]),
    "gaussianity": lambda: figures.gaussianity([GaussianPanel("conv0", INSIDE, OUTSIDE, 0.987)] * 2),
    "layers": lambda: figures.layer_histograms([_row("mahalanobis", 1), _row("igeood", 4)]),
}


@pytest.fixture(params=FIGURES)
def make(request):
    return FIGURES[request.param]


def _axes(figure):
    return figure.axes or [axes for part in figure.subfigs for axes in part.axes]


def _patch(axes, name):
    handles, names = axes.get_legend_handles_labels()
    return handles[names.index(name)]


def _mass(patch):
    values, edges, _ = patch.get_data()
    return float((values * np.diff(edges)).sum())


def test_every_method_has_a_look_of_its_own():
    assert list(figures.STYLE) == list(METHODS)
    assert len({style[1:] for style in figures.STYLE.values()}) == len(METHODS)


def test_every_axis_is_labelled_and_every_letter_is_large_enough(make):
    figure = make()
    figure.draw_without_rendering()
    shared = figure.get_supxlabel()
    for axes in _axes(figure):
        assert axes.get_ylabel()
        assert axes.get_title()
        assert axes.get_xlabel() or shared
        texts = [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts, *axes.get_xticklabels()]
        assert min(text.get_fontsize() for text in texts) >= 8
    assert figure.get_figwidth() == pytest.approx(6.3)
    assert len(figure.legends) == 1


def test_titles_and_legend_do_not_overlap(make):
    figure = make()
    figure.draw_without_rendering()
    boxes = [figure.legends[0].get_window_extent()]
    boxes += [axes.title.get_window_extent() for axes in _axes(figure)]
    boxes += [part._suptitle.get_window_extent() for part in figure.subfigs]
    page = figure.bbox.padded(1.0)
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])
        assert page.x0 <= box.x0 < box.x1 <= page.x1


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_files_are_the_same_bytes_each_time(make, tmp_path, suffix):
    figure = make()
    for name, drawn in (("a", figure), ("b", figure), ("c", make())):
        figures.save(drawn, tmp_path / f"{name}{suffix}")
    contents = {(tmp_path / f"{name}{suffix}").read_bytes() for name in "abc"}
    assert len(contents) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}{suffix}" for name in "abc"]


def test_histograms_have_a_panel_each_and_densities_of_mass_one():
    figure = figures.score_histograms([HistogramPanel(t, INSIDE, {"SVHN": OUTSIDE}) for t in "abcde"])
    assert [axes.get_title() for axes in figure.axes] == list("abcde")
    for axes in figure.axes:
        assert _mass(_patch(axes, "in-distribution")) == pytest.approx(1.0)
        assert _mass(_patch(axes, "SVHN")) == pytest.approx(1.0)
        assert axes.get_ylabel() == "density"
    assert figure.get_supxlabel() == "score (higher is more out-of-distribution)"


def test_a_set_has_one_colour_across_panels_and_figures():
    both = {"LSUN": OUTSIDE, "mine": INSIDE + 1}
    figure = figures.score_histograms(
        [HistogramPanel("a", INSIDE, both), HistogramPanel("b", INSIDE, {"mine": OUTSIDE})]
    )
    first, second = figure.axes
    assert _patch(first, "mine").get_edgecolor() == _patch(second, "mine").get_edgecolor()
    assert to_hex(_patch(first, "LSUN").get_edgecolor()).upper() == figures.ood_colours(["SVHN", "lsun"])["lsun"]
    assert to_hex(_patch(first, "in-distribution").get_edgecolor()).upper() == figures.ID_COLOUR


def test_a_figures_sets_differ_in_colour():
    names = ["mine", "TinyImageNet", "yours", "SVHN", "CIFAR-10", "LSUN"]
    colours = figures.ood_colours(names)
    assert list(colours) == names
    assert len({*colours.values(), figures.ID_COLOUR}) == len(names) + 1


def test_threshold_is_drawn_and_shown_even_beyond_the_scores():
    axes = figures.score_histograms([HistogramPanel("a", INSIDE, {"SVHN": OUTSIDE}, -40.0)]).axes[0]
    line = _patch(axes, "threshold δ")
    assert list(line.get_xdata()) == [-40.0, -40.0]
    assert line.get_linestyle() == "--"
    assert axes.get_xlim()[0] <= -40.0
    assert "−40" in axes.texts[0].get_text()


def test_far_outliers_do_not_squeeze_the_rest_and_the_axis_says_so():
    wild = np.append(INSIDE, 1e6)
    axes, calm = figures.score_histograms(
        [HistogramPanel("wild", wild, {"SVHN": OUTSIDE}), HistogramPanel("calm", INSIDE, {"SVHN": OUTSIDE})]
    ).axes
    assert axes.get_xlim()[1] < 20
    assert "cut at 0.1 and 99.9%" in axes.get_xlabel()
    assert _mass(_patch(axes, "in-distribution")) < 1.0
    assert calm.get_xlabel() == ""


@pytest.mark.parametrize("value", [0.0, 2.0, -1e12, 1e-300])
def test_constant_scores_and_single_samples_have_a_bar(value):
    panel = HistogramPanel("a", [value], {"SVHN": np.full(30, value)}, value)
    axes = figures.score_histograms([panel]).axes[0]
    assert _mass(_patch(axes, "SVHN")) == pytest.approx(1.0)
    assert axes.get_xlim()[0] < value < axes.get_xlim()[1]


def test_curves_mark_the_best_in_the_methods_colour():
    shuffled = RANDOM.permutation(len(T))
    curves = {method: (x[shuffled], y[shuffled]) for method, (x, y) in CURVES.items()}
    figure = figures.tuning_curves([CurvePanel("DenseNet", curves, STEPS)])
    left, right = figure.axes
    assert (left.get_xscale(), right.get_xscale()) == ("log", "linear")
    for line, (method, (x, y)) in zip(left.lines, CURVES.items(), strict=True):
        style = figures.STYLE[method]
        assert (line.get_color(), line.get_linestyle(), line.get_label()) == (style.colour, style.line, style.title)
        assert line.get_xdata()[line.get_markevery()[0]] == x[y.argmax()]
        assert (np.diff(line.get_xdata()) > 0).all()
    colours = [{line.get_label(): line.get_color() for line in axes.lines} for axes in (left, right)]
    assert colours[1].items() <= colours[0].items()


def test_a_side_without_curves_says_so():
    figure = figures.tuning_curves([CurvePanel("DenseNet", CURVES, {}), CurvePanel("ResNet", {}, STEPS)])
    texts = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert texts == [[], ["not tuned here"], ["not tuned here"], []]


def test_a_method_of_ones_own_can_be_drawn():
    line = figures.tuning_curves([CurvePanel("DenseNet", {"mine": CURVES["odin"]}, {})]).axes[0].lines[0]
    assert line.get_label() == "mine"


def test_gaussianity_standardises_and_shows_w():
    panels = [GaussianPanel("conv0", 5 + 3 * INSIDE, OUTSIDE, 0.98765), GaussianPanel("dead", [1.0] * 9, [2], np.nan)]
    first, second = figures.gaussianity(panels).axes
    assert first.get_title() == "conv0\n$W$ = 0.988"
    assert second.get_title() == "dead\n$W$ undefined"
    x, y = _patch(first, "standard normal").get_data()
    assert y[len(x) // 2] == pytest.approx(0.39894, abs=1e-5)
    values, edges, _ = _patch(first, "in-distribution").get_data()
    middles = (edges[1:] + edges[:-1]) / 2
    assert np.average(middles, weights=values) == pytest.approx(0.0, abs=0.1)
    assert np.average(middles**2, weights=values) == pytest.approx(1.0, abs=0.1)


def test_layers_have_a_row_for_each_method_with_tnr_and_weights():
    figure = figures.layer_histograms([_row("mahalanobis"), _row("igeood+")])
    assert [part._suptitle.get_text() for part in figure.subfigs] == ["Mahalanobis", "IGEOOD+"]
    for part in figure.subfigs:
        assert [axes.get_title() for axes in part.axes[:3]] == [f"block{i}\nTNR 50.0%" for i in range(3)]
        assert part.axes[-1].get_title() == "Regression\nTNR 95.1%"
        assert " ".join(part.axes[-1].get_xlabel().split()) == "score α = (1, −3.6, −0.13)"


def test_many_layers_go_on_in_another_line():
    part = figures.layer_histograms([_row("igeood", 6)]).subfigs[0]
    assert {axes.get_gridspec().get_geometry() for axes in part.axes} == {(2, 4)}


def test_save_leaves_the_old_file_and_nothing_else_when_it_fails(tmp_path, monkeypatch):
    target = tmp_path / "a.png"
    target.write_text("old")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.replace", refuse)
    with pytest.raises(InputError, match=r"cannot write .*a\.png \(Permission denied\)"):
        figures.save(FIGURES["scores"](), target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("name", "why"),
    [("a.pdf", "'a.pdf' must end in .png or .svg"), ("a", "'a' must end"), ("no/a.png", "no is no folder; make it")],
)
def test_save_refuses_other_suffixes_and_folders(tmp_path, name, why):
    with pytest.raises(InputError, match=f"path: .*{why}"):
        figures.save(FIGURES["scores"](), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_png_is_sharp_enough(tmp_path):
    from PIL import Image  # noqa: PLC0415

    figures.save(FIGURES["scores"](), tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert image.width >= 6.3 * 150


@pytest.mark.parametrize(
    "draw", [figures.score_histograms, figures.tuning_curves, figures.gaussianity, figures.layer_histograms]
)
def test_nothing_to_draw(draw):
    with pytest.raises(InputError, match="panels: empty"):
        draw([])


@pytest.mark.parametrize("bad", [[], [np.nan], [1.0, np.inf]])
def test_values_that_cannot_be_drawn_are_named(bad):
    with pytest.raises(InputError, match="SVHN: empty, or has NaN"):
        figures.score_histograms([HistogramPanel("a", INSIDE, {"SVHN": bad})])
    with pytest.raises(InputError, match="conv0: empty, or has NaN"):
        figures.gaussianity([GaussianPanel("conv0", INSIDE, bad, 0.9)])


@pytest.mark.parametrize("curve", [([1.0, 2.0], [0.5]), ([0.0, 2.0], [0.5, 0.6])])
def test_curves_that_cannot_be_drawn_are_named(curve):
    with pytest.raises(InputError, match="odin: expected as many x as y, temperatures positive"):
        figures.tuning_curves([CurvePanel("a", {"odin": curve}, {})])


def test_without_matplotlib(monkeypatch, make):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"figures need matplotlib; pip install 'igeood\[report\]'"):
        make()


def test_pyplot_is_not_needed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    figures.save(FIGURES["scores"](), tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<?xml")


SCORES = {
    "energy": (INSIDE, OUTSIDE),
    "igeood+": (INSIDE, OUTSIDE + 1),
    "msp": ([1, 2, 2], [2, 3]),
}
NARROW_FIGURES = {
    "scores": lambda: figures.score_histograms([HistogramPanel("", INSIDE, {figures.OOD_LABEL: OUTSIDE}, 1.5)], NARROW),
    "roc": lambda: figures.roc_curves(SCORES),
    "precision–recall": lambda: figures.precision_recall_curves(SCORES),
    "temperature": lambda: figures.tuning_curve({m: Curve(*c) for m, c in CURVES.items()}, log=True),
    "contributions": lambda: figures.contributions(["output", "a $5_ layer"], [0.1, -2.0], [3.0, 1.0]),
}


@pytest.mark.parametrize("name", NARROW_FIGURES)
def test_narrow_figures_keep_their_letters_inside(name):
    figure = NARROW_FIGURES[name]()
    figure.draw_without_rendering()
    assert figure.get_figwidth() == NARROW
    drawn = figure.get_tightbbox()  # inches
    assert drawn.x0 >= 0
    assert drawn.y0 >= 0
    assert drawn.x1 <= NARROW
    assert drawn.y1 <= figure.get_figheight()


@pytest.mark.parametrize("method", ["energy", "igeood+", "msp"])
def test_the_area_below_the_roc_curve_is_the_auroc(method):
    lines = {line.get_label(): line for line in figures.roc_curves(SCORES).axes[0].lines}
    line = lines[figures.STYLE[method].title]
    x, y = line.get_data()
    inside, outside = SCORES[method]
    assert line.get_color() == figures.STYLE[method].colour
    assert (x[0], y[0], x[-1], y[-1]) == (0, 0, 1, 1)
    assert np.trapezoid(y, x) == pytest.approx(auroc(inside, outside), abs=0.005)  # some 200 points of many


def test_steps_under_the_precision_recall_curve_are_the_aupr():
    inside, outside = INSIDE[:60], OUTSIDE[:50] - 2
    recall, precision = figures.precision_recall_curves({"odin": (inside, outside)}).axes[0].lines[0].get_data()
    assert (np.diff(recall, prepend=0.0) * precision).sum() == pytest.approx(aupr(inside, outside))
    assert recall[-1] == 1
    assert precision[-1] == pytest.approx(60 / 110)


def test_contributions_have_a_bar_for_each_side_and_column():
    axes = NARROW_FIGURES["contributions"]().axes[0]
    widths = [[bar.get_width() for bar in bars] for bars in axes.containers]
    assert widths == [[0.1, -2.0], [3.0, 1.0]]
    assert axes.yaxis_inverted()  # the first column on top
    assert [bars.get_label() for bars in axes.containers] == ["in-distribution", "out-of-distribution"]


def test_one_tuning_curve_is_that_of_the_pair():
    curves = {m: Curve(*c) for m, c in CURVES.items()}
    left = figures.tuning_curves([CurvePanel("", curves, {})]).axes[0]
    alone = figures.tuning_curve(curves, log=True).axes[0]
    assert alone.get_xlabel() == left.get_xlabel()
    assert all(np.array_equal(a.get_xydata(), b.get_xydata()) for a, b in zip(alone.lines, left.lines, strict=True))
    assert (
        figures.tuning_curve(dict.fromkeys(["odin"], Curve(*STEPS["odin"])), log=False).axes[0].get_xscale() == "linear"
    )


def test_letters_stay_letters_when_a_page_asks_for_them():
    figure = FIGURES["scores"]()
    assert b">Energy</text>" in figures.render(figure, "svg", letters=True)
    assert b">Energy</text>" not in figures.render(figure, "svg")
    assert figures.render(figure, "svg", letters=True) == figures.render(FIGURES["scores"](), "svg", letters=True)
