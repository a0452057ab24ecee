"""The page: figures that follow from the files, nothing asked of others, the same bytes each time; in a browser."""

import base64
import hashlib
import json
import re
import shutil
import sys
from dataclasses import replace
from datetime import date
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from igeood import black_box
from igeood.bench.figures.curves import threshold_curves, tuning_curves
from igeood.bench.figures.drawing import save
from igeood.bench.figures.histograms import HistogramPanel, score_histograms
from igeood.bench.guarded import Guarded, Judged, Picture
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


def judged(guard, name, logits, *, is_known):
    """A set under a guard, with up to four pictures each of what is refused and what is kept."""
    verdict, pictures = guard.predict(logits), []
    for refused in (True, False):
        for row in np.flatnonzero(verdict.is_ood == refused)[:4]:
            seen = (verdict.label, np.full(len(logits), 0.9), verdict.score, verdict.p_value, verdict.is_ood)
            pictures.append(Picture(int(row), *(values[row].item() for values in seen), "unlike any training image"))
    images = np.random.default_rng(len(name)).integers(0, 256, (len(pictures), 3, 32, 32), dtype=np.uint8)
    scores = torch.from_numpy(verdict.score).double()
    return Judged(name, name, is_known, float(verdict.is_ood.mean()), scores, torch.from_numpy(images), pictures)


def make_logits(n, margin, seed):
    """Of a classifier with ten classes that is the surer the larger the margin."""
    draw = np.random.default_rng(seed)
    return draw.normal(size=(n, 10)) + draw.uniform(0.6, 1.0, (n, 1)) * margin * np.eye(10)[np.arange(n) % 10]


@pytest.fixture(scope="module")
def guard():
    """A calibrated guard of made logits."""
    logits = make_logits(1300, 9.0, 0)
    return black_box().fit(logits[:150], np.arange(150) % 10).calibrate(logits[150:])


@pytest.fixture(scope="module")
def full(whole, guard, tmp_path_factory):
    """Results with everything that a report can show, and a guard with what it judged, as in the demonstration."""
    folder = tmp_path_factory.mktemp("report") / "results"
    shutil.copytree(whole.folder, folder)
    guard.save(folder / "guard.safetensors")
    sets = [judged(guard, "Digits 0–7", make_logits(200, 9.0, 1), is_known=True)]
    for seed, name in enumerate(("Digits 8, 9", "Photographs")):
        sets.append(judged(guard, name, make_logits(150, 3.5, 2 + seed), is_known=False))
    Guarded(guard.promise, guard.threshold, 0.987, sets).save(folder)
    return Results.existing(folder)


@pytest.fixture(scope="module")
def verdicts(guard, tmp_path_factory):
    """A file of verdicts whose inputs change after 600; its rows have names."""
    verdict = guard.predict(np.concatenate([make_logits(600, 9.0, 7), make_logits(100, 2.0, 8)]))
    lines = [f"camera-{row},{score!r}\n" for row, score in enumerate(verdict.score.tolist())]
    path = tmp_path_factory.mktemp("verdicts") / "verdicts.csv"
    path.write_text("".join(["id,score\n", *lines]))
    return str(path)


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
def html(full, verdicts):
    return make(full, made_on=DAY, verdicts=[verdicts]).html


def test_a_guard_that_judged_nothing_and_another_guard(full, whole, guard, classifier, tmp_path):
    guard.save(tmp_path / "guard.safetensors")
    page = make(whole, made_on=DAY, guard=tmp_path / "guard.safetensors")
    assert page.guard is None
    assert guard.promise in Page(page.html).text
    black_box().fit(classifier.train, classifier.labels).calibrate(classifier.held_out).save(tmp_path / "other")
    assert make(full, made_on=DAY, guard=tmp_path / "other").guard is None


def test_the_monitor_shows_where_the_inputs_changed(html):
    since, at = (int(n) for n in re.findall(r"input (\d+) \(camera-\1\)", html)[:2])
    assert 550 < since < at < 700  # they change after 600


def test_nothing_is_asked_of_others_and_it_is_the_same_each_time(full, html, verdicts):
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
    assert make(Results.existing(full.folder), made_on=DAY, verdicts=[verdicts]).html == html


def test_names_are_text(full, plan, tmp_path):
    evil = "folder:/x/<script>alert(1)</script>"
    quoted = 'folder:/x/"onload="alert(1)" $\\frac{'
    shutil.copytree(full.folder, tmp_path / "r")
    for path in (tmp_path / "r").glob("*.jsonl"):
        text = path.read_text()
        for name, other in zip((*plan().ood[:1], *plan().validation), (evil, quoted), strict=True):
            text = text.replace(json.dumps(name), json.dumps(other))
        path.write_text(text)
    results = Results.existing(tmp_path / "r")
    results.note(["igeood", "bench", "--ood", evil])
    guarded = Guarded.load(full.folder)
    for i, name in ((1, evil), (2, quoted)):
        pictures = [replace(shown, reason=evil) for shown in guarded.sets[i].pictures]
        guarded.sets[i] = replace(guarded.sets[i], name=name, title=name, pictures=pictures)
    guarded.save(tmp_path / "r")
    rows = (f"{evil},{score!r}\n" for score in [*np.zeros(9).tolist(), *[1e9] * 99])
    (tmp_path / "verdicts.csv").write_text("".join(["id,score\n", *rows]))
    html = make(results, made_on=DAY, verdicts=[str(tmp_path / "verdicts.csv")]).html
    page = Page(html)
    assert html.count("<script") == 1
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert evil in page.text
    assert quoted in page.text


def test_what_lies_above_the_drawn_threshold_is_the_tnr_that_was_measured_in_every_cell(full):
    ours = Averages(full)
    key = ours.classifiers()[0]
    evidence = Evidence(ours, key, standings(ours, key), 9)
    for row in evidence.standing.rows:
        for _, scores in evidence.scores(row):
            assert np.mean(scores.arrays["ood"] > scores.threshold) == pytest.approx(scores.cell["tnr"])
            assert np.mean(scores.arrays["id"] <= scores.threshold) >= 0.95


def test_what_the_user_must_fix(full, tmp_path):
    (tmp_path / "results.jsonl").touch()
    for words in ([tmp_path / "none"], [tmp_path], [full.folder, "--verdicts", tmp_path / "none.csv"]):
        assert CliRunner().invoke(main, ["report", *map(str, words)]).exit_code == 2
    assert not list(tmp_path.rglob("*.html"))


def test_it_fits_has_names_for_those_who_do_not_see_it_and_sorts_by_mouse_and_by_keyboard(html, open_page, tmp_path):
    (tmp_path / "report.html").write_text(html, encoding="utf-8")
    for width in (390, 1280):
        page = open_page((tmp_path / "report.html").as_uri(), width)
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
