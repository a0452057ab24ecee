"""The page: what it holds, what it never holds, and that the same folder gives the same bytes."""

import base64
import hashlib
import io
import re
import shlex
from dataclasses import replace
from datetime import date
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from igeood import black_box
from igeood.bench.guarded import Guarded
from igeood.bench.report import make
from igeood.bench.report.drawing import picture
from igeood.bench.report.evidence import Evidence
from igeood.bench.report.standings import standings
from igeood.bench.runs import Results
from igeood.bench.runs.averages import Averages
from igeood.cli import main
from igeood.guard import Verdict
from igeood.monitor import Monitor

DAY = date(2026, 1, 2)
ADDRESSES = {"src", "href", "xlink:href", "srcset", "action", "data", "poster", "formaction", "background"}


class Page(HTMLParser):
    """A page's tags, and the text of each kind of tag."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.texts = [], [], {}
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        if tag in self.open:
            del self.open[len(self.open) - 1 - self.open[::-1].index(tag) :]

    def handle_data(self, data):
        for tag in set(self.open):
            self.texts[tag][-1] += data

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]

    @property
    def text(self):
        return " ".join(self.texts["main"][0].split())


def page(results, **options):
    return Page(make(results, made_on=DAY, **options).html)


@pytest.fixture(scope="module")
def html(full, verdicts):
    return make(full, made_on=DAY, verdicts=[verdicts]).html


@pytest.fixture
def evidence(full):
    ours = Averages(full)
    key = ours.classifiers()[0]
    return Evidence(ours, key, standings(ours, key), 9)


def test_everything_is_there_the_guard_first_and_details_folded(full, html, verdicts):
    shown = Page(html)
    last = ["How to redo it", "What was run: networks, data and versions"]
    assert shown.texts["h2"] == ["The guard", "The inputs over time", "Methods", *last]
    folded = ["ROC and precision–recall curves", "Temperature and step", "What the score is made of"]
    folded += ["Pictures of extreme scores", *last]
    assert [text.strip() for text in shown.texts["summary"]] == folded
    assert shown.all("details") == [{}] * 4 + [{"id": "again"}, {}]  # none is open
    assert "91.3% right on 200 test images" in shown.text
    assert "SVHN (200 images), Chars74K (EnglishImg) (200 images)" in shown.text
    assert "2026-01-02" in html
    assert len(shown.all("svg")) == 4 + 1 + 2 * 2 + 2 + 2  # of the guard, evidence, ROC and PR, tuning, layers
    first = Page(html[: html.index("<details")])
    assert (len(first.all("svg")), len(first.all("img"))) == (4 + 1, 4 * (4 + 2) + 2)
    assert len(shown.all("img")) == len(first.all("img")) + 2 * 8 * 3
    assert make(Results.existing(full.folder), made_on=DAY, verdicts=[verdicts]).html == html


def test_the_guards_figures_are_those_of_its_scores_under_one_threshold(full, html, guard):
    known, *foreign = Guarded.load(full.folder).sets
    refused = {one.title: (one.scores > guard.threshold).double().mean().item() for one in (known, *foreign)}
    assert 0 < refused[known.title] < 0.2 < min(refused[one.title] for one in foreign) < 1
    shown, made = Page(html), make(full, made_on=DAY)
    assert made.guard in shown.text
    assert made.guard.startswith(f"The guard keeps {1 - refused['Digits 0–7']:.1%} of digits 0–7 and refuses ")
    assert made.guard.endswith(f" and {refused['Gaussian noise']:.1%} of Gaussian noise.")
    assert guard.promise in shown.text
    assert "on average over calibration sets of" in guard.promise
    kept = sum(int((one.scores <= guard.threshold).sum()) for one in foreign)
    assert f"Missed: {kept} of 600 foreign images are kept." in shown.text
    assert f"Refused: {600 - kept} of 600 foreign images." in shown.text
    assert f"Refused wrongly: {round(200 * refused[known.title])} of 200 known images." in shown.text
    thresholds = re.findall(r"the threshold (−?[\d.]+) keeps", html)
    assert thresholds == [f"{guard.threshold:.4g}".replace("-", "−")] * 4
    for alt in (attrs["alt"] for attrs in shown.all("img") if attrs["alt"].startswith(("Digits", "Gauss"))):
        is_above = float(re.search(r"score (\S+),", alt)[1].replace("−", "-")) > guard.threshold
        assert alt.endswith("refused" if is_above else "kept")


def test_a_guard_that_judged_nothing_another_guard_and_no_guard(full, guard, maker, classifier, tmp_path):
    results = maker.cell("black-box", "igeood-logits", "svhn").results
    alone = page(results)
    assert alone.texts["h2"][0] == "Methods"
    assert "There is no guard in this folder: igeood demo makes one" in alone.text
    assert alone.texts["summary"][0] == "Scores"  # with the threshold of the test images
    guard.save(maker.folder / "guard.safetensors")
    short = page(results)
    assert short.texts["h2"][0] == "The guard"
    assert "here no set of images was tried on this guard" in short.text
    assert "a network that is not in this report" in short.text
    assert "Scores" not in short.texts["summary"]
    other = black_box().fit(classifier.train, classifier.labels)
    other.save(tmp_path / "other.safetensors")
    assert "the guard is not calibrated" in page(full, guard=tmp_path / "other.safetensors").text
    other.calibrate(classifier.held_out).save(tmp_path / "other.safetensors")
    assert make(full, made_on=DAY, guard=tmp_path / "other.safetensors").guard is None
    (maker.folder / "guard.safetensors").unlink()
    Guarded.load(full.folder).save(maker.folder)
    assert "The guard keeps" in page(results).text  # its file need not be there


def test_the_monitor_says_what_it_saw(full, html, guard, verdicts, maker):
    rows = Path(verdicts).read_text().split()[1:]
    monitor = Monitor(guard)
    scores = np.array([float(row.partition(",")[2]) for row in rows])
    monitor.update(
        Verdict.of(torch.from_numpy(scores), torch.zeros(len(scores)), guard.calibration, {}, None, to_numpy=True)
    )
    since, at = monitor.alarms[0].since, monitor.alarms[0].at
    assert 550 < since < at < 700
    text = Page(html).text
    assert (
        f"Alarm: strong evidence that the inputs have changed, since about input {since} (camera-{since}) of 700."
        in text
    )
    assert f"Alarm at input {at} (camera-{at}), evidence {monitor.alarms[0].evidence:,.0f}" in text
    assert f"Alarms {monitor.alarm_count}" in re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))
    assert "Evidence over 700 inputs: at most" in html
    short = Path(maker.folder / "short.csv")
    short.write_text("\n".join(["id,score", *rows[:300]]))
    assert make(full, made_on=DAY, verdicts=[str(short)]).monitor.startswith("No alarm in 300 inputs")
    lines = page(full, verdicts=[verdicts, str(short)]).texts["code"][-1].splitlines()
    assert shlex.split(lines[-1])[3:] == ["--verdicts", verdicts, "--verdicts", str(short)]


def test_nothing_is_asked_of_others_links_lead_somewhere_and_figures_say_what_they_show(html):
    shown = Page(html)
    fetched = [value for _, attrs in shown.tags for name, value in attrs.items() if name in ADDRESSES]
    assert fetched
    assert all(value.startswith(("#", "data:image/png;base64,")) for value in fetched)
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/)", html)
    policy = next(a["content"] for a in shown.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    assert html.count("<script") == 1
    names = [attrs["id"] for _, attrs in shown.tags if "id" in attrs]
    assert len(names) == len(set(names))
    links = {v[1:] for _, attrs in shown.tags for n, v in attrs.items() if n in ("href", "xlink:href") and v[0] == "#"}
    assert links | set(re.findall(r"url\(#([^)]+)\)", html)) <= set(names)
    assert all(attrs["role"] == "img" and re.search(r"\d", attrs["aria-label"]) for attrs in shown.all("svg"))
    assert all(re.search(r"image \d+, score [\d−]", attrs["alt"]) for attrs in shown.all("img"))


def test_names_are_text(full, maker, guard, tmp_path):
    evil = "folder:/x/<script>alert(1)</script>"
    quoted = 'folder:/x/"onload="alert(1)" $\\frac{'
    for ood in (evil, quoted):
        maker.cell("black-box", "igeood-logits", ood, validation=evil)
        maker.cell("white-box-validation", "igeood", ood, validation=evil)
    maker.results.note(["igeood", "bench", "--ood", evil])
    guard.save(maker.folder / "guard.safetensors")
    guarded = Guarded.load(full.folder)
    for one, name in zip(guarded.sets[1:], (evil, quoted), strict=False):
        pictures = [replace(shown, reason=evil) for shown in one.pictures]
        guarded.sets[guarded.sets.index(one)] = replace(one, name=name, title=name, pictures=pictures)
    guarded.save(maker.folder)
    rows = (f"{evil},{score!r}\n" for score in [*np.zeros(9).tolist(), *[1e9] * 99])
    (tmp_path / "verdicts.csv").write_text("".join(["id,score\n", *rows]))
    html = make(maker.results, made_on=DAY, verdicts=[str(tmp_path / "verdicts.csv")]).html
    shown = Page(html)
    assert html.count("<script") == 1
    assert not any(name.startswith("on") for _, attrs in shown.tags for name in attrs)
    assert evil in " ".join(shown.texts["code"])  # in the command, quoted for a shell
    cards = " ".join(shown.texts["b"] + shown.texts["span"])
    assert evil in cards
    assert quoted in cards
    assert f"({evil})" in shown.text  # the name of an input


def test_the_best_of_a_group_is_bold(maker):
    for method, tnr in (("energy", 0.5), ("odin", 0.7), ("igeood-logits", 0.6)):
        maker.cell("black-box", method, "svhn", tnr=tnr)
    for method, tnr in (("odin", 0.9), ("igeood-logits", 0.9)):
        maker.cell("grey-box", method, "svhn", tnr=tnr)
    html = make(maker.results, made_on=DAY).html
    table = re.search(r"<table>\s*<caption>TNR at TPR-95%.*?</table>", html, re.DOTALL)[0]
    assert re.findall(r"<strong>(.*?)</strong>", table) == ["70.0", "70.0"]  # SVHN and the average; a tie has none
    cells = re.findall(r'data-value="([\d.]+)"', table)
    assert [round(float(value)) for value in cells] == [70, 70, 50, 50, 60, 60, 90, 90, 90, 90]


def test_the_threshold_is_that_of_the_table_and_pictures_come_in_order_with_their_reason(evidence):
    """What lies above the drawn threshold is the TNR that was measured, in every cell."""
    for row in evidence.standing.rows:
        for _, scores in evidence.scores(row):
            assert np.mean(scores.arrays["ood"] > scores.threshold) == pytest.approx(scores.cell["tnr"])
            assert np.mean(scores.arrays["id"] <= scores.threshold) >= 0.95
    scores = dict(evidence.scores(evidence.standing.shown))["svhn"]
    most, least = evidence.pictures(3)["CIFAR-10 (in-distribution)"].values()
    assert [t["score"] for t in most] == [f"{v:.4g}" for v in np.sort(scores.arrays["id"])[::-1][:3]]
    assert [t["score"] for t in least] == [f"−{-v:.4g}" for v in np.sort(scores.arrays["id"])[:3]]
    assert {t["reason"] for t in most} == {"block2"}  # seven tenths of every score
    image = np.random.default_rng(0).integers(0, 256, (3, 32, 32), dtype=np.uint8)
    content = base64.b64decode(picture(image).partition(",")[2])
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(content))), image.transpose(1, 2, 0))
    large = base64.b64decode(picture(np.zeros((3, 224, 112), np.uint8)).partition(",")[2])
    assert Image.open(io.BytesIO(large)).size == (24, 48)


def test_several_networks_have_a_section_each(maker):
    maker.cell("black-box", "igeood-logits", "svhn", tnr=0.4)
    type(maker)(maker.folder, network="densenet-bc-100", weights="other").cell("black-box", "energy", "svhn", tnr=0.6)
    made = make(maker.results, made_on=DAY)
    assert "40.0%" in made.methods["resnet-10-16, CIFAR-10"]
    assert "60.0%" in made.methods["densenet-bc-100, CIFAR-10"]
    assert Page(made.html).texts["h2"][:2] == [f"Methods: {name}" for name in made.methods]


@pytest.mark.slow
def test_a_large_benchmark_is_below_2_mb(maker):
    """Six networks on nine OOD sets, as in the paper, with noise for pictures."""
    sets = ("isun", "svhn", "textures", "lsun", "chars74k", "tiny-imagenet", "places365", "cifar-100", "gaussian")
    methods = [("black-box", m) for m in ("msp", "odin", "energy", "igeood-logits")] + [("white-box", "igeood+")]
    for i in range(6):
        made = maker if i == 0 else type(maker)(maker.folder, weights=f"weights-{i}")
        for setting, method in methods:
            for ood in sets:
                made.cell(setting, method, ood, validation="folder:/mine")
    html = make(maker.results, made_on=DAY).html
    assert len(html.encode()) < 2e6
    assert "Of the 3 hardest OOD sets." in html


def test_the_commands_are_those_that_were_noted(maker):
    results = maker.cell("black-box", "igeood-logits", "svhn").results
    assert "made from Python" in page(results).text
    given = [["igeood", "bench", "--ood", "folder:/a b/c", "--out", "x"], ["igeood", "bench", "--method", "msp"]]
    for line in [*given, given[0]]:  # one given twice is noted once
        results.note(line)
    code = page(Results(results.folder)).texts["code"][-1]
    assert [shlex.split(line) for line in code.splitlines()] == [*given, ["igeood", "report", str(results.folder)]]


def test_what_the_user_must_fix(full, maker, tmp_path):
    (maker.folder / "results.jsonl").touch()
    other = type(maker)(tmp_path / "other").cell("black-box", "igeood-logits", "svhn").results
    for given, message in (
        ([maker.folder / "none"], "no results.jsonl in"),
        ([maker.folder], "nothing was measured"),
        ([full.folder, "--guard", maker.folder / "results.jsonl"], "no guard file"),
        ([full.folder, "--verdicts", maker.folder / "none.csv"], "none.csv"),
        ([other.folder, "--verdicts", "any.csv"], "name it with --guard"),
    ):
        result = CliRunner().invoke(main, ["report", *map(str, given)])
        assert (result.exit_code, message in result.stderr) == (2, True)
    assert not list(tmp_path.rglob("*.html"))
