"""The page of methods: figures that follow from files, nothing asked of others, the same each time; in a browser."""

import base64
import hashlib
import json
import re
import shutil
import sys
from datetime import date
from html.parser import HTMLParser

import numpy as np
import pytest
from click.testing import CliRunner

from igeood.bench.figures.curves import threshold_curves, tuning_curves
from igeood.bench.figures.drawing import save
from igeood.bench.figures.histograms import HistogramPanel, score_histograms
from igeood.bench.report import make
from igeood.bench.report.evidence import Evidence
from igeood.bench.report.standings import standings
from igeood.bench.runs import Results
from igeood.bench.runs.averages import Averages
from igeood.cli import main
from igeood.metrics import aupr, auroc

DAY = date(2026, 1, 2)
ADDRESSES = {"src", "href", "xlink:href", "srcset", "action", "data", "poster", "formaction", "background"}

NAMELESS = """all => all.filter(e => !(e.getAttribute("alt") || e.getAttribute("aria-label") || e.textContent.trim()
  || (e.labels && e.labels.length))).map(e => e.outerHTML.slice(0, 80))"""
TABLE = "[data-metric=tnr] table"


class Page(HTMLParser):
    """A page's tags with their attributes, and its text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(html)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def html(whole):
    return make(whole, made_on=DAY).html


def test_nothing_is_asked_of_others_and_it_is_the_same_each_time(whole, html):
    page = Page(html)
    fetched = [value for _, attrs in page.tags for name, value in attrs.items() if name in ADDRESSES]
    assert all(value.startswith(("#", "data:image/png;base64,")) for value in fetched)
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/)", html)
    metas = [attrs for tag, attrs in page.tags if tag == "meta"]
    policy = next(a["content"] for a in metas if a.get("http-equiv") == "Content-Security-Policy")
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    assert make(Results.existing(whole.folder), made_on=DAY).html == html


def test_names_are_text(whole, plan, tmp_path):
    evil = "folder:/x/<script>alert(1)</script>"
    quoted = 'folder:/x/"onload="alert(1)" $\\frac{'
    shutil.copytree(whole.folder, tmp_path / "r")
    for path in (tmp_path / "r").glob("*.jsonl"):
        text = path.read_text()
        for name, other in zip((*plan().ood[:1], *plan().validation), (evil, quoted), strict=True):
            text = text.replace(json.dumps(name), json.dumps(other))
        path.write_text(text)
    results = Results.existing(tmp_path / "r")
    results.note(["igeood", "bench", "--ood", evil])
    html = make(results, made_on=DAY).html
    page = Page(html)
    assert html.count("<script") == 1
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert evil in page.text
    assert quoted in page.text


def test_what_lies_above_the_drawn_threshold_is_the_tnr_that_was_measured_in_every_cell(whole):
    ours = Averages(whole)
    key = ours.classifiers()[0]
    evidence = Evidence(ours, key, standings(ours, key), 9)
    for row in evidence.standing.rows:
        for _, scores in evidence.scores(row):
            assert np.mean(scores.arrays["ood"] > scores.threshold) == pytest.approx(scores.cell["tnr"])
            assert np.mean(scores.arrays["id"] <= scores.threshold) >= 0.95


def test_what_the_user_must_fix(tmp_path):
    (tmp_path / "results.jsonl").touch()
    for folder in (tmp_path / "none", tmp_path):
        assert CliRunner().invoke(main, ["report", str(folder)]).exit_code == 2
    assert not list(tmp_path.rglob("*.html"))


def test_it_fits_has_names_for_those_who_do_not_see_it_and_sorts_by_mouse_and_by_keyboard(html, open_page, tmp_path):
    (tmp_path / "methods.html").write_text(html, encoding="utf-8")
    for width in (390, 1280):
        page = open_page((tmp_path / "methods.html").as_uri(), width)
        page.locator("details").evaluate_all("all => all.forEach(e => { e.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("img, svg[role=img], button, input, [role=region], nav").evaluate_all(NAMELESS) == []

    def averages():
        rows = page.locator(f"{TABLE} tbody").first.locator("tr:not(.group)")
        return [float(row.locator("td").last.inner_text()) for row in rows.all()]

    button = page.locator(f"{TABLE} thead th").last.locator("button")
    start = averages()
    button.click()
    assert averages() == sorted(start, reverse=True)
    button.focus()
    page.keyboard.press("Enter")
    assert averages() == sorted(start)
    page.get_by_label("AUROC", exact=True).check()
    shown = "all => all.filter(e => e.offsetHeight).map(e => e.dataset.metric)"
    assert page.locator("[data-metric]").evaluate_all(shown) == ["auroc"]


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
